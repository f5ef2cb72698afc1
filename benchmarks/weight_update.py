"""Trainers' write against memcpy, decode stall of a running engine, and the same of adapters (LoRA).

A Llama of SmolLM2-135M's shape with random weights (270 MB in bfloat16). Its weights are replaced again and again,
first while the engine rests, then while it decodes: fp32 master weights of a trainer process -> cast and written to the
shared buffer -> pause, apply, finish, resume. As in a launch, trainer, rollout rank and engine are three processes.
memcpy is timed in the trainer process between two updates. `update` is the write plus everything until the engine goes
on; while it decodes that contains the wait for the step under way, half a step on average, so that it grows with the
load, while the stall in steps grows as steps get shorter: with 24 completions the first may be missed, with 8 the
second. The stall is the time between two tokens of running requests across the update, the usual step included.
The proof of an update runs beside decoding, outside the pause: `cost of the proof` is by how much the steps until its
end took longer than as many undisturbed ones; what sequences of the probe add, of which the longer ones are measured
once, counts by how seldom they are scored. Adapters of rank 16 are updated in an engine that keeps the model; what
their matrices cost is told from what any update costs by one of a single linear layer's adapter, in a third engine.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from rollout.engine import Engine  # first: it prepares the environment for vLLM

# isort: split
import torch
import torch.distributed as dist

from benchmarks.child import Child
from benchmarks.figures import Figure, benchmark
from benchmarks.llama import SCALE, SMOLLM2_135M, Shape, random_weights, write_model
from rollout.weights import make_sender
from rollout.weights.proof import PublishedWeights, compare_held, scoring_interval
from rollout.weights.receiver import WeightReceiver
from shared.config import Config
from shared.errors import RunError
from shared.launch.messages import GenerateRequest
from shared.model.lora import A, B
from shared.types import Completion
from trainer.data.data_source import PROBE_TOKENS

MEMCPY_BYTES = 512 << 20
"""a larger copy is made of several of this size"""
START_S = 300.0
"""for a trainer to draw its weights and touch its buffers"""
CALM_S = 1.0
"""of decoding before a proof, to compare with"""
WARM_UP = 2
"""updates that do not count: they touch both buffers on both sides"""
SHARE, SHARE_OF, SHARE_TARGET = "bandwidth of the write, bytes read and written", "memcpy's, read and written", 0.7
UPDATE_TARGET, STALL_TARGET, PROOF_TARGET = 5.0, 2.0, 0.5
ADAPTER_RANK, ADAPTER_TARGET = 16, 0.1
CAST = "one cast of as many values, float32 to bfloat16"
MOVED = (4 + 2) / (2 + 2)
"""bytes that a write reads (float32) and writes (bfloat16) for a value, beside those of a copy of what it writes"""
Times = dict[str, list[float]]
"""[updates] seconds of each part, "stall" and "proof" in decode steps"""
PROBE = [list(range(100, 100 + count)) for count in PROBE_TOKENS]


def parts(size_bytes: int) -> list[int]:
    """Return the bytes of each copy: whole ones of MEMCPY_BYTES, and the rest."""
    whole, rest = divmod(size_bytes, MEMCPY_BYTES)
    return [MEMCPY_BYTES] * whole + [rest] * bool(rest)


def time_copies(pairs: list[tuple[torch.Tensor, torch.Tensor]], rounds: int) -> list[float]:
    """Return the seconds of copying every source into its target, after a first time that does not count."""
    seconds = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        for source, target in pairs:
            target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def time_memcpy(size_bytes: int, rounds: int) -> list[float]:
    """Return the seconds of copying so many bytes between two warm buffers, one thread."""
    most = min(size_bytes, MEMCPY_BYTES)
    source, target = torch.ones(most, dtype=torch.uint8), torch.zeros(most, dtype=torch.uint8)
    return time_copies([(source[:part], target[:part]) for part in parts(size_bytes)], rounds)


def linear_layers(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and weight's shape of every linear layer but the head."""
    matrices = ((name, size) for name, size in shape.tensors() if len(size) == 2 and ".layers." in name)
    return [(name.removesuffix(".weight"), size) for name, size in matrices]


def random_adapters(shape: Shape, layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Draw float32 adapters of the first linear layers of a model."""
    for name, (outputs, inputs) in linear_layers(shape)[:layers]:
        yield name + A, torch.nn.Parameter(SCALE * torch.randn(ADAPTER_RANK, inputs))
        yield name + B, torch.nn.Parameter(SCALE * torch.randn(outputs, ADAPTER_RANK))


class TrainerSide:
    """What a trainer rank does in an update; lives in a process of its own (`Child`)."""

    def __init__(self, shape: Shape, engines: int, layers: int = 0):
        """layers: of how many linear layers it sends adapters, 0: it sends all weights."""
        torch.set_num_threads(1)
        weights = list(random_adapters(shape, layers) if layers else random_weights(shape).items())
        self.sender = make_sender(
            "shm", weights, torch.bfloat16, rank=0, world=1, store=dist.HashStore(), engines=engines
        )
        self.bytes = self.sender.layout.payload_bytes

    def describe(self) -> dict[str, Any]:
        """Describe the buffers for the receiver."""
        return self.sender.describe()

    def write(self, version: int) -> float:
        """Write a version; returns the seconds."""
        return self.sender.write(version)[1]

    def memcpy(self, rounds: int) -> list[float]:
        """Return the seconds of plain copies of the same bytes."""
        return time_memcpy(self.bytes, rounds)

    def cast(self, rounds: int) -> list[float]:
        """Return the seconds of plain casts of as many float32 values to bfloat16: what a write cannot do without."""
        values = self.bytes // torch.bfloat16.itemsize
        return time_copies([(torch.ones(values), torch.zeros(values, dtype=torch.bfloat16))], rounds)

    def published(self, version: int) -> PublishedWeights:
        """Return the checksums of the master weights."""
        found = PublishedWeights(version, self.bytes, 0.0)
        found.add_checksums(self.sender)
        return found

    def close(self) -> None:
        """Free the buffers."""
        self.sender.close()


def settings(tokens: int, requests: int, rank: int = 0) -> Config:
    """Return settings of an engine that decodes so many requests of so many tokens; the proof is measured apart."""
    return Config.model_validate({
        "model": {"dtype": "bfloat16", "max_tokens": tokens + 64},
        "rollout": {"max_completion_tokens": tokens, "max_sequences": requests + len(PROBE), "cache_bytes": 3 << 30},
        "sync": {"verify": False}, "lora": {"rank": rank},
    })  # fmt: skip


async def keep_busy(engine: Engine, count: int, tokens: int) -> None:
    """Start requests and wait until all decode."""
    requests = [
        GenerateRequest([1, *range(99 + index, 119 + index)], Completion(group=index, index=0, seed=index), tokens, 1.0)
        for index in range(count)
    ]
    engine.stop_token_ids = []
    await engine.generate(requests, hold=True)
    while any(len(request.completion.token_ids) < 8 for request in requests):
        await asyncio.sleep(0.01)


async def prove(engine: Engine, published: PublishedWeights) -> float:
    """Prove an update as a run does, without the trainers' log-probs. Returns by how many undisturbed decode steps the
    steps until its end were longer; the shortest sequence of the probe counts by how seldom it is scored."""
    await asyncio.sleep(0.3)  # the trainer has just read all its weights

    async def proof() -> None:
        await engine.start_read_back([published.chosen])
        compare_held([published], await engine.read_back(), engine.engine)

    return await delay(engine, proof()) + await scoring_cost(engine, PROBE[0])


async def scoring_cost(engine: Engine, sequence: list[int]) -> float:
    """Return what scoring a sequence of the probe costs an update on average, in undisturbed decode steps."""
    return await delay(engine, engine.score([sequence])) / scoring_interval(len(sequence), len(PROBE[0]))


async def delay(engine: Engine, work: Awaitable[object]) -> float:
    """Do some work beside decoding; 0 if there is none. Returns by how many undisturbed decode steps the steps until
    its end were longer."""
    timer = engine.outputs.step_timer

    async def steps(work: Awaitable[object]) -> list[float]:
        """Seconds of the decode steps until some work is done, whole ones."""
        await timer.next_step()
        timer.intervals_s.clear()
        await work
        await timer.next_step()
        return list(timer.intervals_s)

    if not engine.outputs.running:
        await work
        return 0.0
    calm, delayed = await steps(asyncio.sleep(CALM_S)), await steps(work)
    return sum(delayed) / statistics.mean(calm) - len(delayed)


async def measure(engines: list[Engine], trainer: Child, versions: range, requests: int) -> Times:
    """Update all engines at once with each version; of several engines the slowest counts. Raises RunError when
    completions ended before the last update."""
    found: Times = {name: [] for name in ("memcpy", "cast", "write", "update", "stall", "proof")}
    for version in versions:
        # decode undisturbed, so that the median step is known; for a random time, so that writes begin anywhere in one
        await asyncio.sleep(random.uniform(0.6, 0.9))
        found["memcpy"] += await trainer("memcpy", 3)
        found["cast"] += await trainer("cast", 3)
        write_s = await trainer("write", version)
        done = await asyncio.gather(*(engine.update(version) for engine in engines))
        found["write"].append(write_s)
        found["update"].append(write_s + max(one.seconds["total"] for one in done))
        found["stall"].append(max(one.stall_steps for one in done))
        for engine in engines:
            found["proof"].append(await prove(engine, await trainer("published", version)))
            if len(engine.outputs.running) < requests:
                raise RunError(f"completions ended before the last of {len(versions)} updates")
    for sequence in PROBE[1:]:
        rare = await scoring_cost(engines[0], sequence)
        found["proof"] = [cost + rare for cost in found["proof"]]
    return found


async def play(
    shape: Shape, count: int, updates: int, requests: int, tokens: int, folder: Path, layers: int
) -> dict[str, Times]:
    """Start so many engines, measure at rest and decoding, stop."""
    model, loads = write_model(folder, shape, end=shape.vocabulary), {}
    with Child(TrainerSide, shape, count, layers, deadline_s=START_S) as trainer:
        description = await trainer("describe")
        config = settings(tokens, requests, ADAPTER_RANK if layers else 0)
        engines = [Engine(config, model, rank=1 + number, engine=number) for number in range(count)]
        try:
            for engine in engines:
                await engine.start()
                await engine.attach(WeightReceiver([description], engine.engine, dist.HashStore(), torch.device("cpu")))
            first = WARM_UP + updates
            await measure(engines, trainer, range(WARM_UP), 0)
            loads["at rest"] = await measure(engines, trainer, range(WARM_UP, first), 0)
            for engine in engines:
                await keep_busy(engine, requests, tokens)
            loads["decoding"] = await measure(engines, trainer, range(first, first + updates), requests)
        finally:
            for engine in engines:
                await engine.stop()
    return loads


def measured(shape: Shape, engines: int, updates: int, requests: int, tokens: int, layers: int = 0) -> dict[str, Times]:
    """Measure in a folder that is removed afterwards. layers: of how many linear layers adapters are sent, 0: all
    weights are."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(play(shape, engines, updates, requests, tokens, Path(folder), layers))


def share(name: str, times: Times) -> Figure:
    """Return the bandwidth of the write beside that of the median copy of what it writes."""
    memcpy = statistics.median(times["memcpy"])
    values = [MOVED * memcpy / seconds for seconds in times["write"]]
    return Figure(name, values, "", SHARE_OF, "higher", SHARE_TARGET, "sync")


def of_load(load: str, times: Times, size_bytes: int) -> Iterator[Figure]:
    """Yield rates, and ratios to copies and casts."""
    memcpy, cast = statistics.median(times["memcpy"]), statistics.median(times["cast"])
    for name in ("memcpy", "write", "update"):
        rates = [size_bytes / seconds / 1e9 for seconds in times[name]]
        yield Figure(f"{name}, {load}", rates, "GB/s", kind="sync", better="" if name == "memcpy" else "higher")
    yield share(f"{SHARE}, {load}", times)
    yield Figure(f"time of an update, {load}", [seconds / memcpy for seconds in times["update"]], "",
                 "memcpy of the same bytes", "lower", UPDATE_TARGET, "sync")  # fmt: skip
    yield Figure(f"time of the write, {load}", [seconds / cast for seconds in times["write"]], "", CAST, "lower",
                 kind="sync")  # fmt: skip
    if load == "decoding":
        yield Figure(f"stall of running requests, {load}", times["stall"], "", "a decode step", "lower", STALL_TARGET,
                     "sync")  # fmt: skip
        yield Figure("cost of the proof to running requests", times["proof"], "", "a decode step", "lower",
                     PROOF_TARGET, "sync")  # fmt: skip


def of_adapters(whole: dict[str, Times], adapters: dict[str, Times], one: dict[str, Times]) -> Iterator[Figure]:
    """Yield what an update of adapters costs beside one of all weights, and its stall. one: of a single adapter."""
    shape, what, other = SMOLLM2_135M, f"update of adapters of rank {ADAPTER_RANK}", "an update of all weights"
    sent = ADAPTER_RANK * sum(sum(size) for _, size in linear_layers(shape))
    yield Figure(f"bytes of an {what}", [sent / shape.parameters], "", other, "lower", ADAPTER_TARGET, "sync")
    least, full = (statistics.median(times["at rest"]["update"]) for times in (one, whole))
    seconds = adapters["at rest"]["update"]
    yield Figure(f"time of an {what}, at rest", [each / full for each in seconds], "", other, "lower", kind="sync")
    small = [each / full for each in one["at rest"]["update"]]
    yield Figure("time of an update of one layer's adapter, at rest", small, "", other, "lower", kind="sync")
    above = [(each - least) / (full - least) for each in seconds]
    yield Figure(f"time of an {what} above one layer's, at rest", above, "", f"{other}, above one layer's", "lower",
                 ADAPTER_TARGET, "sync")  # fmt: skip
    yield Figure(f"stall of running requests by an {what}", adapters["decoding"]["stall"], "", "a decode step", "lower",
                 STALL_TARGET, "sync")  # fmt: skip


@benchmark()
def weight_update(quick: bool) -> Iterator[Figure]:
    """Measure one engine at rest, then decoding; then one with adapters, and one with a single layer's."""
    updates, requests = (4, 8) if quick else (12, 16)
    size = SMOLLM2_135M, 1, updates, requests, 40 + 180 * updates
    whole = measured(*size)
    for load, times in whole.items():
        yield from of_load(load, times, 2 * SMOLLM2_135M.parameters)
    adapters = measured(*size, len(linear_layers(SMOLLM2_135M)))
    yield from of_adapters(whole, adapters, measured(*size, 1))
