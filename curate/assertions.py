"""Parses Python test code: finds assertions of the form `f(literals) == literal`, and drops or changes them.

Such an assertion is a call with an expected value, so the values that solutions return can be compared with it and
replace it; all other test code can only pass or fail. The text is edited in place, and the rest of it is unchanged.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

from verify.code.sandbox.assertion_runner import decides
from verify.code.tests import CallTest

MAX_CODE = 200_000


class Statement(NamedTuple):
    """A top-level statement of test code that decides something."""

    start: int
    end: int
    """lines from 0, `end` excluded"""
    call: CallTest | None
    """the call and its expected value, if the statement is `f(literals) == literal`"""
    expected: tuple[int, int, int, int] | None = None
    """position of the literal: line from 0 and byte of its start and end"""


def read_code(code: str) -> list[Statement]:
    """Return the assertions (and blocks and calls that may assert) of Python test code, in order.

    Raises ValueError if it is too long or not Python, or if several statements share a line.
    """
    if len(code) > MAX_CODE:
        raise ValueError(f"test code of more than {MAX_CODE} characters")
    try:
        tree = ast.parse(code)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test code is no Python ({error})") from error
    own = set[str]().union(*map(_bound, tree.body))
    starts = [node.lineno for node in tree.body]
    if len(set(starts)) < len(starts):
        raise ValueError("several statements of the test code share a line")
    return [_statement(node, own) for node in tree.body if decides(node)]


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a top-level statement of the test code binds; calls of them are not of the solution."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _statement(node: ast.stmt, own: set[str]) -> Statement:
    end = node.end_lineno or node.lineno
    test = node.test if isinstance(node, ast.Assert) else None
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return Statement(node.lineno - 1, end, None)
    left, right = test.left, test.comparators[0]
    for call, literal in ((left, right), (right, left)):
        read = _call(call, literal)
        if read is not None and read.function not in own:
            assert literal.end_lineno is not None and literal.end_col_offset is not None
            position = (literal.lineno - 1, literal.col_offset, literal.end_lineno - 1, literal.end_col_offset)
            return Statement(node.lineno - 1, end, read, position)
    return Statement(node.lineno - 1, end, None)


def _call(call: ast.expr, literal: ast.expr) -> CallTest | None:
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        return None
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    try:
        args = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        expected = ast.literal_eval(literal)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return CallTest(call.func.id, args, expected, named)


def literal_of(value: Any) -> str | None:
    """Return the source of a literal that evaluates to the value, None if there is none."""
    try:
        text = repr(value)
        return text if len(text) < MAX_CODE and ast.literal_eval(text) == value else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def edit(code: str, statements: list[Statement], dropped: set[int], replaced: Mapping[int, str]) -> str:
    """Return the code without the `dropped` statements, and with the literals in `replaced`, both by position."""
    lines = [line.encode() for line in io.StringIO(code, newline="")]  # lines as Python counts them
    for position, statement in reversed(list(enumerate(statements))):
        if position in dropped:
            del lines[statement.start : statement.end]
        elif position in replaced and statement.expected is not None:
            first, start, last, end = statement.expected
            lines[first : last + 1] = [lines[first][:start] + replaced[position].encode() + lines[last][end:]]
    return b"".join(lines).decode()
