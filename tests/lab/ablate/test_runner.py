"""Failures and times of launches, and what is shown of them; real launches are in tests/system/test_ablate.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lab.ablate.ablation import read
from lab.ablate.runner import TIMES, last_error, note_time, run_all, wall_s
from lab.ablate.runs import AblationRun, plan
from tests.lab.ablate.conftest import TEXT


def test_finished_runs_are_not_started_again(finished: list[AblationRun], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all(finished) == {}
    assert "6 of 6 runs are finished already" in capsys.readouterr().err
    assert not (finished[0].run_dir.parent / TIMES).exists()


def test_a_run_whose_start_is_not_there_is_not_tried(file: Path) -> None:
    file.write_text(TEXT.replace("[variants.base]", "[start]\n\n[variants.base]"))
    runs = plan(read(file), file, Path("runs"), [0])[1:]
    assert set(run_all(runs).values()) == {"its start is not there (runs/clips/start)"}
    assert not Path("runs").exists()


def test_times_of_launches_add_up_by_run(tmp_path: Path) -> None:
    assert wall_s(tmp_path) == 0
    for name, seconds, code in (("base-0", 50.04, 130), ("base-0", 10.0, 0), ("base-1", 5.0, 1)):
        note_time(tmp_path / name, seconds, code)
    assert wall_s(tmp_path) == 65.0 and wall_s(tmp_path, "base-0") == 60.0


def test_the_last_error_is_what_a_launch_said(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("step 1\nerror: the disk is full\nTraceback of torchrun\n\n")
    assert last_error(log) == "error: the disk is full"
    log.write_text("step 1\nKilled\n\n")
    assert last_error(log) == "Killed"
    log.write_text("")
    assert last_error(log) == "it printed nothing"


def test_a_failure_is_shown_with_its_run_and_the_others_go_on(
    launches: list[AblationRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho step 1\necho error: it broke\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    failures = run_all(launches[:2])
    assert list(failures) == [Path("runs/clips/base-0"), Path("runs/clips/symmetric-0")]
    why = "exit code 3; error: it broke (all it printed: runs/clips/base-0.log)"
    assert failures[Path("runs/clips/base-0")] == why
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["[1/2] clips: clip-higher, seed 0", f"    failed: {why}"] and len(lines) == 4
    assert [json.loads(line)["code"] for line in Path("runs/clips", TIMES).read_text().splitlines()] == [3, 3]
