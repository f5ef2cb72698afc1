"""Failures and times of launches, and what is shown of them; real launches are in tests/system/test_ablate.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.ablate.ablation import read
from lab.ablate.runner import FIRST_UNIT_S, TIMES, Display, last_error, note_time, run_all, wall_s
from lab.ablate.runs import FIXED_UNITS, AblationRun, plan
from tests.lab.ablate.conftest import TEXT, Write


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


def test_the_time_left_is_told_from_the_launches_that_ended(
    launches: list[AblationRun], write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    display = Display(launches, clock=lambda: now[0])
    units = FIXED_UNITS + 4
    assert display.left_s() == pytest.approx(6 * units * FIRST_UNIT_S)
    display.begin(1, launches[0])
    now[0] = 12.0
    display.end(launches[0], "")
    display.begin(2, launches[1])
    assert display.left_s() == pytest.approx(5 * 12)
    now[0] = 13.0
    display.show(launches[1])  # too early for another line
    now[0] = 112.0
    display.end(launches[1], "it broke")
    display.begin(3, launches[2])
    assert display.left_s() == pytest.approx(4 * 12), "a failed launch says nothing of the others' time"
    now[0] = 180.0
    write_run(launches[2], {"reward/mean": [0.1] * 4}, {"de": 0.5})
    display.show(launches[2])
    assert display.left_s() == pytest.approx(3 * 12), "it takes longer than thought"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[1/6] clips: clip-higher, seed 0  (left about 3:21 min)"
    assert lines[1] == "    finished in 12 s" and lines[3] == "    failed: it broke"
    assert lines[5] == "    clips: clip-higher, seed 1: step 4/4, left about 36 s" and len(lines) == 6
