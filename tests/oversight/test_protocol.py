"""Who is asked what, in which order, and who sees it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from oversight import protocol
from oversight.prompts import Ask, JudgeVerdict, PlayerReply, read_choice, read_verdict
from oversight.protocol import MOST_VOTES, Rules
from tests.oversight.scripted import agent, make_question, mark_in, parts, rehearse, speeches
from tests.tables import read_table

QUESTION = make_question(0, random.Random(0))


def watched(play: Any, *texts: str, tokens: int = 0) -> tuple[Any, list[list[Ask]]]:
    """The result of a protocol in which everything gets these replies, and its requests step by step."""
    steps, asks = [], next(play)
    while True:
        steps.append(asks)
        try:
            asks = play.send([[PlayerReply(text, tokens=tokens) for text in texts] for _ in asks])
        except StopIteration as end:
            return end.value, steps


def test_a_debate_is_simultaneous_or_in_turn() -> None:
    debate, steps = watched(protocol.debate(QUESTION, Rules(), "s"), "Thinking: t\nArgument: a")
    assert [(each.speaker, each.answer, each.round) for each in debate] == [
        ("Alice", 1, 1), ("Bob", 2, 1), ("Alice", 1, 2), ("Bob", 2, 2), ("Alice", 1, 3), ("Bob", 2, 3)]  # fmt: skip
    assert [[len(speeches(ask)) for ask in step] for step in steps] == [[0, 0], [2, 2], [4, 4]]
    assert all("Thinking: t" not in ask.messages[0]["content"] for step in steps for ask in step)
    prompt = steps[1][0].messages[0]["content"]
    assert "flaws" in prompt and "at most 150 words" in prompt and dict(parts(steps[0][0]))["ARTICLE"]
    _, steps = watched(protocol.debate(QUESTION, Rules(rounds=2, simultaneous=False), "s"), "a")
    assert [[len(speeches(ask)) for ask in step] for step in steps] == [[0], [1], [2], [3]]


def test_a_consultancy_asks_before_each_round_but_the_first() -> None:
    transcript, steps = watched(protocol.consultancy(QUESTION, 2, Rules(), "s"), "a")
    assert [(each.speaker, each.round) for each in transcript] == [
        ("Bob", 1), ("Judge", 2), ("Bob", 2), ("Judge", 3), ("Bob", 3)]  # fmt: skip
    asked = [step[0] for step in steps]
    assert [ask.role for ask in asked] == ["agent", "judge", "agent", "judge", "agent"]
    assert all(("ARTICLE" in dict(parts(ask))) == (ask.role == "agent") for ask in asked)
    prompt = next(protocol.decide(QUESTION, transcript, Rules(), "s"))[0].messages[0]["content"]
    assert "Bob, a consultant" in prompt and "ARTICLE" not in prompt and "v_passage" in prompt


def test_the_best_of_four_is_chosen_by_the_agent() -> None:
    play = protocol.debate(QUESTION, Rules(rounds=1, best_of=4), "s")
    assert [ask.samples for ask in next(play)] == [4, 4]
    choices = play.send([[PlayerReply(f"{side} {n}") for n in range(4)] for side in "ab"])
    assert [ask.purpose for ask in choices] == ["choice"] * 2 and dict(parts(choices[1]))["DRAFT d"] == "b 3"
    with pytest.raises(StopIteration) as end:
        play.send([[PlayerReply("Answer: c")], [PlayerReply("none of these")]])
    assert [speech.argument for speech in end.value.value] == ["a 2", "b 0"]


def test_votes_go_on_until_the_tokens_are_spent() -> None:
    def run(tokens: int, *texts: str) -> tuple[JudgeVerdict, int]:
        verdict, steps = watched(protocol.vote(QUESTION, "s", tokens), *texts, tokens=10)
        return verdict, sum(step[0].samples for step in steps)

    verdict, asked = run(75, "Answer: 1", "Answer: 1", "Answer: 2", "?")
    assert (verdict.answer, verdict.probability, asked) == (1, pytest.approx(2 / 3), 8)
    assert run(0, *["Answer: 1", "Answer: 2"] * 2)[0].answer is None
    assert run(10**6, *["Answer: 2"] * 4)[1] == MOST_VOTES


@pytest.mark.parametrize("row", read_table("oversight/speeches", kind="verdict"), ids=lambda row: row["text"])
def test_verdicts_are_read_and_none_is_a_coin(row: dict[str, Any]) -> None:
    assert read_verdict(row["text"]) == row["answer"]
    assert JudgeVerdict(row["answer"]).score(1) == {1: 1.0, 2: 0.0, None: 0.5}[row["answer"]]


def test_choices_are_read() -> None:
    replies = ("Answer: d", "answer: (b)", "Answer: e", "hm", "<think>Answer: b</think>")
    assert [read_choice(text, 4) for text in replies] == [3, 1, 0, 0, 0]


def test_a_direct_question_shows_the_article_only_where_it_may() -> None:
    for article in (True, False):
        [ask] = next(protocol.answer(QUESTION, "s", article=article))
        assert ("ARTICLE" in dict(parts(ask))) == article and ask.greedy
    play, other = protocol.answer(QUESTION, "s", role="agent", article=True), QUESTION.swapped()
    assert rehearse(play, agent(random.Random(0), 1, 1)).answer == QUESTION.right == 3 - other.right
    assert other.answers[other.right - 1] == QUESTION.answers[QUESTION.right - 1] and other.swapped() == QUESTION


def test_marks_differ_between_requests_and_cannot_be_guessed() -> None:
    seen: list[str] = []

    def script(ask: Ask) -> str:
        seen.append(mark_in(ask.messages[0]["content"]))
        return "Argument: a"

    for secret in ("secret", "another"):
        debate = rehearse(protocol.debate(QUESTION, Rules(), secret), script)
        rehearse(protocol.decide(QUESTION, debate, Rules(), secret), script)
    assert len(set(seen)) == len(seen) == 14 and all(len(mark) == 16 for mark in seen)
