"""SFT, then reinforcement learning, of a real language model on a CPU; results into docs/results/smollm2.md.

    pip install -e ".[cpu,smollm2,recipe]"      (make recipe does it, and starts this)
    python -m benchmarks.recipe [--runs-dir runs/recipe] [--rl-steps 100] [--report-only]

Three launches and a report: problems are made (easy_problems.py), `mode = "sft"` imitates 800 of them (half
worked, half answered at once) and keeps the version that does best on validation problems, reinforcement learning goes
on from there. A launch that ended is not repeated, one that was stopped goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.easy_problems import write_files
from benchmarks.page import clearly_above, draw, launch, one_of_each, pick, table, trained_on
from benchmarks.section import ROOT
from lab.ablate.runner import wall_s
from shared import settings_file
from shared.atomic_write import beside
from shared.progress import duration
from trainer.evaluation import best_version

SFT, RL = "smollm2-sft", "smollm2-rl"
RESULTS = ROOT / "docs" / "results"


def report(runs_dir: Path) -> str:
    """The page; it says so where reinforcement learning did not clearly help."""
    sft, rl = runs_dir / SFT, runs_dir / RL
    config = settings_file.load(rl / "config.toml")
    imitated = settings_file.load(sft / "config.toml")
    best = best_version(imitated)
    before, start, end = pick(sft, 0), pick(sft, best), pick(rl, None)
    draw(rl, RESULTS / "smollm2.png")
    clear = clearly_above(end, start)
    seconds = [wall_s(runs_dir, name) for name in (SFT, RL)]
    return "\n".join([
        "# SmolLM2-135M-Instruct: SFT, then reinforcement learning",
        "",
        f"{trained_on(rl)}; this page is written by `python -m "
        "benchmarks.recipe`.",
        f"Wall time: SFT {duration(seconds[0])}, reinforcement learning {duration(seconds[1])}, together "
        f"{duration(sum(seconds))}, start-up and evaluations included.",
        "",
        f"Problems: four kinds of reasoning-gym in their easiest settings (`benchmarks/easy_problems.py`); "
        f"{end.problems} validation ones, {end.completions} completions each at temperature "
        f"{config.rollout.temperature:g}. SFT: {imitated.sft.steps} SFT steps on demonstrations, "
        f"of which half answer at once; version {best} was best. Reinforcement learning: {config.steps} steps of "
        f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} completions.",
        "",
        *table({"as downloaded": before, "after SFT": start, "after reinforcement learning": end}),
        "",
        f"The intervals of the last two columns {'do not overlap' if clear else 'OVERLAP: no clear gain'}.",
        "",
        "![accuracy and length over the steps](smollm2.png)",
        "",
        "## Completions after training",
        "",
        *one_of_each(end),
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
        files = [f"--data.train={data}/train.jsonl", f"--data.validation={data}/validation.jsonl"]
        demonstrations = f"--sft.demonstrations={data}/demonstrations.jsonl"
        launch(SFT, runs_dir, "configs/recipe/smollm2_sft.toml", *files, demonstrations)
        steps = [f"--steps={options.rl_steps}"] if options.rl_steps else []
        best = (runs_dir / SFT / "best").resolve()
        launch(RL, runs_dir, "configs/recipe/smollm2_rl.toml", *files, f"--model.path={best}", *steps)
    RESULTS.mkdir(parents=True, exist_ok=True)
    page = report(runs_dir)
    with beside(RESULTS / "smollm2.md") as partial:
        partial.write_text(page, encoding="utf-8")
    print(f"written: {RESULTS / 'smollm2.md'}")


if __name__ == "__main__":
    main()
