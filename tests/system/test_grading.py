"""Magistral's two rounds of filtering on a real tiny model, with planted wrong labels; and the run is analysed."""

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
from tests.system.launch import ROOT, TINY

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
PLANTED, SAMPLES, STEPS = 8, 4, 2


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_grader(seasoned: Path, folder: Path) -> Path:
    """Settings of a grader that learns the problems by heart from flawless demonstrations."""
    config, rng = settings_file.load(seasoned / "config.toml"), random.Random(0)
    problems = draw_word_problems(read_options(config.prepare.options), config.seed, 64, validation=False)
    shown = [{"problem": s.text, "completion": demonstrate(rng, s, [s.language], NO_FLAWS)} for s in problems]
    values = TINY | {
        "name": "grader", "runs_dir": str(folder / "runs"), "model.path": str((seasoned / "latest").resolve()),
        "data.validation": "", "sft.demonstrations": str(write(folder / "demonstrations.jsonl", shown)),
        "sft.steps": 80, "sft.batch": 32, "rollout.max_async_level": 0, "steps": STEPS,
        "optimiser.learning_rate": 1e-5, "checkpoint.keep": 9,
    }  # fmt: skip
    options = [f"--{key}={value}" for key, value in values.items()]
    settings_file.write(settings_file.load(ROOT / "configs" / "quickstart.toml", options), folder / "grader.toml")
    return folder / "grader.toml"


def test_a_grader_that_solves_most_finds_planted_labels_and_its_run_is_analysed(seasoned, tmp_path):
    """The commands of docs/curation.md."""
    grader, rows = write_grader(seasoned, tmp_path), read(seasoned / "made" / "train.jsonl")
    wrong = random.Random(1).sample(rows, PLANTED)
    for number, row in enumerate(wrong):
        row["answer"] = str(int(row["answer"]) + (1, -1, 10, 7)[number % 4])
    write(tmp_path / "problems.jsonl", rows)

    def stage(name: str, given: str, out: str, *options: str) -> list[dict[str, Any]]:
        assert curate([name, str(tmp_path / given), "--out", str(tmp_path / out), *options]) == 0
        return read(tmp_path / out)

    sampling = ("--config", str(grader), "--samples", str(SAMPLES), "--model")
    first = stage("sample", "problems.jsonl", "sampled.jsonl", *sampling, str((seasoned / "latest").resolve()))
    stage("difficulty", "sampled.jsonl", "learnable.jsonl", "--most", "1")
    data = str(tmp_path / "learnable.jsonl")
    subprocess.run([sys.executable, "-m", "trainer", grader, f"--data.train={data}"], check=True, cwd=ROOT)
    run_dir = tmp_path / "runs" / "grader"
    second = stage("sample", "problems.jsonl", "graded.jsonl", *sampling, str(run_dir / "latest"))
    stage("labels", "graded.jsonl", "labelled.jsonl", "--workers", "1")
    kept = stage("difficulty", "labelled.jsonl", "out.jsonl", "--most", "1", "--without-samples")

    assert [row["id"] for row in first] == [row["id"] for row in second] and len(second) == 64
    assert all(len(row["samples"]) == SAMPLES for row in first + second)
    before, after = (sum(row["pass_rate"] for row in rows) / 64 for rows in (first, second))
    assert before < 0.6 < after  # the planted ones cannot be solved
    dropped = {row["id"]: row["rejected"] for row in read(tmp_path / "labelled.rejected.jsonl")}
    planted = {row["id"] for row in wrong}
    assert len(dropped.keys() & planted) >= PLANTED - 1 and len(dropped.keys() - planted) <= 2
    assert {why["reason"] for why in dropped.values()} == {CONTRADICTED}
    assert len(kept) > 40 and not {row["id"] for row in kept} & dropped.keys()
    assert all(0 < row["pass_rate"] <= 1 and "samples" not in row for row in kept)

    options = ("--points", "2", "--problems", "8", "--samples", "2", "--margin", "0", "--data", data)
    assert analyse([str(run_dir), *options]) == 0
    results = json.loads((run_dir / "analysis" / "results.json").read_text())
    assert results["steps"] == list(range(STEPS + 1)) and results["origin"] == STEPS
    assert len(results["points"]) == 4 and sum(results["explained"]) == pytest.approx(1)
    for point in results["points"]:
        assert point["completions"] == 16 and point["accuracy"] > 0.5  # tiny steps: all corners are good graders
        assert point["raw_reward"] >= point["reward"] and 0 < point["length"] <= 40
    assert (run_dir / "analysis" / "surface.png").stat().st_size > 10_000
