"""Provides the plain parts of pytest to tests in a sandbox, where pytest is not installed; no fixtures."""

from __future__ import annotations

import cmath
import contextlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

PARAMETERS, LEFT_OUT = "_parameters", "_left_out"
"""attributes of test functions: lists of argument sets to combine; True for skip and xfail"""


class SkippedTest(Exception):
    """The test said that it is not to be run."""


class FailedTest(AssertionError):
    """The test said that it failed."""


class _Raised:
    """What a `with raises(...)` block raised."""

    value: Any = None
    type: Any = None
    tb: Any = None

    @property
    def typename(self) -> str:
        """The name of the exception's class."""
        return str(self.type.__name__)

    def match(self, pattern: str) -> bool:
        """Raise AssertionError unless the message has the pattern."""
        assert re.search(pattern, str(self.value)), f"{pattern!r} is not in {str(self.value)!r}"
        return True

    def errisinstance(self, kind: Any) -> bool:
        """Return whether the exception is of a class."""
        return isinstance(self.value, kind)


@contextlib.contextmanager
def _raising(kind: Any, pattern: str | None) -> Iterator[_Raised]:
    raised = _Raised()
    try:
        yield raised
    except kind as error:
        raised.value, raised.type, raised.tb = error, type(error), error.__traceback__
        if pattern is not None:
            raised.match(pattern)
        return
    raise FailedTest(f"did not raise {kind}")


def raises(kind: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    """Expect an exception of a block, or of `raises(kind, function, *arguments)`."""
    if not call:
        return _raising(kind, match)
    with _raising(kind, None) as raised:
        call[0](*call[1:], **named)
    return raised


class approx:
    """Equals numbers, and lists and dicts of numbers, within 1e-6 of their size or 1e-12."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def __eq__(self, other: object) -> bool:
        return self._near(self.expected, other)

    def _near(self, expected: Any, value: Any) -> bool:
        if isinstance(expected, Mapping):
            same = isinstance(value, Mapping) and expected.keys() == value.keys()
            return same and all(self._near(item, value[key]) for key, item in expected.items())
        if isinstance(expected, (list, tuple)):
            if not hasattr(value, "__len__") or isinstance(value, (str, bytes)) or len(value) != len(expected):
                return False
            return all(self._near(*pair) for pair in zip(expected, value, strict=True))
        if isinstance(expected, bool) or not hasattr(expected, "__abs__") or not hasattr(value, "__abs__"):
            return bool(expected == value)
        if expected == value:
            return True
        if cmath.isnan(expected) or cmath.isnan(value):
            return self.nan_ok and cmath.isnan(expected) and cmath.isnan(value)
        if cmath.isinf(expected) or cmath.isinf(value):
            return False
        relative = 0.0 if self.rel is None and self.abs is not None else 1e-6 if self.rel is None else self.rel
        bound = max(relative * abs(expected), 1e-12 if self.abs is None else self.abs)
        return bool(abs(value - expected) <= bound)

    __hash__ = None  # type: ignore[assignment]


def param(*values: Any, marks: Any = (), id: Any = None) -> Any:
    """Return one argument set; one that is marked as skipped or failing is left out."""
    marks = marks if isinstance(marks, (list, tuple)) else [marks]
    return _Set(values, any(getattr(mark, "leaves_out", False) for mark in marks))


class _Set:
    def __init__(self, values: tuple[Any, ...], left_out: bool) -> None:
        self.values, self.left_out = values, left_out


def _parametrize(names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
    listed = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)

    def named(value: Any) -> dict[str, Any]:
        if isinstance(value, _Set):
            value = value.values if len(listed) > 1 else value.values[0]
        return dict(zip(listed, value, strict=True)) if len(listed) > 1 else {listed[0]: value}

    sets = [named(value) for value in values if not (isinstance(value, _Set) and value.left_out)]

    def add(function: Any) -> Any:
        setattr(function, PARAMETERS, [*getattr(function, PARAMETERS, []), sets])
        return function

    return add


class _Mark:
    """A mark: `@pytest.mark.name` or `@pytest.mark.name(...)`."""

    def __init__(self, leaves_out: bool) -> None:
        self.leaves_out = leaves_out

    def __call__(self, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and not named and isinstance(given[0], (types.FunctionType, type)):
            return self._put(given[0])
        conditions = [value for value in given if isinstance(value, bool)]
        return _Mark(self.leaves_out and all(conditions))

    def _put(self, function: Any) -> Any:
        if self.leaves_out:
            setattr(function, LEFT_OUT, True)
        return function


class _Marks:
    parametrize = staticmethod(_parametrize)

    def __getattr__(self, name: str) -> _Mark:
        return _Mark(name in ("skip", "skipif", "xfail"))


def skip(reason: str = "", **_: Any) -> None:
    """End a test without a result."""
    raise SkippedTest(reason)


def fail(reason: str = "", **_: Any) -> None:
    """Fail a test."""
    raise FailedTest(reason)


def importorskip(name: str, **_: Any) -> Any:
    """Import a module, or skip."""
    try:
        return __import__(name)
    except ImportError as error:
        raise SkippedTest(str(error)) from None


def main(*_: Any, **__: Any) -> int:
    """Do nothing: the tests are run anyway."""
    return 0


def module() -> types.ModuleType:
    """Return the module that `import pytest` gives."""
    made = types.ModuleType("pytest")
    names = (approx, fail, importorskip, main, param, raises, skip)
    vars(made).update({function.__name__: function for function in names}, mark=_Marks())
    made.fail.Exception, made.skip.Exception = FailedTest, SkippedTest
    return made
