"""Runs entry points that start an engine up to that start, on a machine that seems to have GPUs.

    python start_scene.py FOLDER    with model/ and train.jsonl

Each runs in a child of this process and prints one line of JSON: what torch was asked before
PYTORCH_NVML_BASED_CUDA_CHECK was set, and the start method and arguments that vLLM would use, or the error.
"""

import asyncio
import json
import os
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm.v1.engine.async_llm as async_llm
from vllm.utils.system_utils import get_mp_context

FORK, NVML = "VLLM_WORKER_MULTIPROC_METHOD", "PYTORCH_NVML_BASED_CUDA_CHECK"
asked_early: list[str] = []


def watched(name: str, answer: Any) -> Callable[..., Any]:
    def ask(*_: Any) -> Any:
        if os.environ.get(NVML) != "1":
            asked_early.append(name)
        return answer

    return ask


def report(**found: Any) -> None:
    print(json.dumps({"asked_early": asked_early, **found}), flush=True)
    os._exit(0)


SAY = "import tqdm, warnings; warnings.warn('TensorFloat32 tensor cores ...'); list(tqdm.tqdm(range(2)))"
"""what vLLM's GPU runner and torch's compiler write on the error stream of an engine process"""


def start_engine(vllm_config: Any, **_: Any) -> None:
    """Instead of AsyncLLM.from_vllm_config: here vLLM would make its engine process."""
    report(
        method=get_mp_context().get_start_method(),
        float32=os.environ.get("TRITON_F32_DEFAULT"),
        said=subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True).stderr,
        share=vllm_config.cache_config.gpu_memory_utilization,
        cache=vllm_config.cache_config.kv_cache_memory_bytes,
        parallel=vllm_config.parallel_config.tensor_parallel_size,
    )


class Link:
    """An engine rank's link without a controller."""

    def __init__(self, role: Any):
        assert role.device == torch.device("cuda", 1)

    async def register(self) -> None:
        """Nobody is there."""

    async def calls(self, rank_class: type) -> AsyncIterator[Any]:
        await asyncio.sleep(1e6)
        yield

    async def send(self, call_id: int, message: Any) -> None:
        report(error=str(message))

    def close(self) -> None:
        """Nothing is open."""


def run_trainer(folder: Path) -> None:
    """The engine rank of a launch."""
    import torch.distributed as dist

    from shared.config import Config
    from shared.launch import rpc, watchdog
    from trainer.rank_process import run_engine

    os.environ |= {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    config = Config.model_validate({"model": {"path": str(folder), "dtype": "float32", "max_tokens": 128},
                                    "rollout": {"max_completion_tokens": 32}})  # fmt: skip
    with mock.patch.object(rpc, "EngineLink", Link), mock.patch.object(watchdog, "Pulse", mock.Mock()):
        run_engine(config, dist.HashStore(), folder)


def run_module(*arguments: str) -> None:
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def main(folder: Path) -> None:
    """All entry points, one after the other."""
    torch.cuda.is_available = watched("is_available", True)
    torch.cuda.device_count = watched("device_count", 2)
    torch.cuda.get_device_properties = watched("properties", SimpleNamespace(total_memory=80 << 30))  # type: ignore
    async_llm.AsyncLLM.from_vllm_config = start_engine  # type: ignore[assignment]
    model = str(folder / "model")
    serve, out = ("serve", "--model", model, "--port", "0"), str(folder / "out.jsonl")
    curate = ("curate", "sample", f"{folder}/train.jsonl", "--model", model, "--out", out)
    entries: dict[str, Callable[[], None]] = {
        "trainer": lambda: run_trainer(folder / "model"),
        "curate": lambda: run_module(*curate, "--max-completion-tokens", "32"),
        "serve": lambda: run_module(*serve, "--gpu-memory-utilization", "0.25"),
        "serve with a cache": lambda: run_module(*serve, "--cache-bytes", "1000000", "--tensor-parallel", "2"),
        "fork": lambda: run_trainer(folder / "model"),
    }
    for name, run in entries.items():
        os.environ.pop(NVML, None)  # vLLM's import, above, has set it
        os.environ.pop(FORK, None)
        if name == "fork":
            os.environ[FORK] = "fork"
        print(name, end="\t", flush=True)
        if (child := os.fork()) == 0:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - the test reads it
                report(error=f"{type(error).__name__}: {error}")
            report(error="it ended")
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
