"""Experiment trackers: each receives what a run wrote; none that is killed, stopped, slow or raising is in its way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.controller_run import play, problems, settings
from benchmarks.scripted import Script
from shared.clean_text import clean
from shared.config import Config
from shared.launch.deaths import Watched
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from tests.trainer.tracker_readers import READERS
from trainer import __main__, trackers
from trainer.run_log import RunLogger
from trainer.tracker_process import TRACKERS, as_markdown
from trainer.trackers import COLUMNS, UNHANDLED, TrackedRow, TrackedRun, Trackers, not_installed

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded_metrics.jsonl").read_bytes().splitlines()
"""lines that real launches wrote: SFT, evaluations, training"""
TEXT = 'A box: \\boxed{5} | "five" <script>alert(1)</script>\n![x](http://host/x)_`` *é*\u202e'
FAULTY = """
import os, sys, time
fault, calls = os.environ["FAULT"], 0
class Settings:
    def __init__(self, **given): pass
class Table: pass
class Run:
    def define_metric(self, name, step_metric): pass
    def log(self, row):
        global calls
        calls += 1
        if fault == "raises" or fault == "raises at times" and calls % 3 == 0: raise OSError("no route to host")
        if fault == "hangs": time.sleep(1000)
        if fault == "exits" and calls == 5: os._exit(3)
        if fault == "is slow": time.sleep(0.002)
    def finish(self, exit_code):
        if fault == "hangs at the end": time.sleep(1000)
def init(**given):
    if fault == "refuses": raise ValueError("no key was given")
    return Run()
"""
"""stands in for the package wandb, whose real one is tested beside it"""


def skip_without(name: str) -> None:
    try:
        distribution(name)
    except PackageNotFoundError:
        pytest.skip(f'the extra "{name}" is not installed')


def group_of(text: str) -> Group:
    reward = Reward(1.25, 0.1, 0.9, 0.0, 0.0, Verdict.CORRECT, "5 = 5", answer="5")
    return Group(Prompt(0, Problem("p", "2 + 3?", "5"), [1]), [Completion(0, 0, 0)], [reward], [text])


def lines(count: int) -> list[bytes]:
    return [
        json.dumps({"step": step, "kind": "train", "time": 1.0, "loss": 1 / step}).encode() for step in range(1, count)
    ]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def all_handled(held: Trackers) -> bool:
    for link in held.links:
        link.hear()
    return all(link.ended or link.handled.messages == link.sent for link in held.links)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every tracker writes into this folder, by its own variables; MLflow's tables lie in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # it reads its variables when it is imported
    return tmp_path


def send(folder: Path, name: str, version: int, rows: list[bytes], finished: bool, warned: list[str]) -> Trackers:
    config = Config.model_validate({"name": "run", "runs_dir": str(folder), "trackers": [name]})
    held = Trackers(config, version, warned.append)
    for row in rows:
        held.row(row)
    held.samples(11 if version else 1, [group_of(TEXT)] * 9)
    held.end(finished)
    held.wait()
    return held


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.timeout(400)
def test_a_tracker_has_what_the_run_wrote_and_goes_on_after_a_resume(name: str, offline: Path) -> None:
    """The first launch ends at step 4, the second goes on from step 3 in the same run of the tracker."""
    skip_without(name)
    warned: list[str] = []
    cut = next(
        place for place, line in enumerate(RECORDED) if (json.loads(line)["step"], b"train" in line) == (4, True)
    )
    again = json.loads(RECORDED[cut]) | {"loss": 0.25, "entropy": None, "time": time.time()}
    first, second = RECORDED[: cut + 1], [json.dumps(again).encode(), *RECORDED[cut + 1 :]]
    held = send(offline, name, 0, first, False, warned), send(offline, name, 3, second, True, warned)
    log = (offline / "run" / "trackers" / f"{name}.log").read_text()
    assert not warned and [one.dropped for one in held] == [0, 0], log
    expected: dict[tuple[str, int], float] = {}
    for line in [*first, *second]:
        row = json.loads(line)
        values = {key: value for key, value in row.items() if key not in ("step", "kind", "time") and value is not None}
        expected |= {(key, row["step"]): value for key, value in values.items()}
    if name == "tensorboard":  # single precision; what is behind the step that a launch goes on from is read no more
        expected = {key: struct.unpack("f", struct.pack("f", value))[0] for key, value in expected.items()}
        expected.pop(("entropy", 4))
    found, cells, runs = READERS[name](offline / "run")
    assert found == expected and len(found) > 200 and runs == 1
    texts = ["2 + 3?", clean(TEXT), "5", "correct", "1.25", "5 = 5"]
    assert sorted(cells) == sorted([step, *texts] for step in ("1", "11") for _ in range(4))


def test_cells_of_a_table_in_markdown_mean_nothing_in_it() -> None:
    assert as_markdown("a|b\n<i>_x_ ") == "a&#124;b<br>&#60;i&#62;&#95;x&#95; " and as_markdown(None) == ""


def test_the_setting_and_the_trackers_have_the_same_names() -> None:
    for name in TRACKERS:
        assert Config.model_validate({"trackers": [name]}).trackers == [name]
    with pytest.raises(ValueError, match="trackers"):
        Config.model_validate({"trackers": ["comet"]})


def test_a_tracker_that_is_not_installed_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").mkdir()  # a folder of this name is no package
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [line.split('"')[1] for line in not_installed(Config(trackers=["tensorboard", "mlflow"]))] == [
        "tensorboard",
        "mlflow",
    ]
    monkeypatch.undo()

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(trackers, "distribution", missing)
    assert __main__.main(["configs/quickstart.toml", '--trackers=["mlflow"]', "--dry-run"]) == 2
    assert 'pip install "maestrale[mlflow]"' in capsys.readouterr().err


def trouble(
    folder: Path, name: str, at: int = 0, harm: Callable[[int], Any] | None = None
) -> tuple[Trackers, list[str]]:
    """600 rows with a fault, each handed over in no time. at: the row before which `harm` gets the pid."""
    warned: list[str] = []
    config = Config.model_validate({"name": "run", "runs_dir": str(folder), "trackers": [name]})
    held = Trackers(config, 0, warned.append)
    took = []
    for place, line in enumerate(lines(601)):
        if harm is not None and place == at:
            until(lambda: all_handled(held))
            child = held.links[0].child
            assert child is not None
            harm(child.pid)
        before = time.monotonic()
        held.row(line)
        took.append(time.monotonic() - before)
        if harm is None and place % 50 == 49 and os.environ.get("FAULT") != "hangs":
            until(lambda: all_handled(held))
    assert sorted(took)[-6] < 0.005 and sum(took) < 1.0  # the system may have given the processor to somebody else
    return held, warned


def killed(pid: int) -> None:
    watched = Watched(pid)
    os.kill(pid, signal.SIGKILL)
    until(watched.ended)
    watched.close()


@pytest.mark.parametrize("name", TRACKERS)
def test_rows_behind_the_kill_of_a_tracker_are_dropped_and_counted(name: str, offline: Path) -> None:
    skip_without(name)
    held, warned = trouble(offline, name, 40, killed)
    assert held.dropped == 560 and len(warned) == 1 and "killed by signal 9" in warned[0]
    held.end(True)
    held.wait()
    assert held.dropped == 560


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_stopped_gets_what_the_queue_holds(
    name: str, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(name)
    monkeypatch.setattr(trackers, "END_S", 0.5)
    held, warned = trouble(offline, name, 40, lambda pid: os.kill(pid, signal.SIGSTOP))
    assert held.dropped == 600 - 40 - UNHANDLED and len(warned) == 1 and "does not keep up" in warned[0]
    held.end(True)
    before = time.monotonic()
    held.wait()
    assert 0.4 < time.monotonic() - before < 5.0 and held.dropped == 560


@pytest.mark.parametrize(
    ("fault", "dropped", "words"),
    [
        ("none", 0, ""),
        ("raises", 600, "no route to host"),
        ("raises at times", 200, "no route to host"),
        ("refuses", 600, "no key was given"),
        ("exits", 596, "has ended"),
        ("hangs", 600, "does not keep up"),
        ("is slow", 0, ""),
        ("hangs at the end", 0, ""),
    ],
)
def test_faults_of_a_library_are_counted_and_told_once(
    fault: str, dropped: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAULT", fault)
    held, warned = trouble(tmp_path, "wandb")
    if fault == "hangs":
        assert held.dropped == 600 - UNHANDLED
    monkeypatch.setattr(trackers, "END_S", 1.0)
    held.end(True)
    held.wait()
    assert held.dropped == dropped
    assert any(words in line for line in warned) or not words
    assert len(warned) <= 2 and (warned or not dropped)


def test_what_cannot_be_sent_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is larger than the socket, a folder that cannot be written."""
    (tmp_path / "wandb.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAULT", "none")
    config = Config(name="run", runs_dir=str(tmp_path), trackers=["wandb"])
    warned: list[str] = []
    held = Trackers(config, 0, warned.append)
    held.links[0].send(TrackedRow(msgspec.Raw(b'"' + b"x" * (8 << 20) + b'"')))
    held.end(True)
    held.wait()
    assert held.dropped == 1 and len(warned) == 1 and "was not given a message" in warned[0]
    (tmp_path / "file").write_text("")
    held = Trackers(config.model_copy(update={"runs_dir": str(tmp_path / "file")}), 0, warned.append)
    held.row(lines(2)[0])
    held.end(True)
    held.wait()
    assert held.dropped == 1 and "did not start" in warned[-1]


def test_samples_are_bounded_and_come_with_every_tenth_step(tmp_path: Path) -> None:
    held = Trackers(Config(runs_dir=str(tmp_path)), 0, print)
    sent: list[Any] = []

    class Link:
        send = sent.append

    held.links = [Link()]  # type: ignore[list-item]
    for step in range(1, 22):
        held.samples(step, [group_of("x" * 10_000)] * 16)
    assert [one.step for one in sent] == [1, 11, 21]
    assert all(len(one.rows) == 4 and len(row) == len(COLUMNS) for one in sent for row in one.rows)
    assert all(len(row[2]) == 2000 and row[3:] == ["5", "correct", 1.25, "5 = 5"] for row in sent[0].rows)
    assert len(msgspec.json.encode(sent[0])) < 100_000


@pytest.mark.parametrize("fault", ["none", "hangs at the end"])
def test_the_process_ends_behind_a_killed_controller(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hands over what it has got, and has a bounded time for it, whatever hangs."""
    (tmp_path / "wandb.py").write_text(FAULTY)
    (tmp_path / "run" / "trackers").mkdir(parents=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = "import sys; from trainer import tracker_process as p; p.END_S = 2; sys.exit(p.main())"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "FAULT": fault}
    command = [sys.executable, "-c", program, "wandb", str(theirs.fileno())]
    child = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.send(msgspec.json.encode(TrackedRun("run", str(tmp_path / "run"), {}, 0)))
    for line in lines(5):
        ours.send(msgspec.json.encode(TrackedRow(msgspec.Raw(line))))
    until(lambda: msgspec.json.decode(ours.recv(4096))["messages"] == 4)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        child.send_signal(number)  # a cluster sends them to every process; the run saves first
    time.sleep(0.2)
    assert child.poll() is None
    ours.close()
    try:
        assert child.wait(20) == (0 if fault == "none" else -signal.SIGALRM)
    finally:
        child.kill()


def played(folder: Path, *names: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of five synchronous steps of the whole controller, engines and trainers scripted."""
    made: list[RunLogger] = []
    begin = RunLogger.__init__

    def keep(logger: RunLogger, *arguments: Any) -> None:
        begin(logger, *arguments)
        made.append(logger)

    script = Script(seats=4, token_s=1e-4, mean_tokens=8, accumulate_s=1e-3, step_s=1e-3)
    config = settings(folder, script, steps=5, prompts_per_step=4, group_size=4, async_level=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLogger, "__init__", keep)
        rows = asyncio.run(play(config.model_copy(update={"trackers": list(names)}), script, problems(256))).steps
    made[0].end()
    made[0].trackers.wait()
    return rows


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return played(tmp_path_factory.mktemp("without"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs", "exits"])
def test_a_faulty_tracker_changes_no_number_of_a_run(
    fault: str, without: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "UNHANDLED", 2)
    (tmp_path / "wandb.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setattr(trackers, "END_S", 0.5)
    with_it = played(tmp_path, "wandb")
    assert len(with_it) == 5 and with_it[-1]["trackers/dropped"] > 0 and "trackers/dropped" not in without[0]
    timed = ("time", "tokens/", "sync/", "memory/", "tflops", "trackers/")
    numbers = [[{k: v for k, v in row.items() if not k.startswith(timed)} for row in run] for run in (without, with_it)]
    assert numbers[0] == numbers[1] and len(numbers[0][0]) > 25


@pytest.mark.slow
def test_what_the_loop_writes_is_what_a_tracker_has(tmp_path: Path) -> None:
    skip_without("tensorboard")
    rows = played(tmp_path, "tensorboard")
    found, cells, _ = READERS["tensorboard"](tmp_path / "run")
    assert {step for _, step in found} == {1, 2, 3, 4, 5} and [row[0] for row in cells] == ["1"] * 4
    for row in rows:
        assert found["reward/mean", row["step"]] == pytest.approx(row["reward/mean"])
