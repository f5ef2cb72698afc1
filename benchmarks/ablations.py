"""Tables and plots of ablations in docs/results/ablations, with machine and date.

Without files: what Magistral's claims need on two cores (quick.toml and programs.toml). Every run is an ordinary launch
(`python -m lab.ablate`); a finished one is not repeated.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import ROOT, Section, benchmark, measured_with
from shared.errors import DataError, RunError

FILES = [Path("configs/ablations/quick.toml"), Path("configs/ablations/programs.toml")]
PAGES = "docs/results/ablations"


def page(file: Path, folder: Path) -> str:
    """Return the table of one ablation, saying where and when it was run. Raises DataError where no run is finished."""
    if not (folder / "plot.png").is_file():
        raise DataError(f"{folder} has no finished run to show: run `python -m lab.ablate {file}` first")
    heading, _, rest = (folder / "table.md").read_text(encoding="utf-8").partition("\n")
    when = datetime.date.fromtimestamp((folder / "launches.jsonl").stat().st_mtime)
    plot = rest.replace("(plot.png)", f"({file.stem}.png)")
    return f"{heading}\n\n{measured_with(f'ablations --files {file}', when)}.\n{plot}"


@benchmark(page="docs/results/ablations")
def ablations(
    quick: bool, files: list[Path] = FILES, runs_dir: Path = Path("runs/ablations"), no_run: bool = False
) -> Iterator[Section]:
    """Run, then publish table, plot and unrounded data. quick: the report alone."""
    command = [sys.executable, "-m", "lab.ablate", *map(str, files), f"--runs-dir={runs_dir}"]
    code = subprocess.run([*command, *["--report"] * (no_run or quick)], cwd=ROOT, check=False).returncode
    if code:
        raise RunError(f"lab.ablate ended with code {code}")
    for file in files:
        folder = ROOT / runs_dir / file.stem
        beside = {".png": (folder / "plot.png").read_bytes(), ".json": (folder / "results.json").read_bytes()}
        yield Section(page(file, folder), f"{PAGES}/{file.stem}.md", files=beside)
