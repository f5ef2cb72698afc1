"""Reads Python test code without running it, to refuse what can be no test."""

from __future__ import annotations

import ast

from shared.errors import DataError
from verify.code.sandbox.assertion_runner import decides


def check_assertion_text(code: str, entry_point: str) -> None:
    """Raise DataError when test code is not Python, or compares nothing. `entry_point`: the function under test."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"the tests are read as Python test code, and are none ({error}): give assertions, or inputs and outputs"
        ) from error
    if not any(map(_compares, tree.body)):
        raise DataError("the test code compares nothing: give assertions, or inputs and outputs")


def _compares(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name.startswith(("test", "check")):
        return any(isinstance(node, (ast.Assert, ast.Raise, ast.Call)) for node in ast.walk(statement))
    return decides(statement) or isinstance(statement, ast.ClassDef)
