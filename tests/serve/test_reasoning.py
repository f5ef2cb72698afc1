"""Reasoning and answer of a stream, cut at any place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve.engine import Constraint, Delta, SamplingParameters
from serve.generation import Phase, Try
from serve.plan import GenerationPlan, Response
from serve.reasoning import Chunk, ReasoningCounter, Splitter, State
from serve.reasoning_language import LanguageChoice
from serve.system_prompts import PromptRenderer
from shared.chat import Chat
from shared.reasoning_tags import CONTROL, TEXT
from shared.tool_calls import unfinished

OPEN_ID, CLOSE_ID, WORD = 7, 8, 1


def read(chunks: list[str], opened: bool = False) -> tuple[str, str, State]:
    """Reasoning and answer of a stream of text."""
    splitter = Splitter(TEXT, opened=opened)
    chunks = [chunk for chunk in chunks for chunk in splitter.feed(chunk)] + splitter.end()
    assert all(chunk.text for chunk in chunks)
    thinking = [chunk.thinking for chunk in chunks]
    assert thinking == sorted(thinking, reverse=True), "all reasoning comes before the answer"
    parts = ["".join(chunk.text for chunk in chunks if chunk.thinking is kind) for kind in (True, False)]
    return parts[0], parts[1], splitter.state


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>2+2 is 4</think>4", False, "2+2 is 4", "4"),
        (" \n<think>\n2+2\n</think>\n\nIt is 4.", False, "2+2", "It is 4."),
        ("<think> a \n b \n</think> c \n d \n ", False, "a \n b", "c \n d"),
        ("2+2</think>4", True, "2+2", "4"),
        ("4", False, "", "4"),
        ("4 <think>late</think>", False, "", "4 <think>late</think>"),
        ("<think>never closed", False, "never closed", ""),
        ("<think></think>4", False, "", "4"),
        ("<think>a</think>b</think>c<think>", False, "a", "b</think>c<think>"),
        ("<thinking>x", False, "", "<thinking>x"),
        ("<thi", False, "", "<thi"),
        ("<think>a</thi", False, "a</thi", ""),
        ("  ", False, "", ""),
        ("", True, "", ""),
        ("<think>a < b, b </ c</think>d", False, "a < b, b </ c", "d"),
    ],
)  # fmt: skip
def test_every_chunking_gives_the_same(text: str, opened: bool, reasoning: str, answer: str) -> None:
    assert read([text], opened)[:2] == (reasoning, answer)
    assert read(list(text), opened)[:2] == (reasoning, answer)
    for place in range(len(text)):
        assert read([text[:place], text[place:]], opened)[:2] == (reasoning, answer)


@given(
    chunks=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "th", "ink>", "a", " ", "é中"]), max_size=12),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    opened=st.booleans(),
)
@example(chunks=["<think>", "</", "th", "ink>", "a"], cuts=[8, 9, 12], opened=False)
def test_cuts_change_nothing(chunks: list[str], cuts: list[int], opened: bool) -> None:
    text = "".join(chunks)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    chunks = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    whole = read([text], opened)
    assert read(chunks, opened) == whole
    if not opened and not text.lstrip().startswith("<think>"):
        assert whole[:2] == ("", text.strip())


def test_reasoning_is_told_as_soon_as_it_is_clear() -> None:
    splitter = Splitter(TEXT)
    told = [splitter.feed(chunk) for chunk in ("<th", "ink>one", " two <", "b </th", "ink>", "3")]
    assert told == [
        [], [Chunk(True, "one")], [Chunk(True, " two")], [Chunk(True, " <b")], [], [Chunk(False, "3")],
    ]  # fmt: skip


def test_tokens_of_reasoning_are_counted_with_their_tags() -> None:
    letters = {5: "<think>", 1: "a", 2: "b", 6: "</think>", 3: "4"}.__getitem__
    counter = ReasoningCounter(letters, TEXT)
    counter.feed([5, 1, 2, 6, 3])
    assert counter.tokens == 4
    none = ReasoningCounter(letters, TEXT)
    none.feed([3, 1, 2])
    assert none.tokens == 0


def test_control_tokens_are_believed_and_their_letters_are_not() -> None:
    splitter = Splitter(CONTROL, control=(OPEN_ID, CLOSE_ID))
    chunks = splitter.feed("[THINK]", [OPEN_ID]) + splitter.feed("a [/THINK] b", [WORD] * 6)
    chunks += splitter.feed("[/THINK]", [CLOSE_ID]) + splitter.feed("[THINK]4", [WORD] * 3) + splitter.end()
    assert "".join(chunk.text for chunk in chunks if chunk.thinking) == "a [/THINK] b"
    assert "".join(chunk.text for chunk in chunks if not chunk.thinking) == "[THINK]4"
    typed = Splitter(CONTROL, control=(OPEN_ID, CLOSE_ID))
    assert typed.feed("[THINK]a", [WORD] * 4) + typed.end() == [Chunk(False, "[THINK]a")]


@pytest.mark.parametrize(
    ("text", "size"), [("x</t", 3), ("x", 0), ("</think", 7), ("<<", 1), ("", 0), ("</think>", 0), ("</</", 2)]
)
def test_what_may_become_a_tag(text: str, size: int) -> None:
    assert unfinished(text, "</think>") == size


def attempt_of(folder: Path, constraint: Constraint | None = None) -> tuple[Try, Response, Callable[..., Delta]]:
    """A try of a model that opens its reasoning itself, and deltas of its text."""
    chat, response = Chat(folder), Response()
    sampling = SamplingParameters(100, constraint=constraint)
    plan = GenerationPlan(chat.encode("Why?"), sampling, LanguageChoice("", "off"), "prompt")

    def delta(text: str, *more: int) -> Delta:
        return Delta(text, [*chat.encode(text), *more], [])

    return Try(PromptRenderer(chat), plan, "ask", response), response, delta


def test_a_try_ends_its_reasoning_by_the_tag(model_folder: Path) -> None:
    attempt, response, delta = attempt_of(model_folder)
    leg = attempt.begin_leg()
    assert attempt.phase is Phase.BEFORE and not attempt.is_beyond
    assert [chunk.text for chunk in attempt.take(delta("<think>One"))] == ["One"]
    assert attempt.phase is Phase.REASONING and not attempt.is_to_interrupt
    assert [chunk.text for chunk in attempt.take(delta("</think>Two"))] == ["Two"]
    response.finish_reason, response.end_reasoning_early = "stop", True
    assert attempt.phase is Phase.ANSWER and not attempt.is_beyond and attempt.end_leg(leg) == ([], True)


def test_a_try_that_is_interrupted_goes_on_behind_the_servers_words(model_folder: Path) -> None:
    attempt, response, delta = attempt_of(model_folder)
    before = attempt.prompt_ids
    attempt.begin_leg()
    attempt.take(delta("<think>One"))
    response.end_reasoning_early = True
    assert attempt.is_to_interrupt and attempt.interrupt_leg() == [] and attempt.is_beyond
    [words] = attempt.end_reasoning()
    assert words.thinking and words.forced and attempt.phase is Phase.ANSWER and not attempt.is_beyond
    added = attempt.prompt_ids[len(before) :]
    assert Chat(model_folder).decode(added).startswith("<think>One") and attempt.sampling.max_tokens == 100 - len(added)


def test_a_try_that_the_model_ends_within_its_reasoning_must_still_have_its_form(model_folder: Path) -> None:
    attempt, response, delta = attempt_of(model_folder, Constraint("json_object", ""))
    leg = attempt.begin_leg()
    assert attempt.phase is Phase.REASONING and leg.constraint is None and leg.through
    attempt.take(delta("One", Chat(model_folder).eos_id))
    response.finish_reason = "stop"
    chunks, over = attempt.end_leg(leg)
    assert [chunk.forced for chunk in chunks] == [True] and not over and response.finish_reason == ""
    assert Chat(model_folder).eos_id not in attempt.prompt_ids
    assert attempt.phase is Phase.ANSWER and attempt.begin_leg().constraint == Constraint("json_object", "")
