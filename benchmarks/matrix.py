"""One table of training steps: model, tokens, card or CPU, all weights or adapters; tokens a second, MFU, memory.

SmolLM2-135M's shape with random weights is measured here, on the CPU, in a process for each row: forward and backward
of 4,096 packed tokens of heavy-tailed sequences, clipping and AdamW (benchmarks/step.py). What cards did is read from
the results files of `make gpu-check` (docs/results/gpu), what another CPU did from benchmarks/results.json (training).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from benchmarks import head_memory
from benchmarks.figures import ROOT, Measured, Section, benchmark, decode, describe_machine, measured_with
from benchmarks.llama import SMOLLM2_135M, Shape
from benchmarks.peak import SIZES, Peak
from benchmarks.report import shown, table
from benchmarks.step import Rank, alone, draw, micro_batches, work
from shared.model.cpu.processor import keep_freed_memory, multiplies_bfloat16_fast

CARDS, RESULTS = ROOT / "docs" / "results" / "gpu", ROOT / "benchmarks" / "results.json"
HEAD = ("model", "trained", "tokens a step", "recomputed", "device", "speed", "MFU", "memory", "measured on")
MODELS = {"0.6b": "Qwen3 0.6B", "1.7b": "Qwen3 1.7B", "8b": "Llama 3.1 8B"}
SMOLLM2, ALL = "SmolLM2-135M", "all weights"
ADAPTERS = 16
"""rank of the adapters"""
BACKWARD = {0: 1.0, ADAPTERS: 2 / 3}
"""rank of adapters -> share of a step's operations that is computed: frozen weights take no gradient"""
OF_CARD = re.compile(
    r"(\S+?)(?:, (\d+ of \d+ layers))?, ([\d,]+) tokens, (one sequence, )?(nothing|all layers) recomputed"
)
OF_CPU = re.compile(r"step, ([\d,]+) tokens, (float32|bfloat16)")
BESIDE = "step of 8,192 tokens with adapters of rank 16: time"
BESIDE_MEMORY = "step with adapters: largest memory"
"""figures of a card's item `adapters`, which measured a Qwen3 0.6B, beside a step of all weights"""
TEXT = """# Benchmark matrix

{measured}; what results files of earlier days say has its day in the table.

One training step of one rank: forward, backward, clipping and AdamW over float32 master weights. Nothing is sampled:
whole steps of a launch stand in [performance.md](performance.md), beside TRL's. Weights are random. Tokens are those
of prompts and completions.

On cards products are in bfloat16, and sequences have 4,096 tokens, packed, where nothing else is said. On CPUs
sequences have 64 to 1,024 tokens, 256 in the median. Memory is the card's largest allocation, and on a CPU the
largest resident memory of the process.

MFU counts what the step computes once (`trainer/step/flops.py`), which is forward and backward. Gradients of frozen
weights are not computed with adapters, so they do not count. Recomputed layers do not count either. On a card it is a
share of the data sheet's dense bfloat16 peak. On a CPU it is a share of the fastest matrix product that the same
process measured.

Which cards hold which model, on paper: [plan.md](plan.md#what-it-can-train). What was measured on a card:
[gpu.md](gpu.md).

{rows}{others}"""

ABSENT = "\nNot measured yet: adapters on a CPU, and memory there (`python -m benchmarks matrix` does).\n"


class Load(NamedTuple):
    """What is measured on the CPU."""

    shape: Shape
    tokens: int
    products: Sequence[tuple[int, int, int]]
    """that the peak is looked for among"""


class Step(NamedTuple):
    """Steps of one rank on the CPU."""

    seconds: list[float]
    shares: list[float]
    """[steps] operations a second, of the matrix product measured behind each"""
    memory_bytes: int
    dtype: str
    """of the products"""
    others: float
    """share of the processors' time that other processes took meanwhile"""


FULL = Load(SMOLLM2_135M, 4096, SIZES)
QUICK = Load(SMOLLM2_135M._replace(layers=2), 512, SIZES[:1])


@benchmark(page="docs/matrix.md")
def matrix(quick: bool, gather: bool = False) -> Iterator[Section]:
    """Measure on the CPU, gather the rest, and write the page. gather: measure nothing, only read what there is."""
    load, rows, others = QUICK if quick else FULL, list[list[str]](), 0.0
    sentence = measured_with("matrix --gather" if gather else "matrix")
    for adapters in () if gather else BACKWARD:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            step = process.submit(measure, load, adapters).result()
        rows.append(row_of(load, adapters, step))
        others = max(others, step.others)
        print(" ", *rows[-1], step)
    told = f"\nWhile this machine was measured, other processes took up to {others:.0%} of its processors' time.\n"
    rows += [*of_other_cpus(decode(RESULTS.read_bytes())), *of_cards(CARDS)]
    done = "Gathered" if gather else "Measured"
    yield Section(TEXT.format(measured=sentence.replace("Measured", done), rows=table(HEAD, *rows),
                              others=told if others >= 0.02 else ABSENT if gather else ""))  # fmt: skip


def used(process: psutil.Process) -> tuple[float, float, float]:
    """Return wall time, and processor time of all processes and of one, seconds."""
    whole, own = psutil.cpu_times(), process.cpu_times()
    busy = sum(whole) - whole.idle - getattr(whole, "iowait", 0.0)
    return time.perf_counter(), busy, own.user + own.system


def measure(load: Load, adapters: int) -> Step:
    """Step three times in this process, which is not measured for anything else; the first is not counted."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    keep_freed_memory()  # as a trainer does
    dtype = "bfloat16" if multiplies_bfloat16_fast("cpu") else "float32"
    place, batches = torch.device("cpu"), micro_batches(draw(load.tokens, 0, load.shape.vocabulary), load.tokens)
    operations = BACKWARD[adapters] * work(load.shape.decoder, batches)
    with alone(place) as mesh:
        rank = Rank(load.shape.decoder, dtype, mesh, place, adapters=adapters)
        rank.step(batches)
        before = used(psutil.Process())
        seconds = [rank.step(batches)]
        memory = head_memory.peak_bytes()  # before the products of the peak take theirs
        peak = Peak(getattr(torch, dtype), place, load.products)
        peaks = [peak.measure()]
        seconds.append(rank.step(batches))
        peaks.append(peak.measure())
        wall, busy, own = (now - then for now, then in zip(used(psutil.Process()), before, strict=True))
    shares = [operations / second / fastest for second, fastest in zip(seconds, peaks, strict=True)]
    return Step(seconds, shares, memory, dtype, max(0.0, (busy - own) / (wall * cores)))


def row_of(load: Load, adapters: int, step: Step) -> list[str]:
    """Return the cells of HEAD of steps that were measured here, today."""
    device, day = f"{describe_machine()}; {step.dtype}", str(datetime.date.today())
    trained = f"adapters of rank {adapters}" if adapters else ALL
    speed = shown(load.tokens / statistics.median(step.seconds), "tokens/s")
    share, memory = shown(statistics.median(step.shares), "%"), shown(step.memory_bytes / 2**30, "GiB")
    return [SMOLLM2, trained, f"{load.tokens:,}", "nothing", device, speed, share, memory, day]


def of_other_cpus(results: dict[str, Measured]) -> Iterator[list[str]]:
    """Yield rows of the benchmark `training`, which measures no memory of a step."""
    for name, found in results.items():
        figures = {figure.name: figure for figure in found.rows if figure.values}
        for title in figures if name == "training" and not found.quick else ():
            if match := OF_CPU.fullmatch(title):
                share = shown(figures[title.replace("step", "MFU")].median, "%")
                speed, machine = shown(figures[title].median, "tokens/s"), f"{found.place.machine}; {match[2]}"
                yield [SMOLLM2, ALL, match[1], "nothing", machine, speed, share, "not measured", found.place.date]


def of_cards(folder: Path) -> Iterator[list[str]]:
    """Yield rows of the results files of cards."""
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        values = {one["name"]: one["value"] for item in results["items"] for one in item["figures"]}
        where, day = results["card"] or "no card", results["date"]
        for name, value in values.items():
            if (match := OF_CARD.fullmatch(name)) and value is not None:
                label, layers, tokens, one_sequence, recomputed = match.groups()
                yield [
                    MODELS[label] + (f", {layers}" if layers else ""), ALL,
                    tokens + (", one sequence" if one_sequence else ""), recomputed, where, shown(value, "tokens/s"),
                    shown(values[f"{name}: MFU"], "%"), shown(values[f"{name}: memory"], "GiB"), day,
                ]  # fmt: skip
        if values.get(BESIDE):
            memory = f"{shown(values[BESIDE_MEMORY], '')} of that of all weights"
            yield [MODELS["0.6b"], f"adapters of rank {ADAPTERS}", "8,192, sequences of 1,024", "nothing", where,
                   f"{shown(1 / values[BESIDE], '')} of that of all weights", "not measured", memory, day]  # fmt: skip
