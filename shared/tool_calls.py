"""Tool calls as the policy writes them: telling it of tools, and finding calls in its answers.

Calls have the form of the templates of Hermes and Qwen, for every model:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL_END = f"}}\n{CLOSE}"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
TOOLS_PROMPT = """You may call tools. Their signatures, one JSON object a line:

{given}

To call one, write after your thoughts, for each call:

<tool_call>
{"name": <name of the tool>, "arguments": <object of its arguments>}
</tool_call>"""


class ParsedCall(NamedTuple):
    """A tool call in a completion."""

    id: str
    name: str
    arguments: str
    """JSON"""


def call_start(name: str) -> str:
    """Return the text of a call before its arguments."""
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '


def call_text(name: str, arguments: str) -> str:
    """Return the text of a call in a prompt or completion; arguments: JSON."""
    return call_start(name) + arguments + CALL_END


class CallReader:
    """Finds the calls in the streamed text of an answer, however the stream is divided."""

    def __init__(self, names: Collection[str], most: int):
        """names: of the tools. most: calls beyond this number stay text."""
        self._names, self._left = names, most
        self._held = ""
        self._searched = 0
        """number of characters of the held text that were searched for the end of a call"""
        self._called = False

    def feed(self, text: str, last: bool = False) -> Iterator[str | ParsedCall]:
        """Take the next text of the answer; yield the text and calls that are settled. last: no more text follows, and
        an unfinished call is text."""
        self._held += text
        while self._held:
            place = self._held.find(OPEN) if self._left else -1
            if place < 0:
                keep = 0 if last or not self._left else self._unclear()
                clear, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                if clear.strip() or (clear and not self._called):  # blanks behind a call say nothing
                    yield clear
                return
            before = len(self._held[:place].rstrip())
            if before:
                yield self._held[:before]
                self._held, place, self._searched = self._held[before:], place - before, 0
            end = self._held.find(CLOSE, max(place, self._searched))
            if end < 0:
                self._searched = max(len(self._held) - len(CLOSE), 0)
                if last:
                    yield self._held
                    self._held = ""
                return
            self._searched = 0
            whole, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
            call = read_call(whole[place + len(OPEN) : -len(CLOSE)], self._names)
            self._left -= call is not None
            self._called = self._called or call is not None
            yield call or whole  # blanks before a call say nothing

    def _unclear(self) -> int:
        """Return how many letters at the end of the held text may belong to a call or be blanks before one."""
        begun = unfinished(self._held, OPEN)
        rest = self._held[: len(self._held) - begun]
        return begun + len(rest) - len(rest.rstrip())


def read_call(text: str, names: Collection[str]) -> ParsedCall | None:
    """Parse the text between the tags as a call; None if it is not a call of a known tool."""
    try:
        found = json.loads(text)
        name, arguments = found["name"], found["arguments"]
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        encoded.encode()  # not with half a character in it
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ParsedCall(f"call_{uuid.uuid4().hex[:24]}", name, encoded)


def unfinished(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may begin a tag, e.g. 3 for ("x</t", "</think>")."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
