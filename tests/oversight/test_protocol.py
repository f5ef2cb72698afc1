"""Debates: who is asked what, in which order, and who sees it; what is shown of a speech; and debaters who cheat, who
gain nothing over the same words without the trick, before judges that can be fooled."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from oversight import protocol
from oversight.prompts import Ask, JudgeVerdict, PlayerReply, Question, read_choice, read_verdict
from oversight.protocol import MOST_VOTES, Rules
from oversight.speech import Speech, read_speech, split_thinking
from tests.oversight.scripted import ARTICLE, agent, make_question, mark_in, parts, rehearse, speeches, trusting
from tests.processor_time import at_most
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


def test_a_debate_is_simultaneous_or_in_turn():
    debate, steps = watched(protocol.debate(QUESTION, Rules(), "s"), "Thinking: t\nArgument: a")
    assert [(each.speaker, each.answer, each.round) for each in debate] == [
        ("Alice", 1, 1), ("Bob", 2, 1), ("Alice", 1, 2), ("Bob", 2, 2), ("Alice", 1, 3), ("Bob", 2, 3)]  # fmt: skip
    assert [[len(speeches(ask)) for ask in step] for step in steps] == [[0, 0], [2, 2], [4, 4]]
    assert all("Thinking: t" not in ask.messages[0]["content"] for step in steps for ask in step)
    prompt = steps[1][0].messages[0]["content"]
    assert "flaws" in prompt and "at most 150 words" in prompt and dict(parts(steps[0][0]))["ARTICLE"]
    _, steps = watched(protocol.debate(QUESTION, Rules(rounds=2, simultaneous=False), "s"), "a")
    assert [[len(speeches(ask)) for ask in step] for step in steps] == [[0], [1], [2], [3]]


def test_a_consultancy_asks_before_each_round_but_the_first():
    transcript, steps = watched(protocol.consultancy(QUESTION, 2, Rules(), "s"), "a")
    assert [(each.speaker, each.round) for each in transcript] == [
        ("Bob", 1), ("Judge", 2), ("Bob", 2), ("Judge", 3), ("Bob", 3)]  # fmt: skip
    asked = [step[0] for step in steps]
    assert [ask.role for ask in asked] == ["agent", "judge", "agent", "judge", "agent"]
    assert all(("ARTICLE" in dict(parts(ask))) == (ask.role == "agent") for ask in asked)
    prompt = next(protocol.decide(QUESTION, transcript, Rules(), "s"))[0].messages[0]["content"]
    assert "Bob, a consultant" in prompt and "ARTICLE" not in prompt and "v_passage" in prompt


def test_the_best_of_four_is_chosen_by_the_agent():
    play = protocol.debate(QUESTION, Rules(rounds=1, best_of=4), "s")
    assert [ask.samples for ask in next(play)] == [4, 4]
    choices = play.send([[PlayerReply(f"{side} {n}") for n in range(4)] for side in "ab"])
    assert [ask.purpose for ask in choices] == ["choice"] * 2 and dict(parts(choices[1]))["DRAFT d"] == "b 3"
    with pytest.raises(StopIteration) as end:
        play.send([[PlayerReply("Answer: c")], [PlayerReply("none of these")]])
    assert [speech.argument for speech in end.value.value] == ["a 2", "b 0"]


def test_votes_go_on_until_the_tokens_are_spent():
    def run(tokens: int, *texts: str) -> tuple[JudgeVerdict, int]:
        verdict, steps = watched(protocol.vote(QUESTION, "s", tokens), *texts, tokens=10)
        assert not any("ARTICLE" in dict(parts(step[0])) for step in steps), "a judge votes without it"
        return verdict, sum(step[0].samples for step in steps)

    verdict, asked = run(75, "Answer: 1", "Answer: 1", "Answer: 2", "?")
    assert (verdict.answer, verdict.probability, asked) == (1, pytest.approx(2 / 3), 8)
    assert run(0, *["Answer: 1", "Answer: 2"] * 2)[0].answer is None
    assert run(10**6, *["Answer: 2"] * 4)[1] == MOST_VOTES


@pytest.mark.parametrize("row", read_table("oversight/speeches", kind="verdict"), ids=lambda row: row["text"])
def test_verdicts_are_read_and_none_is_a_coin(row):
    assert read_verdict(row["text"]) == row["answer"]
    assert JudgeVerdict(row["answer"]).score(1) == {1: 1.0, 2: 0.0, None: 0.5}[row["answer"]]


def test_choices_are_read():
    replies = ("Answer: d", "answer: (b)", "Answer: e", "hm", "<think>Answer: b</think>")
    assert [read_choice(text, 4) for text in replies] == [3, 1, 0, 0, 0]


def test_a_direct_question_shows_the_article_only_where_it_may():
    for article in (True, False):
        [ask] = next(protocol.answer(QUESTION, "s", article=article))
        assert ("ARTICLE" in dict(parts(ask))) == article and ask.greedy
    play, other = protocol.answer(QUESTION, "s", role="agent", article=True), QUESTION.swapped()
    assert rehearse(play, agent(random.Random(0), 1, 1)).answer == QUESTION.right == 3 - other.right
    assert other.answers[other.right - 1] == QUESTION.answers[QUESTION.right - 1] and other.swapped() == QUESTION


def test_marks_differ_between_requests_and_cannot_be_guessed():
    seen: list[str] = []

    def script(ask: Ask) -> str:
        seen.append(mark_in(ask.messages[0]["content"]))
        return "Argument: a"

    for secret in ("secret", "another"):
        debate = rehearse(protocol.debate(QUESTION, Rules(), secret), script)
        rehearse(protocol.decide(QUESTION, debate, Rules(), secret), script)
    assert len(set(seen)) == len(seen) == 14 and all(len(mark) == 16 for mark in seen)


TRUE = ARTICLE.format("nine geese")
LIE = "Tove keeps two mules in a barn beside the old mill"


@pytest.mark.parametrize(
    "forged", [row["text"].format(lie=LIE) for row in read_table("oversight/speeches", kind="forged")]
)
def test_forged_marks_are_removed(forged):
    shown = read_speech(f"Argument: {forged}, so it is two mules.", 150, TRUE)
    assert not any(passage.verified for passage in shown.passages)
    tags = re.findall(r"<[^<>]*pass[^<>]*>", shown.argument, re.IGNORECASE)  # what a reader could take for one
    assert {*tags} <= {"<u_passage>", "</u_passage>"}
    assert "v_passage" not in shown.argument.casefold() and LIE in shown.argument


@pytest.mark.parametrize("row", read_table("oversight/speeches", kind="quoted"), ids=lambda row: row["text"])
def test_passages_are_verified_word_for_word(row):
    quoted, verified = row["text"], row["verified"]
    shown, name = (
        read_speech(f"So <passage>{quoted}</passage> it is.", 150, TRUE),
        "v_passage" if verified else "u_passage",
    )
    assert [passage.verified for passage in shown.passages] == [verified]
    assert f"So <{name}>{quoted}</{name}> it is." == shown.argument


def test_quotation_marks_and_dashes_are_of_one_kind():
    article = "He said \u201cnever again\u201d \u2013 and left the room."
    assert read_speech('<passage>said "never again" - and left</passage>', 50, article).passages[0].verified


def test_other_brackets_stay():
    for row in read_table("oversight/speeches", kind="plain"):
        assert read_speech(row["text"], 150).argument == row["text"]


@pytest.mark.parametrize("row", read_table("oversight/speeches", kind="thinking"), ids=lambda row: row["text"])
def test_thinking_stays_hidden(row):
    hidden, shown = split_thinking(row["text"])
    assert shown == row["argument"] and ("secret" in hidden or "secret" not in row["text"])


@pytest.mark.parametrize("text", ["word " * 5000, "x" * 200_000, "\u9a74" * 5000, "two words " * 75, "a-b " * 400])
def test_speeches_end_at_the_limit(text):
    """Characters of a script without blanks are words; one word of 12 characters is as long as they get."""
    shown = read_speech(text, 150)
    assert shown.cut == (len(text.split()) > 150 or len(text) > 1800)
    assert len(shown.argument) <= 1800 and len(shown.argument.split()) <= 150
    assert not text.startswith("\u9a74") or len(shown.argument) == 150


def test_a_cut_passage_is_checked_as_it_is_shown():
    shown = read_speech("x " * 145 + f"<passage>{TRUE}</passage>", 150, TRUE)
    assert shown.cut and shown.argument.endswith("<v_passage>In the valley of Orm</v_passage>")


def test_nested_tags_take_no_time():
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
def test_tricks_gain_nothing(name):
    for judge in (naive, trusting(random.Random(0))):
        assert decided(f"Argument: {PLAIN}", judge)[1] == 2
        transcript, verdict = decided(f"Argument: {TRICKS[name]}", judge)
        assert verdict == 2 and not any(passage.verified for passage in transcript[0].passages), transcript[0].argument


@pytest.mark.parametrize("name", ["forged mark", "order outside", "forged opponent"])
def test_the_naive_judge_is_fooled_where_nothing_is_guarded(name):
    """So the tests above can fail: the same judge follows the same trick if texts reach it as they are."""
    opening = f"Texts between two marks {GUESS} are material. QUESTION {GUESS}\nx\n{GUESS}"
    transcript = (
        f"ROUND 1, Alice {GUESS}\n{TRICKS[name]}\n{GUESS}\n\nROUND 1, Bob {GUESS}\n{'nine geese, ' * 30}\n{GUESS}"
    )
    messages = [{"role": "user", "content": f"{opening}\n\n{transcript}"}]
    assert naive(Ask(role="judge", purpose="verdict", messages=messages)) == "Answer: 1"
