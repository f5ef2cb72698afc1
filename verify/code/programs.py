"""Programs of completions, each on its problem's tests, under the settings of [reward.sandbox].

What this does not do: extract programs (`verify/fence.py`), or weigh what became of them (`reward.py`). Who calls this:
`reward.Scorer`; it is made by the controller, `python -m verify` and `reward.score`.
"""

from __future__ import annotations

import asyncio
from typing import cast

from shared.config import Sandbox
from shared.errors import DataError
from shared.types import Problem, Verdict
from verify import program
from verify.code import cpp
from verify.code.exam import CallTest, read_tests
from verify.code.result import Language, Limits, Result
from verify.code.sandbox.client import SandboxRefused
from verify.code.seats import Seats

LANGUAGES = {
    "python": ("python", "python3", "py"),
    "cpp": ("cpp", "c++", "cc", "cxx", "c++20", "cpp20"),
}
_BY_FENCE = {word: language for language, words in LANGUAGES.items() for word in words}


class Programs:
    """Runs programs in boxes that are started when the first one is needed, and ended by `close`."""

    def __init__(self, settings: Sandbox) -> None:
        self.settings = settings
        self.seats = Seats(
            settings.boxes, unsafe=settings.isolation == "none", shared_folder=cpp.cache_folder()
        )

    async def start(self) -> str:
        """Start a box and say in one line what it isolates. Raises SandboxRefused, which names the setting."""
        try:
            return await asyncio.to_thread(program.isolation, self.seats)
        except SandboxRefused as error:
            raise SandboxRefused(
                f'{error}, with reward.sandbox.isolation = "none" (programs of the model then run with the rights of '
                "this user)"
            ) from error

    async def run(self, problem: Problem, source: str, language: str, group: int) -> Result:
        """Run a program on the tests of (problem, group). `language`: the word behind its fence, in lower case.

        A program in a language that the tests do not take is WRONG: a model must not escape them by the choice of one.
        """
        try:
            tests = read_tests(problem.tests)
        except DataError as error:
            return Result(Verdict.UNVERIFIABLE, [], str(error))
        wanted = getattr(tests[0], "language", "") or ("python" if isinstance(tests[0], CallTest) else "")
        known = _BY_FENCE.get(language, "")
        if not known or (wanted and known != wanted):
            allowed = wanted or " or ".join(LANGUAGES)
            return Result(Verdict.WRONG, [], f'a program in "{language[:20]}", where the tests take {allowed}')
        settings = self.settings
        limits = Limits(
            test_s=settings.test_s,
            memory_bytes=settings.memory_bytes,
            compile_s=settings.compile_s,
            max_tests=settings.max_tests,
            seed=f"{problem.id}/{group}",
        )
        return await program.grade(source, cast(Language, known), tests, limits, seats=self.seats)

    async def close(self) -> None:
        """End all boxes."""
        await asyncio.to_thread(self.seats.close)
