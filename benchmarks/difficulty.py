"""How well the two-stage filter finds wrong labels: planted ones among the quickstart's stories, with a real grader.

A tiny model starts cold (a fair share of guesses, as in the quickstart). Its samples are the first stage; the grader is
trained from it by reinforcement learning on what is left, wrong labels among it, and re-scores all. The same samples
then say how the first model alone would have judged. Everything is resumable with the same command.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import ROOT, Section, benchmark, measured_with
from benchmarks.report import table
from benchmarks.runs import launch
from curate import runner
from curate.difficulty import CONTRADICTED, NEVER, OFTEN, DifficultyStage, LabelsStage
from shared.errors import RunError

CONFIG = ROOT / "configs" / "quickstart.toml"
SHIFTS = (-10, -2, -1, 1, 2, 10)
MOST = 0.9


class Judgement(NamedTuple):
    """What one model's samples lead to."""

    name: str
    accuracy: float
    """mean pass rate over problems with right labels"""
    found: int
    """planted labels that are contradicted"""
    false: int
    """right labels that are contradicted"""
    never_valid: int
    """problems with right labels that are never solved"""
    never_planted: int
    often: int
    """problems with right labels that are solved too often"""


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def plant(source: Path, path: Path, count: int, share: float) -> set[str]:
    """Write the first `count` problems, a share of them with a wrong label; returns the ids of these."""
    rng = random.Random("wrong labels")
    rows = read(source)[:count]
    wrong = rng.sample(rows, round(share * len(rows)))
    for row in wrong:
        label = int(row["answer"])
        row["answer"] = str(rng.choice([label + shift for shift in SHIFTS if label + shift >= 0]))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return {row["id"] for row in wrong}


def write_grader(path: Path, start: Path, steps: int) -> None:
    """Write the quickstart's settings, without SFT."""
    text = CONFIG.read_text(encoding="utf-8")
    changes = {
        'name = "quickstart"': f'name = "grader"\nruns_dir = "{path.parent}"',
        "steps = 100": f"steps = {steps}",
        'script = "examples/quickstart/prepare.py"': 'script = ""',
        'path = "made/model"': f'path = "{(start / "latest").resolve()}"',
        'validation = "made/validation.jsonl"': f'validation = "{start / "made" / "validation.jsonl"}"',
        'demonstrations = "made/demonstrations.jsonl"': 'demonstrations = ""',
        "steps = 450": "steps = 0",
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def judge(name: str, sampled: Path, folder: Path, planted: set[str]) -> Judgement:
    """Return what labels and difficulty make of one model's samples, each on all problems."""
    reasons: dict[str, set[str]] = {}
    for stage in (LabelsStage(), DifficultyStage(most=MOST)):
        out = folder / f"{name.replace(' ', '_')}.{stage.name}.jsonl"
        runner.run(stage, [sampled], out, quiet=True)
        for row in read(out.with_suffix(".rejected.jsonl")):
            reasons.setdefault(row["rejected"]["reason"], set()).add(row["id"])
    valid = [row for row in read(sampled) if row["id"] not in planted]
    contradicted, never = reasons.get(CONTRADICTED, set()), reasons.get(NEVER, set())
    return Judgement(
        name,
        accuracy=sum(row["pass_rate"] for row in valid) / len(valid),
        found=len(contradicted & planted),
        false=len(contradicted - planted),
        never_valid=len(never - planted),
        never_planted=len(never & planted),
        often=len(reasons.get(OFTEN, set()) - planted),
    )


def percent(part: int, whole: int) -> str:
    """Format a share, e.g. "28 of 30 (93 %)"."""
    return f"{part} of {whole} ({part / whole:.0%})".replace("%", " %") if whole else "none"


@benchmark(page="docs/curation.md")
def difficulty(
    quick: bool, problems: int = 600, samples: int = 16, wrong: float = 0.05, steps: int = 100,
    folder: Path = ROOT / "runs" / "difficulty",
) -> Iterator[Section]:  # fmt: skip
    """Train, filter, judge. problems: of the 4000 stories; wrong: share of wrong labels; steps: of the grader."""
    if quick:
        problems, samples, steps, folder = 40, 4, 3, folder / "quick"
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    launch("start", folder, str(CONFIG), "--steps=0")  # its problems lie in made/
    start, given = folder / "start", folder / "problems.jsonl"
    planted = plant(start / "made" / "train.jsonl", given, problems, wrong)
    write_grader(folder / "grader.toml", start, steps)
    command = ["two-stage", str(given), "--grader", str(folder / "grader.toml"), "--out", str(folder / "curated.jsonl"),
               "--samples", str(samples), "--most", str(MOST)]  # fmt: skip
    if code := subprocess.run([sys.executable, "-m", "curate", *command], cwd=ROOT, check=False).returncode:
        raise RunError(f"curate two-stage ended with code {code}")
    both = [judge("first model", folder / "curated.1_sampled.jsonl", folder, planted),
            judge("grader", folder / "curated.4_graded.jsonl", folder, planted)]  # fmt: skip
    count, right = len(planted), problems - len(planted)
    rows: dict[str, Callable[[Judgement], str]] = {
        "solves, mean over right labels": lambda j: f"{j.accuracy:.3f}",
        "wrong labels that its majority contradicts (recall)": lambda j: percent(j.found, count),
        "contradicted labels that are wrong (precision)": lambda j: percent(j.found, j.found + j.false),
        "right labels dropped as never solved": lambda j: percent(j.never_valid, right),
        "wrong labels dropped as never solved": lambda j: percent(j.never_planted, count),
        f"right labels solved in more than {100 * MOST:.0f} % of samples": lambda j: percent(j.often, right),
    }
    cells = table(["", *(one.name for one in both)], *([name, *map(cell, both)] for name, cell in rows.items()))
    yield Section(
        f"{measured_with('difficulty')}: {problems} of the quickstart's stories, {count} of them with a wrong label, "
        f"{samples} samples a problem. The grader is the first model after reinforcement learning on the problems that "
        f"it solved sometimes (two-stage, --most {MOST:g}); both columns judge all problems.\n\n{cells}",
        mark="difficulty",
    )
