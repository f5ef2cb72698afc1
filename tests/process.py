"""A process of its own for a test that joins a process group: what torch keeps of one for a thread (sharded tensors'
rules) is destroyed in every child that another thread forks later, where it waits without end for Gloo's threads."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
"""of processes that import this project"""


def until(condition: Callable[[], Any], seconds: float = DEADLINE_S) -> Any:
    """Wait for a condition, and return what it gives."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return result


def started(program: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A Python program of its own, with pipes to its standard input and output."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": ENVIRONMENT} | options
    return subprocess.Popen(command, **options)


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function of a module returns there; raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result(DEADLINE_S)


def run_ranks(folder: Path, *names: str) -> None:
    """Run scenes of tests/trainer/rank_scene.py, which forks real ranks, one thread each, and leaves what came of them
    in the folder."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, root / "tests" / "trainer" / "rank_scene.py", folder, *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2700, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
