"""An engine that leaves its GPU to the trainers and takes it again: by a real engine (on the CPU, where nothing is
freed), by vLLM's own calls noted down, and on a GPU by both."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.engine import Engine
from rollout.vllm_config import build_vllm_config
from rollout.weights.layout import NO_VERSION
from rollout.worker import EngineRank
from shared.errors import RunError
from shared.launch.calls import request as call_of
from tests.rollout.test_worker import Line, place
from tests.rollout.tiny_llama import Trainers, engine_config, random_weights, request, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def tokens_of(line: Line, group: int) -> list[list[int]]:
    """Greedy completions of four prompts."""
    line.generate([request(index, group=group) for index in range(4)], hold=True)
    return [completion.token_ids for completion in await line.wait(group, 4)]


async def play(folder: Path) -> dict[str, Any]:
    """Sample; sleep, wake, sample with new weights; die asleep, wake, sample."""
    line, store, found = Line(), dist.HashStore(), dict[str, Any]()
    worker = EngineRank(line, engine_config(), place(store), str(write_model(folder, random_weights(0))))
    running = asyncio.create_task(worker.run())
    trainers = Trainers(0, store)
    await line.call(EngineRank.sleep)  # before it has weights, as a launch does while the trainers load
    await line.call(EngineRank.attach, [trainers.sender.describe()])
    for version, seed in enumerate((0, 1, 0)):
        trainers.become(seed)
        trainers.sender.write(version)
        await line.call(EngineRank.wake)
        await line.call(EngineRank.update, version)
        found[f"sampled {version}"] = await tokens_of(line, version)
        await line.call(EngineRank.sleep)
        if version == 1:
            with pytest.raises(RunError, match="no weights of the policy"):
                await worker.generate([request(0)])
            assert worker.engine.llm is not None
            os.kill(worker.engine.llm.pids()[0], signal.SIGKILL)
            await asyncio.sleep(1)
            found["started while asleep"] = worker.engine.starts
    found["starts"] = worker.engine.starts
    line.incoming.put_nowait((0, call_of(EngineRank.stop)))
    await running
    trainers.sender.close()
    return found


def test_after_its_sleep_an_engine_samples_with_the_weights_it_was_given(tmp_path: Path) -> None:
    found = asyncio.run(play(tmp_path))
    assert found["sampled 0"] == found["sampled 2"] != found["sampled 1"]
    assert (found["started while asleep"], found["starts"]) == (1, 2), "a dead engine waits for its turn"


@pytest.mark.soak
def test_an_engine_that_is_spawned_takes_weights_and_samples_as_a_forked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start method of GPUs, with all that hangs on the engine process, on the CPU (half a minute to start)."""

    async def ask() -> list[list[int]]:
        line, store = Line(), dist.HashStore()
        worker = EngineRank(line, engine_config(), place(store), str(write_model(tmp_path, random_weights(0))))
        running, trainers = asyncio.create_task(worker.run()), Trainers(1, store)
        await line.call(EngineRank.attach, [trainers.sender.describe()])
        trainers.sender.write(0)
        await line.call(EngineRank.update, 0, [[1, 2, 3]])
        found = await tokens_of(line, 0)
        line.incoming.put_nowait((0, call_of(EngineRank.stop)))
        await running
        trainers.sender.close()
        return found

    def spawned(*arguments: Any, **named: Any) -> Any:
        made = build_vllm_config(*arguments, **named)
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        return made

    forked = asyncio.run(ask())
    monkeypatch.setattr("rollout.engine.build_vllm_config", spawned)
    assert asyncio.run(ask()) == forked


class Noted:
    """vLLM's calls, noted down."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def sleep(self, **options: Any) -> None:
        self.calls.append(options)

    async def wake_up(self) -> bool:
        self.calls.append("wake_up")
        return True


def test_on_a_gpu_vllm_drops_weights_and_cache_and_keeps_requests(tmp_path: Path) -> None:
    async def ask(device: str) -> list[Any]:
        engine = Engine(engine_config(), str(tmp_path), rank=2, engine=0, device=torch.device(device))
        noted = engine.llm = Noted()  # type: ignore[assignment]
        await engine.wake()
        await engine.sleep()
        await engine.sleep()
        assert engine.asleep and engine.version == NO_VERSION
        await engine.wake()
        assert not engine.asleep
        return noted.calls

    write_model(tmp_path, random_weights(0))
    assert asyncio.run(ask("cuda")) == [{"level": 2, "mode": "keep"}, "wake_up"]
    assert asyncio.run(ask("cpu")) == []


def test_only_engines_that_take_turns_on_a_gpu_are_made_to_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.engine.arg_utils as arg_utils

    asked: list[dict[str, Any]] = []

    def arguments(**values: Any) -> Any:
        asked.append(values)
        return SimpleNamespace(create_engine_config=lambda: None)

    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    total = SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    folder, config = str(write_model(tmp_path, random_weights(0))), engine_config(cache_bytes=None)
    for way, cache in (("never", None), ("resident", None), ("turns", 1 << 20)):
        placed = config.model_copy(update={"placement": config.placement.model_copy(update={"colocate": way})})
        build_vllm_config(placed, folder, seed=0, device=torch.device("cuda", 0), cache_bytes=cache)
    assert [values.get("enable_sleep_mode", False) for values in asked] == [False, False, True]
    # a first start takes its share less 512 MiB and copies of two tables, the next ones what the first found free
    share = 0.92 - ((512 << 20) + 2 * 512 * 64 * 4) / (8 << 30)
    assert [values["gpu_memory_utilization"] for values in asked] == pytest.approx([share, share, 0.01])
    assert [values["kv_cache_memory_bytes"] for values in asked] == [None, None, 1 << 20]


@pytest.mark.gpu
def test_a_sleeping_engine_frees_its_gpu(tmp_path: Path) -> None:
    """Memory before, asleep, and awake; then the same tokens as before, from weights that an update brought."""

    async def ask() -> tuple[list[int], list[Any]]:
        config = engine_config(cache_bytes=1 << 30)
        config = config.model_copy(update={"placement": config.placement.model_copy(update={"colocate": "turns"})})
        store, device = dist.HashStore(), torch.device("cuda", 0)
        line, role = Line(), SimpleNamespace(rank=2, rank_in_role=0, device=device, store=store)
        worker = EngineRank(line, config, role, str(write_model(tmp_path, random_weights(0))))
        running = asyncio.create_task(worker.run())
        trainers = Trainers(0, store, "cuda_ipc")
        await line.call(EngineRank.attach, [trainers.sender.describe()])
        free, sampled = [], []
        for version in range(2):
            trainers.sender.write(version)
            await line.call(EngineRank.wake)
            await line.call(EngineRank.update, version)
            sampled.append(await tokens_of(line, version))
            free.append(torch.cuda.mem_get_info(device)[0])
            await line.call(EngineRank.sleep)
            free.append(torch.cuda.mem_get_info(device)[0])
        line.incoming.put_nowait((0, call_of(EngineRank.stop)))
        await running
        return free, sampled

    free, sampled = asyncio.run(ask())
    assert min(free[1], free[3]) - max(free[0], free[2]) > 1 << 30
    assert sampled[0] == sampled[1]
