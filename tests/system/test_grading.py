"""Magistral's two rounds of filtering on a real tiny model, with planted wrong labels; and the run is analysed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from curate.__main__ import main as curate
from curate.difficulty import CONTRADICTED
from examples.quickstart.prepare import draw_word_problems, read_options
from examples.quickstart.word_problems import NO_FLAWS, demonstrate
from lab.analyse.__main__ import main as analyse
from shared import settings_file
from shared.config import Config
from tests.system.launch import ROOT, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PLANTED = 8
SAMPLES = 4
STEPS = 2
"""with step 0 three checkpoints: enough for a plane"""


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def grader_settings(seasoned: Path, folder: Path) -> Config:
    """A grader that learns the problems of the fixture by heart from flawless demonstrations."""
    config = settings_file.load(seasoned / "config.toml")
    problems = draw_word_problems(read_options(config.prepare.options), config.seed, 64, validation=False)
    rng = random.Random(0)
    shown = [{"problem": s.text, "completion": demonstrate(rng, s, [s.language], NO_FLAWS)} for s in problems]
    values = TINY | {
        "name": "grader",
        "runs_dir": str(folder / "runs"),
        "model.path": str((seasoned / "latest").resolve()),
        "data.validation": "",
        "sft.demonstrations": str(write(folder / "demonstrations.jsonl", shown)),
        "sft.steps": 80,
        "rollout.max_async_level": 0,
        "sft.batch": 32,
        "steps": STEPS,
        "optimiser.learning_rate": 1e-5,
        "checkpoint.keep": 9,
    }
    options = [f"--{key}={value}" for key, value in values.items()]
    return settings_file.load(ROOT / "configs" / "quickstart.toml", options)


def plant(rows: list[dict[str, Any]]) -> list[str]:
    """Give some rows a wrong label; returns their ids."""
    wrong = random.Random(1).sample(rows, PLANTED)
    for number, row in enumerate(wrong):
        row["answer"] = str(int(row["answer"]) + (1, -1, 10, 7)[number % 4])
    return [row["id"] for row in wrong]


def grade(folder: Path, model: str) -> None:
    """The commands of docs/curation.md."""
    grader = str(folder / "grader.toml")

    def stage(name: str, given: str, out: str, *options: str) -> None:
        assert curate([name, str(folder / given), "--out", str(folder / out), *options]) == 0

    sampling = ["--config", grader, "--samples", str(SAMPLES)]
    stage("sample", "problems.jsonl", "sampled.jsonl", *sampling, "--model", model)
    stage("difficulty", "sampled.jsonl", "learnable.jsonl", "--most", "1")
    train = [sys.executable, "-m", "trainer", grader, f"--data.train={folder / 'learnable.jsonl'}"]
    subprocess.run(train, check=True, timeout=600)
    stage("sample", "problems.jsonl", "graded.jsonl", *sampling, "--model", str(folder / "runs" / "grader" / "latest"))
    stage("labels", "graded.jsonl", "labelled.jsonl", "--workers", "1")
    stage("difficulty", "labelled.jsonl", "out.jsonl", "--most", "1", "--without-samples")


@pytest.fixture(scope="module")
def graded(seasoned: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder that the commands worked in, and the ids of the planted labels."""
    folder = tmp_path_factory.mktemp("graded")
    settings_file.write(grader_settings(seasoned, folder), folder / "grader.toml")
    rows = read(seasoned / "made" / "train.jsonl")
    planted = plant(rows)
    write(folder / "problems.jsonl", rows)
    grade(folder, str((seasoned / "latest").resolve()))
    return folder, planted


@pytest.mark.soak  # in make test: tests/curate/test_difficulty.py
def test_a_grader_that_solves_most_finds_planted_labels(graded: tuple[Path, list[str]]) -> None:
    folder, planted = graded
    first, second = read(folder / "sampled.jsonl"), read(folder / "graded.jsonl")
    assert [row["id"] for row in first] == [row["id"] for row in second] and len(second) == 64
    assert all(len(row["samples"]) == SAMPLES for row in first + second)
    before, after = (sum(row["pass_rate"] for row in rows) / 64 for rows in (first, second))
    assert before < 0.6 < after  # the planted ones cannot be solved
    dropped = {row["id"]: row["rejected"] for row in read(folder / "labelled.rejected.jsonl")}
    assert len(dropped.keys() & set(planted)) >= PLANTED - 1
    assert len(dropped.keys() - set(planted)) <= 2
    assert {why["reason"] for why in dropped.values()} == {CONTRADICTED}
    kept = read(folder / "out.jsonl")
    assert len(kept) > 40 and not {row["id"] for row in kept} & dropped.keys()
    assert all(0 < row["pass_rate"] <= 1 and "samples" not in row for row in kept)


@pytest.mark.soak  # in make test: tests/lab/analyse
def test_its_run_is_analysed(graded: tuple[Path, list[str]]) -> None:
    folder, _ = graded
    (run_dir,) = (folder / "runs").iterdir()
    data = ["--data", str(folder / "learnable.jsonl")]
    options = [str(run_dir), "--points", "2", "--problems", "8", "--samples", "2", "--margin", "0", *data]
    assert analyse(options) == 0
    results = json.loads((run_dir / "analysis" / "results.json").read_text())
    assert results["steps"] == list(range(STEPS + 1)) and results["origin"] == STEPS
    assert len(results["points"]) == 4 and sum(results["explained"]) == pytest.approx(1)
    for point in results["points"]:
        assert point["completions"] == 16 and point["accuracy"] > 0.5  # tiny steps: all corners are good graders
        assert point["raw_reward"] >= point["reward"] and 0 < point["length"] <= 40
    assert (run_dir / "analysis" / "surface.png").stat().st_size > 10_000
