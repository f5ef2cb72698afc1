"""Texts of others in a prompt: problems, system messages, descriptions of tools. None spells a control token."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared.errors import ModelError
from shared.tool_calls import TOOLS_PROMPT

if TYPE_CHECKING:
    from shared.chat import Chat

PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")


class NormalisedTokens:
    """Finds control tokens as a pattern does, in a text and in what the tokenizer's normaliser makes of it."""

    def __init__(self, pattern: re.Pattern[str], normalise: Callable[[str], str]):
        self.match, self.split, self.findall = pattern.match, pattern.split, pattern.findall
        self._search, self._normalise = pattern.search, normalise

    def search(self, text: str) -> re.Match[str] | None:
        """The first one."""
        return self._search(text) or self._search(self._normalise(text))


def spelled_tokens(tokenizer: Any) -> re.Pattern[str] | NormalisedTokens:
    """What finds the control tokens that a text spells."""
    added = [one for one in tokenizer.added_tokens_decoder.values() if one.content.strip()]  # some add blank lines
    normaliser: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    late = [one.content for one in added if one.normalized] if normaliser is not None else []
    known = {*(one.content for one in added), *(normaliser.normalize_str(content) for content in late)}
    words = sorted(known, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, words))})" if words else "(?!)()")
    return NormalisedTokens(pattern, normaliser.normalize_str) if late else pattern


class QuotedTexts:
    """Texts in one prompt that problems or clients wrote. One that spells a control token is replaced by a placeholder
    until tokenisation, and is text then."""

    def __init__(self, chat: Chat):
        self._chat = chat
        self._quoted: list[str] = []

    def quote(self, text: str) -> str:
        """Return the text itself or, if it spells a control token, a placeholder."""
        if PLACEHOLDER.search(text) or self._chat.added.search(text):
            self._quoted.append(text)
            return f"\ue000{len(self._quoted) - 1}\ue001"
        return text

    def quote_system(self, text: str) -> str:
        """The same for a part of the system prompt. TOOLS_PROMPT at its end is not quoted, but for the place of
        {given} in it: the other words are ours."""
        before, after = TOOLS_PROMPT.split("{given}")
        rest, is_ours, given = text.removesuffix(after).rpartition(before)
        if not (is_ours and text.endswith(after) and (not rest or rest.endswith("\n\n"))):
            return self.quote(text)
        return f"{self.quote(rest[:-2])}{rest[-2:]}{before}{self.quote(given)}{after}"

    def encode(self, rendered: str) -> list[int]:
        """Return the [tokens] of a rendered prompt, quoted texts as plain text. Raises ModelError if one is lost."""
        parts = PLACEHOLDER.split(rendered)
        if sorted(parts[1::2]) != sorted(str(number) for number in range(len(self._quoted))):
            raise ModelError("the chat template changes what users write, and control tokens cannot be kept out of it")
        ids: list[int] = []
        for number, piece in enumerate(parts):
            ids += self._chat.encode_plain(self._quoted[int(piece)]) if number % 2 else self._chat.encode(piece)
        return ids
