"""How outputs and returned values are compared, and how tests are read and drawn."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shared.errors import DataError
from tests.verify import numbers
from verify.code.output import same_output, same_value
from verify.code.sandbox import codec
from verify.code.tests import Assertions, CallTest, StdioTest, Test, draw, read_tests


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("6\n", b"6", True),
        ("6", b"6\n\n\n", True),
        ("1 2\n3\n", b"1 2  \r\n3\t\n", True),
        ("", b"\n", True),
        ("0.5\n", b"0.50000000001\n", True),
        ("0.5\n", b"1/2\n", False),
        ("1e-3", b"0.001", True),
        ("1000000.0", b"1000000.9", False),
        ("1000000.5", b"1000000", False),
        ("12345678.90", b"12345690.00", False),
        ("0.0000001", b"0", False),
        ("12e3", b"12000", True),
        ("1.10", b"1.1", True),
        ("1000000000.123456", b"1000000000.1234567", True),
        ("1.0", b"1", True),
        ("1", b"1.0", False),
        ("3", b"3.0000000001", False),
        ("0.333333 4", b"0.3333334 4", True),
        ("0.333333 4", b"0.3333334 5", False),
        ("0.5", b"nan", False),
        ("0.5", b"0.6", False),
        ("1.5", b"1_0.5", False),
        ("6.0", "\uff16.0".encode(), False),
        ("6", b"6\xff", False),
        ("6", b"6\0", False),
        ("6", b"", False),
        ("", b"6", False),
        ("a\n\nb", b"a\nb", False),
        ("a b", b"a  b", False),
        (" a", b"a", False),
        ("YES", b"Yes", False),
        ("1.0e999", b"2.0e999", False),
    ],
)
def test_output_is_compared_as_judges_do(expected: str, printed: bytes, same: bool) -> None:
    assert same_output(expected, printed) is same


def test_tolerance_is_of_the_test() -> None:
    assert same_output("1000000.0", b"1000000.9", 1e-6)
    assert same_output("0.5", b"0.51", 0.1) and not same_output("0.5", b"0.51") and not same_output("0.5", b"0.50", 0)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (1, True, False),
        (True, 1, False),
        ([1, 2], (1, 2), True),
        ([1, 2], {1, 2}, False),
        ([1, [2.0]], [1, [2.0000000001]], True),
        (0.1, 0.2, False),
        (0.5, 10**400, False),
        (0.5, float("nan"), False),
        ({"a": [1]}, {"a": (1,)}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
    ],
)
def test_values_are_compared_by_type_and_value(expected: Any, got: Any, same: bool) -> None:
    assert same_value(expected, got) is same


def test_values_travel_as_data() -> None:
    value = [
        1,
        -(10**5000),
        0.1,
        float("inf"),
        "\ud800",
        b"\xff",
        (1, {2}),
        {"k": frozenset([3])},
        None,
        True,
        1j,
        range(3),
        int,
    ]
    assert codec.decode(codec.load(codec.dump(codec.encode(value)))) == value


@pytest.mark.parametrize("kind", [int, str, list, dict, float])
def test_subclasses_do_not_travel(kind: type) -> None:
    with pytest.raises(codec.Unencodable):
        codec.encode(type("Equal", (kind,), {"__eq__": lambda self, other: True, "__hash__": kind.__hash__})())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7",
        b"[" * 100_000,
        b'["int","zz"]',
        b'["dict",[[["list",[]],1]]]',
        b'["reference",1]',
        b"1e9999",
        b'{"a":1}',
        b'["list"]',
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(codec.Malformed):
        codec.decode(codec.load(data))


def test_shapes_of_tests() -> None:
    assert read_tests([{"input": "1", "output": "2"}]) == [StdioTest("1", "2")]
    assert read_tests({"inputs": ["1", "2"], "outputs": ["3", "4"]}) == [StdioTest("1", "3"), StdioTest("2", "4")]
    assert read_tests({"fn_name": "f", "inputs": [[1]], "outputs": [2]}) == [CallTest("f", [1], 2)]
    assert read_tests({"fn_name": "f", "inputs": ["[1]\n2"], "outputs": ["3"]}) == [CallTest("f", [[1], 2], 3)]
    assert read_tests(["assert f(1) == 2", "assert f(2) == 3"]) == [
        Assertions("assert f(1) == 2\nassert f(2) == 3", language="python")
    ]
    assert read_tests({"type": "asserts", "code": "assert c", "prefix": "p", "entry_point": "e"}) == [
        Assertions("assert c", "p", "e", "python")
    ]
    assert read_tests({"function": "f", "tests": [{"args": [1], "expected": 2}]}) == [CallTest("f", [1], 2)]
    assert read_tests('{"inputs": ["3\\n"], "outputs": ["6\\n"]}') == [StdioTest("3\n", "6\n")]
    assert read_tests({"input": ["3", "4"], "output": ["7"]}) == [StdioTest("3\n4\n", "7\n")]
    assert read_tests({"test_list": ["assert g(f(1))"], "test_setup_code": "def g(x): return x"}) == [
        Assertions("def g(x): return x\nassert g(f(1))", language="python")
    ]
    assert read_tests({"function": "f", "args": {"x": 3}, "expected": 6}) == [CallTest("f", [], 6, {"x": 3})]
    assert read_tests("#include <cassert>\nint main() { assert(f()); }")[0].language == "cpp"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "tests",
    [
        [], "", {}, 3, [{"input": "1"}], [StdioTest("", ""), Assertions("")], {"input": 1, "output": 2}, {"code": 5},
        '{"inputs"', {"inputs": ["1"], "outputs": []}, {"function": "f", "args": "xy", "expected": 1},
        {"type": "main", "code": "void check() {}"}, {"input": "1", "output": "2", "tolerance": "much"},
    ],
)  # fmt: skip
def test_what_is_no_test_is_one_clear_error(tests: Any) -> None:
    with pytest.raises(DataError):
        read_tests(tests)


def test_a_group_sits_the_same_exam() -> None:
    tests: list[Test] = [StdioTest(str(n), "") for n in range(100)]
    first = draw(tests, 20, "problem-1/7")
    assert first == draw(tests, 20, "problem-1/7") and len(first) == 20
    assert first != draw(tests, 20, "problem-1/8") and first == sorted(first, key=lambda test: int(test.input))  # type: ignore[union-attr]
    assert draw(tests[:20], 20, "x") == tests[:20]


def test_keys_made_to_collide_are_refused_in_no_time() -> None:
    numbers = [["int", hex(k * (2**61 - 1))] for k in range(1, 100_000)]
    for tree in (["set", numbers], ["dict", [[number, None] for number in numbers]]):
        start = time.perf_counter()
        with pytest.raises(codec.Malformed, match="hashes"):
            codec.decode(tree)
        assert time.perf_counter() - start < 5
    assert len(codec.decode(["set", [["int", hex(k << 40)] for k in range(50_000)]])) == 50_000


@pytest.mark.parametrize("row", range(len(numbers.FIRST + numbers.SECOND)))
def test_digits_beyond_a_double_count(row: int) -> None:
    expected, got, tolerance, right = (numbers.FIRST + numbers.SECOND)[row]
    if isinstance(expected, str):
        assert same_output(expected, got.encode(), tolerance) is right
    else:
        assert same_value(expected, got, tolerance) is right
