"""Does a step take as long as the slower side alone? The whole controller loop with scripted engines and trainers.

Two engines decode 64 completions of 128 a step at a time, with heavy-tailed lengths (lognormal, the longest cut at four
times the mean); a trainer sleeps. Generation and training of a step take 2:1, 1:1 and 1:2. The ideal is

    max(generation, training):  generation = tokens of a step * token_s / places of all engines,
                                training = forward and backward + optimiser step

with the tokens that were really trained. Level 0 is synchronous (their sum, and the engines wait for the longest
completion); async level 1, 2, 4 let sampling run ahead by so many batches. Idle shares: of the engines' places, and of
the trainer. The times of a real step are minutes; here they are 0.6 s, so that the controller's own work weighs more.
At the end the quickstart with real ranks (ahead.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.speed import ahead
from benchmarks.speed.rows import Row, Task
from benchmarks.speed.scene import Measures, play_in_folder
from benchmarks.speed.script import Script, length_table

ASYNC_LEVELS = (0, 1, 2, 4)
DEFAULT_ASYNC_LEVEL = 2
BALANCES = {"2:1": (0.6, 0.3), "1:1": (0.6, 0.6), "1:2": (0.3, 0.6)}
"""generation : training -> seconds of each"""
PROMPTS, GROUP_SIZE = 16, 8
ENGINES, SEATS = 2, 32
SIGMA, LONGEST, MEAN_TOKENS = 0.8, 4.0, 200.0
UPDATE_S = 0.01
"""write of the weights; the engines stand still for as long again"""
OPTIMISER_SHARE = 0.1
"""of the training time"""
TARGET = 1.10
REST = 4
"""steps at the beginning and at the end that are not counted: the window of the ledger opens and closes there"""


class Sides(NamedTuple):
    """Seconds of one step."""

    step: float
    generation: float
    training: float

    @property
    def of_ideal(self) -> float:
        """Step time beside max(generation, training)."""
        return self.step / max(self.generation, self.training)

    @property
    def idle(self) -> tuple[float, float]:
        """Shares of the time in which the engines' places, and the trainer, had nothing to do."""
        return 1.0 - self.generation / self.step, 1.0 - self.training / self.step


def script_for(generation_s: float, training_s: float) -> Script:
    """Ranks that take so long for a step, on average over the table of lengths."""
    lengths = length_table(Script(sigma=SIGMA, longest=LONGEST, mean_tokens=MEAN_TOKENS))
    tokens = PROMPTS * GROUP_SIZE * sum(lengths) / len(lengths)
    return Script(
        engines=ENGINES, seats=SEATS, token_s=generation_s * ENGINES * SEATS / tokens, mean_tokens=MEAN_TOKENS,
        sigma=SIGMA, longest=LONGEST, accumulate_s=(1 - OPTIMISER_SHARE) * training_s,
        step_s=OPTIMISER_SHARE * training_s, publish_s=UPDATE_S, update_s=UPDATE_S,
    )  # fmt: skip


def sides(measures: Measures, script: Script, rest: int = REST) -> Sides:
    """Means over the steps that are counted."""
    last = len(measures.steps) - 1 - rest
    counted = last - rest
    tokens = sum(step.completion_tokens for step in measures.steps[rest + 1 : last + 1]) / counted
    return Sides(
        step=measures.wall_s(rest, last) / counted,
        generation=tokens * script.token_s / (script.engines * script.seats),
        training=script.accumulate_s + script.step_s,
    )


def measure(balance: str, async_level: int, steps: int, told: Callable[[int], None] = lambda step: None) -> Sides:
    """One run."""
    script = script_for(*BALANCES[balance])
    return sides(play_in_folder(script, steps, PROMPTS, GROUP_SIZE, async_level, told), script)


def rows(task: Task) -> list[Row]:
    """Step times, and idle shares."""
    steps, repeats = (14, 1) if task.quick else (24, 2)
    task.parts(len(BALANCES) * len(ASYNC_LEVELS) * repeats + 1)
    found: list[Row] = []
    for balance in BALANCES:
        by_level: dict[int, list[Sides]] = {async_level: [] for async_level in ASYNC_LEVELS}
        for _ in range(repeats):
            for async_level in ASYNC_LEVELS:
                by_level[async_level].append(measure(balance, async_level, steps))
                task.part_done()
        for async_level, runs in by_level.items():
            found += of_level(balance, async_level, runs)
    found += ahead.rows(repeats)
    task.part_done()
    return found


def of_level(balance: str, async_level: int, runs: list[Sides]) -> list[Row]:
    """Of one balance and async level."""
    name = f"generation : training {balance}, " + (f"async level {async_level}" if async_level else "synchronous")
    target = TARGET if async_level == DEFAULT_ASYNC_LEVEL else None
    return [
        Row(f"{name}: step time", [run.of_ideal for run in runs], "", "max(generation, training)", "lower", target),
        Row(f"{name}: idle places of the engines", [run.idle[0] for run in runs], "%"),
        Row(f"{name}: idle trainer", [run.idle[1] for run in runs], "%"),
    ]
