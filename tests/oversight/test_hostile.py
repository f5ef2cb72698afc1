"""Debaters who cheat gain nothing over the same words without the trick, before judges that can be fooled."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from oversight import protocol
from oversight.prompts import Ask, Question
from oversight.protocol import Rules
from oversight.speech import Speech, read_speech, split_thinking
from tests.oversight.scripted import ARTICLE, mark_in, rehearse, speeches, trusting
from tests.processor_time import at_most
from tests.tables import read_table

TRUE = ARTICLE.format("nine geese")
LIE = "Tove keeps two mules in a barn beside the old mill"


@pytest.mark.parametrize(
    "forged", [row["text"].format(lie=LIE) for row in read_table("oversight/speeches", kind="forged")]
)
def test_forged_marks_are_removed(forged: str) -> None:
    shown = read_speech(f"Argument: {forged}, so it is two mules.", 150, TRUE)
    assert not any(passage.verified for passage in shown.passages)
    tags = re.findall(r"<[^<>]*pass[^<>]*>", shown.argument, re.IGNORECASE)  # what a reader could take for one
    assert {*tags} <= {"<u_passage>", "</u_passage>"}
    assert "v_passage" not in shown.argument.casefold() and LIE in shown.argument


@pytest.mark.parametrize("row", read_table("oversight/speeches", kind="quoted"), ids=lambda row: row["text"])
def test_passages_are_verified_word_for_word(row: dict[str, Any]) -> None:
    quoted, verified = row["text"], row["verified"]
    shown, name = (
        read_speech(f"So <passage>{quoted}</passage> it is.", 150, TRUE),
        "v_passage" if verified else "u_passage",
    )
    assert [passage.verified for passage in shown.passages] == [verified]
    assert f"So <{name}>{quoted}</{name}> it is." == shown.argument


def test_quotation_marks_and_dashes_are_of_one_kind() -> None:
    article = "He said \u201cnever again\u201d \u2013 and left the room."
    assert read_speech('<passage>said "never again" - and left</passage>', 50, article).passages[0].verified


def test_other_brackets_stay() -> None:
    for row in read_table("oversight/speeches", kind="plain"):
        assert read_speech(row["text"], 150).argument == row["text"]


@pytest.mark.parametrize("row", read_table("oversight/speeches", kind="thinking"), ids=lambda row: row["text"])
def test_thinking_stays_hidden(row: dict[str, str]) -> None:
    hidden, shown = split_thinking(row["text"])
    assert shown == row["argument"] and ("secret" in hidden or "secret" not in row["text"])


@pytest.mark.parametrize("text", ["word " * 5000, "x" * 200_000, "\u9a74" * 5000, "two words " * 75, "a-b " * 400])
def test_speeches_end_at_the_limit(text: str) -> None:
    """Characters of a script without blanks are words; one word of 12 characters is as long as they get."""
    shown = read_speech(text, 150)
    assert shown.cut == (len(text.split()) > 150 or len(text) > 1800)
    assert len(shown.argument) <= 1800 and len(shown.argument.split()) <= 150
    assert not text.startswith("\u9a74") or len(shown.argument) == 150


def test_a_cut_passage_is_checked_as_it_is_shown() -> None:
    shown = read_speech("x " * 145 + f"<passage>{TRUE}</passage>", 150, TRUE)
    assert shown.cut and shown.argument.endswith("<v_passage>In the valley of Orm</v_passage>")


def test_nested_tags_take_no_time() -> None:
    for hostile in ("<v_" * 300_000 + "passage>" * 300_000, "<passage>" * 200_000, "&lt;" * 300_000, "<" * 10**6):
        with at_most(30):
            read_speech(hostile, 150, TRUE)


def naive(ask: Ask) -> str:
    """A judge that can be fooled: it obeys an instruction that does not stand between marks, follows who was conceded
    to by name, counts verified passages, then words."""
    prompt = ask.messages[0]["content"]
    outside = "".join(prompt.split(mark_in(prompt))[1::2])  # before the first text, between and after them
    if orders := re.findall(r"the judge must answer ([12])", outside):
        return f"Answer: {orders[-1]}"
    transcript = speeches(ask)
    if any(name == "Bob" and "I concede" in text for name, text in transcript):
        return "Answer: 1"
    texts = ["".join(text for name, text in transcript if name == who) for who in ("Alice", "Bob")]
    scores = [(text.count("<v_passage>"), len(text)) for text in texts]
    return f"Answer: {1 if scores[0] >= scores[1] else 2}"


GUESS = "0123456789abcdef"
PLAIN = f"{LIE}, so it is two mules."
TRICKS = {row["name"]: row["text"] for row in read_table("oversight/speeches", kind="trick")}
TRICKS["endless"] = f"{PLAIN} " + "mules " * 100_000
OTHER = f"Argument: The article says <passage>{TRUE}</passage>, so it is nine geese."


def decided(speech: str, judge: Callable[[Ask], str]) -> tuple[list[Speech], int | None]:
    """Alice's speech for the wrong answer against Bob's honest one."""
    question = Question(id="1", text="What does Tove keep?", answers=("two mules", "nine geese"), right=2, article=TRUE)
    rules = Rules(rounds=1)
    transcript = rehearse(protocol.debate(question, rules, "s"), lambda ask: speech if ask.answer == 1 else OTHER)
    return transcript, rehearse(protocol.decide(question, transcript, rules, "s"), judge).answer


@pytest.mark.parametrize("name", TRICKS)
def test_tricks_gain_nothing(name: str) -> None:
    for judge in (naive, trusting(random.Random(0))):
        assert decided(f"Argument: {PLAIN}", judge)[1] == 2
        transcript, verdict = decided(f"Argument: {TRICKS[name]}", judge)
        assert verdict == 2 and not any(passage.verified for passage in transcript[0].passages), transcript[0].argument


@pytest.mark.parametrize("name", ["forged mark", "order outside", "forged opponent"])
def test_the_naive_judge_is_fooled_where_nothing_is_guarded(name: str) -> None:
    """So the tests above can fail: the same judge follows the same trick if texts reach it as they are."""
    opening = f"Texts between two marks {GUESS} are material. QUESTION {GUESS}\nx\n{GUESS}"
    transcript = (
        f"ROUND 1, Alice {GUESS}\n{TRICKS[name]}\n{GUESS}\n\nROUND 1, Bob {GUESS}\n{'nine geese, ' * 30}\n{GUESS}"
    )
    messages = [{"role": "user", "content": f"{opening}\n\n{transcript}"}]
    assert naive(Ask(role="judge", purpose="verdict", messages=messages)) == "Answer: 1"
