"""Step time with async level 0 to 4 against max(generation, training), scripted ranks; then the quickstart's own
launches.

Two scripted engines (scripted.py) decode 64 completions of 128 a step at a time, with heavy-tailed lengths (lognormal,
the longest cut at four times the mean); a trainer sleeps. Generation and training of a step take 2:1, 1:1 and 1:2. The
ideal is

    max(generation, training):  generation = tokens of a step * token_s / places of all engines,
                                training = forward and backward + optimiser step

with the tokens that were really trained. Level 0 is synchronous (their sum, and the engines wait for the longest
completion); async level 1, 2, 4 let sampling run ahead by so many batches. The times of a real step are minutes; here
they are 0.6 s, so that the controller's own work weighs more.

At the end the quickstart itself, synchronous and with its own async level, without SFT, evaluation and filter, so
that both train equal numbers of completions: one trainer and one engine with a thread each.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.controller_run import Measures, play_in_folder
from benchmarks.end_to_end import StepTime, counted, from_metrics
from benchmarks.figures import Figure, benchmark
from benchmarks.scripted import Script, length_table
from benchmarks.startup import OVERRIDES, quickstart

ASYNC_LEVELS, DEFAULT_ASYNC_LEVEL = (0, 1, 2, 4), 2
BALANCES = {"2:1": (0.6, 0.3), "1:1": (0.6, 0.6), "1:2": (0.3, 0.6)}
"""generation : training -> seconds of each"""
PROMPTS, GROUP_SIZE = 16, 8
SIGMA, LONGEST, MEAN_TOKENS = 0.8, 4.0, 200.0
UPDATE_S = 0.01
OPTIMISER_SHARE = 0.1
"""of the training time"""
TARGET, AHEAD_TARGET = 1.10, 0.95
REST = 4
"""steps at the beginning and at the end that are not counted: the window of the ledger opens and closes there"""
LAUNCH_STEPS, WARM_UP = 16, 4


def script_for(generation_s: float, training_s: float) -> Script:
    """Return ranks that take so long for a step, on average over the table of lengths."""
    engines, seats = 2, 32
    lengths = length_table(Script(sigma=SIGMA, longest=LONGEST, mean_tokens=MEAN_TOKENS))
    tokens = PROMPTS * GROUP_SIZE * sum(lengths) / len(lengths)
    return Script(
        engines=engines, seats=seats, token_s=generation_s * engines * seats / tokens, mean_tokens=MEAN_TOKENS,
        sigma=SIGMA, longest=LONGEST, accumulate_s=(1 - OPTIMISER_SHARE) * training_s,
        step_s=OPTIMISER_SHARE * training_s, publish_s=UPDATE_S, update_s=UPDATE_S,
    )  # fmt: skip


def of_ideal(measures: Measures, script: Script, rest: int = REST) -> float:
    """Return the time of a step beside max(generation, training), a mean over the steps that are counted."""
    last = len(measures.steps) - 1 - rest
    tokens = statistics.fmean(
        PROMPTS * GROUP_SIZE * step["length/mean"] for step in measures.steps[rest + 1 : last + 1]
    )
    generation_s = tokens * script.token_s / (script.engines * script.seats)
    return measures.step_s(rest, last) / max(generation_s, script.accumulate_s + script.step_s)


def launch(async_level: int) -> list[StepTime]:
    """Return the steps of one launch of the quickstart that count."""
    with tempfile.TemporaryDirectory() as folder:
        quickstart(Path(folder), {"steps": LAUNCH_STEPS, "rollout.max_async_level": async_level, "checkpoint.every": 0})
        steps = from_metrics(Path(folder) / str(OVERRIDES["name"]) / "metrics.jsonl")
        return counted(steps, WARM_UP, DEFAULT_ASYNC_LEVEL)


def ahead(launches: Mapping[int, Sequence[Sequence[StepTime]]]) -> Iterator[Figure]:
    """Yield the seconds of a step, and each async level beside the median of the synchronous ones. launches:
    async_level -> steps."""
    seconds = {async_level: [statistics.fmean(step.seconds for step in one) for one in found]
               for async_level, found in launches.items()}  # fmt: skip
    alone = statistics.median(seconds[0])
    names = {level: f"quickstart, async level {level}" if level else "quickstart, synchronous" for level in seconds}
    for async_level, values in seconds.items():
        yield Figure(f"{names[async_level]}: step", values, "s", better="lower")
    for async_level, values in seconds.items():
        if async_level:
            beside = [value / alone for value in values]
            yield Figure(f"{names[async_level]}: step time", beside, "", "synchronous", "lower", AHEAD_TARGET)


@benchmark()
def asynchrony(quick: bool) -> Iterator[Figure]:
    """Measure each balance with each async level, then launches that take turns."""
    steps, repeats = (14, 1) if quick else (24, 2)
    for balance, times in BALANCES.items():
        script, runs = script_for(*times), {async_level: list[float]() for async_level in ASYNC_LEVELS}
        for _ in range(repeats):
            for async_level, values in runs.items():
                values.append(of_ideal(play_in_folder(script, steps, PROMPTS, GROUP_SIZE, async_level), script))
        for async_level, values in runs.items():
            name = f"generation : training {balance}, " + (
                f"async level {async_level}" if async_level else "synchronous"
            )
            target = TARGET if async_level == DEFAULT_ASYNC_LEVEL else None
            yield Figure(f"{name}: step time", values, "", "max(generation, training)", "lower", target)
    launches: dict[int, list[list[StepTime]]] = {0: [], DEFAULT_ASYNC_LEVEL: []}
    for _ in range(repeats):
        for async_level, found in launches.items():
            found.append(launch(async_level))
    yield from ahead(launches)
