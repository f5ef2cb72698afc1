"""Seconds from the launch of the quickstart to its first trained step, by phase.

`python -m trainer configs/quickstart.toml` with one step, without SFT and evaluation, in a new folder each time:
torchrun, three ranks, everything made on the spot. The phases are those that the run itself writes down (phases.jsonl,
metrics.jsonl); they begin on rank 0, so that a phase in which it waits for other ranks shows what is left of their
start, not all of it. Beside them, in the same run, a process that only imports the rollout rank's code, vLLM mostly.
The first launch after a boot also reads files from the disk; the median leaves it out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import ROOT, Figure, benchmark
from shared.errors import RunError
from shared.metrics import read_rows

OVERRIDES = {
    "name": "start", "steps": 1, "sft.steps": 0, "data.validation": "", "objective.filter_groups_by": "off",
}  # fmt: skip
LAUNCH_S = 300.0
LOG_CHARACTERS = 3000
BEGIN, TRAINING = "imports and torchrun, until rank 0 works", "training"
BATCH, STEP = "first batch sampled and verified", "first optimiser step"
PEER = "import of vLLM and the rollout rank alone"


def phases(launched: float, begun: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> dict[str, float]:
    """Return phase -> seconds, in order. launched: Unix time. begun: lines of phases.jsonl. first: metrics of step 1.

    The phase TRAINING is told in two: the wait for the batch, and the rest until the step is written down. What begins
    after that does not count. Raises RunError if the run did not get so far.
    """
    marks = [(launched, BEGIN), *((float(line["time"]), str(line["phase"])) for line in begun)]
    marks = [mark for mark in marks if mark[0] <= first["time"]]
    if marks[-1][1] != TRAINING:
        raise RunError(f"step 1 was trained in the phase '{marks[-1][1]}', not in '{TRAINING}'")
    found: dict[str, float] = {}
    for (start, name), (end, _) in zip(marks[:-1], marks[1:], strict=True):
        found[name] = found.get(name, 0.0) + end - start
    waited = float(first["time/wait_batch_s"])
    return {**found, BATCH: waited, STEP: float(first["time"]) - marks[-1][0] - waited}


def run(command: Sequence[str]) -> float:
    """Return the seconds of a process. Raises RunError with the end of what it printed if it fails."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LAUNCH_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{' '.join(command)} did not end within {LAUNCH_S:.0f} s") from error
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-LOG_CHARACTERS:]}")
    return time.perf_counter() - start


def quickstart(folder: Path, settings: Mapping[str, object]) -> None:
    """Launch the quickstart into a folder with settings over OVERRIDES. Raises RunError."""
    words = [f"--{name}={value}" for name, value in {**OVERRIDES, "runs_dir": folder, **settings}.items()]
    run([sys.executable, "-m", "trainer", "configs/quickstart.toml", *words])


def launch(folder: Path) -> dict[str, float]:
    """Return phase -> seconds of one launch."""
    launched = time.time()
    quickstart(folder, {})
    run_dir = folder / str(OVERRIDES["name"])
    first = next(row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train")
    begun = [json.loads(line) for line in (run_dir / "phases.jsonl").read_text(encoding="utf-8").splitlines()]
    return phases(launched, begun, first)


def figures(launches: Sequence[Mapping[str, float]], imports: Sequence[float]) -> Iterator[Figure]:
    """Yield the sum of the phases, the sum beside the import alone, and each phase."""
    totals, alone = [sum(one.values()) for one in launches], statistics.median(imports)
    yield Figure("launch to first trained step", totals, "s", better="lower")
    beside = [total / alone for total in totals]
    yield Figure("launch to first trained step, beside the import", beside, "", PEER, "lower")
    yield Figure(PEER, list(imports), "s")
    for name in dict.fromkeys(name for one in launches for name in one):
        yield Figure(f"phase: {name}", [one.get(name, 0.0) for one in launches], "s")


@benchmark()
def startup(quick: bool) -> Iterator[Figure]:
    """Let launches and imports take turns."""
    launches, imports = [], []
    for _ in range(1 if quick else 5):
        imports.append(run([sys.executable, "-c", "import rollout.engine"]))
        with tempfile.TemporaryDirectory() as folder:
            launches.append(launch(Path(folder)))
    yield from figures(launches, imports)
