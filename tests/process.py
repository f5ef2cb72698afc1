"""A process of its own for a test that joins a process group: what torch keeps of one for a thread (sharded tensors'
rules) is destroyed in every child that another thread forks later, where it waits without end for Gloo's threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function of a module returns there; raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result(DEADLINE_S)


def run_ranks(script: Path, folder: Path) -> None:
    """Run a script of tests/trainer that forks real ranks, one thread each, and leaves what it finds in the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    run = subprocess.run(
        [sys.executable, script, folder], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
