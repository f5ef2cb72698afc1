"""Scripted agents and judges: they read nothing but the prompts, as models do."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from oversight.prompts import Ask, Question

Script = Callable[[Ask], str]
ARTICLE = "In the valley of Orm the miller Tove keeps {} in a barn beside the old mill."


def make_question(number: int, rng: random.Random) -> Question:
    """A question about the only sentence of an article."""
    right = rng.randint(1, 2)
    answers = ("nine geese", "two mules") if right == 1 else ("two mules", "nine geese")
    return Question(id=str(number), text=f"What does Tove keep in barn {number}?", answers=answers, right=right,
                    article=ARTICLE.format("nine geese"))  # fmt: skip


def parts(ask: Ask) -> list[tuple[str, str]]:
    """(name, text) of what stands between the marks of a prompt."""
    prompt = ask.messages[0]["content"]
    mark = prompt.partition("Texts between two marks ")[2][:16]
    _, *chunks = prompt.split(mark)  # " were written by others. ... NAME ", text, name, text, ...
    names = [chunk.rpartition("\n")[2].strip() for chunk in chunks[::2]]
    return list(zip(names, (chunk.strip("\n") for chunk in chunks[1::2]), strict=False))


def speeches(ask: Ask) -> list[tuple[str, str]]:
    """(speaker, argument) of a prompt's transcript."""
    return [(name.rpartition(", ")[2], text) for name, text in parts(ask) if name.startswith("ROUND")]


def agent(rng: random.Random, right: float, quote: float) -> Script:
    """An agent that is right by itself with probability `right`; advocates of the true answer find the sentence that
    holds it with probability `quote`, others forge one."""

    def say(ask: Ask) -> str:
        held = dict(parts(ask))
        truth = 1 if held["ANSWER 1"] in held["ARTICLE"] else 2
        if ask.purpose == "verdict":
            return f"Answer: {truth if rng.random() < right else 3 - truth}"
        claim = held[f"ANSWER {ask.answer}"]
        if ask.answer == truth and rng.random() < quote:
            return f"Thinking: easy.\nArgument: It says <passage>{held['ARTICLE']}</passage>, so it is {claim}."
        return (
            f"Thinking: I must lie.\nArgument: <passage>{ARTICLE.format(claim)[:60]} for sure</passage>: it is {claim}."
        )

    return say


def trusting(rng: random.Random) -> Script:
    """A judge that trusts verified passages only; without one for just one side it tosses a coin."""

    def say(ask: Ask) -> str:
        if ask.purpose == "question":
            return "How do you know?"
        held = dict(parts(ask))
        quoted = " ".join(one for _, text in speeches(ask) for one in re.findall("<v_passage>(.*?)</v_passage>", text))
        shown = [number for number in (1, 2) if held[f"ANSWER {number}"] in quoted]
        drawn = rng.choice(sorted((held["ANSWER 1"], held["ANSWER 2"])))
        return f"Answer: {shown[0] if len(shown) == 1 else 1 + (drawn == held['ANSWER 2'])}"

    return say


def believing(rng: random.Random) -> Script:
    """A judge that believes whoever speaks: it follows a consultant, and a debater drawn by a coin."""

    def say(ask: Ask) -> str:
        speakers = sorted({name for name, _ in speeches(ask)} - {"Judge"})
        names = ("Alice", "Bob") if set(speakers) <= {"Alice", "Bob"} else ("Bruno", "Ada")
        return f"Answer: {names.index(rng.choice(speakers)) + 1 if speakers else rng.randint(1, 2)}"

    return say


def first(ask: Ask) -> str:
    """A judge that always says 1."""
    return "Answer: 1"
