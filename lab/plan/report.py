"""Renders a split for readers (one sentence, tables, settings to copy) and for programs (JSON)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.plan.scenario import CARDS, Machine, Scenario
from lab.plan.split import Split
from lab.plan.times import WIDTH
from trainer.memory import activation_bytes


def settings(split: Split, scenario: Scenario) -> dict[str, Any]:
    """Return the settings of a run with this split: section.key -> value."""
    work = scenario.work
    return {
        "placement.trainers": split.trainers,
        **({"placement.replicas": split.replicas} if split.replicas > 1 else {}),
        **({"placement.tensor": scenario.tensor} if scenario.tensor > 1 else {}),
        **({"placement.context": scenario.context} if scenario.context > 1 else {}),
        "placement.engines": split.engines, "rollout.tensor_parallel": split.tensor_parallel,
        "rollout.max_async_level": split.async_level, "rollout.max_sequences": split.max_sequences,
        **({"placement.colocate": split.sharing} if split.sharing else {"rollout.cache_bytes": split.cache_bytes}),
        "rollout.prompts_per_step": work.prompts_per_step, "rollout.group_size": work.group_size,
        "rollout.max_completion_tokens": work.max_completion_tokens, "model.max_tokens": work.max_tokens,
        "optimiser.micro_batch_tokens": work.micro_batch_tokens,
        **({"optimiser.activation_bytes": activation_budget(scenario, split)} if split.again.layers else {}),
        **({"lora.rank": work.lora_rank} if work.lora_rank else {}),
    }  # fmt: skip


def activation_budget(scenario: Scenario, split: Split) -> int:
    """The value of optimiser.activation_bytes with which a launch keeps what the split counts."""
    tokens, again = scenario.work.micro_batch_most, split.again
    return 0 if again.inputs_on_host else activation_bytes(scenario.decoder, tokens, WIDTH, again)


def toml(values: dict[str, Any]) -> str:
    """Render settings as TOML, by section."""
    lines: dict[str, list[str]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        lines.setdefault(section, [f"[{section}]"]).append(f"{name} = {json.dumps(value)}")
    return "\n".join(line for section in lines.values() for line in section)


def recommendation(split: Split) -> str:
    """Return one line with the split, its step times and its bottleneck."""
    if split.sharing:
        way = "both in its memory" if split.sharing == "resident" else "in turns"
        return (
            f"trainer and engine share one GPU, {way}, async level {split.async_level}: a step of "
            f"{seconds(split.asynchronous_s)}"
        )
    share = split.trainers / (split.trainers + split.engines * split.tensor_parallel)
    return (
        f"{split.trainers} trainers and {split.engines} engines of {split.tensor_parallel} GPU"
        f"{'' if split.tensor_parallel == 1 else 's'} ({share:.0%} train), async level {split.async_level}: a step of "
        f"{seconds(split.asynchronous_s)} instead of {seconds(split.synchronous_s)} synchronously "
        f"({split.synchronous_s / split.asynchronous_s:.2f} times faster), limited by: {split.bottleneck}"
    )


def as_json(scenario: Scenario, split: Split) -> dict[str, Any]:
    """Return the whole plan for programs. Times in seconds, memory in bytes."""
    work = scenario.work
    return {
        "recommendation": recommendation(split), "settings": settings(split, scenario),
        "step_s": {"asynchronous": split.asynchronous_s, "synchronous": split.synchronous_s},
        "bottleneck": split.bottleneck, "bounds_s": split.bounds, "split": asdict(split),
        "tokens": {
            "trained_per_step": work.tokens, "trained_per_s": work.tokens / split.asynchronous_s,
            "completion_mean": work.lengths.mean, "completion_longest_of_step": work.longest,
        },
        "parameters": scenario.decoder.parameters,
        "usable_bytes": scenario.machine.usable_bytes,
        "machine": asdict(scenario.machine),
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
    return f"{count / (1 << 30):.1f} GiB"


def show(scenario: Scenario, split: Split) -> Group:
    """Render the whole report."""
    usable = gib(scenario.machine.usable_bytes)
    return Group(
        Text(recommendation(split), style="bold"),
        Text(speeds(scenario.machine)),
        _table("one step", ("", "time", "how"), _time_rows(scenario, split)),
        _table(f"memory of a GPU, of {usable} to use", ("", "needs", "of which"), _memory_rows(split)),
        Text("settings", style="bold"),
        Text(toml(settings(split, scenario))),
    )


def speeds(machine: Machine) -> str:
    """Say of which card the speeds are, and where its memory is another."""
    card, numbers = (
        CARDS[machine.card],
        f"{machine.flops_per_s / 1e12:,.0f} TFLOP/s, {machine.bandwidth / 1e9:,.0f} GB/s",
    )
    text = f"speeds of a GPU: {numbers}"
    if machine.flops_per_s != card.flops_per_s and machine.bandwidth != card.bandwidth:
        return text
    other = (
        f", which has {card.memory_bytes / 1e9:g} GB and not {machine.memory_bytes / 1e9:g}: the times are "
        "not those of your card. Name it (--card), or give its --tflops and --bandwidth"
    )
    return f"{text} ({machine.card})" + other * (machine.memory_bytes != card.memory_bytes)


def _table(title: str, columns: tuple[str, str, str], rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column == columns[1] else "left", no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*row)
    return table


def _time_rows(scenario: Scenario, split: Split) -> list[tuple[str, str, str]]:
    work, sampled = scenario.work, split.sampling
    recomputed = ", recomputation" if split.again.layers else ""
    recomputed += ", inputs of layers on the host" if split.again.inputs_on_host else ""
    return [
        ("sampling, slots always taken", seconds(sampled.full_s),
         f"{work.sampled:,.0f} completions of {work.lengths.mean:,.0f} tokens; up to {sampled.slots:.0f} at once an "
         "engine"),
        ("sampling, started together", seconds(sampled.together_s),
         f"to the end of the longest: {work.longest:,.0f} tokens"),
        ("longest completion", seconds(sampled.longest_s), f"decode step {seconds(sampled.decode_s)}"),
        ("training", seconds(split.train_s), f"{work.tokens:,.0f} tokens, MFU {scenario.machine.mfu:g}{recomputed}"),
        ("weight update", seconds(split.update_s),
         f"write {seconds(split.write_s)}, delivery {seconds(split.delivery_s)}, in which engines pause"),
        ("step, asynchronous", seconds(split.asynchronous_s), f"waits for: {split.bottleneck}"),
        ("step, synchronous (async level 0)", seconds(split.synchronous_s), "sampling together + training + update"),
    ]  # fmt: skip


def _memory_rows(split: Split) -> list[tuple[str, str, str]]:
    rank = split.trainer_memory
    names = {"frozen": "frozen models", "buffers": "weight buffers"}
    parts = [f"{names.get(name, name)} {gib(count)}" for name, count in asdict(rank).items() if count]
    engine = [("weights", split.weight_bytes), ("weights on their way", split.arriving_bytes),
              ("KV cache", split.cache_bytes)]  # fmt: skip
    return [
        ("trainer", gib(rank.total), ", ".join(parts)),
        ("engine", gib(sum(count for _, count in engine)), ", ".join(f"{name} {gib(count)}" for name, count in engine)),
    ]
