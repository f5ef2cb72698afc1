"""Experiment trackers: each has what a run folder holds, sent by a process that goes on where the last one stopped."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dashboard import track
from dashboard.trackers import COLUMNS, TRACKERS, Rows, as_markdown
from shared import settings_file
from shared.clean_text import clean
from shared.config import Config
from shared.errors import install_command
from shared.metrics import MetricsLog
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from tests.dashboard.run_folders import write_lines
from tests.dashboard.tracker_readers import READERS
from tests.tables import read_table
from trainer import __main__, trackers
from trainer.data.data_source import write_jsonl
from trainer.run_lock import RunLock

ROOT = Path(__file__).resolve().parents[2]
RECORDED = read_table("dashboard/recorded_metrics")
"""rows that real launches wrote: SFT, evaluations, training"""
TEXT = 'A box: \\boxed{5} | "five" <script>alert(1)</script>\n![x](http://host/x)_`` *é*\u202e'
FAULTY = """
import os, sys, time
fault, calls = os.environ["FAULT"], 0
class Settings:
    def __init__(self, **given): pass
class Table:
    def __init__(self, columns, data): pass
class Run:
    def define_metric(self, name, step_metric): pass
    def log(self, row):
        global calls
        calls += 1
        if fault == "raises" or fault == "raises at times" and calls % 3 == 0: raise OSError("no route to host")
        if fault == "hangs": time.sleep(1000)
        if fault == "exits" and calls == 5: os._exit(3)
    def finish(self, exit_code):
        if fault == "hangs at the end": time.sleep(1000)
def init(**given):
    if fault == "refuses": raise ValueError("no key was given")
    return Run()
"""
"""stands in for the package wandb, whose real one is tested beside it"""
CONTROLLER = """
import sys, time
from pathlib import Path
from trainer.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("holds it", flush=True)
time.sleep(300)
"""


def group_of(text: str) -> Group:
    reward = Reward(1.25, 0.1, 0.9, 0.0, 0.0, Verdict.CORRECT, "5 = 5", answer="5")
    return Group(Prompt(0, Problem("p", "2 + 3?", "5"), [1]), [Completion(0, 0, 0)], [reward], [text])


def train_rows(count: int) -> list[dict[str, Any]]:
    return [{"step": step, "kind": "train", "time": 1.0, "loss": 1 / step} for step in range(1, count + 1)]


def start(folder: Path, name: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dashboard.track", str(folder), name, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def follow(folder: Path, name: str, *options: str) -> tuple[int, str]:
    """(exit code, output) of a follower that ends by itself."""
    process = start(folder, name, *options)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def sent(folder: Path, name: str = "wandb") -> list[str]:
    path = folder / "trackers" / f"{name}.sent"
    return [line for line in path.read_text().splitlines() if line != track.CLOSED] if path.exists() else []


def launch(folder: Path, resumed: int | None, rows: list[dict[str, Any]], step: int, ended: str) -> None:
    """What a launch writes that goes on from a step, with the rollouts of one."""
    lock = RunLock(folder)
    log = MetricsLog(folder / "metrics.jsonl", resumed)
    settings_file.write(Config(name="run", runs_dir=str(folder.parent)), folder / "config.toml")
    before = log.path.read_text().splitlines() if log.path.exists() else []
    write_lines(log.path, [*before, *rows])
    (folder / "rollouts").mkdir(exist_ok=True)
    write_jsonl(folder / "rollouts" / f"step_{step}.jsonl", [group_of(TEXT)] * 9)
    lock.close(ended)


def of_another_machine(rows: Path, ended: str, written: float) -> None:
    write_lines(rows / "lock", [json.loads((rows / "lock").read_bytes()) | {"host": "elsewhere", "ended": ended}])
    for path in [rows, *rows.rglob("*")]:
        os.utime(path, (written, written))


class InMemory:
    """A tracker that keeps what it gets; `failing` says whether it cannot close."""

    def __init__(self) -> None:
        self.failing, self.steps, self.closes, self.tables = False, list[int](), list[bool](), dict[int, Rows]()

    def row(self, row: Any, values: Any, again: bool) -> None:
        self.steps.append(row["step"])

    def samples(self, step: int, when: float, rows: Rows) -> None:
        self.tables[step] = rows

    def close(self, finished: bool) -> None:
        if self.failing:
            raise OSError("no route to host")
        self.closes.append(finished)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Every tracker writes into this folder, by its own variables; MLflow's tables lie in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"), ("WANDB_MODE", "offline"),
                        ("TRACKIO_DIR", str(tmp_path / "trackio")),
                        ("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")):  # fmt: skip
        monkeypatch.setenv(name, value)
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # it reads its variables when it is imported
    return tmp_path


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The folder of a run that has ended after twelve steps; FAULT says what `wandb` does."""
    (tmp_path / "wandb.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAULT", "none")
    launch(tmp_path / "run", None, train_rows(12), 1, "exit code 0")
    return tmp_path / "run"


@pytest.fixture
def tracker(monkeypatch):
    kept = InMemory()
    monkeypatch.setitem(TRACKERS, "wandb", lambda run: kept)
    return kept


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.timeout(400)
def test_a_tracker_has_what_the_run_wrote_and_goes_on_after_a_resume(name, offline):
    """The first launch ends at step 4, the second goes on from step 3 in the same run of the tracker."""
    if find_spec(name) is None:
        pytest.skip(f'the extra "{name}" is not installed')
    folder, before = offline / "run", list[str]()
    cut = next(place for place, row in enumerate(RECORDED) if (row["step"], row["kind"]) == (4, "train"))
    again = RECORDED[cut] | {"loss": 0.25, "entropy": None, "time": time.time()}
    first, second = RECORDED[: cut + 1], [again, *RECORDED[cut + 1 :], again | {"step": 11}]
    for resumed, rows, step, ended in ((None, first, 1, "exit code 143"), (3, second, 11, "exit code 0")):
        launch(folder, resumed, rows, step, ended)
        assert follow(folder, name) == (0, "")
        assert len(before) < len(before := sent(folder, name)) == len(set(before))
    assert follow(folder, name) == (0, "") and sent(folder, name) == before
    expected = {(key, row["step"]): value for row in [*first, *second] for key, value in row.items()
                if key not in ("step", "kind", "time") and value is not None}  # fmt: skip
    if name == "tensorboard":  # single precision; what is behind the step that a launch goes on from is read no more
        expected = {key: struct.unpack("f", struct.pack("f", value))[0] for key, value in expected.items()}
        expected.pop(("entropy", 4))
    numbers, cells, runs = READERS[name](folder)
    assert numbers == expected and len(numbers) > 200 and runs == 1
    texts = ["2 + 3?", clean(TEXT), "5", "correct", "1.25", "5 = 5"]
    assert sorted(cells) == sorted([step, *texts] for step in ("1", "11") for _ in range(4))


def test_names_of_trackers_and_a_package_that_is_not_installed(tmp_path, monkeypatch, capsys):
    assert Config.model_validate({"trackers": list(TRACKERS)}).trackers == list(TRACKERS)
    with pytest.raises(ValueError, match="trackers"):
        Config.model_validate({"trackers": ["comet"]})
    (tmp_path / "tensorboard").mkdir()  # a folder of this name is no package
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", [str(tmp_path)])
        lines = list(trackers.not_installed(Config(trackers=["tensorboard", "mlflow"])))
    assert [line.split('"')[1] for line in lines] == ["tensorboard", "mlflow"]
    monkeypatch.setattr(trackers, "distribution", Mock(side_effect=PackageNotFoundError("mlflow")))
    assert __main__.main(["configs/quickstart.toml", '--trackers=["mlflow"]', "--dry-run"]) == 2
    assert f"not installed: {install_command('mlflow')}\n" in capsys.readouterr().err


def test_cells_of_a_table_in_markdown_mean_nothing_in_it():
    assert as_markdown("a|b\n<i>_x_ ") == "a&#124;b<br>&#60;i&#62;&#95;x&#95; " and as_markdown(None) == ""


@pytest.mark.parametrize(("fault", "options", "code", "count", "words"), [
    ("raises", [], 1, 0, "no route to host"),
    ("raises at times", [], 1, 9, "4 rows or tables were refused"),
    ("refuses", [], 1, 0, "error: wandb: ValueError: no key was given"), ("exits", [], 3, 4, ""),
    ("hangs", ["--within=1"], -signal.SIGALRM, 0, ""),
    ("hangs at the end", ["--within=1"], -signal.SIGALRM, 13, ""),
])  # fmt: skip
def test_the_next_start_sends_what_a_fault_left(fault, options, code, count, words, rows, monkeypatch):
    monkeypatch.setenv("FAULT", fault)
    ended, output = follow(rows, "wandb", *options)
    assert ended == code and words in output and len(sent(rows)) == count
    monkeypatch.setenv("FAULT", "none")
    assert follow(rows, "wandb") == (0, "")
    assert sorted(sent(rows)) == sorted([*(f"train {step} 1.0" for step in range(1, 13)), "samples 1 1.0"])


def test_an_end_that_fails_is_made_up_for_by_the_next_start(rows, tracker, capsys):
    tracker.failing = True
    for _ in range(2):  # the second start has no row to send, and closes all the same
        assert track.main([str(rows), "wandb"]) == 1
        assert capsys.readouterr().err == "error: wandb: OSError: no route to host\n"
    tracker.failing = False
    for _ in range(2):  # after the first there is nothing left to do
        assert track.main([str(rows), "wandb"]) == 0 and tracker.closes == [True]
    assert tracker.steps == list(range(1, 13)) and len(sent(rows)) == 13


def test_a_silent_run_on_another_machine_is_followed_until_it_has_ended(rows, tracker, monkeypatch, capsys):
    of_another_machine(rows, "", 1.0)
    monkeypatch.setattr(track.time, "sleep", lambda seconds: of_another_machine(rows, "exit code 0", 1.0))
    assert track.main([str(rows), "wandb"]) == 0 and tracker.closes == [True] and len(tracker.steps) == 12
    told = capsys.readouterr().err
    assert "nothing was written for" in told and told.count("\n") == 1


@pytest.mark.parametrize("failing", [False, True])
def test_ctrl_c_closes_the_tracker_and_is_one_line(failing, rows, tracker, monkeypatch, capsys):
    of_another_machine(rows, "", time.time())
    tracker.failing = failing
    monkeypatch.setattr(track.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    failed = (1, [], "error: wandb: OSError: no route to host")
    code, closes, words = failed if failing else (130, [False], track.STOPPED)
    assert track.main([str(rows), "wandb"]) == code and tracker.closes == closes
    assert capsys.readouterr().err == f"{words}\n"


def test_it_follows_a_run_and_ends_behind_a_killed_controller(rows):
    """It ignores the signals that a cluster sends to every process: the run saves first."""
    command = [sys.executable, "-c", CONTROLLER, str(rows)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None and controller.stdout.readline() == b"holds it\n"
        child = start(rows, "wandb", "--within=60")
        try:
            while len(sent(rows)) < 13:
                time.sleep(0.01)
            for request in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                child.send_signal(request)
            MetricsLog(rows / "metrics.jsonl", 12).write(13, {"loss": 1.0})
            while len(sent(rows)) < 14:
                time.sleep(0.01)
            assert child.poll() is None
            controller.kill()
            assert child.communicate(timeout=150)[0] == "" and child.returncode == 0
        finally:
            child.kill()
            controller.kill()


def test_lines_and_folders_of_others_are_no_end(rows, capsys):
    with (rows / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 13\n[]\n{"step": 14, "kind": "train", "loss": "low", "lr": 1e400, "stage": true}\n')
    (rows / "rollouts" / "step_11.jsonl").write_text("{}\n")
    (rows / "config.toml").write_bytes(b"\xff")
    code, output = follow(rows, "wandb")
    assert code == 1 and output.startswith("samples 11 1.0: ValidationError") and len(sent(rows)) == 14, output
    assert track.main([str(rows / "rollouts"), "wandb"]) == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_samples_are_bounded_and_come_with_every_tenth_step(rows, tracker):
    launch(rows, 0, train_rows(22), 1, "exit code 0")
    for step in range(1, 23):
        write_jsonl(rows / "rollouts" / f"step_{step}.jsonl", [group_of("x" * 10_000)] * 16)
    assert track.main([str(rows), "wandb"]) == 0 and list(tracker.tables) == [1, 11, 21]
    assert all(len(table) == 4 and len(row) == len(COLUMNS) for table in tracker.tables.values() for row in table)
    assert all(len(row[2]) == 2000 and row[3:] == ["5", "correct", 1.25, "5 = 5"] for row in tracker.tables[1])


def test_the_end_of_a_tracker_is_one_warning_and_it_has_a_time_to_end(rows, monkeypatch):
    """A launch waits for it last of all, and kills one that is stopped."""
    at_exit, warned, config = Mock(), list[str](), Config(name="run", runs_dir=str(rows.parent), trackers=["wandb"])
    monkeypatch.setattr(trackers, "atexit", at_exit)
    ends = ("exits", 60, "has ended with exit code 3"), ("hangs at the end", 1, "killed by signal 9")
    for fault, end_s, words in ends:
        monkeypatch.setenv("FAULT", fault)
        trackers.start_trackers(config, warned.append)
        monkeypatch.setattr(trackers, "END_S", end_s)
        wait, *given = at_exit.register.call_args.args
        wait(*given)
        assert words in warned[-1] and "sends what it lacks" in warned[-1]
    (rows.parent / "file").write_text("")
    trackers.start_trackers(config.model_copy(update={"runs_dir": str(rows.parent / "file")}), warned.append)
    assert len(warned) == 3 and "did not start" in warned[2]
