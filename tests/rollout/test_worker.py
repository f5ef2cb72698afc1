"""A rollout rank under fire: its engine is killed again and again by one completion, dies asleep, is stopped, and dies
once too often; completions go on from their tokens."""

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
from rollout.trial import GIVEN_UP
from rollout.weights.proof import PublishedWeights, Updated
from rollout.worker import EngineRank
from shared import record_file
from shared.errors import EngineLost, RunError
from shared.launch.calls import CallReply, CallRequest
from shared.launch.calls import request as call_of
from shared.launch.messages import EngineEnded, EngineRestarted, Finished, GenerateRequest, Message, RankFailed
from shared.types import Completion
from tests.model_folder import load_model
from tests.rollout.tiny_llama import (
    Trainers,
    assert_computed_with,
    engine_config,
    largest_gap,
    random_weights,
    request,
    write_model,
)


class Line:
    """The controller's end of a link, in this process."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[tuple[int, CallRequest[Any]]] = asyncio.Queue()
        self.replies: dict[int, asyncio.Future[Any]] = {}
        self.finished: dict[tuple[int, int], Completion] = {}
        self.most_together = 0
        self.events: list[Any] = []

    async def calls(self, rank_class: type) -> AsyncIterator[tuple[int, CallRequest[Any]]]:
        while True:
            call_id, asked = await self.incoming.get()
            yield call_id, asked
            if asked.call.last:
                return

    async def send(self, call_id: int, message: Message | CallReply[Any]) -> None:
        if call_id:
            self.replies[call_id].set_result(message.value if isinstance(message, CallReply) else message)
        elif isinstance(message, Finished):
            self.most_together = max(self.most_together, len(message.completions))
            for completion in message.completions:
                key = (completion.group, completion.index)
                assert key not in self.finished, "a completion was reported twice"
                self.finished[key] = completion
        else:
            self.events.append(message)

    def of_kind(self, kind: type) -> list[Any]:
        """The events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def call(self, method: Any, *arguments: Any) -> Any:
        """Call and wait for the reply."""
        number = len(self.replies) + 1
        self.replies[number] = asyncio.get_running_loop().create_future()
        self.incoming.put_nowait((number, call_of(method, *arguments)))
        return await asyncio.wait_for(self.replies[number], 300)

    def sample(self, group: int) -> list[GenerateRequest]:
        """Start six greedy completions."""
        requests = [request(index, 150, group=group) for index in range(6)]
        self.incoming.put_nowait((0, call_of(EngineRank.generate, requests, True)))
        return requests

    async def until(self, condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.01)
            assert not self.of_kind(RankFailed), self.events

    async def wait(self, group: int) -> list[Completion]:
        """Until the completions of a group ended."""
        await self.until(lambda: len([key for key in self.finished if key[0] == group]) == 6)
        return [self.finished[group, index] for index in range(6)]


def place(store: dist.Store | None = None) -> Any:
    """The role of the only engine rank."""
    return SimpleNamespace(rank=2, rank_in_role=0, device=torch.device("cpu"), store=store or dist.HashStore())


DEADLY = 3
"""index of the completion that kills its engine"""
Played = dict[Any, Any]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def kill(engine: Engine, number: signal.Signals = signal.SIGKILL) -> None:
    assert engine.llm is not None
    os.kill(engine.llm.pids()[0], number)


def plant_death(engine: Engine) -> None:
    """Let the engine die whenever the deadly completion has 20 tokens."""
    take_step = engine.outputs.take_step

    def die_of_it(outputs: Any) -> None:
        take_step(outputs)
        for running in engine.outputs.running.values():
            completion = running.completion
            if completion.group == 1 and completion.index == DEADLY and len(completion.token_ids) >= 20:
                kill(engine)

    engine.outputs.take_step = die_of_it  # type: ignore[method-assign]


async def story(worker: EngineRank, line: Line, trainers: Trainers, folder: Path) -> Played:
    """Sleep until there are weights; sample; three deaths by one completion; two updates; a death asleep; SIGSTOP."""
    engine, played = worker.engine, dict[Any, Any]()

    async def snapshot() -> list[Completion]:
        (name,) = await line.call(EngineRank.snapshot, str(folder))
        assert name == "engine-0.msgpack"
        return [msgspec.msgpack.decode(content, type=Completion) for content in record_file.read(folder / name)]

    async def publish(version: int, seed: int, *more: Any) -> Updated:
        trainers.become(seed)
        trainers.sender.write(version)
        updated: Updated = await line.call(EngineRank.update, version, *more)
        return updated

    await line.call(EngineRank.sleep)  # before it has weights, as a launch does while the trainers load
    with pytest.raises(RunError, match="before the first update"):
        await worker.generate([request(0)])
    played["attach"] = await line.call(EngineRank.attach, [trainers.sender.describe()])
    await line.call(EngineRank.wake)
    played["update"] = await publish(0, seed=0)
    line.sample(0)
    played[0] = await line.wait(0)

    line.sample(1)
    await line.until(lambda: line.of_kind(EngineEnded))
    played["at the first death"] = await snapshot()
    await line.until(lambda: len(line.of_kind(EngineRestarted)) == 2)
    played["after the second"] = [*await snapshot(), *line.finished.values()]
    played[1] = await line.wait(1)

    trainers.become(1)  # while engines died nobody asked the trainers; now they publish, and all is as ever
    trainers.sender.write(1)
    published = PublishedWeights(1, 0, 0.0)
    published.add_checksums(trainers.sender)
    played["update after"] = await line.call(EngineRank.update, 1, [[1, 2, 3]], [published.chosen])
    line.sample(2)
    played[2] = await line.wait(2)

    await line.call(EngineRank.sleep)
    with pytest.raises(RunError, match="no weights of the policy"):
        await worker.generate([request(0)])
    starts = engine.starts
    kill(engine)
    await engine.ended.wait()
    await snapshot()
    played["started while asleep"] = engine.starts - starts
    await line.call(EngineRank.wake)
    played["update with an empty probe"] = await publish(2, 0, [])
    requests = line.sample(3)
    await line.until(lambda: len(requests[0].completion.token_ids) > 30)
    kill(engine, signal.SIGSTOP)
    played[3] = await line.wait(3)
    kill(engine)
    return played


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The whole story on one worker; its results."""
    folder = tmp_path_factory.mktemp("worker")

    async def play() -> Played:
        config, store, line = engine_config({"sync_s": 16.0}, max_restarts=5), dist.HashStore(), Line()
        trainers = Trainers(0, store)
        worker = EngineRank(line, config, place(store), str(write_model(folder / "model", random_weights(5))))
        plant_death(worker.engine)
        running = asyncio.create_task(worker.run())
        try:
            telling = asyncio.create_task(story(worker, line, trainers, folder))
            await asyncio.wait({telling, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            result = await telling
            with pytest.raises(EngineLost) as lost:
                await asyncio.wait_for(running, 300)
            return {**result, "lost": str(lost.value), "line": line}
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            trainers.sender.close()

    (folder / "stacks").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAESTRALE_STACKS", str(folder / "stacks"))
        return {**asyncio.run(play()), "stacks": [path.name for path in (folder / "stacks").iterdir()]}


def test_calls_are_answered_and_an_update_says_what_it_brought(played):
    assert played["attach"] is None and played["stacks"] == ["engine-2.txt"]
    update: Updated = played["update"]
    assert (update.engine, update.version, update.probe, update.scored_version) == (0, 0, [], -1)
    assert set(update.seconds) == {"receive", "requeue", "pause", "apply", "finish", "resume", "total"}
    assert update.bytes == 4 * sum(value.numel() for value in random_weights(0).values())
    after: Updated = played["update after"]
    assert after.version == after.scored_version == 1 and [len(row) for row in after.probe] == [2]
    assert {*after.held.checksums, *after.held.columns} == set(random_weights(0))
    empty: Updated = played["update with an empty probe"]
    assert (empty.probe, empty.scored_version) == ([], 2), "an empty probe proves the version"


def test_engines_compute_with_the_weights_that_came(played, tmp_path):
    for seed, group in ((0, 0), (1, 2)):
        truth = load_model(write_model(tmp_path / str(seed), random_weights(seed)))
        assert_computed_with(truth, [(request(one.index).prompt_ids, one) for one in played[group]], greedy=True)


@pytest.mark.parametrize("group", [1, 3], ids=["deaths", "SIGSTOP"])
def test_interrupted_completions_continue_to_the_tokens_of_an_undisturbed_run(played, group):
    for calm, harmed in zip(played[0], played[group], strict=True):
        if group == 1 and harmed.index == DEADLY:
            continue
        assert harmed.token_ids == calm.token_ids and harmed.finish_reason == calm.finish_reason
        assert largest_gap(calm.logprobs, harmed.logprobs) < 2e-4
        assert harmed.restarts >= 1 or len(harmed.token_ids) < 60
        assert (harmed.spans[0].start, harmed.spans[-1].end) == (0, len(harmed.token_ids))


def test_the_deadly_completion_is_given_up_alone_at_the_third_death(played):
    assert [one.finish_reason == GIVEN_UP for one in played[1]] == [index == DEADLY for index in range(6)]
    assert {one.index for one in played["after the second"] if one.group == 1} == set(range(6)), "none is lost"


def test_a_snapshot_during_the_outage_holds_the_tokens_so_far(played):
    assert len(played["at the first death"]) > 1
    for partial in played["at the first death"]:
        assert len(partial.token_ids) >= 10 and partial.finish_reason is None
        assert partial.token_ids == played[0][partial.index].token_ids[: len(partial.token_ids)]


def test_each_restart_is_reported_with_its_reason(played):
    restarted = played["line"].of_kind(EngineRestarted)
    first, _, third, asleep, stopped = (event.reason for event in restarted)
    assert "was killed by signal 9 (SIGKILL)" in first and "pid" in first and restarted[0].continued == 6
    assert "completion 3 of group 1" in third and "given up" in third
    assert "SIGKILL" in asleep and "no token and no answer" in stopped and "deadlines.sync_s" in stopped
    assert "in phase 'sampling, 6 completions left'" in stopped
    ended = played["line"].of_kind(EngineEnded)
    assert all(after.reason.startswith(before.reason) for before, after in zip(ended, restarted, strict=True))
    assert played["started while asleep"] == 0, "a dead engine waits for its turn"


def test_one_death_too_many_ends_the_rank_and_names_the_setting(played):
    assert "died 6 times" in played["lost"] and "rollout.max_restarts = 5" in played["lost"]
    assert [failed.kind for failed in played["line"].of_kind(RankFailed)] == ["EngineLost"]


def test_completions_that_end_in_one_step_are_told_in_one_message(played):
    ends = [len(completion.token_ids) for completion in played[0]]
    together = max(ends.count(end) for end in ends)
    assert together > 1, "all ended at other lengths: the test tests nothing"
    assert played["line"].most_together >= together
