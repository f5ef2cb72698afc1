"""While an engine process starts: which GPUs it sees, how long it may take, and its end where nobody waits any more.

What it does not: start it (engine.py), or say with which settings (vllm_settings.py). Who calls this: engine.py, serve.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import torch

ENGINE_PROCESS = "EngineCore"
"""how vLLM names them"""


@contextmanager
def started_within(deadline_s: float) -> Iterator[None]:
    """While an engine process starts: vLLM waits without end for one that hangs, so it is killed at the deadline.

    Raises TimeoutError then, in place of what vLLM raises.
    """
    late, others = threading.Event(), engine_processes()

    def end() -> None:
        late.set()
        kill_engines(others)

    timer = threading.Timer(deadline_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise TimeoutError(f"vLLM's engine process had not started after {deadline_s:g} s") from error
        raise
    finally:
        timer.cancel()


def engine_processes() -> set[BaseProcess]:
    """Those that live below this process."""
    return {child for child in multiprocessing.active_children() if child.name.startswith(ENGINE_PROCESS)}


def kill_engines(others: set[BaseProcess]) -> None:
    """kill -9 the engine processes of this process but for `others`."""
    for child in engine_processes() - others:
        child.kill()


@contextmanager
def own_gpus_first(device: torch.device, count: int) -> Iterator[None]:
    """While an engine process starts, CUDA_VISIBLE_DEVICES lists its `count` GPUs from `device` on, then the others.

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
