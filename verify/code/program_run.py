"""Runs one program on its tests in one lease: compiles, feeds, waits, compares.

A test that was killed at its wall time although the host gave it only part of a processor is run once more with more
wall time, so that a busy host fails no program; processor time is limited all the same. So it is for compiling.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shared.types import Verdict
from verify.code import cpp
from verify.code.output import same_output
from verify.code.readings import MEANINGS, argument_readings, fitting_meanings
from verify.code.sandbox import codec, object_file
from verify.code.sandbox.client import Ended, Pipe
from verify.code.sandbox.program_process import CELL_ENDED, CELL_RAISED
from verify.code.sandbox.protocol import AssertionResults, call, raised, run_assertions
from verify.code.sandbox_pool import SandboxLease
from verify.code.tests import (
    Assertions,
    CallTest,
    CellOutput,
    Language,
    Limits,
    Output,
    ProgramVerdict,
    Status,
    StdioTest,
    Test,
)

_Found = TypeVar("_Found")
_PATIENCE = 3.0
_ASSERTION_RUNNER_BYTES = 600 << 20
_COMPILER_OUTPUT_BYTES = 1 << 20
_PROBE_S = 60.0
ROOM_BYTES = 256 << 20
"""room that C++ programs need on the disk where a sandbox has no memory-backed folder"""


class ProgramRun:
    """Runs one program on its tests in the sandboxes of a lease."""

    def __init__(self, lease: SandboxLease, limits: Limits) -> None:
        self.lease, self.limits, self.sandbox = lease, limits, lease.candidate
        self.second_chances = limits.max_timeouts
        self.cpu_s = self.compile_s = 0.0
        self.reason = ""
        self.meanings = set(range(MEANINGS))
        """of the expected values of calls, those that hold in all tests that passed"""

    def run(self, source: str, language: Language, tests: list[Test]) -> ProgramVerdict:
        """Run a program on tests and return the verdict. Raises Lost, DataError."""
        try:
            statuses = self._run_tests(source, language, tests)
        finally:
            if language == "cpp":
                self.sandbox.tell(do="clear")
        unverifiable = not statuses
        statuses += [Status.SKIPPED] * (len(tests) - len(statuses))
        verdict = Verdict.CORRECT if all(status is Status.PASSED for status in statuses) else Verdict.WRONG
        verdict = Verdict.UNVERIFIABLE if unverifiable else verdict
        return ProgramVerdict(verdict, statuses, self.reason, self.compile_s, self.cpu_s)

    def outputs(self, source: str, language: Language, tests: list[Test]) -> list[Output]:
        """Return what the program prints or returns on each test, without comparing; no test may be `Assertions`.

        Raises Lost, DataError.
        """
        try:
            if language == "cpp" and not self._compile(cpp.whole_program(source)):
                return [Output(Status.COMPILE)] * len(tests)
            results = list(self._each(source, language, tests))
            return results + [Output(Status.SKIPPED)] * (len(tests) - len(results))
        finally:
            if language == "cpp":
                self.sandbox.tell(do="clear")

    def cells(self, cells: list[str], seed: int, earlier_s: float) -> CellOutput:
        """Run the last of the cells with the names that the others leave (`program_process.run_cells`), which took
        `earlier_s` processor seconds before. Raises Lost."""
        cpu_s, what = self.limits.test_s + 1.5 * earlier_s, {"do": "run_cells", "arguments": [cells, seed]}

        def attempt(wall_s: float) -> tuple[Ended, Pipe]:
            with Pipe(b"", self.limits.output_bytes) as pipe:
                memory = self.limits.memory_bytes
                return self.sandbox.run(pipe, (0, 1), wall_s, cpu_s, memory_bytes=memory, **what), pipe

        ended, pipe = self._with_patience(attempt, cpu_s)
        text = bytes(pipe.got[: self.limits.output_bytes]).decode("utf-8", "replace")
        if pipe.flooded:
            return CellOutput(text, f"stopped: it printed more than {self.limits.output_bytes} bytes", ended.cpu_s)
        if not ended.timed_out and ended.status in (CELL_ENDED, CELL_RAISED):
            return CellOutput(text, cpu_s=ended.cpu_s, raised=ended.status == CELL_RAISED)
        self._how(ended)
        return CellOutput(text, f"stopped: {self.reason or 'it left the interpreter'}", ended.cpu_s)

    def _each(self, source: str, language: Language, tests: list[Test]) -> Iterator[Output]:
        """Yield the output of each test, until too many took all their time."""
        slow = 0
        for test in tests:
            if isinstance(test, Assertions):
                continue
            yield (
                output := self._print(source, language, test)
                if isinstance(test, StdioTest)
                else self._call(source, test)
            )
            slow += output.status is Status.TIMEOUT
            if slow >= self.limits.max_timeouts:
                return

    def _with_patience(self, attempt: Callable[[float], tuple[Ended, _Found]], limit_s: float) -> tuple[Ended, _Found]:
        """Return attempt(wall_s), repeated with a longer wall time if it was starved, a few times in a run.

        Starved: killed at its wall time, having worked, but less than a processor of its own would have let it.
        """
        ended, result = attempt(limit_s)
        if self.second_chances and ended.timed_out and 0.1 * limit_s < ended.cpu_s < 0.8 * limit_s:
            self.second_chances -= 1
            return attempt(_PATIENCE * limit_s)
        return ended, result

    def _run_tests(self, source: str, language: Language, tests: list[Test]) -> list[Status]:
        first = tests[0]
        if language == "python":
            if isinstance(first, Assertions):
                return self._assert_each(source, tests)
            return self._run_each(source, language, tests)
        if not isinstance(first, Assertions):
            return self._run_each("", language, tests) if self._compile(cpp.whole_program(source)) else [Status.COMPILE]
        if missing := cpp.missing_library():
            self.reason = f"{missing} is not installed on this host: C++ tests with a `main` are linked statically"
            return []
        statuses: list[Status] = []
        for test in tests:
            assert isinstance(test, Assertions)
            nonce = secrets.token_hex(16)
            code = cpp.guarded(test, nonce)
            compiled = self._compile(cpp.assertion_program(source, code))
            statuses.append(self._run_assertions(nonce) if compiled else Status.COMPILE)
            if not compiled:
                break
        return statuses

    def _compile(self, steps: list[cpp.CompilerStep]) -> bool:
        """Run the compiler's steps in the sandbox; say whether all succeeded."""
        limit_s = left_s = self.limits.compile_s
        for step in steps:
            ended, text = self._compile_one(step.argv, step.text, left_s)
            left_s -= ended.cpu_s
            if ended.status and not ended.timed_out and step.otherwise is not None and left_s > 0:
                ended, text = self._compile_one(step.argv, step.otherwise, left_s)
                left_s -= ended.cpu_s
            if ended.timed_out or ended.status or left_s <= 0:
                late = ended.timed_out or left_s <= 0
                self.reason = f"compiling takes more than {limit_s:g} s" if late else f"compiler: {text[:600]}"
                return False
        return True

    def _compile_one(self, argv: list[str], text: str, limit_s: float) -> tuple[Ended, str]:
        """Run one command of the compiler; return its end and the head of its messages."""

        def attempt(wall_s: float) -> tuple[Ended, Pipe]:
            with Pipe(text.encode(), _COMPILER_OUTPUT_BYTES) as pipe:
                return self.sandbox.run(pipe, (0, 2), wall_s, limit_s, do="compile", argv=argv), pipe

        ended, pipe = self._with_patience(attempt, limit_s)
        self.compile_s += ended.cpu_s
        return ended, pipe.got.decode("utf-8", "replace").strip()

    def _assert_each(self, source: str, tests: list[Test]) -> list[Status]:
        """Return one status for each assertion of all test codes; [] when one of them cannot be run."""
        statuses: list[Status] = []
        for test in tests:
            assert isinstance(test, Assertions)
            results = self._assert(source, test)
            if not results:
                return []
            statuses += results
        return statuses

    def _run_each(self, source: str, language: Language, tests: list[Test]) -> list[Status]:
        """Return one status for each test, of the reading of the arguments in which most pass."""
        best: tuple[int, list[Status], str] = (-1, [], "")
        for reading in argument_readings(tests):
            self.reason, self.meanings = "", set(range(MEANINGS))
            outputs = self._each(source, language, reading)
            statuses = [self._compared(*pair) for pair in zip(reading, outputs, strict=False)]
            passed = statuses.count(Status.PASSED)
            if passed == len(tests):
                return statuses
            best = max(best, (passed, statuses, self.reason), key=lambda run: run[0])
        self.reason = best[2]
        return best[1]

    def _compared(self, test: Test, output: Output) -> Status:
        """Return the status of a test by what its program printed or returned."""
        if output.status is not Status.PASSED:
            return output.status
        if isinstance(test, StdioTest):
            if same_output(test.output, output.printed, test.tolerance):
                return Status.PASSED
            return self._fail(Status.WRONG, f"printed {output.printed[:200].decode('utf-8', 'replace')!r}")
        assert isinstance(test, CallTest)
        if fitting := self.meanings & fitting_meanings(test, output):
            self.meanings = fitting
            return Status.PASSED
        return self._fail(Status.WRONG, "returned another value")

    def _print(self, source: str, language: Language, test: StdioTest) -> Output:
        most = max(self.limits.output_bytes, 4 * len(test.output))
        what = self._binary()
        if language == "python":
            what = {"do": "run_script", "arguments": [source]}
        ended, got, flooded = self._run(test.input.encode("utf-8", "replace"), most, (0, 1), what)
        if flooded:
            return Output(self._fail(Status.FLOOD, f"printed more than {most} bytes"))
        return Output(self._how(ended), got)

    def _run_assertions(self, nonce: str) -> Status:
        what = self._binary() | {"candidate": cpp.CANDIDATE}
        ended, got, _ = self._run(b"", 4096, (0, cpp.RESULT), what)
        if ended.status == object_file.REFUSED:
            return self._fail(Status.ERROR, "indirect functions, or sections that no compiler makes of C++")
        status = self._how(ended)
        if status is Status.PASSED and got.decode("ascii", "replace") != nonce:
            return self._fail(Status.WRONG, "ended before the tests did")
        return status

    def _binary(self) -> dict[str, object]:
        return {"do": "binary", "argv": [f"{self.sandbox.work}/build/program"]}

    def _run(
        self, send: bytes, most: int, targets: tuple[int, int], what: dict[str, object]
    ) -> tuple[Ended, bytes, bool]:
        """Run a child to its end; return how it ended, what it wrote, and whether that was too much."""
        limits = self.limits

        def attempt(wall_s: float) -> tuple[Ended, Pipe]:
            with Pipe(send, most) as pipe:
                ended = self.sandbox.run(pipe, targets, wall_s, limits.test_s, memory_bytes=limits.memory_bytes, **what)
                return ended, pipe

        ended, pipe = self._with_patience(attempt, limits.test_s)
        self.cpu_s += ended.cpu_s
        return ended, bytes(pipe.got), pipe.flooded

    def _call(self, source: str, test: CallTest) -> Output:
        limits = self.limits

        def attempt(wall_s: float) -> tuple[Ended, Any]:
            return call(self.sandbox, source, test, wall_s, limits)

        ended, reply = self._with_patience(attempt, limits.test_s)
        self.cpu_s += ended.cpu_s
        if reply is None:
            status = self._how(ended)
            status = status if status is not Status.PASSED else self._fail(Status.ERROR, "ended without an answer")
            return Output(status)
        if reply[0] != "value":
            return Output(self._fail(Status.ERROR, raised(reply) or "ended without an answer"))
        try:
            value = codec.decode(reply[1])
        except codec.Malformed:
            return Output(self._fail(Status.WRONG, "returned an object that is no plain value"))
        return Output(Status.PASSED, value=value, changed=_changed(reply))

    def _assert(self, source: str, test: Assertions) -> list[Status]:
        """Return one status for each top-level assertion; [] when the tests themselves cannot be run."""
        limits = self.limits
        memory_bytes = (limits.memory_bytes, _ASSERTION_RUNNER_BYTES)

        def attempt(wall_s: float) -> tuple[Ended, AssertionResults]:
            seconds = (wall_s, limits.test_s)
            finding = run_assertions(self.sandbox, self.lease.assertion_sandbox, source, test, seconds, memory_bytes)
            return finding.candidate, finding

        ended, finding = self._with_patience(attempt, limits.test_s)
        self.cpu_s += ended.cpu_s
        self.reason = finding.reason
        if finding.refused:
            return []
        if finding.passed == []:
            self.reason = "the tests assert nothing"
        if finding.passed is None:
            status = self._how(ended)
            return [status if status is not Status.PASSED else self._fail(Status.ERROR, "ended before the tests did")]
        return [Status.PASSED if passed else Status.WRONG for passed in finding.passed]

    def _how(self, ended: Ended) -> Status:
        """Return the status of a child by its end alone."""
        limits = self.limits
        spent = ended.cpu_s > 0.95 * limits.test_s and ended.status in (-9, -24)  # RLIMIT_CPU, in whole seconds
        if ended.timed_out or spent or ended.cpu_s > limits.test_s + 0.5:
            return self._fail(Status.TIMEOUT, f"took more than {limits.test_s:g} s")
        if ended.status < 0:
            near = ended.memory_bytes > 0.9 * limits.memory_bytes
            return self._fail(Status.MEMORY if near else Status.CRASH, f"killed by signal {-ended.status}")
        if ended.status:
            return self._fail(Status.ERROR, f"exit status {ended.status}")
        return Status.PASSED

    def _fail(self, status: Status, reason: str) -> Status:
        self.reason = self.reason or reason
        return status


def _changed(reply: list[Any]) -> list[Any]:
    """Return the arguments after a call that returned None; [] where they are not plain values."""
    try:
        arguments = codec.decode(reply[2]) if len(reply) > 2 else []
    except codec.Malformed:
        return []
    return arguments if isinstance(arguments, list) else []


def cpp_works(lease: SandboxLease) -> str:
    """Return why C++ programs cannot be compiled and run in this lease's sandbox, "" when they can. Raises Lost.

    A program known to be right is run first, so that no candidate is blamed for the host. Failures are not kept: a host
    that was repaired, or had no time, is tested again. Without namespaces the room on the disk is checked every time.
    """
    if missing := cpp.missing_tool():
        return f"{missing} is not installed on this host"
    folder = lease.candidate.folder
    if folder and shutil.disk_usage(folder).free < ROOM_BYTES:
        return f"less than {ROOM_BYTES >> 20} MB are free on the disk of {folder}: make room, or set TMPDIR"
    if lease.pool.compiles:
        return ""
    source, code, prefix = cpp.PROBE
    tests: list[Test] = [Assertions(code, prefix)]
    if cpp.missing_library():  # tests of input and output do without
        source, tests = "int main() {}", [StdioTest("", "")]
    limits = Limits(test_s=_PROBE_S, compile_s=_PROBE_S)
    verdict = ProgramRun(lease, limits).run(source, "cpp", tests)
    lease.pool.compiles = verdict.verdict is Verdict.CORRECT
    if lease.pool.compiles:
        return ""
    work = lease.candidate.work
    return (
        f"a C++ program known to be right does not work in a sandbox here ({verdict.reason}): is {work} mounted noexec?"
    )
