"""What each model needs by `python -m lab.plan`, and how far the plan is from published step times.

Every row of the comparisons states what is published, with its source, what the plan says, and the error; what was not
published and had to be assumed stands beside it. Takes some seconds, needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from benchmarks.figures import Section, benchmark
from benchmarks.report import table
from benchmarks.trainable import trainable_section
from lab.plan import split, times
from lab.plan.scenario import CARDS, MODELS, Lengths, Machine, Scenario, Workload
from shared.model.config import DecoderConfig

T = TypeVar("T")
TAIL = 3.0
"""99th percentile over mean, where only the mean is published"""


def h100(gpus: int, **changes: float) -> Machine:
    """Return a cluster of H100 nodes with the plan's own assumptions."""
    return replace(CARDS["h100"], gpus=gpus, **changes)  # type: ignore[arg-type]


def error(planned: float, published: float) -> str:
    """Format a signed error, in per cent of what is published."""
    return f"{100 * (planned / published - 1):+.0f} %"


# ---- NeMo RL: the only published step times with the whole configuration -----------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of NeMo RL's performance summary (v0.4, DGX H100, bfloat16): dense models one step off policy."""

    model: str
    mean: int
    """mean sequence, prompt included, tokens"""
    gpus: int
    engine_gpus: int
    tensor_parallel: int
    step_s: float


NEMO = (
    Row("8b", 1129, 16, 8, 1, 74.6),
    Row("32b", 3207, 64, 32, 4, 215),
)
NEMO_PROMPT, NEMO_LIMIT = 150, 4096


def nemo_plan(row: Row) -> float:
    """Plan the step time, seconds: 64 prompts x 32, 4 optimiser steps a batch, two passes for log-probs."""
    mean = row.mean - NEMO_PROMPT
    limit = NEMO_LIMIT - NEMO_PROMPT
    lengths = Lengths(mean, TAIL * mean, limit)
    work = Workload(lengths, limit, 64, 32, NEMO_PROMPT, optimiser_steps=4, extra_forwards=2)
    scenario = Scenario(MODELS[row.model], h100(row.gpus), work)
    engines = row.engine_gpus // row.tensor_parallel
    return need(split.place(scenario, engines, row.tensor_parallel, async_level=1)).asynchronous_s


def need(value: T | None) -> T:
    """Return what must be there: these configurations were run, so they fit."""
    if value is None:
        raise ValueError("a published configuration does not fit into memory by the plan")
    return value


def nemo_section() -> str:
    """Return the Markdown."""
    rows = [("model", "GPUs", "mean tokens", "published", "plan", "error")]
    for row in NEMO:
        planned = nemo_plan(row)
        split_of = f"{row.gpus - row.engine_gpus} train, {row.engine_gpus} sample"
        rows.append((row.model.upper(), split_of, f"{row.mean:,}", f"{row.step_s:g} s", f"{planned:.1f} s",
                     error(planned, row.step_s)))  # fmt: skip
    return table(*rows)


# ---- LlamaRL -------------------------------------------------------------------------------------------------------

LLAMARL = (("8b", 256, 8.90), ("70b", 256, 20.67), ("405b", 1024, 59.5))
"""model, GPUs (assumed), asynchronous step (s)"""
LLAMARL_BATCH = (512, 4)
"""prompts x completions: assumed"""
LLAMARL_PROMPT = 200
FITTED = "70b"
ROOM_BYTES = 320e9
"""memory of a GPU assumed where 80 GB do not hold our way of sharding: LlamaRL shards the 405B model otherwise"""
DDMA = (("70b", 256, 1.15), ("405b", 1024, 2.0))
"""model, GPUs (assumed), seconds of a weight update"""


def llamarl_work(mean: float) -> Workload:
    """Return the work of a step with completions of this mean."""
    limit = round(TAIL * mean)
    lengths = Lengths(mean, TAIL * mean, limit)
    return Workload(lengths, limit, *LLAMARL_BATCH, LLAMARL_PROMPT)


def llamarl_plan(name: str, gpus: int, mean: float) -> float:
    """Return the asynchronous step with the best split at async level 1, seconds."""
    machine = h100(gpus, memory_bytes=ROOM_BYTES) if name == "405b" else h100(gpus)
    scenario = Scenario(MODELS[name], machine, llamarl_work(mean), async_level=1)
    return split.best(scenario).asynchronous_s


def fitted_mean() -> float:
    """Find the mean completion (tokens) at which the plan gives the published step of the fitted row, by bisection."""
    _, gpus, published = next(row for row in LLAMARL if row[0] == FITTED)
    low, high = 10.0, 4_000.0
    for _ in range(30):
        middle = (low + high) / 2
        slower = llamarl_plan(FITTED, gpus, middle) > published
        low, high = (low, middle) if slower else (middle, high)
    return low


def llamarl_section() -> str:
    """Return the Markdown."""
    mean = fitted_mean()
    rows = [("model", "GPUs", "published step", "plan", "error")]
    for name, gpus, published in LLAMARL:
        planned = llamarl_plan(name, gpus, mean)
        wrong = "fitted" if name == FITTED else error(planned, published)
        rows.append((name.upper(), f"{gpus:,}", f"{published:g} s", f"{planned:.1f} s", wrong))
    updates = [("model", "published update", "plan, 8 links an engine", "error", "Maestrale's network way, 1 link")]
    for name, gpus, published in DDMA:
        fast, ours = (update_s(MODELS[name], gpus, links) for links in (8, 1))
        updates.append((name.upper(), f"{published:g} s", f"{fast:.2f} s", error(fast, published), f"{ours:.1f} s"))
    told = f"One length was fitted, on the {FITTED.upper()} row: {mean:,.0f} tokens a completion on average.\n\n"
    return told + table(*rows) + "\n" + table(*updates)


def update_s(decoder: DecoderConfig, gpus: int, links: int) -> float:
    """Return the seconds of sending all weights between nodes, half of the GPUs in engines of 8."""
    return times.delivery_s(decoder.parameters, h100(gpus), gpus // 2, gpus // 16, 8, links)


# ---- Magistral's rules ---------------------------------------------------------------------------------------------


ASYNC_LEVELS = (1, 2, 4)


def magistral_section() -> str:
    """Say what the rule on open completions costs by the plan, and whether the one on updates is kept, at 24B."""
    steps = [f"step, async level {async_level} (open / batch {async_level + 1})" for async_level in ASYNC_LEVELS]
    rows = [("GPUs", "best split at async level 1", *steps, "weight update (rule: below 5 s)")]
    lengths = Lengths(6000, 24_000, 32_768)
    work = Workload(lengths, 32_768, 128, 16, 200)  # 2048 completions: the batch that the paper names for 24B
    for gpus in (32, 64, 128, 256):
        first, *others = (
            split.best(Scenario(MODELS["24b"], h100(gpus), work, async_level)) for async_level in ASYNC_LEVELS
        )
        steps_s = [f"{plan.asynchronous_s:,.0f} s, waits for: {plan.bottleneck}" for plan in (first, *others)]
        chosen = f"{first.trainers} trainers, {first.engines} engines of {first.tensor_parallel}"
        kept = "kept" if first.update_s < 5 else "not kept"
        rows.append((str(gpus), chosen, *steps_s, f"{first.update_s:.2f} s: {kept}"))
    return table(*rows)


@benchmark(page="docs/plan.md")
def plan(quick: bool) -> Iterator[Section]:
    """Yield the tables."""
    yield Section(trainable_section(), mark="what it can train")
    yield Section(nemo_section(), mark="nemo")
    yield Section(llamarl_section(), mark="llamarl")
    yield Section(magistral_section(), mark="magistral")
