"""True vLLM with a tiny fp32 Llama: weights change in flight, and everything that is claimed about it is checked."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from rollout.engine import Engine
from rollout.output_collector import OutputCollector
from rollout.weights.layout import buffer_of
from rollout.weights.proof import PublishedWeights, compare_held, compare_probe
from rollout.weights.receiver import WeightReceiver
from shared.errors import ConfigError, DeadlineExceeded, SyncMismatch
from shared.launch.messages import GenerateRequest
from shared.types import Completion
from tests.rollout.tiny_llama import Trainers, engine_config, random_weights, request, write_model

pytestmark = pytest.mark.slow
Result = TypeVar("Result")
CLOSE = 2e-4


class Scene:
    """One engine attached to one trainer rank, with an event loop of its own."""

    def __init__(self, model_dir: Path, max_sequences: int = 64):
        self.runner = asyncio.Runner()
        self.engine = Engine(engine_config(max_sequences=max_sequences), str(model_dir), rank=1, engine=0)
        self.ended: list[GenerateRequest] = []
        self.engine.outputs.on_finished = self.ended.append
        self.version = -1
        self.run(self.engine.start())

    def run(self, work: Any) -> Any:
        """Run to its end."""
        return self.runner.run(work)

    def attach(self, transport: str = "shm") -> None:
        """Connect to a trainer rank with the weights of seed 0."""
        store = dist.HashStore()
        self.trainers = Trainers(0, store, transport)
        receiver = WeightReceiver([self.trainers.sender.describe()], 0, store, torch.device("cpu"))
        self.run(self.engine.attach(receiver))

    async def publish(self, seed: int) -> Any:
        """The trainers take a step to the weights of `seed`, and the engine follows."""
        self.trainers.become(seed)
        self.version += 1
        self.trainers.sender.write(self.version)
        return await self.engine.update(self.version)

    async def complete(self, requests: list[GenerateRequest], hold: bool = True) -> list[Completion]:
        """Sample to the end."""
        await self.engine.generate(requests, hold)
        await self.wait(requests)
        return [item.completion for item in requests]

    async def wait(self, requests: list[GenerateRequest]) -> None:
        """Until all ended."""
        while any(item.completion.finish_reason is None for item in requests):
            await asyncio.sleep(0.005)
            assert self.engine.failure is None, self.engine.failure

    async def reach(self, item: GenerateRequest, tokens: int) -> None:
        """Until a request has so many tokens."""
        while len(item.completion.token_ids) < tokens:
            await asyncio.sleep(0.001)

    def close(self) -> None:
        """Stop everything."""
        self.run(self.engine.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(write_model(tmp_path_factory.mktemp("model"), random_weights(0)))
    scene.attach()
    yield scene
    scene.close()
    scene.trainers.sender.close()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a freshly started engine answers that loaded the weights of seed 1 from disk."""
    scene = Scene(write_model(tmp_path_factory.mktemp("fresh"), random_weights(1)))
    completions = scene.run(scene.complete([request(index) for index in range(4)]))
    scores = scene.run(scene.engine.score([completions[0].token_ids, [5, 6, 7]]))
    scene.close()
    return {"completions": completions, "scores": scores}


def largest_gap(left: list[float], right: list[float]) -> float:
    """max |difference|."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def test_after_an_update_in_flight_greedy_tokens_and_logprobs_equal_those_of_a_fresh_engine(
    scene: Scene, fresh: dict[str, Any]
) -> None:
    async def story() -> list[Completion]:
        await scene.publish(0)
        await scene.complete([request(index) for index in range(4)])  # fills the prefix cache with the old weights
        busy = [request(10 + index, 400, 1.0) for index in range(4)]
        await scene.engine.generate(busy)
        await scene.reach(busy[0], 20)
        await scene.publish(1)
        await scene.wait(busy)
        return await scene.complete([request(index) for index in range(4)])

    for ours, theirs in zip(scene.run(story()), fresh["completions"], strict=True):
        assert ours.token_ids == theirs.token_ids
        assert largest_gap(ours.logprobs, theirs.logprobs) < CLOSE


@pytest.fixture
def collected() -> Iterator[None]:
    """Let gloo's groups end in this process, and not in one that a later test forks."""
    yield
    gc.collect()


@pytest.mark.usefixtures("collected")
def test_streamed_weights_are_those_of_a_fresh_engine_and_come_again_to_the_next_one(
    tmp_path: Path, fresh: dict[str, Any]
) -> None:
    scene = Scene(write_model(tmp_path, random_weights(0)))
    scene.attach("network")

    async def story() -> list[list[Completion]]:
        await scene.publish(1)
        found = [await scene.complete([request(index) for index in range(4)])]
        assert scene.engine.llm is not None
        scene.engine.llm.kill()
        await asyncio.wait_for(scene.engine.ended.wait(), 120)
        await scene.engine.restart()
        return [*found, await scene.complete([request(index) for index in range(4)])]

    try:
        for found in scene.run(story()):
            for ours, theirs in zip(found, fresh["completions"], strict=True):
                assert ours.token_ids == theirs.token_ids
                assert largest_gap(ours.logprobs, theirs.logprobs) < CLOSE
    finally:
        scene.close()
        scene.trainers.sender.close()


def test_scores_equal_those_of_a_fresh_engine_and_the_logprobs_of_sampling(scene: Scene, fresh: dict[str, Any]) -> None:
    async def story() -> tuple[list[list[float]], list[Completion], list[list[float]]]:
        await scene.publish(1)
        scores = await scene.engine.score([fresh["completions"][0].token_ids, [5, 6, 7]])
        sampled = [request(index, 30, 1.0) for index in range(3)]
        completions = await scene.complete(sampled)
        again = await scene.engine.score([item.prompt_ids + item.completion.token_ids for item in sampled])
        return scores, completions, again

    scores, completions, again = scene.run(story())
    for ours, theirs in zip(scores, fresh["scores"], strict=True):
        assert largest_gap(ours, theirs) < CLOSE
    for completion, whole in zip(completions, again, strict=True):
        assert largest_gap(completion.logprobs, whole[-len(completion.token_ids) :]) < CLOSE


def test_an_update_aborts_nothing_and_labels_each_token_with_the_version_that_sampled_it(scene: Scene) -> None:
    async def story() -> tuple[list[Completion], list[Completion], int, Any]:
        await scene.publish(2)
        pure = await scene.complete([request(index, 300) for index in range(4)])
        mixed = [request(index, 300) for index in range(4)]
        await scene.publish(2)
        first = scene.version
        await scene.engine.generate(mixed, hold=True)
        await scene.reach(mixed[0], 60)
        updated = await scene.publish(3)
        await scene.wait(mixed)
        return pure, [item.completion for item in mixed], first, updated

    pure, mixed, first, updated = scene.run(story())
    assert updated.running == 4 and updated.stall_s > 0 and updated.stall_steps > 0
    for alone, crossed in zip(pure, mixed, strict=True):
        assert crossed.finish_reason == ("stop" if crossed.token_ids[-1] == 511 else "length")
        assert [span.version for span in crossed.spans] == [first, first + 1]
        assert crossed.spans[0].start == 0 and crossed.spans[1].end == len(crossed.token_ids)
        border = crossed.spans[0].end
        assert 60 <= border == crossed.spans[1].start < 300
        assert crossed.token_ids[:border] == alone.token_ids[:border]
        assert largest_gap(crossed.logprobs[:border], alone.logprobs[:border]) < CLOSE
        assert abs(crossed.logprobs[border] - alone.logprobs[border]) > CLOSE


def test_a_request_that_waited_through_an_update_starts_on_a_clean_cache(tmp_path: Path) -> None:
    async def story(scene: Scene) -> tuple[list[Completion], list[Completion]]:
        await scene.publish(0)
        block = [request(0, 200), request(0, 200)]
        await scene.engine.generate(block)
        queued = [request(0, 20)]  # same prompt, no slot: it would hit the cache of version 0
        await scene.engine.generate(queued)
        await scene.reach(block[0], 10)
        await scene.publish(1)
        await scene.wait(block + queued)
        return [item.completion for item in queued], await scene.complete([request(0, 20)])

    scene = Scene(write_model(tmp_path, random_weights(0)), max_sequences=2)
    scene.attach()
    (waited,), (clean,) = scene.run(story(scene))
    scene.close()
    scene.trainers.sender.close()
    assert [span.version for span in waited.spans] == [1]
    assert waited.token_ids == clean.token_ids
    assert largest_gap(waited.logprobs, clean.logprobs) < CLOSE


def test_seeds_decide_samples_and_the_stop_token_is_kept_and_ends_a_completion(scene: Scene) -> None:
    async def story() -> list[list[Completion]]:
        await scene.publish(0)
        return [await scene.complete([request(0, 400, 2.0, seed=seed) for seed in range(24)]) for _ in range(2)]

    completions, again = scene.run(story())
    assert [one.token_ids for one in completions] == [one.token_ids for one in again]
    assert completions[0].token_ids != completions[1].token_ids
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids.index(511) == len(completion.token_ids) - 1 == len(completion.logprobs) - 1


def test_a_prompt_that_fills_the_model_and_scoring_at_another_temperature_are_refused(scene: Scene) -> None:
    long = GenerateRequest([1] * 640, Completion(group=0, index=0, seed=0), 10, 0.0)
    with pytest.raises(ConfigError, match=r"model\.max_tokens = 640"):
        scene.run(scene.engine.generate([long]))
    with pytest.raises(ConfigError, match="temperature 1 only"):
        scene.run(scene.engine.score([[1, 2]], 0.6))


# ---- broken updates: each is detected on that update, and named -----------------------------------------------------

NAMES = ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.q_proj.weight")
MISPLACED = {
    "nothing": "",
    "one tensor": rf"{NAMES[0]} still of the previous version \(dropped\)$",
    "two tensors swapped": rf"{NAMES[0]} and {NAMES[1]} are swapped$",
    "everything": r"all \d+ changed tensors are those of the previous version",
}
"""what the trainers write elsewhere -> what the proof says"""


async def publish_and_prove(scene: Scene, seed: int) -> None:
    """What the controller does after an update: compare what the engine computes with."""
    before, published = (PublishedWeights(scene.version + ahead, 0, 0.0) for ahead in (0, 1))
    before.add_checksums(scene.trainers.sender)
    await scene.publish(seed)
    published.add_checksums(scene.trainers.sender)
    await scene.engine.start_read_back([published.chosen])
    compare_held([published], await scene.engine.read_back(), 0, [before])


@pytest.mark.parametrize("what", MISPLACED)
def test_tensors_that_are_written_elsewhere_are_named(scene: Scene, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    for _ in range(2):  # both buffers hold seed 4
        scene.run(scene.publish(4))
    sender, spoiled = scene.trainers.sender, buffer_of(scene.version + 1)
    target, (first, second) = sender.target, ([piece.name for piece in sender.pieces].index(name) for name in NAMES)
    swapped = {first: second, second: first} if what == "two tensors swapped" else {}

    def misplaced(buffer: int, number: int) -> torch.Tensor:
        if buffer == spoiled and (what == "everything" or (what == "one tensor" and number == first)):
            return torch.empty(sender.pieces[number].local.shape)
        return target(buffer, swapped.get(number, number) if buffer == spoiled else number)

    monkeypatch.setattr(sender, "target", misplaced)
    if what == "nothing":
        scene.run(publish_and_prove(scene, 5))
        return
    with pytest.raises(SyncMismatch, match=f"engine 0 .*{MISPLACED[what]}"):
        scene.run(publish_and_prove(scene, 5))


def test_a_version_that_was_never_written_is_refused(scene: Scene) -> None:
    scene.run(scene.publish(4))
    with pytest.raises(SyncMismatch, match=rf"engine 0 should take version {scene.version + 2}, .* trainer 0 holds"):
        scene.run(scene.engine.update(scene.version + 2))


def test_the_probe_sees_weights_that_did_not_reach_the_model(scene: Scene) -> None:
    async def story() -> tuple[list[list[float]], list[list[float]]]:
        await scene.publish(4)
        old = await scene.engine.score([list(range(1, 30))])
        await scene.publish(5)
        return old, await scene.engine.score([list(range(1, 30))])

    old, new = scene.run(story())
    compare_probe(new, new, 0, "float32")
    with pytest.raises(SyncMismatch, match="engine 0 and the trainers disagree"):
        compare_probe(new, old, 0, "float32")


def test_what_is_given_up_with_an_engine_leaves_no_error_that_nobody_reads() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    async def scene() -> list[dict[str, Any]]:
        unread: list[dict[str, Any]] = []
        loop, engine = asyncio.get_running_loop(), Engine.__new__(Engine)
        loop.set_exception_handler(lambda _, context: unread.append(context))
        engine.outputs, engine.ended = OutputCollector(0), asyncio.Event()
        scores = [loop.create_future() for _ in range(2)]
        asking = asyncio.ensure_future(engine._ask(asyncio.gather(*scores)))
        await asyncio.sleep(0)
        engine.ended.set()
        with pytest.raises(EngineDeadError):
            await asking
        await asyncio.sleep(0)
        del asking, scores
        gc.collect()
        return unread

    assert asyncio.run(scene()) == []


def test_an_error_of_the_engines_own_code_ends_the_rank_and_a_dead_process_does_not() -> None:
    """`EngineRank` raises `failure`, and replaces an engine that has ended without one."""
    from vllm.v1.engine.exceptions import EngineDeadError

    async def end(error: Exception, of_this_process: bool = True) -> tuple[bool, BaseException | None]:
        engine, process = Engine.__new__(Engine), object()
        engine.llm, engine.failure, engine.ended = process, None, asyncio.Event()  # type: ignore[assignment]
        engine._end(process if of_this_process else object(), error)  # type: ignore[arg-type]
        return engine.ended.is_set(), engine.failure

    error = RuntimeError("a log-prob is not finite")
    assert asyncio.run(end(error)) == (True, error)
    assert asyncio.run(end(EngineDeadError())) == (True, None)
    assert asyncio.run(end(error, of_this_process=False)) == (False, None), "it was replaced since"


def test_an_engine_that_does_not_start_in_time_is_killed_and_named(tmp_path: Path) -> None:
    config = engine_config(deadlines={"start_s": 0.3})
    engine = Engine(config, str(write_model(tmp_path, random_weights(0))), rank=3, engine=0)
    before = set(multiprocessing.active_children())
    with pytest.raises(DeadlineExceeded, match=r"engine rank 3 waited more than 0 s for its engine process"):
        asyncio.run(engine.start())
    assert set(multiprocessing.active_children()) <= before
