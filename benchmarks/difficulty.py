"""How well the two-stage filter finds wrong labels: planted ones among the quickstart's stories, with a real grader.

    python -m benchmarks.difficulty [--problems 600] [--wrong 0.05] [--folder runs/difficulty] [--no-write]

A tiny model starts cold (a fair share of guesses, as in the quickstart). Its samples are the first stage; the grader is
trained from it by reinforcement learning on what is left, wrong labels among it, and re-scores all. The same samples
then say how the first model alone would have judged. Everything is resumable with the same command. The section goes
into docs/curation.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.page import launch
from benchmarks.section import ROOT, describe_machine, write
from curate import runner
from curate.difficulty import CONTRADICTED, NEVER, OFTEN, DifficultyStage, LabelsStage

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
    """Rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
    """The quickstart's settings, without SFT."""
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
    """What labels and difficulty make of one model's samples, each on all problems."""
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
    """E.g. "28 of 30 (93 %)"."""
    return f"{part} of {whole} ({part / whole:.0%})".replace("%", " %") if whole else "none"


def table(judgements: list[Judgement], problems: int, planted: int, samples: int) -> str:
    """The section of the document."""
    lines = [
        f"Measured on {datetime.date.today():%Y-%m-%d} with `python -m benchmarks.difficulty` on {describe_machine()}: "
        f"{problems} of the quickstart's stories, {planted} of them with a wrong label, {samples} samples a problem. "
        "The grader is the first model after reinforcement learning on the problems that it solved sometimes "
        f"(two-stage, --most {MOST:g}); both columns judge all problems.",
        "",
        "| | " + " | ".join(judgement.name for judgement in judgements) + " |",
        "|---|" + "---|" * len(judgements),
    ]
    valid = problems - planted
    rows = [
        ("solves, mean over right labels", lambda j: f"{j.accuracy:.3f}"),
        ("wrong labels that its majority contradicts (recall)", lambda j: percent(j.found, planted)),
        ("contradicted labels that are wrong (precision)", lambda j: percent(j.found, j.found + j.false)),
        ("right labels dropped as never solved", lambda j: percent(j.never_valid, valid)),
        ("wrong labels dropped as never solved", lambda j: percent(j.never_planted, planted)),
        (f"right labels solved in more than {MOST:.0%} of samples".replace("%", " %"),
         lambda j: percent(j.often, valid)),
    ]  # fmt: skip
    lines += [f"| {name} | " + " | ".join(cell(judgement) for judgement in judgements) + " |" for name, cell in rows]
    return "\n".join([*lines, ""])


def main() -> None:
    """Train, filter, judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=600, help="of the 4000 stories (default 600)")
    parser.add_argument("--samples", type=int, default=16, help="completions a problem (default 16)")
    parser.add_argument("--wrong", type=float, default=0.05, help="share of wrong labels (default 0.05)")
    parser.add_argument("--steps", type=int, default=100, help="of the grader's training (default 100)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "difficulty")
    parser.add_argument("--no-write", action="store_true", help="print the table only")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    launch("start", folder, str(CONFIG), "--steps=0")  # its problems lie in made/
    start = folder / "start"
    given, out = folder / "problems.jsonl", folder / "curated.jsonl"
    planted = plant(start / "made" / "train.jsonl", given, options.problems, options.wrong)
    write_grader(folder / "grader.toml", start, options.steps)
    command = ["two-stage", str(given), "--grader", str(folder / "grader.toml"), "--out", str(out)]
    command += ["--samples", str(options.samples), "--most", str(MOST)]
    if code := subprocess.run([sys.executable, "-m", "curate", *command], cwd=ROOT).returncode:
        raise SystemExit(code)
    judgements = [
        judge("first model", folder / "curated.1_sampled.jsonl", folder, planted),
        judge("grader", folder / "curated.4_graded.jsonl", folder, planted),
    ]
    section = table(judgements, options.problems, len(planted), options.samples)
    print(section)
    if not options.no_write:
        write(section, ROOT / "docs" / "curation.md", "difficulty")


if __name__ == "__main__":
    main()
