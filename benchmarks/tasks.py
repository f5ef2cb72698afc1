"""A tiny model learns to write programs that pass their tests; results into docs/results/programs.md.

    python -m benchmarks.tasks [--runs-dir runs/tasks] [--report-only]

Two launches and a report: configs/programs.toml (Python functions, and C++ programs that are compiled for real), and
the quickstart with three programs in ten problems. A launch that ended is not repeated, one that was stopped goes on.
What it does not: choose settings (configs/). Who calls this: people.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.page import clearly_above, draw, launch, pick, shown, table, wall_s
from benchmarks.section import ROOT, describe_machine
from shared.progress import duration
from shared.types import Group, Problem, Reward, Verdict

PROGRAMS, MIXED = "programs", "mixed"
LAUNCHES = {
    PROGRAMS: ["configs/programs.toml"],
    MIXED: ["configs/quickstart.toml", "--stories.programs=0.3", "--rollout.max_completion_tokens=80", "--steps=60"],
}
MIXED_COMMAND = " ".join(["python -m trainer", *LAUNCHES[MIXED]])
RESULTS = ROOT / "docs" / "results"
AT_BOTH_ENDS = 5
"""steps whose completions are compared"""


class Attempt(NamedTuple):
    """One graded completion of a programming problem."""

    problem: Problem
    text: str
    reward: Reward

    @property
    def cpp(self) -> bool:
        """Whether C++ was asked for."""
        return isinstance(self.problem.tests, dict) and self.problem.tests.get("language") == "cpp"


def read_attempts(run_dir: Path) -> list[list[Attempt]]:
    """[steps] The graded completions of programming problems in each step's rollouts, in order."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem.partition("_")[2]))
    found = []
    for path in files:
        groups = [msgspec.json.decode(line, type=Group) for line in path.read_bytes().splitlines()]
        found.append([
            Attempt(group.prompt.problem, text, reward)
            for group in groups if group.prompt.problem.domain == "code"
            for text, reward in zip(group.texts, group.rewards, strict=True) if reward is not None
        ])  # fmt: skip
    return found


def solved(attempts: list[Attempt]) -> str:
    """"12 of 40 (30 %)"."""
    right = sum(one.reward.verdict is Verdict.CORRECT for one in attempts)
    return f"{right} of {len(attempts)} ({right / len(attempts):.0%})".replace("%", " %") if attempts else "none"


def by_language(steps: list[list[Attempt]]) -> list[str]:
    """Markdown: programs of the first and of the last steps that passed every test."""
    first = [one for step in steps[:AT_BOTH_ENDS] for one in step]
    last = [one for step in steps[-AT_BOTH_ENDS:] for one in step]
    lines = [f"| trained programs | first {AT_BOTH_ENDS} steps | last {AT_BOTH_ENDS} steps |", "|---|---|---|"]
    for language, cpp in (("Python", False), ("C++, compiled", True)):
        ends = [solved([one for one in part if one.cpp is cpp]) for part in (first, last)]
        lines.append(f"| {language} | {' | '.join(ends)} |")
    return lines


def report(runs_dir: Path) -> str:
    """The page."""
    draw(runs_dir / PROGRAMS, RESULTS / "programs.png")
    steps = read_attempts(runs_dir / PROGRAMS)
    right = [one for step in reversed(steps) for one in step if one.cpp and one.reward.verdict is Verdict.CORRECT]
    wrong = [one for step in steps for one in step if one.cpp and one.reward.verdict is Verdict.WRONG]
    columns = {}
    for name in LAUNCHES:
        columns[name] = {"after the cold start": pick(runs_dir / name, 0), "trained": pick(runs_dir / name, None)}
    lines = [
        "# Programs: a tiny model, rewarded by tests",
        "",
        f"Trained on {datetime.date.today():%Y-%m-%d} on {describe_machine()}; this page is written by `python -m "
        "benchmarks.tasks`.",
    ]
    titles = {PROGRAMS: "Programs only: `configs/programs.toml`", MIXED: f"Math and programs: `{MIXED_COMMAND}`"}
    for name, evaluations in columns.items():
        before, after = evaluations.values()
        verdict = "do not overlap" if clearly_above(after, before) else "OVERLAP: no clear gain"
        lines += [
            "", f"## {titles[name]}", "",
            f"{duration(wall_s(runs_dir / name))} of wall time, {after.problems} held-out problems.", "",
            *table(evaluations), "", f"The intervals of pass@1 {verdict}.",
        ]  # fmt: skip
        if name == PROGRAMS:
            lines += ["", *by_language(steps), "", "![accuracy and length over the steps](programs.png)"]
    lines += ["", "## C++ programs of this run, compiled and run on their tests", ""]
    for title, found in (("among the last", right), ("among the first", wrong)):
        lines += shown(title, *found[0]) if found else [f"None {title}.", ""]
    return "\n".join(lines)



def main() -> None:
    """Train twice, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "tasks")
    parser.add_argument("--report-only", action="store_true", help="write the page from runs that are there")
    options = parser.parse_args()
    runs_dir = options.runs_dir.resolve()
    for name in LAUNCHES:
        if not options.report_only:
            launch(name, runs_dir, *LAUNCHES[name])
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "programs.md").write_text(report(runs_dir), encoding="utf-8")
    print(f"written: {RESULTS / 'programs.md'}")


if __name__ == "__main__":
    main()
