"""Splits a streamed completion into reasoning and answer, however the stream is divided.

    before the reasoning  -- <think> -->  reasoning  -- </think> -->  answer

A tag may arrive in any number of chunks: text that could still become one is held back. A completion that does not
begin with the opening tag is all answer; one whose reasoning never closes has no answer; after the closing tag, tags
are ordinary text. For a model with control tokens for its reasoning ([THINK], channels), the token counts and not its
letters: the same letters in ordinary tokens stay text. Tags around the answer, which some families write, are no part
of it.

A completion in channels (harmony) is a sequence of messages: those to nobody in the channels "analysis" and
"commentary" are the reasoning, "final" is the answer, and one to a tool is a call, in the form of `shared.tool_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from shared.reasoning_tags import CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, START, TEXT, Tags
from shared.tool_calls import CALL_END, call_start, unfinished

ReasoningFormat = Literal["both", "openai", "deepseek", "mistral", "inline", "hidden"]
"""where reasoning is in a response (docs/serving.md)"""


class Chunk(NamedTuple):
    """Some text of a completion, never empty."""

    thinking: bool
    """whether it belongs to the reasoning rather than the answer"""
    text: str
    forced: bool = False
    """whether the server wrote it, and not the model"""


class State(Enum):
    """The part of a completion that is being read."""

    BEFORE = "before the reasoning"
    THINKING = "reasoning"
    ANSWER = "answer"


MARK = re.compile("|".join(map(re.escape, MARKS)))
IN_HEADER = (CHANNEL, CONSTRAIN)
NO_TOOLS = ("python", "browser", "container", "assistant", "user", "all")
"""recipients that are no tools of a client"""


def marks_of(tags: Tags) -> Sequence[str]:
    """The texts that separate the parts of a completion."""
    return MARKS if tags.channels else tags[:2]


class ChannelReader:
    """Where a completion in channels is: in the header of a message, or in its text."""

    def __init__(self, inside: bool):
        """inside: the prompt ends in the text of a message."""
        self.header: str | None = None if inside else ""
        """so far; None in the text of a message"""
        self.marked = inside
        """whether a control token was there, so that this is a completion in channels"""
        self.calling = self.hidden = self.empty = False
        """of the message: whether it is a call, is sent to nobody, has no text yet"""

    def is_plain(self, last: bool) -> bool:
        """Whether a completion that begins so, without any control token, is in no channels. last: it ends here."""
        start = (self.header or "").strip()
        begun = start.startswith("to=") or any(text.startswith(start) and text != start for text in (TEXT.open, "to="))
        return bool(start) and (last or not begun)

    def addressed(self) -> tuple[str, str]:
        """The channel and the recipient that the header names, "" for none."""
        matches = (re.search(pattern, self.header or "") for pattern in (r"<\|channel\|>\s*(\w+)", r"to=([^\s<]+)"))
        channel, recipient = (match.group(1) if match else "" for match in matches)
        return channel, recipient


class Splitter:
    """Splits one completion into reasoning and answer as its text arrives."""

    def __init__(
        self, tags: Tags, *, opened: bool = False, begun: bool = False, control: Sequence[int] | None = None,
        exact: bool = False,
    ):  # fmt: skip
        """opened: the prompt ends with the opening tag; begun: it ends with first words of reasoning after that tag.
        control: token ids of both tags, or of `MARKS`, if they are control tokens. exact: blanks before the first word
        of a part and after its last one are kept."""
        self.tags = tags
        self._channels = ChannelReader(opened or begun) if tags.channels else None
        self.state = State.THINKING if opened or begun else State.BEFORE
        self.has_reasoning = opened or begun
        """whether there is reasoning, even if it is empty"""
        self._held = ""
        self._exact, self._fresh = exact, not (begun or exact)
        """fresh: nothing of this part was returned yet, and blanks before its first word are dropped, unless exact"""
        self._blanks = ""
        """at the end of this part so far; they are returned with its next word, if there is one"""
        self._wrapped: bool | None = None if tags.answer[0] else bool(tags.answer[1])
        """whether the tag before the answer was there and the one after it was not yet; None before the answer"""
        self._control = None if control is None else dict(zip(marks_of(tags), control, strict=True))
        self._credit = dict.fromkeys(marks_of(tags), 0)
        """tag -> control tokens that arrived and whose letters were not found yet"""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Chunk]:
        """Take the next text of the completion and its tokens; return the chunks that are settled."""
        for tag, token in (self._control or {}).items():
            self._credit[tag] += token_ids.count(token)
        self._held += text
        return list(self._clear(last=False))

    def end(self) -> list[Chunk]:
        """End the completion: return what was held back as text."""
        return list(self._clear(last=True))

    @property
    def inside(self) -> bool:
        """Whether the next text would be words of the reasoning."""
        return self.state is State.THINKING and (self._channels is None or self._channels.header is None)

    @property
    def calling(self) -> bool:
        """Whether the next text would be arguments of a call in a message of its own."""
        return self._channels is not None and self._channels.header is None and self._channels.calling

    def ending(self, phrase: str, blanks: tuple[str, str, str]) -> str:
        """The text that ends the reasoning here with a phrase, so that the answer follows. blanks: around tags, see
        `ModelCard.tag_blanks`."""
        if self._channels is None:
            begun, end, behind = blanks
            apart = begun or (" " if phrase else "") if self.inside else f"{self.tags.open}{begun}"
            return f"{apart}{phrase}{end}{self.tags.close}{behind}"
        if self.inside:
            return f"\n{phrase}{END}{START}assistant{self.tags.close}"
        return f"{START}assistant{self.tags.close}" if self.has_reasoning else self.tags.close

    def _clear(self, last: bool) -> Iterator[Chunk]:
        """Yield everything in `_held` that no further text can change; with `last`, all of it."""
        if self._channels is not None:
            yield from self._clear_messages(self._channels, last)
            if self._channels is not None:
                return
        if self.state is State.BEFORE:
            start = self._held.lstrip()
            if start.startswith(self.tags.open) and self._spend(self.tags.open):
                self.state, self.has_reasoning, self._held = State.THINKING, True, start.removeprefix(self.tags.open)
            elif last or not self.tags.open.startswith(start):
                self.state = State.ANSWER
            else:
                return
        if self.state is State.THINKING:
            at = self._find_close()
            if at >= 0:
                reasoning = self._held[:at]
                for token in self.tags.dropped:
                    reasoning = reasoning.replace(token, "")
                yield from self._emit(True, reasoning)
                self.state, self._fresh, self._blanks = State.ANSWER, not self._exact, ""
                self._held = self._held[at + len(self.tags.close) :]
            else:
                for token in self.tags.dropped:
                    self._held = self._held.replace(token, "")
                keep = 0 if last else max(unfinished(self._held, tag) for tag in (self.tags.close, *self.tags.dropped))
                yield from self._emit(True, self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return
        yield from self._clear_answer(last)

    def _clear_answer(self, last: bool) -> Iterator[Chunk]:
        opening, closing = self.tags.answer
        if self._wrapped is None:
            start = self._held.lstrip()
            if not last and opening.startswith(start):
                return
            self._wrapped = start.startswith(opening)
            self._held = start.removeprefix(opening) if self._wrapped else self._held
        keep = 0
        if self._wrapped:
            before, closed, behind = self._held.partition(closing)
            self._wrapped, self._held = not closed, before + behind
            keep = 0 if closed or last else unfinished(self._held, closing)
        yield from self._emit(False, self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]

    def _clear_messages(self, reader: ChannelReader, last: bool) -> Iterator[Chunk]:
        """Yield what is settled of a completion in channels. One that begins with <think> is read as others are."""
        while True:
            at, mark = self._next_mark()
            keep = 0 if last or mark else max(unfinished(self._held, each) for each in MARKS)
            at = at if mark else len(self._held) - keep
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            if reader.header is None:
                yield from self._emit_of(reader, text)
            else:
                reader.header += text
                if self.state is State.BEFORE and not reader.marked and reader.is_plain(last and not mark):
                    text, reader.header = reader.header, None
                    if text.lstrip().startswith(TEXT.open):
                        self._channels, self.tags, self._control = None, TEXT, None
                        self._credit, self._held = dict.fromkeys(TEXT[:2], 0), text + mark + self._held
                        return
                    yield from self._begin(reader, "", "")
                    yield from self._emit_of(reader, text)
            if not mark:
                break
            reader.marked = True
            if mark == MESSAGE and reader.header is not None:
                channel, recipient = reader.addressed()
                yield from self._begin(reader, channel, recipient)
            elif mark != MESSAGE:
                yield from self._end_message(reader)
                reader.header = (reader.header or "") + mark if mark in IN_HEADER else ""
        if last:
            yield from self._end_message(reader)

    def _next_mark(self) -> tuple[int, str]:
        """The next control token of harmony in `_held`, and where it is; "" for none."""
        for match in MARK.finditer(self._held):
            if self._spend(match.group()):
                return match.start(), match.group()
        return -1, ""

    def _begin(self, reader: ChannelReader, channel: str, recipient: str) -> Iterator[Chunk]:
        """Begin the text of a message."""
        name = recipient.removeprefix("functions.")
        of_client = name != recipient or name.split(".")[0] not in NO_TOOLS
        reader.header, reader.calling = None, bool(name) and of_client
        thinking = not reader.calling and channel not in ("", "final")
        reader.hidden = thinking and self.state is State.ANSWER  # an answer is the end
        if reader.hidden:
            return
        state = State.THINKING if thinking else State.ANSWER
        again = state is self.state and not self._fresh
        self.state, self._fresh, self._blanks = state, not self._exact, "\n" if again else ""
        self.has_reasoning = self.has_reasoning or thinking
        if reader.calling:
            reader.empty = True
            yield from self._emit(False, call_start(name))

    def _emit_of(self, reader: ChannelReader, text: str) -> Iterator[Chunk]:
        reader.empty = reader.empty and not text.strip()
        if not reader.hidden:
            yield from self._emit(self.state is State.THINKING, text)

    def _end_message(self, reader: ChannelReader) -> Iterator[Chunk]:
        if reader.header is None and reader.calling:
            yield from self._emit(False, ("{}" if reader.empty else "") + CALL_END)
        reader.header = "" if reader.header is None else reader.header

    def _find_close(self) -> int:
        """Return the position of the closing tag in `_held`, -1 if there is none."""
        at = self._held.find(self.tags.close)
        return at if at >= 0 and self._spend(self.tags.close) else -1

    def _spend(self, tag: str) -> bool:
        """Whether letters that spell a tag are one: always without control tokens, else once per such token."""
        if self._control is None:
            return True
        self._credit[tag] -= 1
        if self._credit[tag] < 0:
            self._credit[tag] = 0
            return False
        return True

    def _emit(self, thinking: bool, text: str) -> Iterator[Chunk]:
        if self._fresh:
            text = text.lstrip()
        if not self._exact:
            whole = self._blanks + text
            text = whole.rstrip()
            self._blanks = whole[len(text) :]
        if text:
            self._fresh = False
            yield Chunk(thinking, text)


class ReasoningCounter:
    """Counts the tokens of the reasoning of one completion, tags included, by the tokens alone.

    The token that completes the closing tag is the last one. Text arrives later than its tokens (vLLM holds back
    partial characters and possible stop strings), and many tokens may arrive at once; neither changes the count.
    """

    def __init__(
        self, letters: Callable[[int], str], tags: Tags, *, opened: bool = False, begun: bool = False,
        control: Sequence[int] | None = None,
    ):  # fmt: skip
        """letters: decodes a single token; it need not know letters beyond ASCII. The rest: as for `Splitter`."""
        self._letters, self._tokens = letters, 0
        self._splitter = Splitter(tags, opened=opened, begun=begun, control=control)

    @property
    def tokens(self) -> int:
        """The count so far; 0 if the completion does not begin with the opening tag."""
        return self._tokens if self._splitter.has_reasoning else 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the completion."""
        for token in token_ids:
            if self._splitter.state is State.ANSWER:
                return
            self._tokens += 1
            self._splitter.feed(self._letters(token), (token,))
