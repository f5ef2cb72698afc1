"""A rollout rank without an engine: its trials, checkpoints, patience, threads, sleep and end; on a GPU its sleep."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from rollout.engine import Engine
from rollout.local_engine import LocalEngine
from rollout.trial import Trial
from rollout.vllm_config import THREADS_VARIABLE, build_vllm_config, prepare_environment
from rollout.weights.layout import NO_VERSION
from rollout.worker import EngineRank
from shared import record_file
from shared.errors import SyncMismatch
from shared.types import Completion
from tests.rollout.test_worker import Line, place
from tests.rollout.tiny_llama import Trainers, engine_config, random_weights, request, write_model


def test_suspects_run_one_at_a_time_and_one_of_them_is_given_up():
    trial, requests = Trial(), [request(index) for index in range(4)]

    def die(running: list[Any]) -> tuple[list[int], list[int]]:
        for one in running:
            one.completion.restarts += 1
        innocent, guilty = trial.sort(running)
        return [one.completion.index for one in innocent], [one.completion.index for one in guilty]

    assert die(requests) == ([0, 1, 2, 3], []) and trial.next() is None
    new = request(9)
    assert die([*requests, new]) == ([9], []) and len(trial.waiting) == 4
    assert trial.next() is requests[0] and trial.next() is None, "one at a time"
    requests[0].completion.finish_reason = "stop"
    second = trial.next()
    assert second is requests[1]
    assert die([second, new]) == ([], [1]) and "completion 1 of group 0 was running at 3 deaths" in trial.report
    assert [one.completion.index for one in trial.waiting] == [9, 2, 3], "and what was new is suspected now"
    assert die([]) == ([], []) and trial.report == ""


def test_a_checkpoint_has_the_completions_of_training_alone(tmp_path):
    """Those of an evaluation have a group below 0."""
    running = [Completion(group, 0, seed=0) for group in (-3, 0, 5)]

    async def snapshot(completions: list[Completion]) -> list[Completion]:
        return completions

    engine = SimpleNamespace(unfinished=lambda: running, snapshot=snapshot)
    rank: Any = SimpleNamespace(engine=engine, role=place())
    [name] = asyncio.run(EngineRank.snapshot(rank, str(tmp_path)))
    written = [msgspec.msgpack.decode(content, type=Completion) for content in record_file.read(tmp_path / name)]
    assert [completion.group for completion in written] == [0, 5]


@pytest.mark.parametrize(("longest_s", "patience_s"), [(None, 50), (0.1, 25), (4.0, 40), (30.0, 100)])
def test_the_patience_with_a_silent_engine_follows_its_longest_silence(longest_s, patience_s):
    config = SimpleNamespace(deadlines=SimpleNamespace(token_s=100.0))
    rank: Any = SimpleNamespace(config=config, engine=SimpleNamespace(outputs=SimpleNamespace(longest_s=longest_s)))
    assert EngineRank.patience_s(rank) == patience_s


@pytest.fixture
def idle(tmp_path):
    """A rank whose engine was not started."""
    return EngineRank(Line(), engine_config(), place(), str(write_model(tmp_path, random_weights(0))))


@pytest.mark.parametrize(("mode", "threads"), [("rl", "2"), ("sft", "4")])
def test_an_engine_beside_trainers_that_wait_has_their_cores(mode, threads, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(THREADS_VARIABLE, "")
    monkeypatch.delenv(THREADS_VARIABLE)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    if mode == "rl":
        prepare_environment()  # as the import of rollout.engine does
    config = engine_config().model_copy(update={"mode": mode})
    EngineRank(Line(), config, place(), str(write_model(tmp_path, random_weights(0))))
    assert os.environ[THREADS_VARIABLE] == threads


@pytest.mark.parametrize("mode", ["sft", "rl"])
def test_in_sft_an_engine_that_dies_while_a_later_version_is_written_waits_for_it(mode):
    """SFT publishes versions 0, 10, 20, which lie in one buffer: that of the engine's version is written over."""

    def gone(*_: Any) -> None:
        raise SyncMismatch("the buffer holds version 20")

    async def nothing(*_: Any) -> None:
        return None

    def ignored(*_: Any) -> None:
        return None

    receiver = SimpleNamespace(engine_lost=ignored, wait_for=gone)
    engine: Any = SimpleNamespace(
        config=engine_config().model_copy(update={"mode": mode}), receiver=receiver, version=10, start=nothing,
        _attach=nothing, _submit=nothing, _llm=SimpleNamespace(kill=ignored, shutdown=ignored),
        outputs=SimpleNamespace(step_timer=SimpleNamespace(stop=ignored), cancel_scoring=ignored, running={}),
        trial=SimpleNamespace(sort=lambda requests: ([], []), waiting=[]),
    )  # fmt: skip
    if mode == "rl":
        with pytest.raises(SyncMismatch):
            asyncio.run(Engine.restart(engine))
    else:
        assert asyncio.run(Engine.restart(engine)) == 0 and engine.version == NO_VERSION


def test_stop_is_answered_once_the_engine_is_gone(idle, monkeypatch):
    happened = []

    async def start() -> None:
        happened.append("started")

    async def stop() -> None:
        await asyncio.sleep(0.05)
        happened.append("gone")

    monkeypatch.setattr(idle.engine, "start", start)
    monkeypatch.setattr(idle.engine, "stop", stop)

    async def play() -> None:
        running = asyncio.create_task(idle.run())
        happened.append(await idle.link.call(EngineRank.stop))  # type: ignore[attr-defined]
        await running

    asyncio.run(play())
    assert happened == ["started", "gone", None]


def test_a_launch_names_the_tokens_that_end_a_turn(idle, monkeypatch):
    async def nothing(phase: str, work: object) -> None:
        pass

    monkeypatch.setattr("rollout.worker.WeightReceiver", lambda *_: None)
    monkeypatch.setattr(idle, "run_exclusive", nothing)
    named = idle.engine.stop_token_ids
    asyncio.run(idle.attach([]))
    assert idle.engine.stop_token_ids == named
    asyncio.run(idle.attach([], [5, 9]))
    assert idle.engine.stop_token_ids == [5, 9]


def test_completions_end_with_the_tokens_of_the_chat_template_too(tmp_path):
    folder = str(write_model(tmp_path, random_weights(0)))
    named = LocalEngine(engine_config(), folder).rank.engine.stop_token_ids
    assert LocalEngine(engine_config(), folder, stop_ids=(9, 5)).rank.engine.stop_token_ids == [5, 9] != named


class Noted:
    """vLLM's calls, noted down."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def sleep(self, **options: Any) -> None:
        self.calls.append(options)

    async def wake_up(self) -> bool:
        self.calls.append("wake_up")
        return True


def test_on_a_gpu_vllm_drops_weights_and_cache_and_keeps_requests(tmp_path):
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


def test_only_engines_that_take_turns_on_a_gpu_are_made_to_sleep(tmp_path, monkeypatch):
    import vllm.engine.arg_utils as arg_utils

    asked: list[dict[str, Any]] = []

    def arguments(**values: Any) -> Any:
        asked.append(values)
        return SimpleNamespace(create_engine_config=lambda: None)

    total = SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    folder, config = str(write_model(tmp_path, random_weights(0))), engine_config(cache_bytes=None)
    for way, cache in (("never", None), ("resident", None), ("turns", 1 << 20)):
        placed = config.model_copy(update={"placement": config.placement.model_copy(update={"colocate": way})})
        build_vllm_config(placed, folder, seed=0, device=torch.device("cuda", 0), cache_bytes=cache)
    assert [values.get("enable_sleep_mode", False) for values in asked] == [False, False, True]
    # a first start takes its share less 512 MiB and copies of two tables, the next ones what the first found free
    share = 0.92 - ((512 << 20) + 2 * 512 * 64 * 4) / (8 << 30)
    assert [values["gpu_memory_utilization"] for values in asked] == pytest.approx([share, share, 0.01])
    assert [values["kv_cache_memory_bytes"] for values in asked] == [None, None, 1 << 20]


async def sample_and_sleep(folder: Path, device: str, transport: str, **settings: Any) -> tuple[list[int], list[Any]]:
    """A rank samples twice with the same weights, which each update brings, and sleeps after each: memory that is free
    awake and asleep, in turns (of a GPU), and the completions."""
    config, store, line, role = engine_config(cache_bytes=1 << 28), dist.HashStore(), Line(), place()
    config = config.model_copy(update={"placement": config.placement.model_copy(update=settings)})
    role.device, role.store = torch.device(device), store
    worker = EngineRank(line, config, role, str(write_model(folder, random_weights(0))))
    running, trainers = asyncio.create_task(worker.run()), Trainers(1, store, transport)
    await line.call(EngineRank.attach, [trainers.sender.describe()])
    free, sampled = [], []

    def look() -> None:
        free.append(torch.cuda.mem_get_info(role.device)[0] if role.device.type == "cuda" else 0)

    for version in range(2):
        trainers.sender.write(version)
        await line.call(EngineRank.wake)
        await line.call(EngineRank.update, version)
        line.sample(version)
        sampled.append([completion.token_ids for completion in await line.wait(version)])
        look()
        await line.call(EngineRank.sleep)
        look()
    await line.call(EngineRank.stop)
    await running
    trainers.sender.close()
    return free, sampled


@pytest.mark.gpu
def test_a_sleeping_engine_frees_its_gpu(tmp_path):
    free, sampled = asyncio.run(sample_and_sleep(tmp_path, "cuda:0", "cuda_ipc", colocate="turns"))
    assert min(free[1], free[3]) - max(free[0], free[2]) > 1 << 28
    assert sampled[0] == sampled[1]


@pytest.mark.soak
def test_an_engine_that_is_spawned_takes_weights_and_samples_as_a_forked_one(tmp_path, monkeypatch):
    """The start method of GPUs, with all that hangs on the engine process, on the CPU (half a minute to start)."""

    def spawned(*arguments: Any, **named: Any) -> Any:
        made = build_vllm_config(*arguments, **named)
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        return made

    forked = asyncio.run(sample_and_sleep(tmp_path, "cpu", "shm"))
    monkeypatch.setattr("rollout.engine.build_vllm_config", spawned)
    assert asyncio.run(sample_and_sleep(tmp_path, "cpu", "shm")) == forked
