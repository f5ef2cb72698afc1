"""Reasoning and answer of a stream, cut at any place; and its tokens."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve.reasoning import Chunk, ReasoningCounter, Splitter
from shared.reasoning_tags import CONTROL, TEXT
from shared.tool_calls import unfinished


def read(chunks, opened=False):
    """Reasoning, answer and last state of a stream of text."""
    splitter = Splitter(TEXT, opened=opened)
    chunks = [chunk for chunk in chunks for chunk in splitter.feed(chunk)] + splitter.end()
    assert all(chunk.text for chunk in chunks)
    thinking = [chunk.thinking for chunk in chunks]
    assert thinking == sorted(thinking, reverse=True), "all reasoning comes before the answer"
    reasoning, answer = ("".join(chunk.text for chunk in chunks if chunk.thinking is kind) for kind in (True, False))
    return reasoning, answer, splitter.state


@pytest.mark.parametrize(("text", "reasoning", "answer"), [
    ("<think>2+2 is 4</think>4", "2+2 is 4", "4"),
    (" \n<think>\n2+2\n</think>\n\nIt is 4.", "2+2", "It is 4."),
    ("<think> a \n b \n</think> c \n d \n ", "a \n b", "c \n d"), ("4 <think>a</think>", "", "4 <think>a</think>"),
    ("<think>never closed", "never closed", ""), ("<think></think>4", "", "4"), ("<thi", "", "<thi"),
    ("<think>a</think>b</think>c<think>", "a", "b</think>c<think>"), ("<thinking>x", "", "<thinking>x"),
    ("<think>a</thi", "a</thi", ""), ("  ", "", ""), ("<think>a < b, </ c</think>d", "a < b, </ c", "d"),
])  # fmt: skip
def test_every_chunking_gives_the_same(text, reasoning, answer):
    for place in range(len(text) + 1):
        assert read([text[:place], text[place:]])[:2] == read(list(text))[:2] == (reasoning, answer)
    inside = text.lstrip().removeprefix("<think>")
    if inside != text.lstrip():
        assert read([inside], opened=True)[:2] == (reasoning, answer)


@given(
    chunks=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "th", "ink>", "a", " ", "é中"]), max_size=12),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    opened=st.booleans(),
)
@example(chunks=["<think>", "</", "th", "ink>", "a"], cuts=[8, 9, 12], opened=False)
def test_cuts_change_nothing(chunks, cuts, opened):
    text = "".join(chunks)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    whole = read([text], opened)
    assert read([text[start:end] for start, end in zip(places, places[1:], strict=False)], opened) == whole
    if not opened and not text.lstrip().startswith("<think>"):
        assert whole[:2] == ("", text.strip())
    begun = [size for size in range(len("</think>")) if text.endswith("</think>"[:size])]
    assert unfinished(text, "</think>") == max(begun)


def test_reasoning_is_told_as_soon_as_it_is_clear():
    splitter = Splitter(TEXT)
    assert [splitter.feed(chunk) for chunk in ("<th", "ink>one", " two <", "b </th", "ink>", "3")] == [
        [], [Chunk(True, "one")], [Chunk(True, " two")], [Chunk(True, " <b")], [], [Chunk(False, "3")],
    ]  # fmt: skip


def test_control_tokens_are_believed_and_their_letters_are_not():
    splitter = Splitter(CONTROL, control=(7, 8))
    chunks = splitter.feed("[THINK]", [7]) + splitter.feed("a [/THINK] b", [1] * 6)
    chunks += splitter.feed("[/THINK]", [8]) + splitter.feed("[THINK]4", [1] * 3) + splitter.end()
    assert "".join(chunk.text for chunk in chunks if chunk.thinking) == "a [/THINK] b"
    assert "".join(chunk.text for chunk in chunks if not chunk.thinking) == "[THINK]4"
    typed = Splitter(CONTROL, control=(7, 8))
    assert typed.feed("[THINK]a", [1] * 4) + typed.end() == [Chunk(False, "[THINK]a")]
    letters = {7: "[THINK]", 8: "[/THINK]", 1: "w", 2: "[/THINK]"}
    counter = ReasoningCounter(letters.__getitem__, CONTROL, control=(7, 8))
    counter.feed([7, 1, 2, 8, 1, 1])
    assert counter.tokens == 4, "letters of a tag that are no control token end nothing"


@pytest.mark.parametrize(
    ("ids", "count"),
    [([6, 1, 2, 3, 4, 5, 5], 5), ([1, 2, 7, 3, 4, 5], 5), ([5, 1, 2, 3, 4], 0), ([1, 2, 2], 3), ([6, 7], 0), ([1], 1)],
)
def test_reasoning_is_counted_by_the_tokens_alone(ids, count):
    letters = {1: "<think>", 2: "a", 3: "</th", 4: "ink>", 5: "b", 6: " ", 7: "</"}
    for size in (1, 2, 3, 9):
        counter = ReasoningCounter(letters.__getitem__, TEXT)
        for start in range(0, len(ids), size):
            counter.feed(ids[start : start + size])
        assert counter.tokens == count, size
