"""How fast weights reach a running vLLM engine, against a plain memcpy of the same bytes in the same run.

    python -m benchmarks.weight_update [--updates 12] [--requests 16] [--json FILE]
    python -m benchmarks.speed weight_update

A Llama of SmolLM2-135M's shape with random weights (270 MB in bfloat16). Its weights are replaced again and again,
first while the engine rests, then while it decodes `--requests` completions: fp32 master weights of a trainer process
-> cast and written to the shared buffer -> pause, apply, finish, resume. As in a launch, trainer, rollout rank and
engine are three processes. memcpy is timed in the trainer process between two updates. `update` is the write plus
everything until the engine goes on; while it decodes that contains the wait for the step under way, half a step on
average, so that it grows with the load, while `stall_steps` grows as steps get shorter: with 24 completions the first
may be missed, with 8 the second. `stall` is the time between two tokens of running requests across the
update, the usual step included. Checksums of both sides are outside the pause and timed on their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.speed.rows import Row, Task
from rollout.engine import Engine  # first: it prepares the environment for vLLM
from rollout.weights import make_sender
from rollout.weights.proof import compare_checksums
from rollout.weights.receiver import WeightReceiver
from shared.config import Config
from shared.messages import GenerateRequest
from shared.types import Completion

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from benchmarks.speed.child import Child  # isort: skip
from benchmarks.speed.llama import SMOLLM2_135M, Shape, random_weights, write_model  # isort: skip

MEMCPY_BYTES = 512 << 20
"""a larger copy is made of several of this size"""
TARGETS = [
    # figure, load, at least or at most, target
    ("write_bandwidth_share", "at rest", ">=", 0.7),
    ("write_bandwidth_share", "decoding", ">=", 0.7),
    ("update_in_memcpys", "at rest", "<=", 5.0),
    ("update_in_memcpys", "decoding", "<=", 5.0),
    ("stall_steps", "decoding", "<=", 2.0),
]
WORDS = {
    "write_bandwidth_share": ("bandwidth of the write, bytes read and written", "memcpy's, read and written"),
    "update_in_memcpys": ("time of an update", "memcpy of the same bytes"),
    "stall_steps": ("stall of running requests", "a decode step"),
}
"""what the figures are called in a table, and what they are ratios of"""
CAST = "one cast of as many values, float32 to bfloat16"
MOVED = (4 + 2) / (2 + 2)
"""bytes that a write reads (float32) and writes (bfloat16) for a value, beside those of a copy of what it writes"""


def parts(size_bytes: int) -> list[int]:
    """Bytes of each copy: whole ones of MEMCPY_BYTES, and the rest."""
    whole, rest = divmod(size_bytes, MEMCPY_BYTES)
    return [MEMCPY_BYTES] * whole + [rest] * bool(rest)


def time_copies(pairs: list[tuple[torch.Tensor, torch.Tensor]], rounds: int) -> list[float]:
    """Seconds of copying every source into its target, after a first time that does not count."""
    seconds = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        for source, target in pairs:
            target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def time_memcpy(size_bytes: int, rounds: int) -> list[float]:
    """Seconds of copying so many bytes between two warm buffers, one thread."""
    most = min(size_bytes, MEMCPY_BYTES)
    source, target = torch.ones(most, dtype=torch.uint8), torch.zeros(most, dtype=torch.uint8)
    return time_copies([(source[:part], target[:part]) for part in parts(size_bytes)], rounds)


def time_cast(values: int, rounds: int) -> list[float]:
    """Seconds of one cast of so many float32 values to bfloat16 between two warm buffers, one thread: what a write
    cannot do without."""
    return time_copies([(torch.ones(values), torch.zeros(values, dtype=torch.bfloat16))], rounds)


async def keep_busy(engine: Engine, count: int, tokens: int) -> None:
    """Start the requests and wait until all decode."""
    requests = [
        GenerateRequest([1, *range(99 + index, 119 + index)], Completion(group=index, index=0, seed=index), tokens, 1.0)
        for index in range(count)
    ]
    engine.stop_token_ids = []
    await engine.generate(requests, hold=True)
    while any(len(request.completion.token_ids) < 8 for request in requests):
        await asyncio.sleep(0.01)


class TrainerSide:
    """What a trainer rank does in an update; lives in a process of its own (`Child`)."""

    def __init__(self, shape: Shape, engines: int):
        torch.set_num_threads(1)
        weights: list[tuple[str, torch.Tensor]] = list(random_weights(shape).items())
        self.sender = make_sender(
            "shm", weights, torch.bfloat16, rank=0, world=1, store=dist.HashStore(), engines=engines
        )

    def describe(self) -> dict[str, Any]:
        """For the receiver."""
        return self.sender.describe()

    def write(self, version: int) -> float:
        """Seconds of a write."""
        return self.sender.write(version)[1]

    def memcpy(self, rounds: int) -> list[float]:
        """Seconds of plain copies of the same bytes."""
        return time_memcpy(self.sender.layout.payload_bytes, rounds)

    def cast(self, rounds: int) -> list[float]:
        """Seconds of plain casts of as many values."""
        return time_cast(self.sender.layout.payload_bytes // torch.bfloat16.itemsize, rounds)

    def checksums(self) -> dict[str, int]:
        """From the master weights."""
        return self.sender.checksums()

    def close(self) -> None:
        """Free the buffers."""
        self.sender.close()


Rows = dict[str, list[float]]


async def measure(engine: Engine, trainer: Child, versions: range, memcpy_rounds: int) -> Rows:
    """A number per update of each figure, seconds unless named otherwise. Memory copies are timed between updates."""
    rows: Rows = {"bytes": [float(engine.receiver.layout.payload_bytes if engine.receiver else 0)]}

    def note(name: str, *values: float) -> None:
        rows.setdefault(name, []).extend(values)

    for version in versions:
        # decode undisturbed, so that the median step is known; for a random time, so that writes begin anywhere in one
        await asyncio.sleep(random.uniform(0.6, 0.9))
        note("memcpy", *await trainer("memcpy", memcpy_rounds))
        note("cast", *await trainer("cast", memcpy_rounds))
        write_s = await trainer("write", version)
        updated = await engine.update(version)
        note("write", write_s)
        for phase, seconds in updated.seconds.items():
            note(phase, seconds)
        note("update", write_s + updated.seconds["total"])
        note("stall", updated.stall_s)
        note("stall_steps", updated.stall_steps)
        note("step", engine.outputs.step_timer.median_s())
        start = time.perf_counter()
        received = await engine.checksums(version)
        note("engine_checksums", time.perf_counter() - start)
        start = time.perf_counter()
        compare_checksums(await trainer("checksums"), received, 0)
        note("trainer_checksums", time.perf_counter() - start)
    return rows


async def play(options: argparse.Namespace, folder: Path) -> dict[str, Rows]:
    """Start, warm up, measure at rest and decoding, stop."""
    tokens = 40 + 60 * options.updates
    config = settings(tokens, options.requests)
    model = write_model(folder, SMOLLM2_135M)
    with Child(TrainerSide, SMOLLM2_135M, 1) as trainer:
        engine = Engine(config, model, rank=1, engine=0)
        await engine.start()
        await engine.attach(WeightReceiver([await trainer("describe")], 0, dist.HashStore(), torch.device("cpu")))
        for version in (0, 1):  # both buffers warm on both sides
            await trainer("write", version)
            await engine.update(version)
        first, second = range(2, 2 + options.updates), range(2 + options.updates, 2 + 2 * options.updates)
        at_rest = await measure(engine, trainer, first, memcpy_rounds=3)
        await keep_busy(engine, options.requests, tokens)
        decoding = await measure(engine, trainer, second, memcpy_rounds=3)
        await engine.stop()
    return {"at rest": at_rest, "decoding": decoding}


def settings(tokens: int, requests: int) -> Config:
    """Of an engine that decodes so many requests of so many tokens; the proof is measured apart."""
    return Config.model_validate(
        {
            "model": {"dtype": "bfloat16", "max_tokens": tokens + 64},
            "rollout": {"max_completion_tokens": tokens, "max_sequences": requests, "cache_bytes": 1 << 30},
            "sync": {"verify": False},
        }
    )


def with_ratios(found: Rows) -> Rows:
    """With a number per update of each ratio: write and update beside the median copy of as many bfloat16 values, write
    beside the median cast."""
    memcpy, cast = statistics.median(found["memcpy"]), statistics.median(found["cast"])
    return found | {
        "write_in_casts": [seconds / cast for seconds in found["write"]],
        "write_bandwidth_share": [MOVED * memcpy / seconds for seconds in found["write"]],
        "update_in_memcpys": [seconds / memcpy for seconds in found["update"]],
    }


def summarise(found: Rows) -> dict[str, float]:
    """Medians."""
    return {name: statistics.median(values) for name, values in with_ratios(found).items()}


def show(results: dict[str, dict[str, float]]) -> None:
    """The tables."""
    size = results["at rest"]["bytes"]
    print(f"{size / 1e6:.0f} MB of weights, bfloat16; medians\n")
    print(f"  {'':<20}" + "".join(f"{load:>24}" for load in results))
    for name in ("memcpy", "cast", "write", "engine_checksums", "trainer_checksums"):
        cells = (f"{found[name] * 1e3:9.1f} ms {size / found[name] / 1e9:6.2f} GB/s" for found in results.values())
        print(f"  {name:<20}" + "".join(f"{cell:>24}" for cell in cells))
    for name in ("receive", "requeue", "pause", "apply", "finish", "resume", "update", "stall", "step"):
        cells = (f"{found[name] * 1e3:9.1f} ms {'':11}" for found in results.values())
        print(f"  {name:<20}" + "".join(f"{cell:>24}" for cell in cells))
    print()
    for name, load, sign, target in TARGETS:
        value = results[load][name]
        met = value >= target if sign == ">=" else value <= target
        print(f"  {name:<20}{load:<10}{value:7.2f}    target {sign} {target}   {'met' if met else 'MISSED'}")


def rows(task: Task) -> list[Row]:
    """The figures with targets, and rates, for benchmarks/speed."""
    options = argparse.Namespace(updates=4 if task.quick else 12, requests=8 if task.quick else 16)
    task.parts(1)
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(play(options, Path(folder)))
    task.part_done()
    return table(measured)


def table(measured: dict[str, Rows]) -> list[Row]:
    """Rows of what was measured under each load."""
    loads = {load: with_ratios(found) for load, found in measured.items()}
    size = loads["at rest"]["bytes"][0]
    rates = [
        Row(f"{name}, {load}", [size / seconds / 1e9 for seconds in found[name]], "GB/s", kind="sync",
            better="" if name == "memcpy" else "higher")
        for load, found in loads.items()
        for name in ("memcpy", "write", "update")
    ]  # fmt: skip
    targets = [
        Row(f"{words}, {load}", loads[load][name], "", of, "higher" if sign == ">=" else "lower", target, "sync")
        for name, load, sign, target in TARGETS
        for words, of in (WORDS[name],)
    ]
    limits = [
        Row(f"time of the write, {load}", found["write_in_casts"], "", CAST, "lower", kind="sync")
        for load, found in loads.items()
    ]
    return [*rates, *targets, *limits]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=12, help="weight updates to measure under each load")
    parser.add_argument("--requests", type=int, default=16, help="completions that decode meanwhile")
    parser.add_argument("--json", type=Path, help="also write all numbers here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(play(options, Path(folder)))
    results = {load: summarise(found) for load, found in rows.items()}
    show(results)
    if options.json:
        options.json.write_text(json.dumps({"summary": results, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
