"""How outputs and returned values are compared and travel, and how tests are read and drawn."""

import base64
import json
import struct
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import DataError
from tests.processor_time import at_most
from tests.tables import read_table
from verify.code import private_tests
from verify.code.cpp_head import split_prefix
from verify.code.output import same_output, same_value
from verify.code.private_tests import decode_private_tests
from verify.code.readings import with_number_keys
from verify.code.sandbox import codec
from verify.code.tests import Assertions, CallTest, StdioTest, Test, draw, language_of, read_tests


@pytest.mark.parametrize("row", read_table("verify/outputs"), ids=lambda row: str(row)[:80])
def test_output_is_compared_as_judges_do(row):
    """And digits beyond a double count."""
    expected, got, tolerance = row["expected"], row["got"], row.get("tolerance")
    if isinstance(expected, str):
        assert same_output(expected, got.encode(), tolerance) is row["same"]
        assert not same_output(expected, got.encode() + b"\xff", tolerance), "no UTF-8"
    else:
        assert same_value(expected, got, tolerance) is row["same"]


@pytest.mark.parametrize(("expected", "got", "same"), [
    (3, 3, True), (3, 3.0, True), (1, True, False), (True, 1, False), (None, None, True), (None, 0, False),
    ([1, 2], (1, 2), True), ([1, 2], {1, 2}, False), ([1, [2.0]], [1, [2.0000000001]], True), ("1", 1, False),
    (0.1, 0.2, False), (0.5, 10**400, False), (0.5, float("nan"), False), ({"a": [1]}, {"a": (1,)}, True),
    ({"a": 1}, {"a": 1, "b": 2}, False),
])  # fmt: skip
def test_values_are_compared_by_type_and_value(expected, got, same):
    assert same_value(expected, got) is same


PLAIN = (
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(), max_size=9)),
    *(st.binary(max_size=9), st.complex_numbers(allow_nan=False), st.just(range(3)), st.just(int)),
)
HASHABLE = st.recursive(st.one_of(*PLAIN), lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=4)
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE), lambda inner: st.lists(inner) | st.dictionaries(HASHABLE, inner), max_leaves=8
)


@settings(max_examples=25)
@given(VALUES)
@example([-(10**5000), "\ud800"])
def test_values_travel_as_data(value):
    decoded = codec.decode(codec.load(codec.dump(codec.encode(value))))
    assert decoded == value and type(decoded) is type(value)


@pytest.mark.parametrize("kind", [int, str, list, dict, float])
def test_subclasses_do_not_travel(kind):
    with pytest.raises(codec.Unencodable):
        codec.encode(type("Equal", (kind,), {"__eq__": lambda self, other: True, "__hash__": kind.__hash__})())


@pytest.mark.parametrize("data", [
    b"", b"7", b"[" * 100_000, b'["int","zz"]', b'["dict",[[["list",[]],1]]]', b'["reference",1]', b"1e9999",
    b'{"a":1}', b'["list"]',
])  # fmt: skip
def test_other_bytes_are_refused(data):
    with pytest.raises(codec.Malformed):
        codec.decode(codec.load(data))


def test_keys_made_to_collide_are_refused_in_no_time():
    numbers = [["int", hex(k * (2**61 - 1))] for k in range(1, 100_000)]
    for tree in (["set", numbers], ["dict", [[number, None] for number in numbers]]):
        with at_most(5), pytest.raises(codec.Malformed, match="hashes"):
            codec.decode(tree)
    assert len(codec.decode(["set", [["int", hex(k << 40)] for k in range(50_000)]])) == 50_000


@pytest.mark.parametrize("row", read_table("verify/shapes_of_tests"), ids=lambda row: str(row["tests"])[:80])
def test_shapes_of_tests_and_what_is_no_test(row):
    if row["kind"] == "refused":
        with pytest.raises(DataError, match=row["message"]):
            read_tests(row["tests"])
        return
    kinds = {kind.__name__: kind for kind in (StdioTest, CallTest, Assertions)}
    read = read_tests(row["tests"])
    assert read == [kinds[kind](**fields) for kind, fields in row["read"]]
    assert language_of(read) == {CallTest: "python"}.get(type(read[0]), getattr(read[0], "language", ""))


@pytest.mark.parametrize(("prefix", "signature"), [
    ("#include <cmath>\nint f(int x){\n", "int f(int x)"),
    ("int g(){ return 1; }\nint f(int x){ \n /* like g, { or } */\n", "int f(int x)"),
    ("int f(int x) { // for {1, 2} it is 3\n", "int f(int x)"),
    ("auto f(int x) -> long long {\n", "auto f(int x) -> long long"),
    ("auto g(){ return 1; }\nstatic inline vector<int> f(vector<int> x) {", "vector<int> f(vector<int> x)"),
])  # fmt: skip
def test_the_head_of_a_function_at_the_end_of_a_prefix(prefix, signature):
    assert split_prefix(prefix)[1] == signature


CALLED = {"testtype": "functional", "input": "3\n[1]", "output": "6"}


def pickled(text: str, form: str = "binary") -> bytes:
    """The pickle of one text, as the protocols write it."""
    data = text.encode()
    if form == "text":
        return b"V" + text.encode("raw_unicode_escape").replace(b"\n", b"\\u000a") + b"\np0\n."
    short, size = struct.pack("<I", len(data)), struct.pack("<Q", len(data))
    return {
        "binary": b"\x80\x02X" + short + data + b"q\x00.",
        "framed": b"\x80\x04\x95" + struct.pack("<Q", len(data) + 7) + b"X" + short + data + b"\x94.",
        "short": b"\x80\x04\x8c" + size[:1] + data + b"\x94.",
        "long": b"\x80\x04\x8d" + size + data + b"\x94.",
    }[form]


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


PACKED = packed(pickled(json.dumps([CALLED])))


@pytest.mark.parametrize("beside", [
    {"metadata": {"func_name": "f"}}, {"metadata": '{"func_name": "f"}'}, {"fn_name": "f"},
    {"starter_code": "# class A:\n#     def g(self): ...\nclass Solution:\n    def f(self, x: int) -> int:\n"},
])  # fmt: skip
def test_shapes_as_published_sets_have_them(beside):
    call = [CallTest("f", [3, [1]], 6)]
    for tests in ([CALLED], json.dumps([CALLED]), PACKED, f"\n{PACKED[:30]}\n{PACKED[30:]}\n"):
        assert read_tests({"tests": tests, **beside}) == call
    assert read_tests([{**CALLED, **beside}]) == call
    both = {"public_test_cases": json.dumps([CALLED]), "private_test_cases": PACKED}
    assert read_tests({**both, **beside}) == call * 2


def test_keys_that_are_numbers_in_python():
    assert with_number_keys({"1": [{"2": {"-3": 0}}], "4": {"1.5": {}}}) == {1: [{2: {-3: 0}}], 4: {1.5: {}}}
    for other in ({"01": 1}, {"1": 2, "x": 3}, {"": 1}, {"1 ": 1}, {"1e999": 1}, {"\u0661": 1}, [[{}], "1"],
                  {"1": 0, "1.0": 1}):  # fmt: skip
        assert with_number_keys(other) is other


@pytest.mark.parametrize(("tests", "message"), [
    (b"assert f(1)", "type bytes"), ([StdioTest("", ""), Assertions("")], "different kinds"),
    ({"tests": PACKED, "metadata": "{}"}, "fn_name"), (PACKED[:-8], "compressed tests cannot be read"),
    (PACKED.lower(), "assert"),
    ({"input": "1", "output": "1", "language": "rust"}, '"rust"'),
    ([StdioTest("1", "1", language="cpp"), StdioTest("1", "1")], "different languages"),
])  # fmt: skip
def test_other_objects_and_damaged_texts_are_refused(tests, message):
    with pytest.raises(DataError, match=message):
        read_tests(tests)


@pytest.mark.parametrize(("data", "message"), [
    (b"cbuiltins\nprint\n(X\x02\x00\x00\x00[]tR.", "does more than hold a text: GLOBAL"),
    (b"\x80\x04]\x94\x8c\x02[]\x94a.", "does more"), (b"K\x03.", "does more"), (b"\x80\x04.", "holds 0 texts"),
    (pickled("[]")[:-1] + pickled("[]"), "holds 2 texts"), (pickled("[]")[:-1], "cannot be read"),
    (pickled("{}"), "no list of tests"), (pickled("[1]"), "no list of tests"), (pickled("[" * 99_999), "cannot be"),
    (b"x", "cannot be read"), (b"", "cannot be read"), (bytes((1 << 20) + 1), "more than 1 MiB"),
])  # fmt: skip
def test_compressed_tests_are_never_unpickled(monkeypatch, data, message):
    monkeypatch.setattr(private_tests, "MAX_BYTES", 1 << 20)
    with pytest.raises(DataError, match=message):
        decode_private_tests(packed(data))


@pytest.mark.parametrize(
    ("form", "size"), [("text", 9), ("binary", 9), ("short", 9), ("framed", 90_000), ("long", 90_000)]
)
def test_compressed_tests_of_every_form(form, size):
    tests = [{"input": "ü\n" * size, "output": "6", "testtype": "stdin"}]
    text = json.dumps(tests, ensure_ascii=False)
    assert decode_private_tests(packed(pickled(text, form))) == decode_private_tests(packed(text.encode())) == tests


def test_a_group_sits_the_same_exam():
    tests: list[Test] = [StdioTest(str(n), "") for n in range(100)]
    first = draw(tests, 20, "problem-1/7")
    assert first == draw(tests, 20, "problem-1/7") == sorted(first, key=tests.index) and len(first) == 20
    assert first != draw(tests, 20, "problem-1/8") and draw(tests[:20], 20, "x") == tests[:20]
