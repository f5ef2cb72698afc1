"""Runs programs of completions on the tests of their problems, under the settings of [reward.sandbox]."""

from __future__ import annotations

import asyncio
import threading

from shared.errors import DataError
from shared.sections import Sandbox
from shared.types import Problem, Verdict
from verify import program
from verify.code import cpp
from verify.code.result import Language, Limits, Result
from verify.code.sandbox.client import SandboxRefused
from verify.code.seats import Seats

LANGUAGES: dict[Language, tuple[str, ...]] = {
    "python": ("python", "python3", "py"),
    "cpp": ("cpp", "c++", "cc", "cxx", "c++20", "cpp20", "c++17", "cpp17"),
}
_BY_FENCE: dict[str, Language] = {word: language for language, words in LANGUAGES.items() for word in words}


class Programs:
    """Runs programs in boxes that are started when the first one is needed, and ended by `close`."""

    def __init__(self, settings: Sandbox) -> None:
        self.settings = settings
        self._seats: Seats | None = None
        self._opening = threading.Lock()

    def _open(self) -> Seats:
        with self._opening:
            if self._seats is None:
                unsafe = self.settings.isolation == "none"
                self._seats = Seats(self.settings.max_concurrency, unsafe=unsafe, shared_folder=cpp.cache_folder())
            return self._seats

    async def start(self) -> str:
        """Start a box and return in one line what it isolates. Raises SandboxRefused, which names the setting."""
        try:
            return await asyncio.to_thread(lambda: program.isolation(self._open()))
        except SandboxRefused as error:
            raise SandboxRefused(
                f'{error}, with reward.sandbox.isolation = "none" (programs of the model then run with the rights of '
                "this user)"
            ) from error

    async def run(self, problem: Problem, source: str, language: str, group: int) -> Result:
        """Run a program on the tests of (problem, group). `language`: the word behind its fence, in lower case.

        A program in a language that the tests do not take is WRONG: a model must not escape them by that choice.
        """
        known = _BY_FENCE.get(language)
        if known is None:
            return Result(Verdict.WRONG, [], f'"{language[:20]}" is not run here: {" or ".join(LANGUAGES)} is')
        settings = self.settings
        limits = Limits(
            test_s=settings.test_s,
            memory_bytes=settings.memory_bytes,
            compile_s=settings.compile_s,
            max_tests=settings.max_tests,
            seed=f"{problem.id}/{group}",
        )
        seats = self._seats or await asyncio.to_thread(self._open)
        try:
            return await program.grade(source, known, problem.tests, limits, seats=seats)
        except DataError as error:
            return Result(Verdict.UNVERIFIABLE, [], str(error))

    async def close(self) -> None:
        """End all boxes."""
        if self._seats is not None:
            await asyncio.to_thread(self._seats.close)
