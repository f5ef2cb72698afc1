"""A run folder: one launch at a time; a full or read-only disk and damaged small files are told with the repair."""

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from shared import metrics, settings_file
from shared.atomic_write import append_line
from shared.config import Config
from shared.errors import ConfigError, DiskError, MaestraleError
from shared.metrics import MetricsLog, read_rows
from shared.model import hf
from shared.progress import Progress
from tests.dashboard.test_track import group_of
from tests.shared.test_hf import CONFIG, make_decoder
from tests.trainer.test_evaluation import logger_of
from tests.trainer.test_report import evaluation
from trainer.data.data_source import write_jsonl
from trainer.evaluation import FILE, EvaluationRecord, read_evaluations
from trainer.plot import write_plot
from trainer.run_lock import RunLock
from trainer.run_log import check_folder, forget_after, rollout_files

FULL = r"cannot be written \(No space left on device, 0 bytes free\): free disk space"


@pytest.fixture
def disk(tmp_path):
    """A disk of 128 kB with nothing left on it but 4 kB that a test may free."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as stream, pytest.raises(OSError):
        while True:
            stream.write(b"x" * 4096)


def test_every_writer_of_a_run_names_the_file_the_free_space_and_the_repair(disk):
    MetricsLog(disk / "metrics.jsonl").write(1, {"reward/mean": 0.5, "time/step_s": 1.0})
    append_line(disk / FILE, b"{}")
    fill(disk)
    big = [EvaluationRecord(1, 1.0, evaluation(1.0, 0.5))] * 100
    writers = {
        "step_3.jsonl": lambda: write_jsonl(disk / "step_3.jsonl", list(big)),
        "config.toml": lambda: settings_file.write(Config(), disk / "config.toml"),
        "evaluations.jsonl": lambda: append_line(disk / FILE, b"x" * 9000),
        "plot.png": lambda: write_plot(disk),
    }
    for name, write in writers.items():
        with pytest.raises(DiskError, match=rf"{name} {FULL}") as error:
            write()
        assert isinstance(error.value, MaestraleError) and isinstance(error.value, OSError)
    assert (disk / FILE).read_bytes() == b"{}\n", "half a line is taken back"
    with pytest.raises(MaestraleError, match=r"model.*free disk space"):
        hf.save_model(disk / "model", CONFIG, make_decoder().named_parameters(), torch.float32)
    assert not list(disk.glob("*.partial"))


def test_metric_lines_wait_for_room_and_none_is_lost(disk):
    log = MetricsLog(disk / "metrics.jsonl")
    log.write(1, {"loss": 1.0})
    fill(disk)
    for step in range(2, 102):
        log.write(step, {"loss": 1.0})
    assert log.pending and "metrics.jsonl cannot be written" in log.last_failure and "free" in log.last_failure
    assert all(line.endswith("}") for line in log.path.read_text().splitlines()), "no line is cut"
    (disk / "filler").unlink()
    log.write(102, {"loss": 1.0})
    assert not log.pending and [row["step"] for row in read_rows(log.path)] == list(range(1, 103))


def test_the_oldest_rollouts_make_room_and_a_resume_goes_on_from_what_is_there(tmp_path):
    stream = io.StringIO()

    def kept(first: int, last: int, keep_bytes: int) -> list[int]:
        """The files after these steps of a launch."""
        logger = logger_of(tmp_path, stream, first - 1, rollout={"keep_bytes": keep_bytes})
        for version in range(first, last + 1):
            asyncio.run(logger.keep([group_of("x" * 1000)], version))
        return sorted(step for step, _ in rollout_files(tmp_path / "run"))

    assert kept(1, 12, keep_bytes=0) == list(range(1, 13))
    size = (tmp_path / "run" / "rollouts" / "step_9.jsonl").stat().st_size
    (tmp_path / "run" / "rollouts" / "step_note.jsonl").write_text("")
    forget_after(tmp_path / "run", 10, 0)
    assert kept(11, 12, keep_bytes=4 * size + 9) == [9, 10, 11, 12]
    assert kept(13, 13, keep_bytes=1) == [13], "the newest stays"
    assert stream.getvalue().count("the oldest files make room") == 2, "told once a launch"


def test_lines_of_metrics_that_wait_are_bounded_and_losses_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MOST_PENDING", 5)
    stream = io.StringIO()
    logger = logger_of(tmp_path, stream)
    path = logger.metrics.path
    path.unlink()
    path.mkdir()  # as a full disk
    for step in range(1, 20):
        logger._write(step, {"loss": 1.0})
    path.rmdir()
    logger._write(20, {"loss": 1.0})
    assert [row["step"] for row in read_rows(path)] == [15, 16, 17, 18, 19, 20]
    text = " ".join(stream.getvalue().split())
    assert "5 line(s) wait in memory until there is room, 3 older ones are lost" in text
    assert "there is room again, 14 lines are lost" in text
    logger._write(21, {"loss": 1.0})
    assert stream.getvalue().count("room again") == 1


def test_phases_that_cannot_be_written_are_told_once(disk):
    stream = io.StringIO()
    progress = Progress(stream)
    progress.keep_phases(disk / "phases.jsonl")
    fill(disk)
    for _ in range(300):
        progress.phase("training " * 10)
    assert stream.getvalue().count("warning: ") == 1
    assert "phases.jsonl cannot be written (No space left on device" in stream.getvalue().replace("\n", " ")


def test_a_run_folder_that_cannot_be_written_is_a_setting_to_change(tmp_path):
    gone = tmp_path / "gone" / "name"
    for write in (lambda: append_line(gone / "rollouts" / "a", b"x"), lambda: write_jsonl(gone / "b", [])):
        with pytest.raises(DiskError, match=rf"cannot be written: {tmp_path}/gone is not there"):
            write()
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"runs_dir.*runs is a file, where a folder is wanted"):
        RunLock(tmp_path / "runs" / "name")
    (tmp_path / "name" / "lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"lock.*Is a directory"):
        RunLock(tmp_path / "name")


def test_the_lock_of_a_run_on_a_full_disk_is_released_and_a_read_only_folder_refused(disk):
    lock = RunLock(disk)
    fill(disk)
    (disk / "lock").write_bytes(b"")
    fill(disk)
    lock.close("exit code 1 " + "x" * 9000)
    assert lock.file.closed
    if subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot remount here")
    with pytest.raises(ConfigError, match=r"runs_dir.*disk.*Read-only file system"):
        RunLock(disk / "name")


def test_damaged_lines_are_told_at_start_kept_aside_and_left_out(tmp_path):
    record = msgspec.json.encode(EvaluationRecord(1, 1.0, evaluation(1.0, 0.5)))
    (tmp_path / FILE).write_bytes(b"\xff\xfe garbage\n" + record + b"\n[1]\n" + record[:40])
    stage = json.dumps({"version": 1, "stage": 1, "change": "", "retired": []}).encode()
    (tmp_path / "stages.jsonl").write_bytes(stage + b"\n{oops\n" + stage[:9])
    step = b'{"step": 1, "kind": "train", "time": 1, "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(step + b'{"step": "x", "kind": []}\n' + b"\x00" * 40 + b"\n" + step[:30])
    lines = check_folder(tmp_path)
    names = [line.partition(":")[0].rpartition("/")[2] for line in lines]
    assert names == ["metrics.jsonl", "evaluations.jsonl", "stages.jsonl"]
    assert "2 damaged lines (the first is line 1)" in lines[1] and "evaluations.jsonl.damaged" in lines[1]
    assert (tmp_path / "evaluations.jsonl.damaged").read_bytes().startswith(b"\xff\xfe garbage")
    assert [record.version for record in read_evaluations(tmp_path)] == [1]
    forget_after(tmp_path, 1, 1)
    assert MetricsLog(tmp_path / "metrics.jsonl", resume_step=1).path.read_text().count("\n") == 1
    assert check_folder(tmp_path) == [], "the files are whole again"
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    with pytest.raises(ConfigError, match=r"evaluations\.jsonl cannot be read.*Is a directory"):
        check_folder(tmp_path)


def test_a_second_launch_is_refused_and_may_come_later(tmp_path):
    first = RunLock(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by another launch"):
        RunLock(tmp_path / "run")
    first.close("exit code 0")
    second = RunLock(tmp_path / "run")
    assert first.silent == second.silent == ""
    second.close("exit code 0")


def test_a_launch_that_was_killed_is_told_of_by_the_next(tmp_path):
    program = "import os, sys; from pathlib import Path; from trainer.run_lock import RunLock\n"
    program += "lock = RunLock(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env={**os.environ, "PYTHONPATH": "."})
    assert killed.wait(600) == -9
    lock = RunLock(tmp_path)
    assert f"controller pid {killed.pid}" in lock.silent and "ended without a word" in lock.silent
    lock.close("exit code 1")
    for rest in (None, b"", b"\x00\x00", b'{"pid": "x"}'):  # a damaged lock file is no obstacle
        if rest is not None:
            (tmp_path / "lock").write_bytes(rest)
        lock = RunLock(tmp_path)
        assert lock.silent == ""
        lock.close("exit code 0")
