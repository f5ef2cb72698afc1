"""The line through points, the means of a point, the pictures, and the command without an engine."""

import asyncio
import json
import math
import subprocess
import sys
from argparse import Namespace
from unittest import mock

import msgspec
import numpy as np
import pytest

from lab.analyse import draw
from lab.analyse.__main__ import main
from lab.analyse.draw import RewardByLength, fit_log, training_points
from lab.analyse.plane import Plane
from lab.analyse.snapshots import WeightSnapshot
from lab.analyse.surface import Point, Survey, summarise
from shared import settings_file
from shared.chat import Chat
from shared.config import Config
from shared.errors import ConfigError
from shared.journal import Journal
from shared.metrics import MetricsLog
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from tests.lab.analyse.known_plane import basis, unflatten, write_checkpoint


def test_the_line_through_three_points_by_hand():
    # mean reward 7/3, slope ((1)(4 - 1)) / 2; residuals 1/6, -1/3, 1/6; total 14/3
    fit = fit_log([math.e, math.e**2, math.e**3], [1.0, 2.0, 4.0])
    assert fit is not None and fit.points == 3
    assert (fit.slope, fit.intercept) == pytest.approx((1.5, -2 / 3))
    assert fit.r_squared == pytest.approx(1 - (1 / 6) / (14 / 3))


def test_lines_that_cannot_be_fitted():
    assert fit_log([], []) is None and fit_log([5.0, 5.0, 5.0], [1.0, 2.0, 3.0]) is None
    flat = fit_log([5.0, 6.0, 7.0], [1.0, 1.0, 1.0])
    assert flat is not None and flat.r_squared is None and flat.slope == pytest.approx(0)


def test_the_length_penalty_is_taken_out_of_the_rewards_of_training(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"reward/mean": 0.5, "reward/length": -0.05, "length/mean": 20.0})
    log.write(2, {"evaluation/accuracy": 0.5})
    log.write(3, {"reward/mean": 0.75, "reward/length": 0.0, "length/mean": 30.0})
    steps, training = training_points(tmp_path)
    assert (steps, training.lengths) == ([1, 3], [20.0, 30.0]) and training.rewards == [pytest.approx(0.55), 0.75]


def point(row: int, column: int, length: float = 20.0) -> Point:
    return Point(row, column, (column / 2, row / 4), 0.5, 0.55, 0.4, 0.9, length, 0.1, 16)


def test_the_means_of_a_point():
    def reward(total: float, length: float, verdict: Verdict) -> Reward:
        return Reward(total, 0.1 if verdict is not Verdict.NO_ANSWER else 0.0, 0.0, length, 0.0, verdict)

    prompt = Prompt(0, Problem("a", "?", "1"), [1])
    completions = [Completion(0, index, 0, token_ids=[0] * tokens) for index, tokens in enumerate((2, 4, 6, 8))]
    rewards: list[Reward | None] = [
        reward(1.0, 0.0, Verdict.CORRECT), reward(0.25, -0.05, Verdict.WRONG), reward(0.0, 0.0, Verdict.NO_ANSWER),
        reward(9.0, 0.0, Verdict.TIMEOUT),
    ]  # fmt: skip
    found = summarise(1, 2, (0.5, -0.5), [Group(prompt, completions, rewards)], limit=8)
    assert found.reward == pytest.approx(1.25 / 3) and found.raw_reward == pytest.approx(1.3 / 3)
    assert found.accuracy == pytest.approx(1 / 3) and found.format == pytest.approx(2 / 3)
    assert (found.length, found.truncated, found.completions) == (5.0, 0.25, 4)


def test_points_of_the_file_are_not_measured_again(tmp_path, monkeypatch):
    """A whole file needs no engine; one of another survey is refused."""
    plane = Plane([0, 5, 10], [0.7, 0.3, 0.0], np.array([[-4.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), ({}, {}))
    config = Config.model_validate({"name": "run", "runs_dir": str(tmp_path)})
    (tmp_path / "run" / "latest").mkdir(parents=True)
    (tmp_path / "run" / "latest" / "config.json").touch()
    monkeypatch.setattr(Chat, "of_run", lambda *_: None)
    monkeypatch.setattr(Survey, "prompts", lambda *_: [])
    path, options = tmp_path / "points.jsonl", Namespace(points=2, margin=0.0, samples=4, restart=False)
    survey = Survey(config, [WeightSnapshot(step, "export") for step in plane.steps], plane, options)
    identity = {"snapshots": [[step, "export"] for step in plane.steps], "origin": 10, "points": 2, "margin": 0.0,
                "axes": [["-4", "0"], ["0", "2"]], "problems": [], "samples": 4}  # fmt: skip
    rows = [point(row, column) for row in range(2) for column in range(2)]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (identity, *rows)))
    assert list(survey.points(path).values()) == rows
    options.samples = 8
    with pytest.raises(ConfigError, match=r"made with other settings \(samples = 4, now 8\): give --restart"):
        survey.points(path)


def test_pictures_are_drawn(tmp_path):
    path = np.array([[-3.0, -0.5], [-2.0, 0.5], [-1.0, 1.0], [-0.01, 0.01], [0.0, 0.0]])
    plane = Plane([0, 5, 10, 15, 20], [0.7, 0.2, 0.1, 0.0, 0.0], path, ({}, {}))
    axes = [-4.0, -2.0, 0.0], [-1.0, 0.0, 1.0]
    points = {(row, column): point(row, column, 10.0 + column) for row in range(3) for column in range(3)}
    lengths, rewards = [10.0, 12.0, 14.0], [0.1, 0.2, 0.4]
    made = [
        draw.draw_plane(tmp_path / "plane.png", plane, "a run"),
        draw.draw_surfaces(tmp_path / "surface.png", plane, axes, points, "a run"),
        draw.draw_lengths(tmp_path / "length.png", RewardByLength([], []), RewardByLength(lengths, rewards), "a"),
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000 for file in made)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["length.png", "plane.png", "surface.png"]


def test_the_weights_alone_are_analysed_without_an_engine(tmp_path, capsys):
    run_dir = tmp_path / "run"
    settings_file.write(Config.model_validate({"name": "run", "runs_dir": str(tmp_path)}), run_dir / "config.toml")
    centre, first, second = basis()
    write_checkpoint(run_dir, 0, unflatten(centre))
    write_checkpoint(run_dir, 5, unflatten(centre + first))
    assert main([str(run_dir), "--points", "0"]) == 2
    assert "at least 3" in capsys.readouterr().err
    write_checkpoint(run_dir, 10, unflatten(centre + first + second))
    assert main([str(run_dir), "--points", "0"]) == 0
    results = json.loads((run_dir / "analysis" / "results.json").read_text())
    assert results["origin"] == 10 and results["path"][2] == [0, 0] and not results["points"]
    assert sum(results["explained"][:2]) == pytest.approx(1)
    # the three lie at the corners of a right triangle with legs of length 1
    assert math.dist(*results["path"][:2]) == pytest.approx(1, abs=1e-5)
    assert math.dist(results["path"][0], results["path"][2]) == pytest.approx(math.sqrt(2), abs=1e-5)
    assert sorted(file.name for file in (run_dir / "analysis").iterdir()) == ["length.png", "plane.png", "results.json"]


def test_a_command_says_at_once_what_it_loads_and_then_what_is_done(tmp_path, root):
    """On the error stream, which is no terminal here."""
    run_dir = tmp_path / "run"
    settings_file.write(Config.model_validate({"name": "run", "runs_dir": str(tmp_path)}), run_dir / "config.toml")
    centre, first, second = basis()
    for step, weights in ((0, centre), (5, centre + first), (10, centre + second)):
        write_checkpoint(run_dir, step, unflatten(weights))
    command = [sys.executable, "-X", "importtime", "-m", "lab.analyse", str(run_dir), "--points", "0"]
    lines = subprocess.run(command, cwd=root, capture_output=True, text=True).stderr.splitlines(keepends=True)
    rest = "".join(lines)
    loaded = next(number for number, line in enumerate(lines) if line.split("|")[-1].strip() == "torch")
    assert f"loading torch, then the weights that {run_dir} keeps\n" in lines[:loaded], "before what takes long"
    assert "3 snapshots, of steps 0, 5, 10: reading their weights twice\n" in rest


def test_the_problems_of_a_survey_are_counted_while_a_point_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shared.progress_bar.PLAIN_EVERY_S", 0)
    monkeypatch.setattr("lab.analyse.surface.put", lambda *_: None)
    plane = Plane([0, 5, 10], [0.7, 0.3, 0.0], np.array([[-4.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), ({}, {}))
    config = Config.model_validate({"name": "run", "runs_dir": str(tmp_path)})
    options = Namespace(points=2, margin=0.0, samples=1, restart=False)
    survey = Survey(config, [WeightSnapshot(0, "export")], plane, options)
    prompts = [Prompt(index, Problem(f"{index}", "?", "1"), [1]) for index in range(3)]
    reward = Reward(1.0, 0.1, 0.9, 0.0, 0.0, Verdict.CORRECT)
    solver = mock.AsyncMock(engine=mock.AsyncMock(device="cpu"))
    solver.solve.side_effect = lambda prompt, _: Group(prompt, [Completion(0, 0, 0, token_ids=[1])], [reward])
    with Journal(tmp_path / "points.jsonl", Point, lambda each: (each.row, each.column), {}, "") as journal:
        asyncio.run(survey.measure(solver, prompts, journal))
        assert len(journal.rows) == 4
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 12 and told[4].startswith("problems sampled: 5 of 12, ") and ", left " in told[4]
