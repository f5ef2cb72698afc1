"""Records the wall times of launches: one line for each that ended, in a file beside the run folders."""

from __future__ import annotations

import json
from pathlib import Path

FILE = "launches.jsonl"


def note(run_dir: Path, seconds: float, code: int) -> None:
    """Append the duration of a launch and its exit code."""
    line = json.dumps({"run": run_dir.name, "seconds": round(seconds, 1), "code": code})
    with (run_dir.parent / FILE).open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")


def wall_s(folder: Path, run: str = "") -> float:
    """Return the seconds of all launches of a folder, or of one run, interrupted and failed ones included."""
    path = folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return float(sum(row["seconds"] for row in rows if run in ("", row["run"])))
