"""A process of its own for a test that joins a process group: what torch keeps of one for a thread (sharded tensors'
rules) is destroyed in every child that another thread forks later, where it waits without end for Gloo's threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

DEADLINE_S = 150.0


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function of a module returns there; raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result(DEADLINE_S)
