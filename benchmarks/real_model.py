"""The figures of a finished run of examples/gsm8k/settings.toml, out of its metrics."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.report import table
from shared.metrics import read_rows

MEDIANS = [
    # label, metric, unit
    ("step", "time/step_s", "s"),
    ("sampled", "tokens/generated_per_s", "tokens/s"),
    ("trained", "tokens/trained_per_s", "tokens/s"),
    ("weights written", "sync/write_s", "s"),
    ("engine's update", "sync/update_s", "s"),
    ("update with proof", "sync/total_s", "s"),
]
ROLES = ("controller", "trainer", "engine")
CURVES = {"mean reward": "reward/mean", "accuracy": "accuracy", "language consistency": "consistency"}


@benchmark(page="docs/models.md")
def real_model(quick: bool, run: Path = Path("runs/smollm2-gsm8k")) -> Iterator[Section]:
    """Read the metrics of the run."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "train"]
    day = datetime.date.fromtimestamp((run / "metrics.jsonl").stat().st_mtime)
    medians = [f"{label} {statistics.median(row[metric] for row in rows if metric in row):.3g} {unit}"
               for label, metric, unit in MEDIANS]  # fmt: skip
    peaks = [f"{role} {max(row[f'memory/{role}_peak_bytes'] for row in rows) / 2**30:.1f} GiB" for role in ROLES]
    curves = table(["step", *(row["step"] for row in rows)],
                   *([label, *(f"{row[name]:.2f}" for row in rows)] for label, name in CURVES.items()))  # fmt: skip
    yield Section(
        f"{measured_with('real_model', day)}.\n\n{curves}\n"
        f"Medians: {', '.join(medians)}. Peak resident memory: {', '.join(peaks)}.\n", mark="smollm2",
    )  # fmt: skip
