"""The figures of a finished run of configs/smollm2_gsm8k.toml, out of its metrics, written into README.md.

python -m benchmarks.real_model runs/smollm2-gsm8k [--no-write]
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from pathlib import Path

from benchmarks.section import ROOT, describe_machine, write
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


def table(run_dir: Path) -> str:
    """The section of the README."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train"]
    day = datetime.date.fromtimestamp((run_dir / "metrics.jsonl").stat().st_mtime)
    medians = []
    for label, metric, unit in MEDIANS:
        medians.append(f"{label} {statistics.median(row[metric] for row in rows if metric in row):.3g} {unit}")
    peaks = [f"{role} {max(row[f'memory/{role}_peak_bytes'] for row in rows) / 2**30:.1f} GiB" for role in ROLES]
    return "\n".join(
        [
            f"Trained on {day:%Y-%m-%d} on {describe_machine()}; written by `python -m benchmarks.real_model`.",
            "",
            "| step | " + " | ".join(str(row["step"]) for row in rows) + " |",
            "|---" * (len(rows) + 1) + "|",
            "| mean reward | " + " | ".join(f"{row['reward/mean']:.2f}" for row in rows) + " |",
            "| accuracy | " + " | ".join(f"{row['accuracy']:.2f}" for row in rows) + " |",
            "| language consistency | " + " | ".join(f"{row['consistency']:.2f}" for row in rows) + " |",
            "",
            f"Medians: {', '.join(medians)}. Peak resident memory: {', '.join(peaks)}.",
            "",
        ]
    )


def main() -> None:
    """Read, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="folder of the finished run")
    parser.add_argument("--no-write", action="store_true", help="print the section only")
    options = parser.parse_args()
    section = table(options.run_dir)
    print(section)
    if not options.no_write:
        write(section, ROOT / "README.md", "smollm2")


if __name__ == "__main__":
    main()
