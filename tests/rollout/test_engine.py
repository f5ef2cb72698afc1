"""True vLLM with a tiny fp32 Llama: weights change in flight, and everything that is claimed about it is checked."""

import asyncio
import gc
import multiprocessing
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.engine import Engine
from rollout.output_collector import OutputCollector
from rollout.weights.proof import compare_probe
from rollout.weights.receiver import WeightReceiver
from shared.errors import ConfigError, DeadlineExceeded, SyncMismatch
from shared.launch.messages import GenerateRequest
from shared.model.language_model import LanguageModel
from shared.types import Completion
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.rollout.tiny_llama import (
    Trainers,
    assert_computed_with,
    engine_config,
    largest_gap,
    random_weights,
    request,
    write_model,
)

CLOSE = 2e-4
of_an_engine = pytest.mark.slow
"""its test needs the scene's engine, or one of its own"""


class Scene:
    """One engine of four sequences attached to one trainer rank, with an event loop of its own."""

    def __init__(self, model_dir: Path, transport: str = "shm"):
        self.runner = asyncio.Runner()
        self.engine = Engine(engine_config(max_sequences=4), str(model_dir), rank=1, engine=0)
        self.engine.outputs.on_finished = lambda ended: None
        self.version, store = -1, dist.HashStore()
        self.run(self.engine.start())
        self.trainers = Trainers(0, store, transport)
        receiver = WeightReceiver([self.trainers.sender.describe()], 0, store, torch.device("cpu"))
        self.run(self.engine.attach(receiver))

    def run(self, work: Any) -> Any:
        """Run to its end."""
        return self.runner.run(work)

    async def publish(self, seed: int) -> Any:
        """The trainers take a step to the weights of `seed`, and the engine follows."""
        self.trainers.become(seed)
        self.version += 1
        self.trainers.sender.write(self.version)
        return await self.engine.update(self.version)

    async def complete(self, requests: list[GenerateRequest], hold: bool = True) -> list[Completion]:
        """Sample to the end."""
        await self.engine.generate(requests, hold)
        return await self.wait(requests)

    async def wait(self, requests: list[GenerateRequest]) -> list[Completion]:
        """Until all ended."""
        while any(item.completion.finish_reason is None for item in requests):
            await asyncio.sleep(0.005)
            assert self.engine.failure is None, self.engine.failure
        return [item.completion for item in requests]

    async def reach(self, item: GenerateRequest, tokens: int) -> None:
        """Until a request has so many tokens."""
        while len(item.completion.token_ids) < tokens:
            await asyncio.sleep(0.001)

    def close(self) -> None:
        self.run(self.engine.stop())
        self.runner.close()
        self.trainers.sender.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    with closing(Scene(write_model(tmp_path_factory.mktemp("model"), random_weights(0)))) as scene:
        yield scene


@pytest.fixture
def truth(tmp_path):
    """The trainers' model with the weights of a seed."""
    return lambda seed: load_model(write_model(tmp_path / str(seed), random_weights(seed)))


def logprobs(model: LanguageModel, tokens: list[int], first: int = 1) -> list[float]:
    with torch.no_grad():
        logprobs_of: list[float] = model(pack_from([tokens], [first]))[0].tolist()
    return logprobs_of


@of_an_engine
def test_what_starts_after_an_update_in_flight_is_sampled_by_the_new_weights_on_a_clean_cache(scene, truth):
    """Also a request that waited through the update for a slot, and whose prompt the old weights have cached."""

    async def story() -> tuple[Completion, list[Completion]]:
        await scene.publish(0)
        await scene.complete([request(index, 10) for index in range(4)])
        busy, queued = [request(10 + index, 200, 1.0) for index in range(4)], request(0, 20)
        await scene.engine.generate(busy)
        await scene.engine.generate([queued])
        await scene.reach(busy[0], 20)
        await scene.publish(1)
        await scene.wait([*busy, queued])
        return queued.completion, await scene.complete([request(index) for index in range(4)])

    queued, after = scene.run(story())
    assert [span.version for span in queued.spans] == [scene.version]
    assert_computed_with(truth(1), [(request(one.index).prompt_ids, one) for one in (queued, *after)], greedy=True)


@pytest.fixture
def collected():
    """Let gloo's groups end in this process, and not in one that a later test forks."""
    yield
    gc.collect()


@of_an_engine
@pytest.mark.usefixtures("collected")
def test_streamed_weights_are_those_of_the_trainers_and_come_again_to_the_next_engine(tmp_path, truth):
    async def story() -> list[Completion]:
        await scene.publish(1)
        before = await scene.complete([request(index) for index in range(2)])
        assert scene.engine.llm is not None
        scene.engine.llm.kill()
        await scene.engine.ended.wait()
        await scene.engine.restart()
        return before + await scene.complete([request(index) for index in range(2)])

    with closing(Scene(write_model(tmp_path / "model", random_weights(0)), "network")) as scene:
        tokens = scene.run(story())
    assert_computed_with(truth(1), [(request(one.index).prompt_ids, one) for one in tokens], greedy=True)


@of_an_engine
def test_scores_are_the_trainers_and_show_weights_that_did_not_reach_the_model(scene, truth):
    async def story() -> tuple[list[list[float]], list[list[float]], list[tuple[list[int], Completion]]]:
        await scene.publish(4)
        old = await scene.engine.score([[5, 6, 7], list(range(1, 60))])
        await scene.publish(5)
        new, sampled = await scene.engine.score([[5, 6, 7], list(range(1, 60))]), [request(0, 30, 1.0)]
        return old, new, [(sampled[0].prompt_ids, one) for one in await scene.complete(sampled)]

    old, new, sampled = scene.run(story())
    before, after = truth(4), truth(5)
    for tokens, was, is_now in zip([[5, 6, 7], list(range(1, 60))], old, new, strict=True):
        assert largest_gap(was, logprobs(before, tokens)) < CLOSE
        assert largest_gap(is_now, logprobs(after, tokens)) < CLOSE
    assert_computed_with(after, sampled)
    compare_probe(new, new, 0, "float32")
    with pytest.raises(SyncMismatch, match="engine 0 and the trainers disagree"):
        compare_probe(new, old, 0, "float32")


@of_an_engine
def test_an_update_aborts_nothing_and_labels_each_token_with_the_version_that_sampled_it(scene, truth):
    async def story() -> tuple[list[Completion], Any]:
        await scene.publish(2)
        mixed = [request(index, 200) for index in range(4)]
        await scene.engine.generate(mixed, hold=True)
        await scene.reach(mixed[0], 60)
        updated = await scene.publish(3)
        return await scene.wait(mixed), updated

    mixed, updated = scene.run(story())
    before = truth(2)
    assert updated.running == 4 and updated.stall_s > 0 and updated.stall_steps > 0
    for one in mixed:
        assert one.finish_reason == ("stop" if one.token_ids[-1] == 511 else "length")
        assert [span.version for span in one.spans] == [scene.version - 1, scene.version]
        border = one.spans[0].end
        assert one.spans[0].start == 0 and one.spans[1].end == len(one.token_ids)
        assert 60 <= border == one.spans[1].start < 200
        of_old = logprobs(before, request(one.index).prompt_ids + one.token_ids, 150)
        assert largest_gap(one.logprobs[:border], of_old[:border]) < CLOSE
        assert abs(one.logprobs[border] - of_old[border]) > CLOSE


@of_an_engine
def test_seeds_decide_samples_and_the_stop_token_is_kept_and_ends_a_completion(scene, monkeypatch):
    async def sample() -> list[list[int]]:
        completions = await scene.complete([request(0, 60, 2.0, seed=seed) for seed in range(4)])
        assert all(len(one.logprobs) == len(one.token_ids) for one in completions)
        assert [one.finish_reason == "stop" for one in completions] == [
            one.token_ids[-1] in scene.engine.stop_token_ids for one in completions
        ]
        return [one.token_ids for one in completions]

    scene.run(scene.publish(0))
    whole = scene.run(sample())
    assert len({tuple(tokens) for tokens in whole}) == 4
    monkeypatch.setattr(scene.engine, "stop_token_ids", [511, stop := whole[0][30]])
    expected = [tokens[: (*tokens, stop).index(stop) + 1] for tokens in whole]
    assert scene.run(sample()) == expected and len(expected[0]) <= 31


@of_an_engine
def test_prompts_temperatures_and_versions_that_cannot_be_are_refused(scene):
    long = GenerateRequest([1] * 640, Completion(group=0, index=0, seed=0), 10, 0.0)
    with pytest.raises(ConfigError, match=r"model\.max_tokens = 640"):
        scene.run(scene.engine.generate([long]))
    with pytest.raises(ConfigError, match="temperature 1 only"):
        scene.run(scene.engine.score([[1, 2]], 0.6))
    scene.run(scene.publish(4))
    with pytest.raises(SyncMismatch, match=rf"engine 0 should take version {scene.version + 2}, .* trainer 0 holds"):
        scene.run(scene.engine.update(scene.version + 2))


def test_what_is_given_up_with_an_engine_leaves_no_error_that_nobody_reads():
    from vllm.v1.engine.exceptions import EngineDeadError

    async def scene() -> list[dict[str, Any]]:
        unread: list[dict[str, Any]] = []
        loop, engine = asyncio.get_running_loop(), Engine.__new__(Engine)
        loop.set_exception_handler(lambda _, context: unread.append(context))
        engine.outputs, engine.ended = OutputCollector(0, Path()), asyncio.Event()
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


def test_an_error_of_the_engines_own_code_ends_the_rank_and_a_dead_process_does_not():
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


@of_an_engine
def test_an_engine_that_does_not_start_in_time_is_killed_and_named(tmp_path):
    """The deadline passes before there is a process."""
    before = set(multiprocessing.active_children())
    engine = Engine(
        engine_config(deadlines={"start_s": 0.01}), str(write_model(tmp_path, random_weights(0))), rank=3, engine=0
    )
    with pytest.raises(DeadlineExceeded, match=r"engine rank 3 waited more than 0 s for its engine process"):
        asyncio.run(engine.start())
    assert set(multiprocessing.active_children()) <= before, "it is killed when it begins"
