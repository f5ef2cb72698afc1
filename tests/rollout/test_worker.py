"""A rollout rank under fire: its engine is killed, stopped, killed too often; completions go on from their tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from rollout.engine import Engine
from rollout.vllm_config import THREADS_VARIABLE, prepare_environment
from rollout.weights.layout import NO_VERSION
from rollout.weights.proof import PublishedWeights, Updated
from rollout.worker import EngineRank, serve
from shared import record_file
from shared.errors import EngineLost, RunError, SyncMismatch
from shared.launch.calls import CallReply, CallRequest
from shared.launch.calls import request as call_of
from shared.launch.messages import EngineEnded, EngineRestarted, Finished, GenerateRequest, Message, RankFailed
from shared.types import Completion
from tests.rollout.tiny_llama import Trainers, engine_config, random_weights, request, write_model


class Line:
    """The controller's end of a link, in this process."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[tuple[int, CallRequest[Any]]] = asyncio.Queue()
        self.replies: dict[int, asyncio.Future[Any]] = {}
        self.finished: dict[tuple[int, int], Completion] = {}
        self.most_together = 0
        self.ended: list[EngineEnded] = []
        self.restarted: list[EngineRestarted] = []
        self.failed: list[RankFailed] = []

    async def calls(self, rank_class: type) -> AsyncIterator[tuple[int, CallRequest[Any]]]:
        while True:
            call_id, asked = await self.incoming.get()
            yield call_id, asked
            if asked.call.last:
                return

    async def send(self, call_id: int, message: Message | CallReply[Any]) -> None:
        if call_id:
            self.replies[call_id].set_result(message.value if isinstance(message, CallReply) else message)
            return
        match message:
            case Finished(completions=completions):
                self.most_together = max(self.most_together, len(completions))
                for completion in completions:
                    key = (completion.group, completion.index)
                    assert key not in self.finished, "a completion was reported twice"
                    self.finished[key] = completion
            case EngineEnded():
                self.ended.append(message)
            case EngineRestarted():
                self.restarted.append(message)
            case RankFailed():
                self.failed.append(message)

    async def call(self, method: Any, *arguments: Any) -> Any:
        """Call and wait for the reply."""
        number = len(self.replies) + 1
        self.replies[number] = asyncio.get_running_loop().create_future()
        self.incoming.put_nowait((number, call_of(method, *arguments)))
        return await asyncio.wait_for(self.replies[number], 150)

    def generate(self, requests: list[GenerateRequest], hold: bool = False) -> None:
        """Start completions."""
        self.incoming.put_nowait((0, call_of(EngineRank.generate, requests, hold)))

    async def wait(self, group: int, count: int) -> list[Completion]:
        """Until so many completions of a group ended."""
        while len(found := [c for (g, _), c in sorted(self.finished.items()) if g == group]) < count:
            await asyncio.sleep(0.01)
            assert not self.failed, self.failed
        return found


async def snapshot(line: Line, folder: Path) -> list[Completion]:
    """What the rank writes into a checkpoint."""
    (name,) = await line.call(EngineRank.snapshot, str(folder))
    assert name == "engine-0.msgpack"
    return [msgspec.msgpack.decode(content, type=Completion) for content in record_file.read(folder / name)]


def place(store: dist.Store) -> Any:
    """The role of the only engine rank."""
    return SimpleNamespace(rank=2, rank_in_role=0, device=torch.device("cpu"), store=store)


async def story(worker: EngineRank, line: Line, trainers: Trainers) -> dict[str, Any]:
    """Attach, update, generate; then kill -9 during generation, SIGSTOP during generation, kill -9 once more."""
    result: dict[str, Any] = {}
    result["attach"] = await line.call(EngineRank.attach, [trainers.sender.describe()])
    trainers.sender.write(0)
    result["update"] = await line.call(EngineRank.update, 0)
    for group, harm in ((0, None), (1, signal.SIGKILL), (2, signal.SIGSTOP)):
        requests = [request(index, 400, group=group) for index in range(6)]
        line.generate(requests, hold=True)
        while not (requests[0].completion.token_ids and len(requests[0].completion.token_ids) > 30):
            await asyncio.sleep(0.001)
        if harm is not None:
            assert worker.engine.llm is not None
            os.kill(worker.engine.llm.pids()[0], harm)
            result[f"snapshot {group}"] = await snapshot(line, Path(os.environ["MAESTRALE_STACKS"]).parent)
        result[group] = await line.wait(group, 6)
        if group == 1:  # while the engine was away nobody asked the trainers; now they publish, and all is as ever
            trainers.become(1)
            trainers.sender.write(1)
            published = PublishedWeights(1, 0, 0.0)
            published.add_checksums(trainers.sender)
            result["update after"] = await line.call(EngineRank.update, 1, [[1, 2, 3]], [published.chosen])
            trainers.become(0)
            trainers.sender.write(2)
            result["update with an empty probe"] = await line.call(EngineRank.update, 2, [])
    assert worker.engine.llm is not None
    worker.engine.llm.kill()
    return result


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The whole story on one worker; its results."""

    async def play() -> dict[str, Any]:
        config = engine_config({"sync_s": 16.0}, max_restarts=2)
        store, line = dist.HashStore(), Line()
        trainers = Trainers(0, store)
        worker = EngineRank(line, config, place(store), str(write_model(folder / "model", random_weights(0))))
        running = asyncio.create_task(worker.run())
        try:
            told = asyncio.create_task(story(worker, line, trainers))
            await asyncio.wait({told, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            result = await told
            with pytest.raises(EngineLost) as lost:
                await asyncio.wait_for(running, 120)
            return {**result, "lost": str(lost.value), "line": line}
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            trainers.sender.close()

    folder = tmp_path_factory.mktemp("worker")
    os.environ["MAESTRALE_STACKS"] = str(folder / "stacks")
    (folder / "stacks").mkdir()
    try:
        return {**asyncio.run(play()), "stacks": folder / "stacks"}
    finally:
        del os.environ["MAESTRALE_STACKS"]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]


def test_attach_and_update_are_answered(played: dict[str, Any]) -> None:
    assert played["attach"] is None
    update: Updated = played["update"]
    assert (update.engine, update.version) == (0, 0)
    assert set(update.seconds) == {"receive", "requeue", "pause", "apply", "finish", "resume", "total"}
    assert update.bytes == 4 * sum(value.numel() for value in random_weights(0).values())
    held = played["update after"].held
    assert {*held.checksums, *held.columns} == set(random_weights(0))


@pytest.mark.parametrize("group", [1, 2], ids=["kill -9", "SIGSTOP"])
def test_interrupted_completions_continue_to_the_tokens_of_an_undisturbed_run(
    played: dict[str, Any], group: int
) -> None:
    for calm, harmed in zip(played[0], played[group], strict=True):
        assert harmed.token_ids == calm.token_ids
        assert len(harmed.logprobs) == len(harmed.token_ids)
        assert max(abs(a - b) for a, b in zip(calm.logprobs, harmed.logprobs, strict=True)) < 2e-4
        assert harmed.finish_reason == calm.finish_reason
        assert harmed.restarts == (1 if len(harmed.token_ids) > 60 else harmed.restarts)
        assert (harmed.spans[0].start, harmed.spans[-1].end) == (0, len(harmed.token_ids))


def test_each_restart_is_reported_with_its_reason(played: dict[str, Any]) -> None:
    killed, stopped = played["line"].restarted
    assert "was killed by signal 9 (SIGKILL)" in killed.reason and "pid" in killed.reason and killed.continued > 0
    assert "no token and no answer" in stopped.reason and "deadlines.sync_s" in stopped.reason
    assert "in phase 'sampling, 6 completions left'" in stopped.reason
    assert [event.reason for event in played["line"].ended] == [killed.reason, stopped.reason], "told before it starts"


def test_a_snapshot_during_the_outage_holds_the_tokens_so_far(played: dict[str, Any]) -> None:
    snapshot: list[Completion] = played["snapshot 1"]
    calm = {completion.index: completion for completion in played[0]}
    assert snapshot
    for partial in snapshot:
        assert len(partial.token_ids) >= 30 and partial.finish_reason is None
        assert partial.token_ids == calm[partial.index].token_ids[: len(partial.token_ids)]


def test_a_restarted_engine_takes_the_next_version(played: dict[str, Any]) -> None:
    updated: Updated = played["update after"]
    assert updated.version == updated.scored_version == 1 and [len(row) for row in updated.probe] == [2]


def test_without_a_probe_nothing_is_scored_but_an_empty_one_proves_the_version(played: dict[str, Any]) -> None:
    without, empty = played["update"], played["update with an empty probe"]
    assert (without.probe, without.scored_version) == ([], -1)
    assert (empty.probe, empty.scored_version) == ([], 2)


def test_completions_that_end_in_one_step_are_told_in_one_message(played: dict[str, Any]) -> None:
    ends = [len(completion.token_ids) for completion in played[0]]
    together = max(ends.count(end) for end in ends)
    assert together > 1, "all ended at other lengths: the test tests nothing"
    assert played["line"].most_together >= together


def test_one_death_too_many_ends_the_rank_and_names_the_setting(played: dict[str, Any]) -> None:
    assert "died 3 times" in played["lost"] and "rollout.max_restarts = 2" in played["lost"]
    assert [failed.kind for failed in played["line"].failed] == ["EngineLost"]


def test_the_engine_process_writes_its_stacks_beside_the_others(played: dict[str, Any]) -> None:
    assert [path.name for path in played["stacks"].iterdir()] == ["engine-2.txt"]


def test_sampling_before_the_first_update_is_refused(tmp_path: Path) -> None:
    async def ask() -> None:
        line = Line()
        worker = EngineRank(
            line, engine_config(), place(dist.HashStore()), str(write_model(tmp_path, random_weights(0)))
        )
        await worker.generate([request(0)])

    with pytest.raises(RunError, match="before the first update"):
        asyncio.run(ask())


def test_a_checkpoint_has_the_completions_of_training_alone(tmp_path: Path) -> None:
    """Those of an evaluation have a group below 0."""
    running = [Completion(group, 0, seed=0) for group in (-3, 0, 5)]
    rank: Any = SimpleNamespace(engine=SimpleNamespace(snapshot=lambda: running), role=place(dist.HashStore()))
    [name] = asyncio.run(EngineRank.snapshot(rank, str(tmp_path)))
    written = [msgspec.msgpack.decode(content, type=Completion) for content in record_file.read(tmp_path / name)]
    assert [completion.group for completion in written] == [0, 5]


@pytest.mark.parametrize(("longest_s", "patience_s"), [(None, 50), (0.1, 25), (4.0, 40), (30.0, 100)])
def test_the_patience_with_a_silent_engine_follows_its_longest_silence(
    longest_s: float | None, patience_s: float
) -> None:
    config = SimpleNamespace(deadlines=SimpleNamespace(token_s=100.0))
    rank: Any = SimpleNamespace(config=config, engine=SimpleNamespace(outputs=SimpleNamespace(longest_s=longest_s)))
    assert EngineRank.patience_s(rank) == patience_s


@pytest.mark.parametrize(("mode", "threads"), [("rl", "2"), ("sft", "4")])
def test_an_engine_beside_trainers_that_wait_has_their_cores(
    mode: str, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(THREADS_VARIABLE, "")
    monkeypatch.delenv(THREADS_VARIABLE)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    config = engine_config().model_copy(update={"mode": mode})
    if mode == "rl":
        prepare_environment()  # as the import of rollout.engine does
    EngineRank(Line(), config, place(dist.HashStore()), str(write_model(tmp_path, random_weights(0))))
    assert os.environ[THREADS_VARIABLE] == threads


@pytest.mark.parametrize("mode", ["sft", "rl"])
def test_in_sft_an_engine_that_dies_while_a_later_version_is_written_waits_for_it(mode: str) -> None:
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


def test_stop_is_answered_once_the_engine_process_is_gone(tmp_path: Path) -> None:
    async def play() -> tuple[Any, list[int]]:
        line = Line()
        model_dir = str(write_model(tmp_path, random_weights(0)))
        running = asyncio.create_task(serve(line, engine_config(), place(dist.HashStore()), model_dir))
        reply = await line.call(EngineRank.stop)
        await running
        return reply, [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]

    reply, children = asyncio.run(play())
    assert reply is None
    assert not [pid for pid in children if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_launch_names_the_tokens_that_end_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.worker.WeightReceiver", lambda *_: None)
    worker = EngineRank(Line(), engine_config(), place(dist.HashStore()), str(write_model(tmp_path, random_weights(0))))

    async def nothing(phase: str, work: object) -> None:
        pass

    monkeypatch.setattr(worker, "run_exclusive", nothing)
    named = worker.engine.stop_token_ids
    asyncio.run(worker.attach([]))
    assert worker.engine.stop_token_ids == named
    asyncio.run(worker.attach([], [5, 9]))
    assert worker.engine.stop_token_ids == [5, 9]
