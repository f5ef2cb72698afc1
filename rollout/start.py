"""Context managers for starting an engine process: GPU visibility, start deadline, reason of a failure; and the
entry function of the process, which can end with its parent.

vLLM reports only that a process failed. The reason is the exception inside it, which is written where this one reads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import re
import stat
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from rollout.routes import allow_routes
from rollout.vllm_config import FOLDER_VARIABLE
from shared.clean_text import clean
from shared.config import Config
from shared.launch import deaths
from shared.launch.watchdog import STACKS_VARIABLE, die_with_parent

ENGINE_PROCESS = "EngineCore"
"""prefix of the names that vLLM gives engine processes"""
REASON_VARIABLE = "MAESTRALE_START_REASON"
REASON_BYTES, MOST_REASON_BYTES = 600, 8192
"""most bytes of an exception's message, and of the whole reason"""
CLEAN_UP_S = 5.0
"""how long an engine process may take from the report of its end to its last words, and from these to its end"""
SLOW_DISK = 200e6
"""bytes/s"""
CHECKPOINT_FACTOR = 6
"""size of a checkpoint (float32 weights and two moments) over that of the weights in bfloat16"""
COMPILE_S = 600
"""for torch.compile and the capture of CUDA graphs by an engine whose caches are empty"""
BELOW_A_RANK = "MAESTRALE_ENGINE"
"""environment variable of a rank whose main thread starts an engine: the engine process ends with it"""


def with_time_to_start(config: Config, model_dir: Path, on_gpu: bool) -> Config:
    """The settings with deadlines.start_s extended by what this model takes: its weights are read, or a checkpoint of
    CHECKPOINT_FACTOR times their size, from a slow disk; on GPUs vLLM compiles and captures graphs."""
    size_bytes = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    more_s = CHECKPOINT_FACTOR * size_bytes / SLOW_DISK + (COMPILE_S if on_gpu else 0)
    deadlines = config.deadlines.model_copy(update={"start_s": config.deadlines.start_s + round(more_s)})
    return config.model_copy(update={"deadlines": deadlines})


@contextmanager
def started_within(deadline_s: float) -> Iterator[None]:
    """Kill an engine process that has not started within the deadline; vLLM would wait for it without end.

    Raises TimeoutError then, in place of what vLLM raises; RuntimeError with the reason if the process failed.
    """
    done, late = threading.Event(), threading.Event()
    others, kills_before = engine_processes(), deaths.memory_kills()
    os.truncate(_reason_file(), 0)
    os.environ[REASON_VARIABLE] = f"/proc/{os.getpid()}/fd/{_reason_file()}"
    _enter_by_us()

    def end() -> None:
        while not done.wait(0.5 if late.is_set() else deadline_s):
            late.set()
            kill_engines(others)  # again and again: the process may begin after the deadline

    threading.Thread(target=end, daemon=True).start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise TimeoutError(f"vLLM's engine process had not started after {deadline_s:g} s") from error
        reason = last_words() or _killed(str(error), kills_before)
        if not reason:
            raise
        raise RuntimeError(f"vLLM's engine process could not start: {reason}") from error
    finally:
        done.set()


@functools.cache
def _reason_file() -> int:
    """Descriptor of the file in memory that engine processes write their last words into. It stays open: an engine may
    die at any time, and another file would have its number then."""
    return os.memfd_create("reason")


def last_words() -> str:
    """The exception of which the engine process that was started last has died, with the file of its traceback; "" for
    none. To be asked when that process has ended, or is about to: vLLM reports its end before it cleans up."""
    end = time.monotonic() + CLEAN_UP_S
    while not (words := os.pread(_reason_file(), MOST_REASON_BYTES, 0)) and time.monotonic() < end:
        if not (living := engine_processes()):
            break
        living.pop().join(0.1)
    for child in engine_processes() if words else ():
        child.join(CLEAN_UP_S)
    return words.decode(errors="replace")


def _killed(words: str, kills_before: int) -> str:
    """Return how the process ended, from vLLM's message; "" if that does not say."""
    failed = re.search(r"Failed core proc\(s\): \{'[^']+': (-?\d+)", words)
    if failed is None:
        return ""
    status = int(failed[1])
    return "it " + deaths.how(status) + deaths.advice(status, "engine", 0, kills_before)


def _enter_by_us() -> None:
    """Make engine processes begin in `run_engine_core` below. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    if not hasattr(EngineCoreProc, "entered_before"):
        EngineCoreProc.entered_before = staticmethod(EngineCoreProc.run_engine_core)
        EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*arguments: Any, **named: Any) -> None:
    """Run vLLM's entry function of an engine process; if it raises, write the reason to REASON_VARIABLE's file. The
    traceback stands in a file of its own, and not on the screen: in the folder for stacks, else where temporary files
    are."""
    from vllm.v1.engine.core import EngineCoreProc

    leave_connections()
    folder = os.environ.get(STACKS_VARIABLE) or tempfile.gettempdir()
    tempfile.tempdir = os.environ.get(FOLDER_VARIABLE)  # vLLM's file for the ranks of an engine stays when it is killed
    if BELOW_A_RANK in os.environ:
        die_with_parent()
    log_no_traceback("vllm.v1.engine.core")
    try:
        allow_routes()
        getattr(EngineCoreProc, "entered_before", EngineCoreProc.run_engine_core)(*arguments, **named)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:REASON_BYTES]
        with contextlib.suppress(OSError):
            number, file = tempfile.mkstemp(".traceback", f"engine_{os.getpid()}_", folder)
            with open(number, "w", encoding="utf-8") as output:
                output.write(clean(traceback.format_exc()))
            text += f" (its traceback: {file})"
            Path(os.environ.get(REASON_VARIABLE, os.devnull)).write_bytes(text.encode(errors="replace"))
            raise SystemExit(1) from error
        raise


def log_no_traceback(name: str) -> None:
    """Leave tracebacks out of the log of a module of vLLM. A level would not last: vLLM resets those of its loggers."""
    logging.getLogger(name).addFilter(lambda record: not record.exc_info)


def leave_connections() -> None:
    """Give up the sockets that a fork has inherited: else a connection of the parent would not end before this process,
    and its port would stay taken. Their numbers lead to /dev/null then, since copies of the parent's objects may still
    close them."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(null, number, inheritable=False)
    os.close(null)


def engine_processes() -> set[BaseProcess]:
    """Return the living engine processes that this process has started."""
    return {child for child in multiprocessing.active_children() if child.name.startswith(ENGINE_PROCESS)}


def kill_engines(others: set[BaseProcess]) -> None:
    """kill -9 the engine processes of this process but for `others`."""
    for child in engine_processes() - others:
        child.kill()


@contextmanager
def own_gpus_first(device: torch.device, count: int) -> Iterator[None]:
    """In the block, CUDA_VISIBLE_DEVICES lists the engine's `count` GPUs from `device` on, then the others.

    vLLM takes the first ones it sees; the others stay visible, because the trainers' buffers lie there (CUDA IPC).
    """
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device.type == "cuda":
        names = before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
        start = device.index or 0
        own = names[start : start + count]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*own, *(name for name in names if name not in own)])
    try:
        yield
    finally:
        if device.type == "cuda":
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
