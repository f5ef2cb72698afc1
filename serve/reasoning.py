"""Splits a streamed completion into reasoning and answer, however the stream is divided.

    before the reasoning  -- <think> -->  reasoning  -- </think> -->  answer

A tag may arrive in any number of chunks: text that could still become one is held back. A completion that does not
begin with the opening tag is all answer; one whose reasoning never closes has no answer; after the closing tag, tags
are ordinary text. For a model with control tokens for its reasoning ([THINK]), the token counts and not its letters:
the same letters in ordinary tokens stay text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from shared.tool_calls import unfinished
from verify.format import Tags

ReasoningFormat = Literal["both", "openai", "deepseek", "mistral", "inline", "hidden"]
"""where reasoning stands in a response (docs/serving.md)"""


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


class Splitter:
    """Splits one completion into reasoning and answer as its text arrives."""

    def __init__(
        self,
        tags: Tags,
        *,
        opened: bool = False,
        begun: bool = False,
        control: tuple[int, int] | None = None,
        exact: bool = False,
    ):
        """opened: the prompt ends with the opening tag; begun: it ends with first words of reasoning after that tag.
        control: token ids of both tags if they are control tokens. exact: blanks before the first word of a part and
        behind its last one are kept."""
        self.tags, self.control = tags, control
        self.state = State.THINKING if opened or begun else State.BEFORE
        self.has_reasoning = opened or begun
        """whether there is reasoning, even if it is empty"""
        self._held = ""
        self._exact, self._fresh = exact, not (begun or exact)
        """fresh: nothing of this part was returned yet, and blanks before its first word are dropped, unless exact"""
        self._blanks = ""
        """at the end of this part so far; they are returned with its next word, if there is one"""
        self._credit = {tags.open: 0, tags.close: 0}
        """tag -> control tokens that arrived and whose letters were not found yet"""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Chunk]:
        """Take the next text of the completion and its tokens; return the chunks that are settled."""
        if self.control is not None:
            self._credit[self.tags.open] += token_ids.count(self.control[0])
            self._credit[self.tags.close] += token_ids.count(self.control[1])
        self._held += text
        return list(self._clear(last=False))

    def end(self) -> list[Chunk]:
        """End the completion: return what was held back as text."""
        return list(self._clear(last=True))

    def _clear(self, last: bool) -> Iterator[Chunk]:
        """Yield everything in `_held` that no further text can change; with `last`, all of it."""
        if self.state is State.BEFORE:
            start = self._held.lstrip()
            if start.startswith(self.tags.open) and self._spend(self.tags.open):
                self.state, self.has_reasoning, self._held = State.THINKING, True, start.removeprefix(self.tags.open)
            elif last or not self.tags.open.startswith(start):
                self.state = State.ANSWER
            else:
                return
        if self.state is State.THINKING:
            place = self._find_close()
            if place >= 0:
                yield from self._emit(True, self._held[:place])
                self.state, self._fresh, self._blanks = State.ANSWER, not self._exact, ""
                self._held = self._held[place + len(self.tags.close) :]
            else:
                keep = 0 if last else unfinished(self._held, self.tags.close)
                yield from self._emit(True, self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return
        yield from self._emit(False, self._held)
        self._held = ""

    def _find_close(self) -> int:
        """Return the position of the closing tag in `_held`, -1 if there is none."""
        place = self._held.find(self.tags.close)
        return place if place >= 0 and self._spend(self.tags.close) else -1

    def _spend(self, tag: str) -> bool:
        """Whether letters that spell a tag are one: always without control tokens, else once per such token."""
        if self.control is None:
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
        control: tuple[int, int] | None = None,
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
