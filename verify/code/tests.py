"""The tests of a programming problem as data, which of them are drawn, and what a program may use and reaches in them.

Three kinds. `StdioTest`: a whole program reads standard input and prints. `CallTest`: a function is called (Python).
`Assertions`: test code that asserts, as MBPP and HumanEval have it (Python, or a C++ `main`). `read_tests` takes the
shapes that data sets come in. `draw` chooses at most so many by a seed of (problem, group): a group runs the same
tests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

import msgspec

from shared.errors import DataError
from shared.json_reader import parse_json
from shared.sandbox_settings import Sandbox
from shared.types import Verdict
from verify.code.assertion_text import check_assertion_text
from verify.code.cpp_head import split_prefix
from verify.code.private_tests import decode_private_tests, is_compressed

Language = Literal["python", "cpp"]


class Status(StrEnum):
    """How one test ended."""

    PASSED = "passed"
    WRONG = "wrong"
    ERROR = "error"
    """the program raised, or left with a status other than 0"""
    CRASH = "crash"
    """killed by a signal of its own"""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    FLOOD = "output limit"
    COMPILE = "compile error"
    SKIPPED = "not run"
    """others before it took all their time, or the program does not compile"""


class Limits(msgspec.Struct, frozen=True):
    """What a program may use; the defaults are the paper's."""

    test_s: float = 4.0
    """per test, processor seconds and wall seconds alike"""
    memory_bytes: int = 300 << 20
    """address space of a test"""
    compile_s: float = 10.0
    """limit of each command of the compiler: one for a program with its own `main`; for C++ assertions two that compile
    (the program once more with another reading where the first fails) and five that link, which take a fraction of a
    second"""
    max_tests: int = 20
    seed: str = ""
    """names (problem, group), e.g. "lcb-12/7": the same seed draws the same tests"""
    output_bytes: int = 4 << 20
    """a test may print so much, or four times what is expected where that is more"""
    max_timeouts: int = 2
    """after so many tests that took all their time the others are not run"""
    imports: tuple[str, ...] = Sandbox().imports
    """modules that a program whose function is called uses without importing them"""


class Output(msgspec.Struct, frozen=True, eq=False):
    """What a program did with one test's input; data of an untrusted program, in plain values."""

    status: Status
    """PASSED: it ended well, whatever it printed or returned"""
    printed: bytes = b""
    value: Any = None
    """the function's result"""
    changed: list[Any] = []
    """its arguments afterwards, where it returned None"""


class CellOutput(msgspec.Struct, frozen=True):
    """What one cell of a notebook did; data of an untrusted program."""

    printed: str
    stopped: str = ""
    """why it did not come to its end, "" if it did: what it changed is then lost"""
    cpu_s: float = 0.0
    """time of this cell and those before it"""
    raised: bool = False
    """it ended with an exception, whose traceback is printed"""


class ProgramVerdict(msgspec.Struct, frozen=True, eq=False):
    """The result of a program. Equals its Verdict, so `run_tests(...) == Verdict.CORRECT` reads as it should."""

    verdict: Verdict
    statuses: list[Status]
    """[tests drawn]"""
    reason: str = ""
    """one line for a human"""
    compile_s: float = 0.0
    cpu_s: float = 0.0
    """time of all tests together"""

    @property
    def passed(self) -> int:
        """Number of tests passed."""
        return self.statuses.count(Status.PASSED)

    @property
    def share(self) -> float:
        """Share of the tests drawn that passed, 0 when there are none."""
        return self.passed / len(self.statuses) if self.statuses else 0.0

    @property
    def status(self) -> Status:
        """PASSED, or how the first test that failed ended."""
        return next((status for status in self.statuses if status is not Status.PASSED), Status.PASSED)

    @property
    def graded(self) -> bool:
        """True when the verdict says something about the program."""
        return self.verdict.graded

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return bool(self.verdict == other)
        if isinstance(other, ProgramVerdict):
            return msgspec.structs.astuple(self) == msgspec.structs.astuple(other)
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.verdict)


class StdioTest(msgspec.Struct, frozen=True):
    """A program is fed `input` and must print `output` (see `output.same_output`; `tolerance` None: the usual one).

    `language`: the only one that the task takes, "" for any.
    """

    input: str
    output: str
    tolerance: float | None = None
    language: str = ""


class CallTest(msgspec.Struct, frozen=True):
    """`function(*args, **kwargs)` must return `expected` (see `output.same_value`); "Solution.f" calls a method."""

    function: str
    args: list[Any]
    expected: Any
    kwargs: dict[str, Any] = {}
    tolerance: float | None = None
    wrapped: bool = False
    """`expected` is a list of one, as in all tests of this problem: what it holds may be meant (`readings.py`)"""


class Assertions(msgspec.Struct, frozen=True):
    """Test code that asserts things about the program.

    `prefix`: code that stands before the program (imports, helpers, and the head of the function asked for); trusted.
    `entry_point`: name of that function, "" when unknown. `language`: of the test code, "" when unknown.
    """

    code: str
    prefix: str = ""
    entry_point: str = ""
    language: str = ""


Test = StdioTest | CallTest | Assertions
_LANGUAGES = {"asserts": "python", "main": "cpp"}
_CPP = re.compile(r"^\s*#\s*include\b|\bint\s+main\s*\(", re.MULTILINE)
_MAIN = re.compile(r"\bmain\s*\(")
_LISTS = ("tests", "cases", "test_cases", "test_list", "public_test_cases", "private_test_cases")
_NAMES = ("function", "fn_name", "entry_point", "func_name")
_CALLS = frozenset(("functional", "function", "function_call", "call", "call_based"))
_STREAMS = frozenset(("stdin", "stdin_stdout", "stdio", "standard_input"))
_HEAD = re.compile(r"^[ \t]*(?:async[ \t]+)?def[ \t]+(?!__)(\w+)", re.MULTILINE)
_check_python = lru_cache(maxsize=512)(check_assertion_text)
"""tests are read for every program that is run on them"""


def read_tests(tests: Any) -> list[Test]:
    """Return the tests that an object describes. Raises DataError when it describes none.

    Taken: tests of the classes above, alone or in a list; the text of test code or a list of `assert` lines; mappings
    {"type": "asserts" | "main", "code", "prefix"?, "entry_point"?}; {"input", "output", "language"?} each;
    {"inputs": [..], "outputs": [..], "fn_name"?}; {"function" | "entry_point" | "fn_name", "args" | "input",
    "expected" | "output"}; {"tests" | "cases": [..], plus what its members share}; JSON text of these; LiveCodeBench's
    {"input", "output", "testtype"} with "metadata" or "starter_code" in the same row, and its compressed tests.
    """
    try:
        described = _read(tests, {})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"the tests of a programming problem are not understood ({error})") from error
    if not described:
        raise DataError("a programming problem has no tests: give at least one")
    if len({type(test) for test in described}) > 1:
        raise DataError("the tests of one programming problem are of different kinds: give one kind")
    if len({test.language for test in described if isinstance(test, StdioTest)}) > 1:
        raise DataError("the tests of one programming problem take different languages: give one language")
    for test in described:
        if isinstance(test, Assertions) and test.language == "cpp":
            if not _MAIN.search(test.code):
                raise DataError("C++ test code needs a main function")
            split_prefix(test.prefix)
    if all(isinstance(test, CallTest) and test.wrapped for test in described):
        return described
    return [_as_it_stands(test) for test in described]


def _as_it_stands(test: Test) -> Test:
    """Return a test whose list of one is meant, since not all tests of its problem have one."""
    return msgspec.structs.replace(test, wrapped=False) if isinstance(test, CallTest) and test.wrapped else test


def language_of(tests: list[Test]) -> str:
    """Return the language that tests take, "" when they take any."""
    first = tests[0]
    return "python" if isinstance(first, CallTest) else first.language


def _read(tests: Any, shared: Mapping[str, Any]) -> list[Test]:
    if isinstance(tests, (StdioTest, CallTest, Assertions)):
        return [tests]
    if isinstance(tests, str):
        if tests.lstrip()[:1] in ("{", "["):  # some data sets keep their tests as the text of JSON
            return _read(parse_json(tests), shared)
        if is_compressed(tests):
            return _read(decode_private_tests(tests), shared)
        return [_assertions(tests, shared)] if tests.strip() else []
    if isinstance(tests, Sequence) and not isinstance(tests, bytes):
        if tests and all(isinstance(test, str) for test in tests):
            return _read("\n".join(tests), shared)
        return [one for test in tests for one in _read(test, shared)]
    if not isinstance(tests, Mapping):
        raise DataError(f"tests of type {type(tests).__name__} are not understood: give a list of tests")
    return _read_mapping({**shared, **tests})


def _assertions(code: str, row: Mapping[str, Any]) -> Assertions:
    """Make `Assertions` of test code and what its row says about it. C++ is recognised by its `main`."""
    prefix, entry_point = row.get("prefix") or "", row.get("entry_point") or ""
    for name, text in (("code", code), ("prefix", prefix), ("entry_point", entry_point)):
        if not isinstance(text, str):
            raise DataError(f"`{name}` of test code must be a text, not {type(text).__name__}")
    imports = row.get("test_imports") or []
    lines = [
        *([imports] if isinstance(imports, str) else imports),
        row.get("test_setup_code") or row.get("setup") or "",
    ]
    setup = "\n".join(line for line in lines if line)
    language = _LANGUAGES.get(str(row.get("type")), "cpp" if _CPP.search(code) else "python")
    code = f"{setup}\n{code}" if setup else code
    if language == "python":
        _check_python(code, entry_point)
    return Assertions(code, prefix, entry_point, language)


def _read_mapping(row: dict[str, Any]) -> list[Test]:
    lists = [row.pop(name) for name in _LISTS if name in row]
    if lists := [tests for tests in lists if tests is not None]:  # a column that other rows have is null in this one
        return [one for tests in lists for one in _read(tests, row)]
    for name in ("code", "test"):
        if row.get(name) is not None:
            return [_assertions(row[name], row)]
    inputs, outputs = row.get("inputs"), row.get("outputs")
    if inputs is not None and outputs is not None:
        if not (isinstance(inputs, (list, tuple)) and isinstance(outputs, (list, tuple))):
            raise DataError("`inputs` and `outputs` must be lists with an entry for each test")
        if len(inputs) != len(outputs):
            raise DataError(
                f"{_count(inputs, 'input')} and {_count(outputs, 'output')}: give one output for each input"
            )
        row = {**row, "inputs": None}
        pairs = zip(inputs, outputs, strict=True)
        return [one for given, expected in pairs for one in _read_mapping({**row, "input": given, "output": expected})]
    given = _first(row, "args", "input", "stdin")
    expected = _first(row, "expected", "output", "expected_output", "stdout")
    if function := _function(row):
        return [_call_test(function, given, expected, row)]
    given, expected = _lines(given), _printed(expected)
    if not (isinstance(given, str) and isinstance(expected, str)):
        raise DataError("a standard input test needs `input` and `output` as text, a call test also `function`")
    language = str(row.get("language") or "")
    if language not in ("", "python", "cpp"):
        raise DataError(f'the tests take programs in "{language[:20]}": only "python" and "cpp" are run here')
    return [StdioTest(given, expected, _tolerance(row), language)]


def _call_test(function: str, given: Any, expected: Any, row: Mapping[str, Any]) -> CallTest:
    """Make a test of a call. Texts as published sets have them are JSON, one argument a line."""
    named = dict(row.get("kwargs") or {})
    if isinstance(given, str) and row.get("args") is None:
        given = [_json(line, f"an argument of {function}") for line in given.splitlines() if line.strip()]
        expected = _json(expected, f"what {function} returns") if isinstance(expected, str) else expected
    if isinstance(given, Mapping):
        given, named = [], dict(given) | named
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise DataError(f"the arguments of {function} must be a list, not {type(given).__name__}")
    stored = row.get("expected") is None and _kind(row) != "functional"  # LiveCodeBench's values stand in no list
    wrapped = stored and isinstance(expected, list) and len(expected) == 1
    return CallTest(function, list(given), expected, named, _tolerance(row), wrapped)


def _json(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{what} must be JSON, one value a line, not {text[:60]!r}") from error


def _kind(row: Mapping[str, Any]) -> str:
    return str(row.get("testtype") or row.get("type") or "").lower()


def _function(row: Mapping[str, Any]) -> str:
    """Return the name of the function that a test calls, "" where it feeds a whole program. Raises DataError where the
    test says that it calls a function, and nothing names it."""
    kind, metadata = _kind(row), row.get("metadata")
    if kind in _STREAMS:
        return ""
    if isinstance(metadata, str):
        metadata = parse_json(metadata) if metadata.lstrip()[:1] == "{" else None
    named = metadata if isinstance(metadata, Mapping) else {}
    function = next((row[name] for name in _NAMES if row.get(name)), named.get("func_name"))
    if function or kind not in _CALLS:
        return str(function or "")
    heads = set(_HEAD.findall(str(row.get("starter_code") or "")))
    if len(heads) != 1:
        raise DataError(
            f'a test of type "{kind}" calls a function whose name is missing: give `fn_name`, `func_name` in '
            f"`metadata`, or `starter_code` with the head of one function"
        )
    return str(heads.pop())


def _tolerance(row: Mapping[str, Any]) -> float | None:
    return None if row.get("tolerance") is None else float(row["tolerance"])


def _count(values: Sequence[Any], name: str) -> str:
    return f"{len(values)} {name}{'' if len(values) == 1 else 's'}"


def _lines(value: Any) -> Any:
    """Return a list of lines as one text, and other values as they are."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value) + "\n"
    return value


def _printed(value: Any) -> Any:
    """Return what a program prints as text: numbers are printed, a list has a line for each."""
    if isinstance(value, list):
        return _lines([_printed(line) if isinstance(line, (int, float)) else line for line in value])
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _first(row: Mapping[str, Any], *names: str) -> Any:
    """Return the first value that is not null; null where a name has it. Raises DataError where the row has none."""
    given = [row[name] for name in names if name in row]
    if given:
        return next((value for value in given if value is not None), None)
    raise DataError(f"a test has none of {', '.join(names)}: it has {', '.join(row) or 'nothing'}")


def draw(tests: list[Test], most: int, seed: str) -> list[Test]:
    """Choose `most` of the tests, the same for the same seed, in their own order."""
    if len(tests) <= most:
        return tests

    def place(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}\0{index}".encode(), digest_size=16).digest()

    return [tests[index] for index in sorted(sorted(range(len(tests)), key=place)[:most])]
