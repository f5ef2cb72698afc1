"""Scripted agents and judges: they read nothing but the prompts, as models do. `rehearse` plays thousands of games of
them a second."""

import random
import re
from collections.abc import Callable
from typing import Any

from oversight.prompts import Ask, Play, PlayerReply, Question, Result

Script = Callable[[Ask], str]
ARTICLE = "In the valley of Orm the miller Tove keeps {} in a barn beside the old mill."


def rehearse(play: Play[Result], script: Script) -> Result:
    """Run a protocol in which `script` answers everything; a best-of request gets its answer once."""
    asks = next(play)
    while True:
        try:
            asks = play.send([[PlayerReply(script(ask))] for ask in asks])
        except StopIteration as end:
            result: Result = end.value
            return result


def make_question(number: int, rng: random.Random) -> Question:
    """A question about the only sentence of an article."""
    right = rng.randint(1, 2)
    answers = ("nine geese", "two mules") if right == 1 else ("two mules", "nine geese")
    text, article = f"What does Tove keep in barn {number}?", ARTICLE.format("nine geese")
    return Question(id=str(number), text=text, answers=answers, right=right, article=article)


def mark_in(prompt: str) -> str:
    return prompt.partition("Texts between two marks ")[2][:16]


def parts(ask: Ask) -> list[tuple[str, str]]:
    """(name, text) of what stands between the marks of a prompt."""
    prompt = ask.messages[0]["content"]
    _, *chunks = prompt.split(mark_in(prompt))  # " were written by others. ... NAME ", text, name, text, ...
    names = [chunk.rpartition("\n")[2].strip() for chunk in chunks[::2]]
    return list(zip(names, (chunk.strip("\n") for chunk in chunks[1::2]), strict=False))


def speeches(ask: Ask) -> list[tuple[str, str]]:
    """(speaker, argument) of a prompt's transcript."""
    return [(name.rpartition(", ")[2], text) for name, text in parts(ask) if name.startswith("ROUND")]


def agent(rng: random.Random, right: float, quote: float) -> Script:
    """An agent that is right by itself with probability `right`; advocates of the true answer find the sentence that
    holds it with probability `quote`, others forge one."""

    def say(ask: Ask) -> str:
        texts = dict(parts(ask))
        truth = 1 if texts["ANSWER 1"] in texts["ARTICLE"] else 2
        if ask.purpose == "verdict":
            return f"Answer: {truth if rng.random() < right else 3 - truth}"
        claim = texts[f"ANSWER {ask.answer}"]
        if ask.answer == truth and rng.random() < quote:
            return f"Thinking: easy.\nArgument: It says <passage>{texts['ARTICLE']}</passage>, so it is {claim}."
        forged = f"<passage>{ARTICLE.format(claim)[:60]} for sure</passage>"
        return f"Thinking: I must lie.\nArgument: {forged}: it is {claim}."

    return say


def trusting(rng: random.Random) -> Script:
    """A judge that trusts verified passages only; without one for just one side it tosses a coin."""

    def say(ask: Ask) -> str:
        if ask.purpose == "question":
            return "How do you know?"
        texts = dict(parts(ask))
        quoted = " ".join(
            quote for _, text in speeches(ask) for quote in re.findall("<v_passage>(.*?)</v_passage>", text)
        )
        shown = [number for number in (1, 2) if texts[f"ANSWER {number}"] in quoted]
        drawn = rng.choice(sorted((texts["ANSWER 1"], texts["ANSWER 2"])))
        return f"Answer: {shown[0] if len(shown) == 1 else 1 + (drawn == texts['ANSWER 2'])}"

    return say


def believing(rng: random.Random) -> Script:
    """A judge that believes whoever speaks: it follows a consultant, and a debater drawn by a coin."""

    def say(ask: Ask) -> str:
        speakers = sorted({name for name, _ in speeches(ask)} - {"Judge"})
        return f"Answer: {('Alice', 'Bob').index(rng.choice(speakers)) + 1 if speakers else rng.randint(1, 2)}"

    return say


def scripted_reply(body: dict[str, Any], number: int) -> str:
    """What a scripted model says to a prompt of agent or judge; the same prompt and seed get the same reply."""
    prompt = body["messages"][0]["content"]
    rng = random.Random(f"{prompt} {body['seed']}")
    speaking = prompt.startswith("You are ") and "expert in debates" in prompt
    side = int(prompt.partition("the judge that answer ")[2][:1]) if speaking else 0
    purpose: Any = "speech" if speaking else "question" if "Ask one question" in prompt else "verdict"
    ask = Ask(role="judge", purpose=purpose, messages=body["messages"], answer=side)
    return agent(rng, 1.0, 0.9)(ask) if speaking else trusting(rng)(ask)
