"""Analyse a run's weights: `python -m lab.analyse RUN_FOLDER`. `--help` explains what it makes and needs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shared import settings_file
from shared.atomic_write import write_whole
from shared.command_line import CommandParser
from shared.errors import ConfigError, run_command

if TYPE_CHECKING:
    from lab.analyse.surface import Survey

EXAMPLES = """
makes, in RUN_FOLDER/analysis/:
  plane.png     the path of the run's weights along the two directions in which they moved most (principal components)
  surface.png   reward, reward without length penalty, accuracy and mean length over that plane, with the path
  length.png    reward without length penalty against the logarithm of the mean length, with fit and R^2, over the
                points of the surface and over the training steps
  results.json  all numbers;  points.jsonl  the points measured so far

It needs the weights of at least three steps: checkpoints (or exports) that the run kept. Train with
  --checkpoint.every=5 --checkpoint.keep=100
For the surface one engine samples --problems x --samples completions from each of --points x --points models.
Ctrl-C stops; the same command goes on with the points that are missing.

examples:
  python -m lab.analyse runs/quickstart
  python -m lab.analyse runs/quickstart --points 9 --problems 256
  python -m lab.analyse runs/quickstart --points 0            (weights and training steps only: no engine)

exit codes: 0 done, 1 failed, 2 the run or an option is wrong (one line says which, and the repair), 130 stopped
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of the command."""
    parser = CommandParser(
        prog="python -m lab.analyse",
        description="Where a run's weights went, and what reward and length are around them.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run_dir", type=Path, metavar="RUN_FOLDER", help="folder of a finished or running run")
    parser.add_argument("--points", type=int, default=5, metavar="N", help="along each direction; 0: none (default 5)")
    parser.add_argument("--problems", type=int, default=64, metavar="N", help="problems a point (default 64)")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="completions a problem (default 4)")
    parser.add_argument(
        "--data", type=Path, metavar="FILE.jsonl", help="problems (default: the run's validation problems)"
    )
    parser.add_argument(
        "--margin", type=float, default=0.25, metavar="X", help="the surface goes so far beyond the path (default 0.25)"
    )
    parser.add_argument("--restart", action="store_true", help="forget the points that were measured")
    options = parser.parse_args(arguments)
    for name, least in (("points", 0), ("problems", 1), ("samples", 1), ("margin", 0)):
        if getattr(options, name) < least or (name == "points" and options.points == 1):
            parser.error(f"--{name} must be {'0 or at least 2' if name == 'points' else f'at least {least}'}")
    return options


def prepare(options: argparse.Namespace) -> Survey:
    """Read the run and find its plane. Raises MaestraleError."""
    sys.stderr.write(f"loading torch, then the weights that {options.run_dir} keeps\n")
    from lab.analyse.plane import find_plane
    from lab.analyse.snapshots import find_snapshots
    from lab.analyse.surface import Survey, warn
    from rollout.vllm_config import prepare_environment

    prepare_environment()  # before torch computes anything: its threads would not survive the engine's fork
    run_dir = options.run_dir.resolve()
    config = settings_file.load_run(options.run_dir)
    config = config.model_copy(update={"name": run_dir.name, "runs_dir": str(run_dir.parent)})
    if config.lora.rank:
        raise ConfigError(
            f"{run_dir} trained adapters (lora.rank = {config.lora.rank}): only whole weights are analysed"
        )
    snapshots = find_snapshots(options.run_dir)
    steps = ", ".join(str(snapshot.step) for snapshot in snapshots)
    warn(f"{len(snapshots)} snapshots, of steps {steps}: reading their weights twice")
    return Survey(config.at_stage(len(config.stages) - 1), snapshots, find_plane(snapshots), options)


def analyse(options: argparse.Namespace) -> int:
    """Measure, fit, draw, write results.json and print a summary."""
    survey = prepare(options)
    import msgspec  # these after the environment of torch is prepared

    from lab.analyse import draw
    from lab.analyse.draw import RewardByLength, training_points

    plane, folder = survey.plane, options.run_dir / "analysis"
    folder.mkdir(exist_ok=True)
    points = survey.points(folder / "points.jsonl")
    steps, training = training_points(options.run_dir)
    ordered = [points[key] for key in sorted(points)]
    surface = RewardByLength([point.length for point in ordered], [point.raw_reward for point in ordered])
    fits = {"surface": surface.fit, "training": training.fit}
    results = {
        "steps": plane.steps, "origin": plane.steps[-1], "explained": plane.explained,
        "path": plane.path.tolist(), "axes": survey.axes, "points": msgspec.to_builtins(ordered),
        "fits": msgspec.to_builtins(fits),
        "training": {"steps": steps, "lengths": training.lengths, "raw_rewards": training.rewards},
    }  # fmt: skip
    write_whole(folder / "results.json", json.dumps(results, indent=1) + "\n")
    title = f"{survey.config.name}: {len(plane.steps)} snapshots, steps {plane.steps[0]} to {plane.steps[-1]}"
    made = [draw.draw_plane(folder / "plane.png", plane, title)]
    if points:
        made.append(draw.draw_surfaces(folder / "surface.png", plane, survey.axes, points, title))
    made.append(draw.draw_lengths(folder / "length.png", surface, training, title))
    print(f"{title}; variance explained: {plane.explained[0]:.1%} + {plane.explained[1]:.1%}")
    for over, fit in fits.items():
        if fit is not None:
            quality = "rewards are all equal" if fit.r_squared is None else f"R^2 {fit.r_squared:.3f}"
            line = f"raw reward = {fit.slope:.3f} ln(length) {fit.intercept:+.3f}"
            print(f"{line} over {fit.points} {over} points, {quality}")
    print("\n".join(map(str, [*made, folder / "results.json"])))
    return 0


def main(arguments: list[str]) -> int:
    """Parse and run; returns the exit code."""
    options = parse(arguments)
    return run_command(lambda: analyse(options), "stopped; the same command goes on with the points that are missing")


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
