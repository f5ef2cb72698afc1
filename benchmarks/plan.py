"""How far `python -m lab.plan` is from published step times, and from the ages that a run of ours measured.

Every row states what is published, with its source, what the plan says, and the error; what was not published and had
to be assumed stands beside it. `runs` are finished runs of ours. Takes a second, needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from benchmarks.figures import Section, benchmark
from benchmarks.report import table
from lab.plan import split, times
from lab.plan.lengths import Lengths, lognormal, of_run
from lab.plan.scenario import CARDS, MODELS, Machine, Scenario, Workload
from shared import settings_file
from shared.errors import DataError
from shared.metrics import read_rows
from shared.model.config import DecoderConfig
from shared.sections import Placement, Rollout

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
    """A line of NeMo RL's performance summary (v0.4, DGX H100, bfloat16): dense models only."""

    model: str
    on_policy: bool
    mean: int
    """mean sequence, prompt included, tokens"""
    gpus: int
    engine_gpus: int
    """of the asynchronous rows; the others take turns on all GPUs"""
    tensor_parallel: int
    step_s: float


NEMO = (
    Row("8b", True, 1060, 16, 16, 1, 97.7),
    Row("8b", False, 1129, 16, 8, 1, 74.6),
    Row("32b", True, 3206, 32, 32, 4, 393),
    Row("32b", False, 3207, 64, 32, 4, 215),
)
NEMO_PROMPT, NEMO_LIMIT = 150, 4096


def nemo_plan(row: Row) -> float:
    """Plan the step time, seconds: 64 prompts x 32, 4 optimiser steps a batch, two passes for log-probs."""
    mean = row.mean - NEMO_PROMPT
    limit = NEMO_LIMIT - NEMO_PROMPT
    lengths = lognormal(mean, TAIL * mean, limit)
    work = Workload(lengths, limit, 64, 32, NEMO_PROMPT, optimiser_steps=4, extra_forwards=2)
    scenario = Scenario(MODELS[row.model], h100(row.gpus), work)
    if row.on_policy:
        return need(split.taking_turns_s(scenario, row.tensor_parallel, resident=False))
    engines = row.engine_gpus // row.tensor_parallel
    return need(split.place(scenario, engines, row.tensor_parallel, async_level=1)).asynchronous_s


def need(value: T | None) -> T:
    """Return what must be there: these configurations were run, so they fit."""
    if value is None:
        raise ValueError("a published configuration does not fit into memory by the plan")
    return value


def nemo_section() -> str:
    """Return the Markdown."""
    rows = [("model", "mode", "GPUs", "mean tokens", "published", "plan", "error")]
    for row in NEMO:
        planned = nemo_plan(row)
        split_of = f"{row.gpus}" if row.on_policy else f"{row.gpus - row.engine_gpus} train, {row.engine_gpus} sample"
        mode = "taking turns" if row.on_policy else "one step off"
        rows.append((row.model.upper(), mode, split_of, f"{row.mean:,}", f"{row.step_s:g} s", f"{planned:.1f} s",
                     error(planned, row.step_s)))  # fmt: skip
    return table(*rows)


# ---- LlamaRL -------------------------------------------------------------------------------------------------------

LLAMARL = (("8b", 256, 8.90, 2.52), ("70b", 256, 20.67, 3.98), ("405b", 1024, 59.5, 10.7))
"""model, GPUs (assumed), asynchronous step (s), speed-up over the synchronous baseline"""
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
    lengths = lognormal(mean, TAIL * mean, limit)
    return Workload(lengths, limit, *LLAMARL_BATCH, LLAMARL_PROMPT)


def llamarl_plan(name: str, gpus: int, mean: float) -> tuple[float, float]:
    """Return (asynchronous step with the best split at async level 1, synchronous step that takes turns on these GPUs),
    s."""
    machine = h100(gpus, memory_bytes=ROOM_BYTES) if name == "405b" else h100(gpus)
    scenario = Scenario(MODELS[name], machine, llamarl_work(mean), async_level=1)
    turns = need(split.taking_turns_s(scenario, machine.node_gpus))
    return split.best(scenario).asynchronous_s, turns


def fitted_mean() -> float:
    """Find the mean completion (tokens) at which the plan gives the published step of the fitted row, by bisection."""
    _, gpus, published, _ = next(row for row in LLAMARL if row[0] == FITTED)
    low, high = 10.0, 4_000.0
    for _ in range(30):
        middle = (low + high) / 2
        slower = llamarl_plan(FITTED, gpus, middle)[0] > published
        low, high = (low, middle) if slower else (middle, high)
    return low


def llamarl_section() -> str:
    """Return the Markdown."""
    mean = fitted_mean()
    rows = [("model", "GPUs", "published step", "plan", "error", "published speed-up", "plan", "error")]
    for name, gpus, published, faster in LLAMARL:
        planned, turns = llamarl_plan(name, gpus, mean)
        wrong = "fitted" if name == FITTED else error(planned, published)
        gain = turns / planned
        rows.append((name.upper(), f"{gpus:,}", f"{published:g} s", f"{planned:.1f} s", wrong, f"{faster:g}",
                     f"{gain:.2f}", error(gain, faster)))  # fmt: skip
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
IDLE = 0.05
"""trainers that wait longer for completions, as a share of the step, are not what a step waits for"""


def magistral_section() -> str:
    """Say what the rule on open completions costs by the plan, and whether the one on updates is kept, at 24B."""
    steps = [f"step, async level {async_level} (open / batch {async_level + 1})" for async_level in ASYNC_LEVELS]
    rows = [("GPUs", "best split at async level 1", *steps, "weight update (rule: below 5 s)")]
    lengths = lognormal(6000, 24_000, 32_768)
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


# ---- our own runs --------------------------------------------------------------------------------------------------


def runs_section(folders: list[Path]) -> str:
    """Compare the mean age of trained tokens in finished runs with the formula, from their other figures."""
    rows = [("run", "async level", "step", "waits for", "groups with signal", "age, measured", "plan", "error")]
    for folder in folders:
        settings = settings_file.read_toml(folder / "config.toml")  # these sections alone: other versions wrote others
        rollout = Rollout.model_validate(settings["rollout"])
        engines = Placement.model_validate(settings["placement"]).engines
        steps = [row for row in read_rows(folder / "metrics.jsonl") if row.get("kind") == "train"]
        run = Late(rollout, engines, steps[len(steps) // 2 :])
        measured, planned = run.mean("staleness/mean"), run.planned_age(of_run(folder)[0])
        rows.append((folder.name, str(rollout.max_async_level), f"{run.mean('time/step_s'):.2f} s",
                     "engines" if run.engines_late else "trainers", f"{run.kept:.0%}", f"{measured:.2f} versions",
                     f"{planned:.2f}", error(planned, measured)))  # fmt: skip
    return table(*rows)


@dataclass(frozen=True)
class Late:
    """The second half of a run."""

    rollout: Rollout
    engines: int
    rows: list[dict[str, Any]]

    def mean(self, name: str) -> float:
        """Return the mean of a metric. Raises DataError where the run has none."""
        values = [row[name] for row in self.rows if row.get(name) is not None]
        if not values:
            raise DataError(f"the run has no '{name}' in its metrics.jsonl: name an RL run of several steps")
        return fmean(values)

    @property
    def kept(self) -> float:
        """Share of groups with signal."""
        return self.mean("groups/trained") / (self.mean("groups/trained") + self.mean("groups/filtered"))

    @property
    def engines_late(self) -> bool:
        """Whether trainers waited for completions."""
        return self.mean("time/wait_batch_s") > IDLE * self.mean("time/step_s")

    def planned_age(self, lengths: Lengths) -> float:
        """Apply `mean_age` to the run's step time, decode step (stall in ms over stall in steps) and kept groups."""
        rollout, step_s = self.rollout, self.mean("time/step_s")
        decode_s = self.mean("sync/stall_ms") / self.mean("sync/stall_steps") / 1000
        limit = rollout.max_completion_tokens
        work = Workload(lengths, limit, rollout.prompts_per_step, rollout.group_size, 1, kept=self.kept)
        waiting = 0.0
        if self.engines_late:
            busy = min(1.0, (self.mean("time/train_s") + self.mean("sync/total_s")) / step_s)
            waiting = times.queue_s(work, self.engines, rollout.max_async_level, rollout.max_sequences, busy, step_s)
        return times.mean_age(lengths, rollout.max_async_level, step_s, decode_s, waiting, self.kept)


@benchmark(page="docs/plan.md")
def plan(quick: bool, runs: list[Path] = []) -> Iterator[Section]:  # noqa: B006 - nothing changes it
    """Yield the tables."""
    yield Section(nemo_section(), mark="nemo")
    yield Section(llamarl_section(), mark="llamarl")
    yield Section(magistral_section(), mark="magistral")
    if runs:
        yield Section(runs_section(runs), mark="runs")
