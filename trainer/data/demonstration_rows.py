"""Demonstrations in the shapes in which they are published, as rows of our own: {"problem", "completion", "system"?}.

A row of ours ({"problem"} with a "completion", or with "solution" and "answer") stays as it is. Then a conversation is
looked for, then a request with its reply, then a problem with its worked solution (`verify.published`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shared.errors import DataError
from shared.json_reader import parse_json
from shared.jsonl import text_of
from shared.tool_calls import ToolDefinition, call_text, tools_prompt
from trainer.data.written_text import CLOSE, OPEN
from verify.extract import extract_answer
from verify.published import NATIVE, Fields, content_text, parsed, to_native

CONVERSATIONS = ("messages", "conversations", "conversation")
REQUESTS = ("instruction", "prompt", "query", "question", "problem")
REPLIES = ("completion", "output", "response", "generated_solution")
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
"""the role of a published turn -> ours; "call": a turn of the assistant that holds nothing but a call of a tool"""
REPAIR = 'docs/data.md has the shapes, and data.columns = { problem = "...", completion = "..." } names columns'
Turn = tuple[str, str]
"""role and text"""


def to_demonstration(row: Fields, where: str) -> tuple[Fields, str]:
    """Our row of a demonstration, and the name of its shape. Raises DataError with `where` for one that is none."""
    try:
        made, shape = _shaped(row) or to_native(row, where)
        if made.get("completion") is None and made.get("solution") in (None, ""):
            raise DataError(f"it holds nothing to imitate: it has {', '.join(map(repr, row)) or 'nothing'}. {REPAIR}")
        return made, shape
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise DataError(f"{where}: the conversation is not understood ({type(error).__name__}: {error})") from error
    except DataError as error:
        raise DataError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def completion_of(row: dict[str, Any], where: str) -> str:
    """Return the completion to imitate: as written, or reasoning and boxed answer from a worked solution. One that has
    the tags of reasoning keeps its own, and gets the box if no answer comes after them."""
    if "completion" not in row and "solution" in row:
        solution, answer = text_of(row, "solution", where), text_of(row, "answer", where)
        if CLOSE in solution:
            solution = solution.strip() if OPEN in solution else f"{OPEN}\n{solution.strip()}"
            boxed = extract_answer(solution.rpartition(CLOSE)[2]) is not None
            return solution if boxed else f"{solution}\nThe answer is \\boxed{{{answer}}}."
        return f"<think>\n{solution}\n</think>\nThe answer is \\boxed{{{answer}}}."
    return text_of(row, "completion", where)


def _shaped(row: Fields) -> tuple[Fields, str] | None:
    completion, problem = row.get("completion"), row.get("problem")
    whole = _whole(completion, problem)
    if isinstance(problem, str) and completion is not None and not whole:
        return row, NATIVE
    if problem and row.get("solution") and row.get("answer") not in (None, ""):
        return None
    system = [("system", text) for name in ("system", "system_prompt") if (text := _text(row.get(name)))]
    for name in CONVERSATIONS:
        if row.get(name):
            return _row(row, [*system, *_turns(_listed(row[name]))]), f"a conversation in '{name}'"
    if whole:
        return _row(row, [*system, *_turns(_listed(completion))]), "a conversation in 'completion'"
    asked, replied = ([name for name in names if row.get(name)] for names in (REQUESTS, REPLIES))
    asked = asked or (["input"] if row.get("input") else [])
    if row.get("chosen") and row.get("rejected"):
        raise DataError("a pair of completions is no demonstration: data.offline takes pairs (docs/offline.md)")
    if len(asked) != 1 or len(replied) != 1:
        return None
    turns = [*system, *_history(row), *_turns(_listed(row[asked[0]], "user"))]
    others = (name for name in ("input", "context") if name not in asked)
    if context := next((text for name in others if (text := _text(row.get(name)))), ""):
        turns.append(("user", context))
    turns += _turns(_listed(row[replied[0]], "assistant"))
    return _row(row, turns), f"'{asked[0]}' and '{replied[0]}'"


def _whole(completion: Any, problem: Any) -> bool:
    """Whether a completion is a whole conversation: it begins with the system, or with its problem."""
    if not isinstance(completion, list) or not completion or not isinstance(completion[0], Mapping):
        return False
    role, text = next(_turns(completion[:1]))
    return role == "system" or (role == "user" and problem in (None, "", text))


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _listed(value: Any, role: str = "") -> list[Any]:
    """The messages of a cell: a list, or the text of one; another text is one message of `role`."""
    if isinstance(value, str) and (not role or value.lstrip().startswith("[{")):
        value = parsed(value)
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise DataError("a conversation is a list of messages, each an object with a role and a content")
    return value


def _history(row: Fields) -> Iterator[Turn]:
    """Earlier turns of {"instruction", "output"} rows: pairs of a request and its reply."""
    for asked, replied in row.get("history") or []:
        yield from (("user", str(asked)), ("assistant", str(replied)))


def _turns(messages: list[Any]) -> Iterator[Turn]:
    for number, message in enumerate(messages):
        name = message.get("role", message.get("from"))
        role = ROLES.get(str(name).lower())
        if role is None:
            known = ", ".join(dict.fromkeys(ROLES))
            raise DataError(f"message {number} has the role {name!r}: it must be one of {known}")
        text = content_text(message.get("content", message.get("value")))
        if role == "call":
            yield "assistant", _call(parse_json(text)) if text.lstrip().startswith("{") else text
            continue
        if role == "assistant":
            text = "\n".join(filter(None, [text, *map(_call, _calls(message))]))
            thoughts = (message.get(key) for key in ("reasoning_content", "reasoning", "thinking"))
            if thought := next((thought for thought in thoughts if _text(thought)), ""):
                text = f"<think>\n{thought.strip()}\n</think>\n{text}"
        yield role, text


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") or []
    return [*calls, *([message["function_call"]] if message.get("function_call") else [])]


def _call(call: Mapping[str, Any]) -> str:
    """The text of a call in a published message."""
    call = call.get("function") or call
    arguments = call.get("arguments", {})
    return call_text(
        call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


def _tools(row: Fields) -> str:
    """The part of the system prompt that describes a row's tools, "" without any."""
    tools = parsed(row.get("tools") or [])
    given = [
        ToolDefinition(tool["name"], tool.get("description") or "", tool.get("parameters") or {})
        for tool in (tool.get("function") or tool for tool in tools)
    ]
    return tools_prompt(given) if given else ""


def _row(row: Fields, turns: list[Turn]) -> Fields:
    """Our row of a conversation: system, problem, then turns of the assistant and what is between them."""
    joined = list[Turn]()
    for role, text in turns:
        if joined and joined[-1][0] == role != "tool":
            joined[-1] = (role, "\n\n".join(filter(None, (joined[-1][1], text))))
        else:
            joined.append((role, text))
    roles = [role for role, _ in joined]
    systems = int(roles[:1] == ["system"])
    rest = joined[systems:]
    if "system" in roles[systems:]:
        raise DataError("a message of the system stands within the conversation: only the first may be one")
    if len(rest) < 2 or rest[0][0] != "user" or rest[-1][0] != "assistant":
        shown = " ".join(roles[:6]) or "nothing"
        raise DataError(f"a conversation begins with the user and ends with the assistant, and this is: {shown}")
    system = "\n\n".join(filter(None, [joined[0][1] if systems else "", _tools(row)]))
    turn = [{"role": role, "content": text} for role, text in rest[1:]]
    used = {*CONVERSATIONS, *REQUESTS, *REPLIES, "system", "system_prompt", "input", "context", "history", "tools"}
    made = {name: value for name, value in row.items() if name not in used}
    made |= {"problem": rest[0][1], "completion": turn[0]["content"] if len(turn) == 1 else turn}
    return made | ({"system": system} if system else {})
