"""The checkers of reasoning-gym, one for each of its kinds of problems: "reasoning_gym:countdown" and a hundred more.

They run in a process of their own (`reasoning_gym_checkers.py`), which starts when a row first names one. One that
hangs or raises costs one completion, as of a plug-in file: it is not graded, and counted.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shared.errors import DataError, NotInstalled
from shared.types import Problem
from verify.plugin_host import host_of
from verify.plugin_process import DescribedVerifier
from verify.plugins import in_force
from verify.verifiers import FAMILIES, REASONING_GYM, Answer, Verifier

FILE = str(Path(__file__).resolve().parents[1] / "reasoning_gym_checkers.py")


def check_installed() -> None:
    """Raise ConfigError where reasoning-gym is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise NotInstalled("reasoning_gym")


def checkers() -> dict[str, Verifier]:
    """Start the process and return the verifiers by name. Raises ConfigError where it cannot start."""
    check_installed()
    host = host_of((FILE,))

    def verifier(known: DescribedVerifier) -> Verifier:
        async def check(answer: Answer) -> float:
            return await host.verify(known, in_force(), answer)

        return host.verifier(known, in_force())._replace(function=check, validate=_validate)

    return {known.domain: verifier(known) for known in host.describe(in_force()).verifiers}


def _validate(problem: Problem) -> None:
    if not isinstance(problem.tests, dict | list):
        raise DataError("its tests must be the metadata that reasoning-gym gave with the problem, an object")


FAMILIES[REASONING_GYM] = checkers
