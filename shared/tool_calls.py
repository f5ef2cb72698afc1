"""Tool calls as text: how tools are described to a model, and how its calls and their results are written and found.

Calls have the form of the templates of Hermes and Qwen, for every model, in serving and in environments alike: lines of
<tool_call>, {"name": "add", "arguments": {"a": 1, "b": 2}}, </tool_call>.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from shared.json_reader import parse_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL_END = f"}}\n{CLOSE}"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
TOOLS_PROMPT = """You may call tools. Their signatures, one JSON object a line:

{given}

To call one, write after your thoughts, for each call:

<tool_call>
{"name": <name of the tool>, "arguments": <object of its arguments>}
</tool_call>"""
"""part of the system prompt; {given} is replaced by `signatures`"""


class ToolDefinition(NamedTuple):
    """What a model is given about a tool."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object"""


class ParsedCall(NamedTuple):
    """A tool call in a completion."""

    id: str
    name: str
    arguments: str
    """JSON"""


class NoCallError(ValueError):
    """A text in the place of a call is none; the message says why."""


def signatures(tools: Sequence[ToolDefinition]) -> str:
    """Return the tools as the model reads them, one JSON object a line."""
    return "\n".join(json.dumps(tool._asdict(), ensure_ascii=False) for tool in tools)


def tools_prompt(tools: Sequence[ToolDefinition]) -> str:
    """Return the part of the system prompt that describes the tools to the model."""
    return TOOLS_PROMPT.replace("{given}", signatures(tools))


def call_start(name: str) -> str:
    """Return the text of a call before its arguments."""
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '


def call_text(name: str, arguments: str) -> str:
    """Return the text of a call in a prompt or completion; arguments: JSON."""
    return call_start(name) + arguments + CALL_END


def result_text(text: str) -> str:
    """Return the result of a call as the model reads it, in a turn of the user."""
    return f"{RESULT_OPEN}\n{text}\n{RESULT_CLOSE}"


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
        an unfinished call is text. What is no call of a known tool, though it has the tags, is a text of its own."""
        self._held += text
        while self._held:
            start = self._held.find(OPEN) if self._left else -1
            if start < 0:
                keep = 0 if last or not self._left else self._unclear()
                clear, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                if clear.strip() or (clear and not self._called):  # blanks after a call say nothing
                    yield clear
                return
            before = len(self._held[:start].rstrip())
            if before:
                yield self._held[:before]
                self._held, start, self._searched = self._held[before:], start - before, 0
            end = self._held.find(CLOSE, max(start, self._searched))
            if end < 0:
                self._searched = max(len(self._held) - len(CLOSE), 0)
                if last:
                    yield self._held
                    self._held = ""
                return
            self._searched = 0
            whole, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
            try:
                call = parse_call(whole[start + len(OPEN) : -len(CLOSE)], self._names)
            except NoCallError:
                yield whole
            else:
                self._left -= 1
                self._called = True
                yield call  # blanks before a call say nothing

    def _unclear(self) -> int:
        """Return how many letters at the end of the held text may belong to a call or be blanks before one."""
        begun = unfinished(self._held, OPEN)
        rest = self._held[: len(self._held) - begun]
        return begun + len(rest) - len(rest.rstrip())


def parse_call(text: str, names: Collection[str]) -> ParsedCall:
    """Parse the text between the tags as a call. Raises NoCallError if it is not a call of a known tool."""
    try:
        call = parse_json(text)
        name, arguments = call["name"], call["arguments"]
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        encoded.encode()  # not with half a character in it
    except (LookupError, TypeError) as error:
        raise NoCallError('a call is an object with "name" and "arguments"') from error
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise NoCallError(f"the call is not JSON ({why})") from error
    if not isinstance(name, str) or name not in names:
        raise NoCallError(f"there is no tool {str(name)[:64]!r}; there is {', '.join(sorted(names))}")
    if not isinstance(arguments, dict):
        raise NoCallError("the arguments of a call are an object")
    return ParsedCall(f"call_{uuid.uuid4().hex[:24]}", name, encoded)


def unfinished(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may begin a tag, e.g. 3 for ("x</t", "</think>")."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
