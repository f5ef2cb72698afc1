"""The settings of the sandboxes in which programs of the model run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from shared.section import Section


class Sandbox(Section):
    isolation: Literal["required", "none"] = "required"
    """"required" refuses to run programs of the model where the host cannot isolate them; "none" runs them all the
    same: for trusted programs only"""
    max_concurrency: int = Field(0, ge=0)
    """programs that run at once; 0 means one less than there are cores"""
    test_s: float = Field(4.0, gt=0)
    """a program is stopped after so many seconds of one test; compiling one of C++ after 2.5 times as many, at least
    10"""
    memory_bytes: int = Field(300 << 20, ge=16 << 20)
    """memory of a program, bytes"""
    max_tests: int = Field(20, ge=1)
    """most tests that are run for a problem; of more, so many are drawn, the same for all completions of a group"""
    imports: tuple[str, ...] = (
        *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
        *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
    )
    """modules of Python's standard library that a program has without importing them, with their public names, where
    tests call one of its functions: sites and published graders put these imports before it; [] for none"""

    @property
    def compile_s(self) -> float:
        """Seconds for compiling a C++ program."""
        return max(10.0, 2.5 * self.test_s)

    def own_contradictions(self) -> Iterator[str]:
        """Yield imports that a sandbox may not have."""
        for name in self.imports:
            if name not in sys.stdlib_module_names:
                yield f"reward.sandbox.imports has {name!r}, no module of Python's standard library: leave it out"
