r"""Compares what a program printed or returned with what the test expects, as programming contests do.

Standard output: strict UTF-8; trailing blanks of every line and trailing empty lines do not count, everything else does
(case, inner spaces, empty lines between). Where lines still differ, a token whose expected form has a decimal point
or exponent ("0.50", "1e-3") may be another decimal within the tolerance; integers and words stay exact. A test may say
its tolerance, absolute or relative to the expected value, 0 for none. Where it says nothing: 1e-6 absolute or 1e-9
relative, and never as much as one in the last digit that is expected. Numbers are compared by all their digits, not as
doubles. ASCII digits only: no "nan", no "inf", no underscores. Returned values: plain built-in values (see
`sandbox/codec.py`), compared by type and value; a tuple equals a list because JSON has no tuples, `True` is not 1, and
where a float is expected a number within the tolerance will do.
"""

from __future__ import annotations

import math
import re
from decimal import Context, Decimal
from typing import Any

ABSOLUTE, RELATIVE = Decimal("1e-6"), Decimal("1e-9")
"""the tolerance where a test gives none"""
_EXACT = Context(prec=4_000)
"""enough for every number that `_NUMBER` takes, and for every double"""
_LARGEST_BITS = 1_100
"""an integer of more bits is larger than any double"""
_SPACES = re.compile(r"([ \t]+)")
_NUMBER = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][+-]?\d{1,3})?", re.ASCII)


def same_output(expected: str, printed: bytes, tolerance: float | None = None) -> bool:
    """Compare what a program printed with what it should print. `tolerance` None: the usual one."""
    try:
        got = _lines(printed.decode("utf-8"))
    except UnicodeDecodeError:
        return False
    expected_lines = _lines(expected)
    if got == expected_lines:
        return True
    if len(got) != len(expected_lines) or tolerance == 0:
        return False
    return all(
        ours == theirs or _same_tokens(ours, theirs, tolerance)
        for ours, theirs in zip(expected_lines, got, strict=True)
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip(" \t\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_tokens(expected: str, printed: str, tolerance: float | None) -> bool:
    tokens, got = _SPACES.split(expected), _SPACES.split(printed)
    return len(tokens) == len(got) and all(
        ours == theirs or _close(ours, theirs, tolerance) for ours, theirs in zip(tokens, got, strict=True)
    )


def _close(expected: str, printed: str, tolerance: float | None) -> bool:
    if not any(mark in expected for mark in ".eE"):
        return False
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(printed)):
        return False
    number, got = Decimal(expected), Decimal(printed)
    if tolerance is None:
        last = Decimal(1).scaleb(int(number.as_tuple().exponent))
        return number == got or (_distance(number, got) < last and _near(number, got, None))
    return _near(number, got, tolerance)


def _distance(number: Decimal, other: Decimal) -> Decimal:
    return _EXACT.abs(_EXACT.subtract(number, other))


def _near(expected: Decimal, got: Decimal, tolerance: float | None) -> bool:
    """Whether two finite numbers agree, by their digits: none is rounded to a double first."""
    size = _EXACT.abs(expected)
    if tolerance is None:
        return _distance(expected, got) <= max(ABSOLUTE, _EXACT.multiply(RELATIVE, size))
    return _distance(expected, got) <= _EXACT.multiply(Decimal(repr(float(tolerance))), max(Decimal(1), size))


def _is_comparable(number: int | float) -> bool:
    return number.bit_length() <= _LARGEST_BITS if isinstance(number, int) else math.isfinite(number)


def same_value(expected: Any, got: Any, tolerance: float | None = None) -> bool:
    """Compare what a function returned, decoded to plain values, with what it should return."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(expected) != len(got):
            return False
        return all(same_value(ours, theirs, tolerance) for ours, theirs in zip(expected, got, strict=True))
    if isinstance(expected, dict):
        if type(got) is not dict or expected.keys() != got.keys():
            return False
        return all(same_value(value, got[key], tolerance) for key, value in expected.items())
    if isinstance(expected, bool) or isinstance(got, bool):
        return type(expected) is type(got) and bool(expected == got)
    if isinstance(expected, float) and isinstance(got, (int, float)):
        if expected != expected:
            return got != got
        if expected == got:
            return True
        if not (math.isfinite(expected) and _is_comparable(got)):
            return False
        return _near(Decimal(expected), Decimal(got), tolerance)
    if isinstance(expected, int):
        return isinstance(got, (int, float)) and expected == got
    return type(expected) is type(got) and bool(expected == got)
