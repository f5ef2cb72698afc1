"""What a run folder tells: how it stands, evaluations, who waits for whom, settings that differ; strangers' folders."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from dashboard.app import create_app
from dashboard.run_folder import RunFolder, RunFolders
from shared.config import Config
from shared.metrics import MetricsLog
from tests.dashboard.run_folders import metrics, write_foreign, write_lines, write_lock, write_run
from trainer.run_lock import RunLock


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a", steps=60, rollouts=1)
    write_run(folder / "b", steps=12, rollouts=1, learning_rate=5e-5)
    write_foreign(folder / "old")
    (folder / "no run").mkdir()
    return folder


@pytest.mark.parametrize(("ended", "state"), [
    ("running", "running"), ("crashed", "crashed"), ("finished", "finished"), ("stopped", "stopped"),
    ("exit code 1", "crashed"), ("exit code 130", "stopped"), ("stopped because something hung", "crashed"),
])  # fmt: skip
def test_how_a_run_stands(tmp_path, ended, state):
    write_lock(tmp_path, ended)
    assert RunFolder(tmp_path).summary()["state"] == state


def test_a_real_lock_is_understood(tmp_path):
    lock, run = RunLock(tmp_path), RunFolder(tmp_path)
    assert run.summary()["state"] == "running" and str(os.getpid()) in run.summary()["story"]
    lock.close("exit code 0")
    assert run.summary()["state"] == "finished"
    RunLock(tmp_path).close("exit code 1", "SyncMismatch: not the weights sent" + "ä" * 5000)
    summary = run.summary()
    assert summary["state"] == "crashed" and "exit code 1: SyncMismatch: not the weights sent" in summary["story"]


def test_the_headline_is_the_evaluation_before_and_after(folder, tmp_path):
    run = RunFolders(folder).find("a")
    sampled = [one for one in run.evaluations() if one["temperature"] == 1.0]
    assert run.summary()["evaluated"] == [sampled[0]["accuracy"], sampled[-1]["accuracy"]]
    rows = [{"version": 3, "seconds": 1, "evaluation": {"accuracy": 0.5, "temperature": 0.0}}, {"version": "x"}]
    write_lines(tmp_path / "evaluations.jsonl", [*rows, {"version": 4, "evaluation": {"accuracy": 10**400}}])
    assert RunFolder(tmp_path).summary()["evaluated"] is None, "one version is no difference"


def test_the_time_of_a_step_is_a_mean_of_the_last_ones(tmp_path):
    """The last step alone may be a short one: it samples nothing for a step after it."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        log.write(step, {"time/step_s": 100.0 if step <= 20 else 2.0 if step < 40 else 22.0})
    assert RunFolder(tmp_path).summary()["step_s"] == 3.0


def test_a_copy_of_a_run_that_has_ended_ended_when_the_run_did(tmp_path):
    lock = RunLock(tmp_path)
    write_lines(tmp_path / "phases.jsonl", [{"time": 5.0, "phase": "stopping trainers and engines"}])
    lock.close("exit code 0")
    run, now = RunFolder(tmp_path), time.time()
    for name in ("lock", "phases.jsonl"):
        os.utime(tmp_path / name, (now + 5000, now + 5000))
    assert abs(run.summary()["written"] - now) < 600
    write_lines(tmp_path / "lock", [{"pid": 3, "host": "another", "since": "2026-11-26", "ended": "exit code 0"}])
    assert run.summary()["written"] == 5.0, "an older run has its records"


def test_a_run_on_another_machine_is_silent_after_a_while(tmp_path):
    write_lines(tmp_path / "lock", [{"pid": 3, "host": "another", "since": "2026-11-26", "ended": ""}])
    run = RunFolder(tmp_path)
    assert run.summary()["state"] == "running"
    long_ago = time.time() - 3600
    os.utime(tmp_path / "lock", (long_ago, long_ago))
    assert run.summary()["state"] == "silent" and "60 minutes" in run.summary()["story"]


def test_the_overview_of_a_run(folder):
    overviews, last = RunFolders(folder).find("a").overview(), metrics(60)
    assert (
        overviews["run"]["step"] == overviews["run"]["steps"] == 60 and overviews["run"]["accuracy"] == last["accuracy"]
    )
    assert overviews["names"]["entropy"]["unit"] == "nats" and overviews["names"]["sft/loss"]["kind"] == "sft"
    assert overviews["bound"] == Config().max_staleness and overviews["alarms"] == [] and overviews["damaged"] == 0
    assert overviews["verdicts"]["correct"] == 12_000 and overviews["rollouts"] == [60]
    evaluations = overviews["evaluations"]
    places = [(version, temperature) for version in (0, 30, 60) for temperature in (1.0, 0.0)]
    assert [(one["version"], one["temperature"]) for one in evaluations] == places
    assert evaluations[0]["parts"]["language/de"]["accuracy"] == pytest.approx(0.25)
    assert "samples" not in evaluations[0] and evaluations[4]["hours"] == pytest.approx(240 / 3600)
    assert [phase["phase"] for phase in overviews["timeline"]["phases"]][-1] == "training"
    step, _, taken, wait, train, sync, checkpoint, stall = overviews["timeline"]["steps"][-1]
    assert (step, taken, wait, train) == (60, 4.0, last["time/wait_batch_s"], last["time/train_s"])
    assert (sync, checkpoint, stall) == (0.1, 0.9, last["sync/stall_ms"] / 1000)


def open_app(folder: Path) -> TestClient:
    return TestClient(create_app(folder, "abc"), base_url="http://127.0.0.1:8400", client=("127.0.0.1", 5),
                      headers={"Authorization": "Bearer abc"})  # fmt: skip


def test_a_name_that_is_not_utf8_hides_only_itself(tmp_path):
    for name in (b"bad\xff", b"\xed\xa0\x80", "gut-ü".encode(), b"line\nline"):
        folder = os.fsencode(tmp_path) + b"/" + name
        os.mkdir(folder)
        with open(folder + b"/metrics.jsonl", "w") as file:
            file.write("{}\n")
    (tmp_path / "gut-ü" / "rollouts").mkdir()
    open(os.fsencode(tmp_path / "gut-ü" / "rollouts") + b"/step_\xff.jsonl", "w").close()
    with open_app(tmp_path) as client:
        assert {run["name"] for run in client.get("/api/runs").json()["runs"]} == {"gut-ü", "line\nline"}
        assert client.get("/api/runs/gut-ü/rollouts").json() == []
        assert client.get("/api/runs/bad%FF").status_code == 404
    broken = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    with open_app(broken) as client:
        assert client.get("/api/runs").json()["runs"] == [] and client.get("/api/runs").json()["root"].endswith("bad·")


def test_hostile_lines_are_no_rows_and_hostile_numbers_no_figures(tmp_path):
    """Lines that are nested too deeply, and an integer that is larger than any float."""
    write_run(tmp_path / "a", steps=3, rollouts=0)
    before = RunFolders(tmp_path).find("a").overview()
    for name in ("metrics.jsonl", "evaluations.jsonl", "phases.jsonl"):
        with open(tmp_path / "a" / name, "ab") as file:
            file.write(b"[" * 5000 + b'\n{"kind": ' + b"[" * 5000 + b"\n")
    (tmp_path / "a" / "lock").write_bytes(b"[" * 4096)
    now = RunFolders(tmp_path).find("a").overview()
    assert now["names"] == before["names"] and now["damaged"] == 2 and now["run"]["step"] == before["run"]["step"]
    row = {"kind": "train", "step": 4, "time": 4.0, **metrics(4), "accuracy": 10**400, "entropy": -(10**400)}
    with open(tmp_path / "a" / "metrics.jsonl", "a") as lines:
        lines.write(json.dumps(row) + "\n")
    run = RunFolders(tmp_path).find("a")
    assert 0 < run.summary()["accuracy"] < 1 and run.overview()["run"]["step"] == 4
    series = run.series(["accuracy", "entropy"], "step", 10)
    assert len(series["x"]) == 4 and series["values"]["accuracy"][-1] in (None, float("inf"))


def test_series_of_a_part_of_an_axis_and_settings_that_differ(folder):
    run = RunFolders(folder).find("a")
    series = run.series(["reward/mean", "entropy", "unknown"], "step", 800, 10, 12)
    assert series["x"] == [10, 11, 12] and series["values"]["reward/mean"][0] == metrics(10)["reward/mean"]
    assert all(value != value for value in series["values"]["unknown"])
    assert run.series(["sft/loss"], "step", 800)["values"]["sft/loss"] == [3.0, 1.5, 1.0, 0.75, 0.6]
    rate = {"a": Config().optimiser.learning_rate, "b": 5e-5}
    both = {"optimiser.learning_rate": rate, "steps": {"a": 60, "b": 12}}
    assert RunFolders(folder).differences(["a", "b"]) == both
    assert RunFolders(folder).differences(["a", "old"])["trainer.flavour"] == {"a": None, "old": "vanilla"}


def test_a_foreign_run_and_a_damaged_one_are_shown_as_far_as_they_go(folder, tmp_path):
    overview = RunFolders(folder).find("old").overview()
    assert overview["run"]["state"] == "unknown" and overview["run"]["step"] == 19 and overview["run"]["steps"] == 50
    assert overview["names"].keys() == {"my/score", "reward/mean"} and overview["damaged"] == 3
    assert overview["bound"] is None and overview["evaluations"] == [] and overview["timeline"]["phases"] == []
    for name in ("config.toml", "lock", "metrics.jsonl", "phases.jsonl", "evaluations.jsonl", "stages.jsonl"):
        (tmp_path / name).write_bytes(b"\x00\xff{[" * 20 + b"\n")
    (tmp_path / "rollouts").write_text("no folder")
    overview = RunFolder(tmp_path).overview()
    assert overview["run"]["state"] == "unknown" and overview["names"] == {} and overview["settings"] == {}


def test_only_runs_are_found_and_only_by_their_name(folder, monkeypatch):
    folders = RunFolders(folder)
    assert [run.name for run in folders.all()] == ["a", "b", "old"]
    assert [run.name for run in RunFolders(folder / "a").all()] == ["a"], "one run may be given as the folder"
    for name in ("..", "../a", "no run", "a/", "/etc", ""):
        with pytest.raises(LookupError):
            folders.find(name)
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "no run":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert {run.name for run in folders.all()} == {"a", "b", "old"}, "a folder that may not be entered hides no run"


def test_the_numbers_in_memory_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(RunFolders, "MOST_CELLS", 2000)
    folders = RunFolders(folder)
    first, second = folders.find("a"), folders.find("b")
    first.overview()
    folders.find("b").overview()
    folders.find("old").overview()
    folders.find("b")
    assert first.columns is None and second.columns is not None, "what was looked at longest ago goes first"


def test_a_controller_with_another_title_runs(tmp_path):
    code = "import setproctitle, time; setproctitle.setproctitle('a title'); print('on', flush=True); time.sleep(60)"
    room = {"ROOM": "x" * 500}  # the title is written over arguments and environment
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=room) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"on\n"
            assert b"python" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
            lock = {"pid": child.pid, "host": os.uname().nodename, "since": "now", "ended": ""}
            write_lines(tmp_path / "lock", [lock])
            assert RunFolder(tmp_path).summary()["state"] == "running"
        finally:
            child.kill()
    assert RunFolder(tmp_path).summary()["state"] == "crashed"
