"""Who is asked what, in which order, and who sees it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from oversight import protocol
from oversight.prompts import Ask, JudgeVerdict, PlayerReply, read_choice, read_verdict
from oversight.protocol import MOST_VOTES, Rules
from tests.oversight.rehearsal import rehearse
from tests.oversight.scripted import agent, make_question, parts, speeches

QUESTION = make_question(0, random.Random(0))


def watched(play: Any, reply: str = "Thinking: t\nArgument: a{}") -> tuple[Any, list[list[Ask]]]:
    """The result of a protocol, and its requests step by step."""
    steps: list[list[Ask]] = []
    asks = next(play)
    while True:
        steps.append(asks)
        try:
            asks = play.send([[PlayerReply(reply.format(len(steps)))] * ask.samples for ask in asks])
        except StopIteration as end:
            return end.value, steps


def test_a_simultaneous_debate() -> None:
    said, steps = watched(protocol.debate(QUESTION, Rules(), "s"))
    assert [(one.speaker, one.answer, one.round) for one in said] == [
        ("Alice", 1, 1), ("Bob", 2, 1), ("Alice", 1, 2), ("Bob", 2, 2), ("Alice", 1, 3), ("Bob", 2, 3)]  # fmt: skip
    assert [len(step) for step in steps] == [2, 2, 2]
    assert [len(speeches(ask)) for step in steps for ask in step] == [0, 0, 2, 2, 4, 4]
    assert all("Thinking: t" not in ask.messages[0]["content"] for step in steps for ask in step)
    prompt = steps[1][0].messages[0]["content"]
    assert "flaws" in prompt and "at most 150 words" in prompt and dict(parts(steps[0][0]))["ARTICLE"]


def test_a_debate_in_turn() -> None:
    _, steps = watched(protocol.debate(QUESTION, Rules(rounds=2, simultaneous=False), "s"))
    assert [[len(speeches(ask)) for ask in step] for step in steps] == [[0], [1], [2], [3]]


def test_a_consultancy_asks_before_each_round_but_the_first() -> None:
    said, steps = watched(protocol.consultancy(QUESTION, 2, Rules(), "s"))
    assert [(one.speaker, one.round) for one in said] == [
        ("Bob", 1), ("Judge", 2), ("Bob", 2), ("Judge", 3), ("Bob", 3)]  # fmt: skip
    asked = [step[0] for step in steps]
    assert [one.role for one in asked] == ["agent", "judge", "agent", "judge", "agent"]
    assert all(("ARTICLE" in dict(parts(one))) == (one.role == "agent") for one in asked)
    verdict = protocol.decide(QUESTION, said, Rules(), "s")
    prompt = next(verdict)[0].messages[0]["content"]
    assert "Bob, a consultant" in prompt and "ARTICLE" not in prompt and "v_passage" in prompt


def test_the_best_of_four_is_chosen_by_the_agent() -> None:
    play = protocol.debate(QUESTION, Rules(rounds=1, best_of=4), "s")
    asks = next(play)
    assert [ask.samples for ask in asks] == [4, 4]
    choices = play.send([[PlayerReply(f"{side} {n}") for n in range(4)] for side in "ab"])
    assert [one.purpose for one in choices] == ["choice"] * 2 and dict(parts(choices[1]))["DRAFT d"] == "b 3"
    with pytest.raises(StopIteration) as end:
        play.send([[PlayerReply("Answer: c")], [PlayerReply("none of these")]])
    assert [one.argument for one in end.value.value] == ["a 2", "b 0"]


def test_votes_go_on_until_the_tokens_are_spent() -> None:
    def run(tokens: int, texts: list[str]) -> tuple[JudgeVerdict, int]:
        play, asked = protocol.vote(QUESTION, "s", tokens), 0
        asks = next(play)
        while True:
            asked += asks[0].samples
            try:
                asks = play.send([[PlayerReply(text, tokens=10) for text in texts]])
            except StopIteration as end:
                return end.value, asked

    found, asked = run(75, ["Answer: 1", "Answer: 1", "Answer: 2", "?"])
    assert (found.answer, found.probability, asked) == (1, pytest.approx(2 / 3), 8)
    assert run(0, ["Answer: 1", "Answer: 2"] * 2)[0].answer is None
    assert run(10**6, ["Answer: 2"] * 4)[1] == MOST_VOTES


@pytest.mark.parametrize("reply, answer", [
    ("Answer: 1", 1), ("answer: <2>", 2), ("**Answer:** 2.", 2), ("2", 2), ("<1>", 1), ("Answer: <1|2>", None),
    ("", None), ("Answer: 1. No: Answer: 2", 2), ("Answer: 12", None), ("Answer: 3", None), ("one", None),
    ("The answer is 1", None), ("<think>Answer: 1</think>Answer: 2", 2), ("<think>Answer: 1", None), ("Answer 2", 2),
])  # fmt: skip
def test_verdicts_are_read(reply: str, answer: int | None) -> None:
    assert read_verdict(reply) == answer


def test_choices_are_read() -> None:
    replies = ("Answer: d", "answer: (b)", "Answer: e", "hm", "<think>Answer: b</think>")
    assert [read_choice(text, 4) for text in replies] == [3, 1, 0, 0, 0]


def test_no_verdict_is_a_coin() -> None:
    assert [JudgeVerdict(one).score(1) for one in (1, 2, None)] == [1.0, 0.0, 0.5]


def test_a_swapped_question_is_the_same_question() -> None:
    other = QUESTION.swapped()
    assert other.right and QUESTION.right
    assert other.answers[other.right - 1] == QUESTION.answers[QUESTION.right - 1] and other.swapped() == QUESTION


def test_a_direct_question_shows_the_article_only_where_it_may() -> None:
    for article in (True, False):
        ask = next(protocol.answer(QUESTION, "s", article=article))[0]
        assert ("ARTICLE" in dict(parts(ask))) == article and ask.greedy
    assert (
        rehearse(protocol.answer(QUESTION, "s", role="agent", article=True), agent(random.Random(0), 1, 1)).answer
        == QUESTION.right
    )
