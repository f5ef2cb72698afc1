"""Grades a program on the tests of a programming problem: it runs in a sandbox, its outputs are compared outside of it.

`run_tests` is the blocking entry, `in_thread` is for event loops (threads wait, the loop does not).
`run_outputs` returns what a program prints or returns without comparing it, to vet tests. The candidate shares no
process, descriptor or namespace with the process that grades; it never holds an expected output. A test may take 4 s
and 300 MB, compiling 10 s; at most 20 tests are drawn by a seed of (problem, group), and a program is right when every
test drawn passed. Source: Magistral (2506.10910), section 3.2; what it leaves open (outputs compared as contests do,
exit status 0 required) is settled in `output.py` and here.

Verdicts: CORRECT and WRONG grade the program, whatever it did wrong (`status` of the result says what: too slow, too
much memory, ...). SANDBOX_REFUSED, CRASH (a sandbox was lost twice) and UNVERIFIABLE (the tests cannot be run) do not.

What a hostile program can still do: in function tests and assertions it may answer from arguments it has seen (a lookup
table is a solution); in C++ assertions see `cpp.py`. It can tell one host from another by time. Python assertions run
in a sandbox of their own, so that exiting early, markers, patched assertions and objects equal to everything come to
nothing; only objects of the program's own classes, which must stay with it, answer for their own content.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from shared.errors import DataError, RunError
from shared.sandbox_settings import Sandbox
from shared.types import Problem, Verdict
from verify.code import cpp
from verify.code.program_run import ProgramRun, cpp_works
from verify.code.sandbox.client import Lost, SandboxRefused
from verify.code.sandbox_pool import SandboxLease, SandboxPool
from verify.code.tests import (
    Assertions,
    CellOutput,
    Language,
    Limits,
    Output,
    ProgramVerdict,
    Status,
    draw,
    language_of,
    read_tests,
)

_Found = TypeVar("_Found")
MAX_SOURCE_BYTES = 1 << 20
CELL_BYTES = 1 << 16
"""a cell of a notebook may print so much"""
_sandboxes: SandboxPool | None = None
_sandboxes_lock = threading.Lock()


def default_sandboxes() -> SandboxPool:
    """Return the sandboxes of this process, which are made at first use and end with it."""
    global _sandboxes
    with _sandboxes_lock:
        if _sandboxes is None or _sandboxes.pid != os.getpid():
            _sandboxes = SandboxPool(shared_folder=cpp.cache_folder())
        return _sandboxes


def describe_isolation(pool: SandboxPool | None = None) -> str:
    """Return one line that says what the sandboxes of this host isolate. Raises SandboxRefused."""
    with (pool or default_sandboxes()).acquire() as lease:
        return lease.candidate.isolation.line()


def _read_limits(limits: Limits | Mapping[str, Any] | None) -> Limits:
    if limits is None or isinstance(limits, Limits):
        return limits or Limits()
    wrong = set(limits) - set(Limits.__struct_fields__)
    if wrong:
        raise DataError(f"unknown limit {sorted(wrong)[0]!r}: known are {', '.join(Limits.__struct_fields__)}")
    return msgspec.convert(dict(limits), Limits)


def run_tests(
    source: str,
    language: Language,
    tests: Any,
    limits: Limits | Mapping[str, Any] | None = None,
    *,
    pool: SandboxPool | None = None,
) -> ProgramVerdict:
    """Run a program on tests (see `tests.read_tests` for their shapes) and return the verdict with its details.

    Blocks until done, at most about compile_s + max_timeouts * 4 * test_s on a busy host, plus the wait for a free
    sandbox. Raises DataError when the tests are not understood, RunError when `pool` is closed.
    """
    limits = _read_limits(limits)
    _check_language(language)
    drawn = draw(read_tests(tests), limits.max_tests, limits.seed)
    failed = [Status.SKIPPED] * len(drawn)
    required = language_of(drawn)
    if required and required != language:
        return ProgramVerdict(Verdict.WRONG, failed, f"the program is in {language}, the tests are for {required}")
    text = _plain(source)
    if text is None:
        return ProgramVerdict(
            Verdict.WRONG, [Status.ERROR, *failed[1:]], "the source is too long or has NUL characters"
        )

    def use(lease: SandboxLease) -> ProgramVerdict:
        if language == "cpp" and (missing := cpp_works(lease)):
            return ProgramVerdict(Verdict.UNVERIFIABLE, failed, missing)
        return ProgramRun(lease, limits).run(text, language, drawn)

    try:
        return _with_lease(pool, use)
    except SandboxRefused as error:
        return ProgramVerdict(Verdict.SANDBOX_REFUSED, failed, str(error))
    except Lost as error:
        return ProgramVerdict(Verdict.CRASH, failed, str(error))


def run_outputs(
    source: str, language: Language, tests: Any, limits: Limits | None = None, *, pool: SandboxPool | None = None
) -> list[Output]:
    """Return [tests] what a program prints or returns on the input of each test; `limits.max_tests` is ignored.

    Raises DataError when the tests are not understood or are assertions, SandboxRefused, and RunError when the host
    runs no C++ or the sandbox is lost twice.
    """
    _check_language(language)
    read, bounds = read_tests(tests), _read_limits(limits)
    if any(isinstance(test, Assertions) for test in read):
        raise DataError("assertions have no outputs: give tests of input and output, or of calls")
    text = _plain(source)
    if text is None or (language_of(read) or language) != language:
        return [Output(Status.ERROR)] * len(read)

    def use(lease: SandboxLease) -> list[Output]:
        if language == "cpp" and (missing := cpp_works(lease)):
            raise RunError(missing)
        return ProgramRun(lease, bounds).outputs(text, language, read)

    try:
        return _with_lease(pool, use)
    except Lost as error:
        raise RunError(str(error)) from error


def _check_language(language: str) -> None:
    if language not in ("python", "cpp"):
        raise DataError(f'language "{language}" is not run here: give "python" or "cpp"')


def _plain(source: str) -> str | None:
    """Return the source as a sandbox accepts it, None when it is too long or holds NUL characters."""
    data = source.encode("utf-8", "replace")
    if len(data) > MAX_SOURCE_BYTES or b"\0" in data:
        return None
    return data.decode().removeprefix("\ufeff")


def _with_lease(pool: SandboxPool | None, work: Callable[[SandboxLease], _Found]) -> _Found:
    """Return work(lease), retried once when the sandbox is lost. Raises SandboxRefused, and Lost the second time."""
    reason = ""
    for _ in range(2):
        try:
            with (pool or default_sandboxes()).acquire() as lease:
                return work(lease)
        except Lost as error:
            reason = f"the sandbox was lost twice {error}".strip()
    raise Lost(reason)


async def in_thread(
    run: Callable[..., _Found], source: str, language: Language, tests: Any, limits: Limits | None = None, *,
    pool: SandboxPool | None,
) -> _Found:  # fmt: skip
    """As `run`, which is `run_tests` or `run_outputs`, for callers with an event loop: as many at once as there are
    sandboxes, the others queue."""
    sandboxes = pool or default_sandboxes()
    work = partial(run, source, language, tests, limits, pool=sandboxes)
    return await asyncio.get_running_loop().run_in_executor(sandboxes.threads, work)


LANGUAGES: dict[Language, tuple[str, ...]] = {
    "python": ("python", "python3", "py"),
    "cpp": ("cpp", "c++", "cc", "cxx", "c++20", "cpp20", "c++17", "cpp17"),
}
_BY_FENCE: dict[str, Language] = {word: language for language, words in LANGUAGES.items() for word in words}


class ProgramVerifier:
    """Runs programs in sandboxes that are started when the first one is needed, and ended by `close`."""

    def __init__(self, settings: Sandbox) -> None:
        self.settings = settings
        self._sandboxes: SandboxPool | None = None
        self._opening = threading.Lock()

    def _open(self) -> SandboxPool:
        with self._opening:
            if self._sandboxes is None:
                unsafe = self.settings.isolation == "none"
                self._sandboxes = SandboxPool(
                    self.settings.max_concurrency, unsafe=unsafe, shared_folder=cpp.cache_folder()
                )
            return self._sandboxes

    async def start(self) -> str:
        """Start a sandbox and return in one line what it isolates. Raises SandboxRefused, which names the setting."""
        try:
            return await asyncio.to_thread(lambda: describe_isolation(self._open()))
        except SandboxRefused as error:
            raise SandboxRefused(
                f'{error}, with reward.sandbox.isolation = "none" (programs of the model then run with the rights of '
                "this user)"
            ) from error

    async def run(self, problem: Problem, source: str, language: str, group: int) -> ProgramVerdict:
        """Run a program on the tests of (problem, group). `language`: the word after its fence, in lower case.

        A program in a language that the tests do not take is WRONG: a model must not escape them by that choice.
        """
        known = _BY_FENCE.get(language)
        if known is None:
            return ProgramVerdict(Verdict.WRONG, [], f'"{language[:20]}" is not run here: {" or ".join(LANGUAGES)} is')
        settings = self.settings
        limits = Limits(
            test_s=settings.test_s, memory_bytes=settings.memory_bytes, compile_s=settings.compile_s,
            max_tests=settings.max_tests, seed=f"{problem.id}/{group}", imports=settings.imports,
        )  # fmt: skip
        sandboxes = self._sandboxes or await asyncio.to_thread(self._open)
        try:
            return await in_thread(run_tests, source, known, problem.tests, limits, pool=sandboxes)
        except DataError as error:
            return ProgramVerdict(Verdict.UNVERIFIABLE, [], str(error))

    async def run_cells(self, cells: list[str], seed: int, earlier_s: float) -> CellOutput:
        """Run the last of the cells of a notebook with the names that the others leave, see `ProgramRun.cells`. Raises
        SandboxRefused, and Lost when the sandbox is lost twice."""
        limits = Limits(test_s=self.settings.test_s, memory_bytes=self.settings.memory_bytes, output_bytes=CELL_BYTES)
        if (last := _plain(cells[-1])) is None:
            return CellOutput("", "not run: the program is too long or has NUL characters")
        pool = await asyncio.to_thread(self._open)
        read = [*cells[:-1], last]

        def use(lease: SandboxLease) -> CellOutput:
            return ProgramRun(lease, limits).cells(read, seed, earlier_s)

        return await asyncio.get_running_loop().run_in_executor(pool.threads, lambda: _with_lease(pool, use))

    async def close(self) -> None:
        """End all sandboxes."""
        if self._sandboxes is not None:
            await asyncio.to_thread(self._sandboxes.close)
