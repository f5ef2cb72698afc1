"""Renders a plan for readers (tables, one sentence, settings to copy) and for programs (JSON)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.plan import step
from lab.plan.machine import Machine
from lab.plan.split import Plan, together_s
from lab.plan.step import Workload
from shared.model.config import DecoderConfig

GIB = 1 << 30


def ages(plan: Plan, work: Workload) -> dict[str, float]:
    """Return mean and largest age of trained tokens in versions, updates per completion, and open batches."""
    step_s, decode_s = plan.asynchronous_s, plan.sampling.decode_s
    waiting = 0.0
    if plan.bottleneck == "engines":  # else a started completion has a seat, or nearly so
        busy = min(1.0, (plan.train_s + plan.update_s) / step_s)
        waiting = step.queue_s(work, plan.engines, plan.lead, plan.sampling.seats, busy, step_s)
    return {
        "mean_age": step.mean_age(work.lengths, plan.lead, step_s, decode_s, waiting, work.kept),
        "largest_age": float(plan.lead + 1),
        "updates_per_completion": work.lengths.mean * decode_s / step_s,
        "open_per_step": float(plan.lead + 1),
    }


def settings(plan: Plan, work: Workload) -> dict[str, Any]:
    """Return the settings of a run with this plan: section.key -> value."""
    return {
        "placement.trainers": plan.trainers,
        "placement.engines": plan.engines,
        "rollout.tensor_parallel": plan.tensor_parallel,
        "rollout.lead": plan.lead,
        "rollout.max_sequences": plan.max_sequences,
        "rollout.cache_bytes": plan.cache_bytes,
        "rollout.prompts_per_step": work.prompts_per_step,
        "rollout.group_size": work.group_size,
        "rollout.max_completion_tokens": work.max_completion_tokens,
        "model.max_tokens": work.max_tokens,
        "optimiser.micro_batch_tokens": work.micro_batch_tokens,
        **({"optimiser.activation_bytes": 0} if plan.recompute else {}),
    }


def toml(values: dict[str, Any]) -> str:
    """Render settings as TOML, by section."""
    lines: list[str] = []
    for section in dict.fromkeys(key.split(".")[0] for key in values):
        lines.append(f"[{section}]")
        for key, value in values.items():
            if key.startswith(section + "."):
                lines.append(f"{key.split('.')[1]} = {str(value).lower() if isinstance(value, bool) else value}")
    return "\n".join(lines)


def recommendation(plan: Plan, work: Workload) -> str:
    """Return one line with the split, its step times and its bottleneck."""
    share = plan.trainers / (plan.trainers + plan.engines * plan.tensor_parallel)
    return (
        f"{plan.trainers} trainers and {plan.engines} engines of {plan.tensor_parallel} GPU"
        f"{'' if plan.tensor_parallel == 1 else 's'} ({share:.0%} train), lead {plan.lead}: a step of "
        f"{seconds(plan.asynchronous_s)} instead of {seconds(plan.synchronous_s)} synchronously "
        f"({plan.synchronous_s / plan.asynchronous_s:.2f} times faster), limited by: {plan.bottleneck}"
    )


def as_json(plan: Plan, decoder: DecoderConfig, machine: Machine, work: Workload) -> dict[str, Any]:
    """Return the whole plan for programs. Times in seconds, memory in bytes."""
    return {
        "recommendation": recommendation(plan, work),
        "settings": settings(plan, work),
        "step_s": {
            "asynchronous": plan.asynchronous_s,
            "synchronous": plan.synchronous_s,
            "taking_turns_on_the_same_gpus": together_s(decoder, machine, work, plan.tensor_parallel),
            "ideal_split": plan.ideal_s,
        },
        "bottleneck": plan.bottleneck,
        "bounds_s": plan.bounds,
        "sampling": asdict(plan.sampling),
        "train_s": plan.train_s,
        "update_s": {
            "total": plan.update_s, "write": plan.write_s, "transfer": plan.transfer_s, "stall": plan.stall_s
        },
        "staleness": ages(plan, work),
        "memory_bytes": {
            "trainer": {**asdict(plan.trainer_memory), "total": plan.trainer_memory.total},
            "engine_gpu": {"weights": plan.weight_bytes, "cache": plan.cache_bytes},
            "usable": machine.usable_bytes,
        },
        "tokens": {
            "trained_per_step": work.tokens,
            "trained_per_s": work.tokens / plan.asynchronous_s,
            "completion_mean": work.lengths.mean,
            "completion_longest_of_step": work.longest,
        },
        "parameters": decoder.parameters,
        "machine": asdict(machine),
    }  # fmt: skip


def seconds(value: float) -> str:
    """Format a time: 12 ms, 3.4 s, 5:20 min."""
    if value < 0.1:
        return f"{value * 1000:.2g} ms"
    if value < 100:
        return f"{value:.3g} s"
    return f"{int(value) // 60}:{int(value) % 60:02} min"


def gib(count: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{count / GIB:.1f} GiB"


def show(plan: Plan, decoder: DecoderConfig, machine: Machine, work: Workload, others: list[Plan]) -> Group:
    """Render the whole report; `others` are the best plans of other leads and splits, for comparison."""
    return Group(
        Text(recommendation(plan, work), style="bold"),
        _times(plan, decoder, machine, work),
        _memory(plan, machine),
        _others(plan, others),
        Text("settings", style="bold"),
        Text(toml(settings(plan, work))),
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if 0 < index < len(columns) - 1 else "left", no_wrap=index == 0)
    return table


def _times(plan: Plan, decoder: DecoderConfig, machine: Machine, work: Workload) -> Table:
    table = _table("one step", "", "time", "how")
    sampled, age, mean = plan.sampling, ages(plan, work), work.lengths.mean
    turns = together_s(decoder, machine, work, plan.tensor_parallel)
    rows = [
        ("sampling, seats always taken", seconds(sampled.full_s),
         f"{work.sampled:,.0f} completions of {mean:,.0f} tokens; up to {sampled.seats:.0f} at once an engine"),
        ("sampling, started together", seconds(sampled.together_s),
         f"to the end of the longest: {work.longest:,.0f} tokens"),
        ("longest completion", seconds(sampled.longest_s), f"decode step {seconds(sampled.decode_s)}"),
        ("training", seconds(plan.train_s),
         f"{work.tokens:,.0f} tokens, MFU {machine.mfu:g}{', recomputation' if plan.recompute else ''}"),
        ("weight update", seconds(plan.update_s),
         f"write {seconds(plan.write_s)}, send {seconds(plan.transfer_s)}, stall {seconds(plan.stall_s)}"),
        ("step, asynchronous", seconds(plan.asynchronous_s), f"waits for: {plan.bottleneck}"),
        ("step, synchronous (lead 0)", seconds(plan.synchronous_s), "sampling together + training + update"),
        ("taking turns on the same GPUs", seconds(turns) if turns else "-",
         "for comparison, not Maestrale" if turns else "both sides do not fit into memory together"),
        ("no rest, no waiting", seconds(plan.ideal_s), "GPU-seconds of both sides over all GPUs"),
        ("mean age of a trained token", f"{age['mean_age']:.1f}", f"versions; at most {age['largest_age']:.0f}"),
        ("open completions / batch", f"{age['open_per_step']:.0f}", "Magistral's n_async / n_batch; it keeps to 2"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan, machine: Machine) -> Table:
    table = _table(f"memory of a GPU, of {gib(machine.usable_bytes)} to use", "", "needs", "of which")
    held = plan.trainer_memory
    parts = [("states", held.states), ("gathered", held.gathered), ("frozen models", held.frozen),
             ("weight buffers", held.buffers), ("activations", held.activations)]  # fmt: skip
    table.add_row("trainer", gib(held.total), ", ".join(f"{name} {gib(count)}" for name, count in parts if count))
    engine = f"weights {gib(plan.weight_bytes)}, KV cache {gib(plan.cache_bytes)}"
    table.add_row("engine", gib(plan.weight_bytes + plan.cache_bytes), engine)
    return table


def _others(plan: Plan, others: list[Plan]) -> Table:
    columns = ("trainers", "engines", "GPUs each", "lead", "asynchronous", "synchronous", "waits for")
    table = _table("other splits", *columns)
    for other in others:
        table.add_row(
            str(other.trainers), str(other.engines), str(other.tensor_parallel), str(other.lead),
            seconds(other.asynchronous_s), seconds(other.synchronous_s), other.bottleneck,
            style="bold" if other == plan else "",
        )  # fmt: skip
    return table
