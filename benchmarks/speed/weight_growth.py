"""How the time of a weight update grows: models of 10 MB to 2 GB (bfloat16), one engine and two.

    python -m benchmarks.speed weight_growth

For every size: a trainer process, and engines as in a launch (weight_update.py). At rest, update after update: memcpy
of the same bytes, the trainers' write, the update of all engines at once, and the oneDNN repack alone: one thread of
this process over the very tensors that the engines take (q, k, v and gate, up as one, the head), with the engines'
trick against cache conflicts and with warm memory. `apply` is what an engine does between pause and finish; a thread
packs ahead as soon as the write is complete, so it may be shorter than the repack alone. Then every engine decodes
`REQUESTS` completions: the stall, in decode steps. Of several engines the slowest counts.
Sizes for which this machine lacks memory are not measured.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import weight_update  # first: it prepares the environment for vLLM
from benchmarks.speed.rows import NotMeasured, Row, Task
from benchmarks.weight_update import TrainerSide, keep_busy, settings

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from benchmarks.speed.child import Child  # isort: skip
from benchmarks.speed.llama import SMOLLM2_135M, Shape, write_model  # isort: skip
from rollout.engine import Engine  # isort: skip
from rollout.weights.cpu import Linear, Target, needs_padding, pack, pad_rows, padded_bytes  # isort: skip
from rollout.weights.layout import Layout, buffer_of  # isort: skip
from rollout.weights.receiver import WeightReceiver  # isort: skip
from rollout.weights.shm import HostWeightBuffer, open_buffer  # isort: skip
from shared.errors import RunError  # isort: skip
from shared.model.cpu import keep_freed_memory  # isort: skip

ITEM_BYTES = 2
"""bfloat16"""
REQUESTS = 8
COPIES, COPIES_OF_ENGINE = 6.0, 3.0
"""memory in copies of the weights: of trainer (float32, two buffers) and of everything passing; of each engine"""
SPARE_BYTES = 3 << 30
START_S = 300.0
"""for a trainer to draw its weights and touch its buffers"""
WRITE, MEMCPY = weight_update.WORDS["write_bandwidth_share"]
WRITE_TARGET, APPLY_TARGET, STALL_TARGET = 0.7, 1.2, 2.0
FUSED: dict[str, tuple[str, ...]] = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}
"""neighbours that vLLM computes as one linear, by the first of them"""
ALONE = ("o_proj", "down_proj", "embed_tokens")


class Size(NamedTuple):
    """A model, and how long its completions must be to outlast the updates."""

    name: str
    shape: Shape
    tokens: int

    @property
    def bytes(self) -> int:
        """Of the weights on the wire."""
        return ITEM_BYTES * self.shape.parameters


SIZES = (
    Size("10 MB", Shape(192, 8, 3, 1, 512, 8192), tokens=6000),
    Size("50 MB", Shape(320, 18, 5, 1, 896, 16384), tokens=3000),
    Size("270 MB", SMOLLM2_135M, tokens=1200),
    Size("1 GB", Shape(1024, 36, 16, 8, 3072, 49152), tokens=500),
    Size("2 GB", Shape(2048, 20, 32, 8, 5632, 49152), tokens=400),
)
ENGINES = {"50 MB": (1, 2), "270 MB": (1, 2), "1 GB": (1, 2)}
"""name -> numbers of engines; one for the others"""
QUICK = SIZES[:2]


class Figures(NamedTuple):
    """[updates] seconds each, and stalls in decode steps."""

    memcpy: list[float]
    write: list[float]
    update: list[float]
    """of the slowest engine, from the call until it goes on"""
    apply: list[float]
    repack: list[float]
    stall_steps: list[float]


def linears(layout: Layout) -> list[Target]:
    """What vLLM packs for a Llama with a tied head, the largest first, as the engines have it."""
    found = []
    for name, place in layout.places.items():
        path, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in FUSED and kind not in ALONE:
            continue
        sources = [f"{path}.{part}.weight" for part in FUSED.get(kind, (kind,))]
        row_bytes = place.row_bytes(layout.dtype.itemsize)
        size = sum(layout.places[source].rows for source in sources) * row_bytes
        found.append(Target(torch.nn.Module(), "weight", sources, size, row_bytes, plain=False, packed=True))
    return sorted(found, key=lambda target: -target.bytes)


class Repack:
    """The repack alone, on one thread: a linear is freed right before its successor is packed, as in the engines."""

    def __init__(self, source: HostWeightBuffer):
        keep_freed_memory()
        self.source, self.targets = source, linears(source.layout)
        padded = [target for target in self.targets if needs_padding(target, ITEM_BYTES)]
        size = max((padded_bytes(target, ITEM_BYTES) for target in padded), default=0)
        self.padded = {id(target) for target in padded}
        self.scratch = torch.empty(size // ITEM_BYTES, dtype=torch.bfloat16)
        self.held: dict[int, Linear] = {}

    @torch.no_grad()
    def run(self, version: int) -> float:
        """Seconds for all linears of a version that lies complete in its buffer."""
        buffer, start = buffer_of(version), time.perf_counter()
        for target in self.targets:
            rows = self.source.view(buffer, target.sources)
            if rows is None:
                raise RunError(f"{', '.join(target.sources)} are no neighbours in the buffer")
            if id(target) in self.padded:
                rows = pad_rows(rows, self.scratch)
            self.held.pop(id(target), None)
            self.held[id(target)] = pack(rows)
        return time.perf_counter() - start


def needed_bytes(size: Size, engines: int) -> int:
    """Memory that a measurement takes, about: 8 copies of the weights with one engine, and what processes take."""
    return round((COPIES + COPIES_OF_ENGINE * engines) * size.bytes) + SPARE_BYTES


async def update_all(engines: list[Engine], version: int) -> tuple[float, float, float]:
    """(seconds of the update, of its apply, stall in steps) of the slowest engine."""
    done = await asyncio.gather(*(engine.update(version) for engine in engines))
    return (
        max(one.seconds["total"] for one in done), max(one.seconds["apply"] for one in done),
        max(one.stall_steps for one in done),
    )  # fmt: skip


async def at_rest(engines: list[Engine], trainer: Child, versions: range, found: Figures) -> None:
    """Updates of resting engines. The first two, which touch both buffers and all memory, do not count."""
    receiver = engines[0].receiver
    assert receiver is not None
    source = open_buffer(receiver.engine_info()["path"], receiver.layout)
    repack = Repack(source)
    try:
        for number, version in enumerate(versions):
            memcpy = await trainer("memcpy", 1)
            write = await trainer("write", version)
            update, apply, _ = await update_all(engines, version)
            alone = await asyncio.to_thread(repack.run, version)
            if number < 2:
                continue
            found.memcpy.extend(memcpy)
            found.write.append(write)
            found.update.append(update)
            found.apply.append(apply)
            found.repack.append(alone)
    finally:
        source.close()


async def decoding(engines: list[Engine], trainer: Child, versions: range, tokens: int, found: Figures) -> None:
    """Updates of engines that decode. Raises RunError when completions ended before."""
    for engine in engines:
        await keep_busy(engine, REQUESTS, tokens)
    for version in versions:
        await asyncio.sleep(random.uniform(0.6, 0.9))  # writes begin anywhere in a decode step
        await trainer("write", version)
        found.stall_steps.append((await update_all(engines, version))[2])
        if any(len(engine.outputs.running) < REQUESTS for engine in engines):
            raise RunError(f"completions of {tokens} tokens ended before the last of {len(versions)} updates")


async def measure(size: Size, count: int, updates: int, folder: Path) -> Figures:
    """One size with so many engines."""
    found = Figures([], [], [], [], [], [])
    config, model = settings(size.tokens, REQUESTS), write_model(folder, size.shape)
    with Child(TrainerSide, size.shape, count, deadline_s=START_S) as trainer:
        description = await trainer("describe")
        engines = [Engine(config, model, rank=1 + number, engine=number) for number in range(count)]
        try:
            for engine in engines:
                await engine.start()
                await engine.attach(WeightReceiver([description], engine.engine, dist.HashStore(), torch.device("cpu")))
            await at_rest(engines, trainer, range(2 + updates), found)
            await decoding(engines, trainer, range(2 + updates, 2 + 2 * updates), size.tokens, found)
        finally:
            for engine in engines:
                await engine.stop()
    return found


def label(size: Size, engines: int) -> str:
    """e.g. "50 MB, 2 engines"."""
    return f"{size.name}, {engines} engine{'s' if engines > 1 else ''}"


def table(size: Size, engines: int, found: Figures) -> list[Row]:
    """Of one size and number of engines."""
    name, gigabytes = label(size, engines), size.bytes / 1e9
    memcpy, repack = statistics.median(found.memcpy), statistics.median(found.repack)
    return [
        Row(f"{name}: memcpy", [gigabytes / seconds for seconds in found.memcpy], "GB/s"),
        Row(f"{name}: write", [gigabytes / seconds for seconds in found.write], "GB/s", better="higher", kind="sync"),
        Row(f"{name}: {WRITE}", [weight_update.MOVED * memcpy / seconds for seconds in found.write], "", MEMCPY,
            "higher", WRITE_TARGET, "sync"),
        Row(f"{name}: update of the slowest engine", [1e3 * seconds for seconds in found.update], "ms",
            better="lower", kind="sync"),
        Row(f"{name}: oneDNN repack alone, one thread", [1e3 * seconds for seconds in found.repack], "ms"),
        Row(f"{name}: apply of the slowest engine", [seconds / repack for seconds in found.apply], "",
            "the oneDNN repack alone", "lower", APPLY_TARGET, "sync"),
        Row(f"{name}: update of the slowest engine, all of it", [seconds / repack for seconds in found.update], "",
            "the oneDNN repack alone", "lower", kind="sync"),
        Row(f"{name}: stall of running requests", found.stall_steps, "", "a decode step", "lower", STALL_TARGET,
            "sync"),
    ]  # fmt: skip


def per_byte(size: Size, found: Figures) -> float:
    """Median seconds of write and update for each byte."""
    return (statistics.median(found.write) + statistics.median(found.update)) / size.bytes


def growth(measured: dict[tuple[str, int], tuple[Size, Figures]]) -> list[Row]:
    """How the time of each byte grows with the bytes, and the time of an update with the engines."""
    rows = []
    single = [pair for (_, engines), pair in measured.items() if engines == 1]
    for size, found in single[1:]:
        first, begin = single[0]
        rows.append(
            Row(f"time of each byte (write and update), {size.name}", [per_byte(size, found) / per_byte(first, begin)],
                "", f"that of {first.name}", "lower", kind="sync")
        )  # fmt: skip
    for (name, engines), (_, found) in measured.items():
        if engines > 1 and (name, 1) in measured:
            one = statistics.median(measured[name, 1][1].update)
            rows.append(
                Row(f"{name}: update of {engines} engines at once", [seconds / one for seconds in found.update], "",
                    "that of one engine", "lower", kind="sync")
            )  # fmt: skip
    return rows


def rows(task: Task) -> list[Row]:
    """All sizes, smallest first."""
    if torch.cuda.is_available():
        raise NotMeasured("engines on a GPU copy weights in place and repack nothing; run this on a CPU")
    sizes, updates = (QUICK, 3) if task.quick else (SIZES, 6)
    combinations = [(size, engines) for size in sizes for engines in ENGINES.get(size.name, (1,))]
    task.parts(len(combinations))
    measured: dict[tuple[str, int], tuple[Size, Figures]] = {}
    shown: list[Row] = []
    for size, engines in combinations:
        needed, free = needed_bytes(size, engines), psutil.virtual_memory().available
        if needed > free:
            reason = f"about {needed / 1e9:.0f} GB of memory are needed, {free / 1e9:.0f} GB are free"
            shown.append(Row(f"{label(size, engines)}: {WRITE}", [], "", not_measured=reason))
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = asyncio.run(measure(size, engines, updates, Path(folder)))
            measured[size.name, engines] = size, found
            shown += table(size, engines, found)
        task.part_done()
    return [*shown, *growth(measured)]
