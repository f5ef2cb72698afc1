"""A tiny model learns to write programs that pass their tests.

Two launches and a report: examples/code/settings.toml (Python functions, and C++ programs that are compiled for real),
and the quickstart with three programs in ten problems. A launch that ended is not repeated, one that was stopped goes
on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.figures import ROOT, Section, benchmark
from benchmarks.runs import clearly_above, draw, launch, pick, shown, table, trained_on
from examples.quickstart.toy_programs import SOURCES
from lab.ablate.runner import wall_s
from shared.progress import duration
from shared.types import Group, Problem, Reward, Verdict

PROGRAMS, MIXED = "programs", "mixed"
LAUNCHES = {
    PROGRAMS: ["examples/code/settings.toml"],
    MIXED: [
        "configs/quickstart.toml",
        "--prepare.options.programs=0.3",
        "--rollout.max_completion_tokens=80",
        "--steps=60",
    ],
}
MIXED_COMMAND = " ".join(["python -m trainer", *LAUNCHES[MIXED]])


def cpp_samples(run_dir: Path) -> list[str]:
    """Return Markdown: a right C++ program of the last steps of training and a wrong one of the first."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem.partition("_")[2]))
    lines = ["### C++ programs of this run, compiled and run on their tests", ""]
    wanted = (("among the last", files[::-1], Verdict.CORRECT), ("among the first", files, Verdict.WRONG))
    for title, ordered, verdict in wanted:
        lines += next((shown(title, *one) for path in ordered for one in cpp_programs(path, verdict)), [])
    return lines


def cpp_programs(path: Path, verdict: Verdict) -> Iterator[tuple[Problem, str, Reward]]:
    """Yield problem, completion and reward of a step's C++ programs with this verdict."""
    for line in path.read_bytes().splitlines():
        group = msgspec.json.decode(line, type=Group)
        if group.prompt.problem.source != SOURCES["cpp"]:
            continue
        for text, reward in zip(group.texts, group.rewards, strict=True):
            if reward is not None and reward.verdict is verdict:
                yield group.prompt.problem, text, reward


def page(runs_dir: Path) -> str:
    """Return the page."""
    columns = {}
    for name in LAUNCHES:
        columns[name] = {"after SFT": pick(runs_dir / name, 0), "trained": pick(runs_dir / name, None)}
    lines = [
        "# Programs: a tiny model, rewarded by tests",
        "",
        f"{trained_on(runs_dir / PROGRAMS)}; this page is written by `python -m benchmarks tasks`.",
    ]
    titles = {PROGRAMS: "Programs only: `examples/code/settings.toml`", MIXED: f"Math and programs: `{MIXED_COMMAND}`"}
    for name, evaluations in columns.items():
        before, after = evaluations.values()
        verdict = "do not overlap" if clearly_above(after, before) else "OVERLAP: no clear gain"
        lines += [
            "", f"## {titles[name]}", "",
            f"{duration(wall_s(runs_dir, name))} of wall time, {after.problems} validation problems.", "",
            table(evaluations), f"The intervals of pass@1 {verdict}.",
        ]  # fmt: skip
        if name == PROGRAMS:
            lines += ["", "![accuracy and length over the steps](programs.png)", "", *cpp_samples(runs_dir / name)]
    return "\n".join([*lines, ""])


@benchmark(page="docs/results/programs.md")
def tasks(quick: bool, runs_dir: Path = ROOT / "runs" / "tasks", report_only: bool = False) -> Iterator[Section]:
    """Train twice, write the page. quick: a few steps each."""
    runs_dir = runs_dir.resolve() / ("quick" if quick else "")
    for name, words in LAUNCHES.items():
        if not report_only:
            launch(name, runs_dir, *words, *["--steps=3", "--sft.steps=30"] * quick)
    yield Section(page(runs_dir), files={".png": draw(runs_dir / PROGRAMS)})
