"""Texts of others in a prompt: problems, system messages, descriptions of tools. None spells a control token."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shared.errors import ModelError
from shared.tool_calls import TOOLS_PROMPT

if TYPE_CHECKING:
    from shared.chat import Chat

PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")


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
        """The same for a part of the system prompt. TOOLS_PROMPT at its end is not quoted, but for what stands for
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
        for place, part in enumerate(parts):
            ids += self._chat.encode_plain(self._quoted[int(part)]) if place % 2 else self._chat.encode(part)
        return ids
