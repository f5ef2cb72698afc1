"""What the values of call tests may mean: JSON, and the sets that store them, leave some of it open.

Published graders of APPS, TACO, PRIME and LiveCodeBench accept a value that equals the stored one or, where a set keeps
each expected value in a list of one, the value in that list; and they take numbers for keys of an object, which JSON
could only store as text. Here a program is right when one meaning holds in all of its tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from verify.code.output import same_value
from verify.code.tests import CallTest, Output, Test

_Test = TypeVar("_Test", bound=Test)
MEANINGS = 4
_NESTING = frozenset((list, tuple, dict))
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,29})(\.\d{1,30})?(e[+-]\d{1,3})?", re.ASCII)


def with_number_keys(value: Any) -> Any:
    """Return a value with numbers for keys in each object whose keys are all numbers as JSON writes them; the same
    object where there is none."""
    if isinstance(value, (list, tuple)):
        if _NESTING.isdisjoint(map(type, value)):
            return value
        items = [with_number_keys(item) for item in value]
        return value if all(map(_is, value, items)) else items
    if not isinstance(value, dict):
        return value
    keys = number_keys(value)
    items = [with_number_keys(item) for item in value.values()]
    changed = keys or not all(map(_is, value.values(), items))
    return dict(zip(keys or value, items, strict=True)) if changed else value


def number_keys(value: dict[Any, Any]) -> list[int | float] | None:
    """Return the keys of an object as the numbers that JSON wrote as text, None where they are not all numbers."""
    if not value or not all(isinstance(key, str) and _NUMBER.fullmatch(key) for key in value):
        return None
    keys = [json.loads(key) for key in value]
    return keys if [json.dumps(key) for key in keys] == list(value) and len(set(keys)) == len(keys) else None


def _is(value: Any, other: Any) -> bool:
    return value is other


def argument_readings(tests: list[_Test]) -> Iterator[list[_Test]]:
    """Yield the tests as they stand, then with numbers for keys in the arguments of calls, where that is not the
    same."""
    yield tests
    changed = [_with_number_arguments(test) for test in tests]
    if not all(map(_is, tests, changed)):
        yield changed


def _with_number_arguments(test: _Test) -> _Test:
    if not isinstance(test, CallTest):
        return test
    args = with_number_keys(test.args)
    named = {name: with_number_keys(value) for name, value in test.kwargs.items()}
    same = args is test.args and all(map(_is, named.values(), test.kwargs.values()))
    return test if same else msgspec.structs.replace(test, args=args, kwargs=named)


def expected_values(test: CallTest) -> list[Any]:
    """Return [MEANINGS] what the expected value may mean, in one order for all tests: as it stands, with numbers for
    keys, and both without the list of one around it, where it stands in one."""
    bare = test.expected[0] if test.wrapped else test.expected
    return [test.expected, with_number_keys(test.expected), bare, with_number_keys(bare)]


def returned(output: Output, expected: Any, tolerance: float | None) -> bool:
    """Whether a function returned a value, or made it of its first argument and returned None."""
    if same_value(expected, output.value, tolerance):
        return True
    in_place = output.value is None and expected is not None and bool(output.changed)
    return in_place and same_value(expected, output.changed[0], tolerance)


def fitting_meanings(test: CallTest, output: Output) -> set[int]:
    """Return the places of the expected values that a function returned."""
    values = expected_values(test)
    verdicts = {key: returned(output, value, test.tolerance) for key, value in {id(one): one for one in values}.items()}
    return {place for place, value in enumerate(values) if verdicts[id(value)]}
