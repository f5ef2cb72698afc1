"""Run ablations and write their tables and plots into docs/results/ablations, with machine and date.

    python -m benchmarks.ablations [FILES ...] [--runs-dir runs/ablations] [--no-run]

Without files: what Magistral's claims need on two cores (quick.toml and programs.toml). Every run is an ordinary launch
(`python -m lab.ablate`); a finished one is not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.section import ROOT, describe_machine
from shared.atomic_write import beside

FILES = [Path("configs/ablations/quick.toml"), Path("configs/ablations/programs.toml")]
RESULTS = ROOT / "docs" / "results" / "ablations"


def publish(file: Path, folder: Path) -> Path:
    """Copy table and plot of one ablation, saying where and when it was run. Exits where no run is finished."""
    name = file.stem
    if not (folder / "plot.png").is_file():
        raise SystemExit(f"error: {folder} has no finished run to show: run `python -m lab.ablate {file}` first")
    text = (folder / "table.md").read_text(encoding="utf-8")
    heading, _, rest = text.partition("\n")
    when = datetime.datetime.fromtimestamp((folder / "launches.jsonl").stat().st_mtime)
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "plot.png", RESULTS / f"{name}.png")
    shutil.copyfile(folder / "results.json", RESULTS / f"{name}.json")
    document = RESULTS / f"{name}.md"
    with beside(document) as partial:
        partial.write_text(
            f"{heading}\n\nMeasured on {when:%Y-%m-%d} on {describe_machine()}; written by "
            f"`python -m benchmarks.ablations {file}`.\n{rest.replace('(plot.png)', f'({name}.png)')}",
            encoding="utf-8",
        )
    return document


def main() -> None:
    """Run, then publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=FILES)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--no-run", action="store_true", help="only write what is finished")
    options = parser.parse_args()
    command = [sys.executable, "-m", "lab.ablate", *map(str, options.files), f"--runs-dir={options.runs_dir}"]
    code = subprocess.run([*command, *["--report"] * options.no_run], cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(code)
    for file in options.files:
        print(publish(file, ROOT / options.runs_dir / file.stem))


if __name__ == "__main__":
    main()
