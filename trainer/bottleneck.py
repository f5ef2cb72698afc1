"""What a run's time goes to, in a line or two for its report: the slowest part of a step, or a start that took longer
than all steps, each with what to try next. Read from metrics.jsonl (time/...) and phases.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.config import Config
from shared.errors import command_of
from shared.json_reader import parse_json

PHASES = "phases.jsonl"
"""in the run's folder: when each phase of each launch began"""
WINDOW = 20
"""steps that are looked at, the last ones"""
BATCH, TRAIN, SYNC, CHECKPOINT = "time/wait_batch_s", "time/train_s", "time/wait_sync_s", "time/checkpoint_s"
REST = "rest"
PARTS = {
    BATCH: "waiting for a full batch (engines, environments, verifiers)",
    TRAIN: "training (forward, backward, optimiser)",
    SYNC: "waiting for weight updates (in synchronous runs also for evaluations)",
    CHECKPOINT: "waiting for checkpoints",
    REST: "the rest (plan of the step, rollouts to disk)",
}
"""parts of time/step_s -> what they are; REST is what the others leave"""
MANY = 0.3
"""share of idle seats, cut completions or filtered groups that is reported"""


def lines(rows: list[dict[str, Any]], config: Config) -> list[str]:
    """Where the time of a run goes, and what to try; [] where that is not known. rows: of its metrics.jsonl."""
    steps = [row for row in rows if row["kind"] == "train" and (row.get("time/step_s") or 0) > 0]
    began = read_phases(config.run_dir / PHASES)
    if not steps:
        return [f'no training step yet; the last phase of the launch: "{began[-1][1]}"'] if began else []
    shares = part_shares(steps[-WINDOW:])
    slowest = max(shares, key=lambda name: shares[name])
    step_s = sum(row["time/step_s"] for row in steps[-WINDOW:]) / len(steps[-WINDOW:])
    report = [
        f"slowest part of a step: {PARTS[slowest]}, {shares[slowest]:.0%} of {step_s:.3g} s",
        f"to make it faster: {advice(slowest, steps[-WINDOW:], config)}",
    ]
    return [*report, *start_lines(began, steps)]


def part_shares(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Share of each of PARTS in the time of these steps, which sum to 1; a long step counts as long as it was."""
    whole = sum(row["time/step_s"] for row in steps)
    shares = {part: sum(row.get(part) or 0.0 for row in steps) / whole for part in PARTS if part != REST}
    return {**shares, REST: max(1 - sum(shares.values()), 0.0)}


def advice(slowest: str, steps: list[dict[str, Any]], config: Config) -> str:
    """What to try first where that part of a step is the slowest."""

    def mean(name: str) -> float:
        values = [row[name] for row in steps if row.get(name) is not None]
        return float(sum(values) / len(values)) if values else 0.0

    if slowest == BATCH:
        filtered = mean("groups/filtered") / max(mean("groups/filtered") + mean("groups/trained"), 1)
        if mean("environment/idle_seats") > MANY:
            return "engines wait for environments: make these faster, or raise rollout.prompts_per_step"
        if config.rollout.max_async_level == 0 and config.placement.colocate != "turns":
            return "let sampling run ahead of training: rollout.max_async_level = 1, unless they share a GPU in turns"
        if filtered > MANY:
            return f"{filtered:.0%} of the groups teach nothing: take problems of middling difficulty (data.pass_rate)"
        if mean("truncated") > MANY:
            return f"{mean('truncated'):.0%} of the completions are cut: raise reward.length, or SFT on shorter ones"
        engines = "more engines (placement.engines), or sequences at once (rollout.max_sequences)"
        return f"{engines}; see {command_of('lab.plan')}"
    if slowest == TRAIN:
        return "more trainers (placement.trainers), or adapters (lora.rank), which cost less to train"
    if slowest == SYNC:
        if config.rollout.max_async_level == 0:
            return "rollout.max_async_level = 1 lets both overlap with the next batch; or raise evaluate.every"
        slower = "trainers' write" if mean("sync/write_s") > mean("sync/update_s") else "engines' update"
        return f"the {slower} is the slower half (sync/write_s, sync/update_s): see rollout.transport"
    if slowest == CHECKPOINT:
        return "raise checkpoint.every, or put runs_dir on a faster disk"
    return "look at what else runs on the controller's machine, and at the disk of runs_dir"


def read_phases(path: Path) -> list[tuple[float, str]]:
    """(Unix time in s, phase) of all launches, in order; damaged lines are left out, a missing file is empty."""
    phases = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            row = parse_json(line)
            phases.append((float(row["time"]), str(row["phase"])))
        except (ValueError, TypeError, KeyError):
            continue
    return phases


def start_lines(began: list[tuple[float, str]], steps: list[dict[str, Any]]) -> Iterator[str]:
    """Tell of a last launch whose start took longer than all of its steps."""
    names = [name for _, name in began]
    first, training = (len(names) - 1 - names[::-1].index(name) if name in names else -1
                       for name in ("reading the problems", "training"))  # fmt: skip
    if not 0 <= first < training:
        return
    trained_s = sum(row["time/step_s"] for row in steps if row["time"] >= began[training][0])
    marks = began[first : training + 1]
    took = {name: end - begin for (begin, name), (end, _) in zip(marks[:-1], marks[1:], strict=True)}
    start_s, longest = sum(took.values()), max(took, key=lambda name: took[name])
    if start_s > trained_s:
        yield (
            f"the start of the last launch took {start_s:.0f} s, all its steps {trained_s:.0f} s; "
            f'longest: "{longest}", {took[longest]:.0f} s: train more steps a launch'
        )
