"""Cold start, then reinforcement learning, of a real language model on a CPU; results into docs/results/smollm2.md.

    pip install -e ".[cpu,smollm2,recipe]"      (make recipe does it, and starts this)
    python -m benchmarks.recipe [--runs-dir runs/recipe] [--rl-steps 100] [--report-only]

Three launches and a report: problems are made (easy_problems.py), `mode = "sft"` imitates 800 worked ones and keeps
the version that does best on held-out problems, reinforcement learning goes on from there. A launch that ended is not
repeated, one that was stopped goes on.
What it does not: choose settings (configs/recipe/). Who calls this: people.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from benchmarks.easy_problems import write_files
from benchmarks.section import ROOT, describe_machine
from shared import settings_file
from shared.metrics import read_rows, series
from shared.progress import duration
from trainer.evaluate import Evaluation
from trainer.evaluations import EvaluationRecord, at_temperature, best_version, read_evaluations
from trainer.report import clean

SFT, RL = "smollm2-sft", "smollm2-rl"
RESULTS = ROOT / "docs" / "results"


def launch(config: str, runs_dir: Path, name: str, *settings: str) -> None:
    """Run one launch to its end unless it ended before. Exits if it fails."""
    if (runs_dir / name / "latest").exists():
        return
    command = [sys.executable, "-m", "trainer", config, f"--name={name}", f"--runs_dir={runs_dir}"]
    data = runs_dir / "data"
    command += [f"--data.train={data}/train.jsonl", f"--data.held_out={data}/held_out.jsonl", *settings]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(code)


def wall_s(run_dir: Path) -> float:
    """Seconds from the start of the first rank until the export."""
    began = (run_dir / "stacks" / "rank0.txt").stat().st_mtime  # its first line is written when the rank starts
    return (run_dir / "latest").stat(follow_symlinks=False).st_mtime - began


def pick(run_dir: Path, version: int | None) -> Evaluation:
    """The sampled evaluation of a version, None for the last."""
    config = settings_file.load(run_dir / "config.toml")
    records = at_temperature(read_evaluations(run_dir), config.rollout.temperature)
    chosen = records[-1] if version is None else next(record for record in records if record.version == version)
    return chosen.evaluation


def interval(accuracy: float, half_width: float) -> str:
    """"0.210 (0.172 to 0.248)"."""
    return f"{accuracy:.3f} ({accuracy - half_width:.3f} to {accuracy + half_width:.3f})"


def table(columns: dict[str, Evaluation]) -> list[str]:
    """Markdown: one column an evaluation."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]

    def add(label: str, cells: list[str]) -> None:
        lines.append(f"| {label} | {' | '.join(cells)} |")

    found = list(columns.values())
    add("**pass@1** (95 % interval over problems)", [interval(e.accuracy, e.accuracy_half_width) for e in found])
    add(f"maj@{found[0].completions}", ["" if e.majority is None else f"{e.majority:.3f}" for e in found])
    add("format", [f"{e.format:.3f}" for e in found])
    add("language consistency", [f"{e.consistency:.3f}" for e in found])
    add("tokens of a completion", [f"{e.tokens:.1f}" for e in found])
    for name in found[-1].parts:
        add(f"pass@1, {name.partition('/')[2]}", [
            interval(e.parts[name].accuracy, e.parts[name].accuracy_half_width) for e in found
        ])  # fmt: skip
    return lines


def draw(runs_dir: Path, records: list[EvaluationRecord], path: Path) -> None:
    """The curve of reinforcement learning: training accuracy and reward, held-out pass@1 with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from trainer.plot import BLUE, GREEN, ORANGE, STYLE

    rows = read_rows(runs_dir / RL / "metrics.jsonl")
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        for axis, names, title in (
            (axes[0], (("accuracy", BLUE, "training, sampled"), ("format", GREEN, "format")), "Accuracy"),
            (axes[1], (("length/mean", BLUE, "mean length, tokens"),), "Completion length"),
        ):
            for name, color, label in names:
                axis.plot(*series(rows, name), color=color, label=label, linewidth=1.3)
            axis.set_title(title)
            axis.set_xlabel("optimiser step")
        axes[0].errorbar(
            [record.version for record in records], [record.evaluation.accuracy for record in records],
            yerr=[record.evaluation.accuracy_half_width for record in records], color=ORANGE, marker="o", capsize=3,
            linestyle="--", label="held-out pass@1",
        )  # fmt: skip
        axes[0].set_ylim(0, 1.03)
        for axis in axes:
            axis.legend(loc="best")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def samples(evaluation: Evaluation, count: int = 5) -> list[str]:
    """Completions as they came, one of each kind of problem."""
    lines: list[str] = []
    by_kind = {sample.problem.source: sample for sample in reversed(evaluation.samples)}
    for kind, sample in sorted(by_kind.items())[:count]:
        said = f"{sample.reward.verdict.value}, reward {sample.reward.total:.2f}"
        lines += [f"**{kind}**, true answer {sample.problem.answer}, {said}", "", "```text"]
        lines += [clean(sample.problem.text), "", clean(sample.text).replace("```", "'''"), "```", ""]
    return lines


def report(runs_dir: Path) -> str:
    """The page. Raises SystemExit when reinforcement learning did not clearly help, after writing it all the same."""
    sft, rl = runs_dir / SFT, runs_dir / RL
    config = settings_file.load(rl / "config.toml")
    imitated = settings_file.load(sft / "config.toml")
    best = best_version(imitated)
    before, start, end = pick(sft, 0), pick(sft, best), pick(rl, None)
    records = at_temperature(read_evaluations(rl), config.rollout.temperature)
    draw(runs_dir, records, RESULTS / "smollm2.png")
    clear = end.accuracy - end.accuracy_half_width > start.accuracy + start.accuracy_half_width
    seconds = [wall_s(sft), wall_s(rl)]
    return "\n".join([
        "# SmolLM2-135M-Instruct: cold start, then reinforcement learning",
        "",
        f"Trained on {datetime.date.today():%Y-%m-%d} on {describe_machine()}; this page is written by `python -m "
        "benchmarks.recipe`.",
        f"Wall time: cold start {duration(seconds[0])}, reinforcement learning {duration(seconds[1])}, together "
        f"{duration(sum(seconds))}, start-up and evaluations included.",
        "",
        f"Problems: four kinds of reasoning-gym in their easiest settings (`benchmarks/easy_problems.py`); "
        f"{end.problems} held-out ones, {end.completions} completions each at temperature "
        f"{config.rollout.temperature:g}. Cold start: {imitated.cold_start.steps} supervised steps on demonstrations, "
        f"of which half answer at once; version {best} was best. Reinforcement learning: {config.steps} steps of "
        f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} completions.",
        "",
        *table({"as downloaded": before, "after the cold start": start, "after reinforcement learning": end}),
        "",
        f"The intervals of the last two columns {'do not overlap' if clear else 'OVERLAP: no clear gain'}.",
        "",
        "![accuracy and length over the steps](smollm2.png)",
        "",
        "## Completions after training",
        "",
        *samples(end),
    ])  # fmt: skip


def main() -> None:
    """Make the data, train twice, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "recipe")
    parser.add_argument("--rl-steps", type=int, default=0, help="instead of the configuration's")
    parser.add_argument("--report-only", action="store_true", help="write the page from runs that are there")
    options = parser.parse_args()
    runs_dir = options.runs_dir.resolve()
    if not options.report_only:
        data = runs_dir / "data"
        write_files(data)
        demonstrations = f"--cold_start.demonstrations={data}/demonstrations.jsonl"
        launch("configs/recipe/smollm2_sft.toml", runs_dir, SFT, demonstrations)
        steps = [f"--steps={options.rl_steps}"] if options.rl_steps else []
        best = (runs_dir / SFT / "best").resolve()
        launch("configs/recipe/smollm2_rl.toml", runs_dir, RL, f"--model.path={best}", *steps)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "smollm2.md").write_text(report(runs_dir), encoding="utf-8")
    print(f"written: {RESULTS / 'smollm2.md'}")


if __name__ == "__main__":
    main()
