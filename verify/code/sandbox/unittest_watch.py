"""Lets unittest report each case to whoever runs the tests, however the text starts them and whatever it reads."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def watch(report: Callable[[Any, bool | None, Any], None], run_cases: Callable[[], Any]) -> None:
    """Call `report(case, passed, error)` for each case, None for one that was skipped; `unittest.main` runs the cases.

    `run_cases` runs what was not run yet and returns unittest's result.
    """
    import unittest  # few tests need it, and every test would pay for it

    def change(name: str, passed: bool | None) -> None:
        plain = getattr(unittest.TestResult, name)

        def add(result: Any, case: Any, *details: Any) -> Any:
            error = details[-1] if details else None
            if name != "addSubTest" or error is not None:
                report(case, passed, error)
            return plain(result, case, *details)

        setattr(unittest.TestResult, name, add)

    for name in ("addSuccess", "addExpectedFailure"):
        change(name, True)
    for name in ("addFailure", "addError", "addUnexpectedSuccess", "addSubTest"):
        change(name, False)
    change("addSkip", None)

    def main(*_: Any, exit: bool = True, **__: Any) -> Any:
        result = run_cases()
        if exit:
            raise SystemExit(0)
        return types.SimpleNamespace(result=result)

    unittest.main = main  # type: ignore[assignment]
