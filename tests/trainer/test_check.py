"""`python -m trainer check`: each kind of trouble, planted for real where one can: line and next step."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import pytest
import torch

from lab.plan.scenario import MODELS
from shared.config import Config
from tests.tables import read_table
from trainer.__main__ import main
from trainer.check import cards, command, machine
from trainer.check.finding import CheckFinding
from trainer.memory import size
from trainer.settings import load
from verify.code import cpp

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = "configs/quickstart.toml"
NO_ISOLATION = """
import ctypes, os, struct, sys
UNSHARE, LANDLOCK, ERRNO, ALLOW = 272, 444, 0x00050001, 0x7FFF0000
rules = [(0x20, 0, 0, 0), (0x15, 1, 0, UNSHARE), (0x15, 0, 1, LANDLOCK), (0x06, 0, 0, ERRNO), (0x06, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0, ctypes.get_errno()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""goes on as a Python command to which the kernel refuses new namespaces and Landlock (seccomp filter, x86-64)"""
MISMATCH = "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
H100 = """case "$1" in --query*) echo "0, NVIDIA H100 80GB HBM3, 81559, 4, 570.86.15, 9.0";;
*) echo "| Driver Version: 570  CUDA Version: {newest} |";; esac"""


def trainer_check(*words: str, before: str = "", **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code and what --json printed, by name. before: shell commands in a mount namespace of its own, ahead."""
    command = [sys.executable, "-m", "trainer", "check", *words, "--json"]
    if before:
        wrapped = [sys.executable, "-c", NO_ISOLATION, *command[1:]]
        command = ["unshare", "--mount", "sh", "-ec", f'{before}\nexec "$@"', "sh", *wrapped]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
                          env={**os.environ, **environment})  # fmt: skip
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["findings"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_trouble_of_a_machine_is_found_with_its_next_step(tmp_path):
    """No compiler, a small /dev/shm, a full disk, no isolation, a port that is taken: planted together for real."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("planting needs root and mount namespaces")
    data, runs = tmp_path / "train.jsonl", tmp_path / "runs"
    data.write_text('{"problem": "Print 1.", "domain": "code", "tests": {"inputs": [""], "outputs": ["1"]}}\n')
    runs.mkdir()
    plant = f"""mount --make-rprivate /
mount -t tmpfs -o size=1m none /dev/shm
mount --bind /dev/null {Path(cpp.compiler()).resolve()}
mount -t tmpfs -o size=8m none {runs}"""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        code, rows = trainer_check(
            QUICKSTART, f"--data.train={data}", f"--runs_dir={runs}", "--prepare.script=", "--model.path=no/model",
            before=plant, MASTER_PORT=str(port), HF_HUB_OFFLINE="1",
        )  # fmt: skip
    assert code == 1
    gone = f"data.validation = '{runs}/quickstart/made/validation.jsonl': there is no such file"
    for name, text, step in (
        ("shared memory", "/dev/shm has 1.0 MiB free, 16.0 MiB are needed", "docker run --shm-size=8g"),
        ("compiler", "g++ is missing: C++ programs of the model are not graded", "apt install g++"),
        ("disk", f"{runs}: 8.0 MiB free, checkpoints and exports take 2.0 GiB", "set another runs_dir"),
        ("isolation", "this host cannot isolate untrusted programs", "allow user namespaces"),
        ("ports", f"port {port} cannot be had (Address already in use)", f"--master-port={port + 1} on every node"),
        ("model", "'no/model' is no folder, and the Hub does not give it", "hf download"),
        ("data", gone, "correct the path"),
    ):
        row = rows[name]
        assert row["status"] == "FAIL" and text in row["text"] and step in row["next"], row
    assert rows["settings"]["status"] == rows["packages"]["status"] == rows["memory"]["status"] == "OK"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_this_machine_has_no_trouble(tmp_path):
    code, rows = trainer_check(QUICKSTART, f"--runs_dir={tmp_path}")
    assert code == 0, rows
    of_cards = ["cards", "CUDA"] if torch.cuda.is_available() else []
    assert list(rows) == ["settings", "packages", "driver", *of_cards, "memory", "shared memory", "compiler",
                          "isolation", "disk", "ports", "data", "SFT", "template", "model"]  # fmt: skip
    assert all(row["next"] for row in rows.values() if row["status"] != "OK")
    assert "made at the start by examples/quickstart/prepare.py" in rows["model"]["text"]


@pytest.fixture
def idle_machine(monkeypatch):
    """Leave out examinations of the machine, which take seconds."""
    for name in ("packages", "host_memory", "shared_memory", "compilers", "isolation", "disk", "ports"):
        monkeypatch.setattr(machine, name, lambda *_, name=name: CheckFinding(name, "OK", ""))


@pytest.mark.usefixtures("idle_machine")
def test_lines_exit_code_and_counts(monkeypatch, capsys):
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["OK", "packages"] and "0 WARN, 0 FAIL" in out
    monkeypatch.setattr(machine, "ports", lambda: CheckFinding("ports", "FAIL", "port 1 is taken", "end it"))
    monkeypatch.setattr(machine, "disk", lambda *_: CheckFinding("disk", "WARN", "slow", "a faster one"))
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  ports         port 1 is taken\n                    next: end it" in out and "1 WARN, 1 FAIL" in out
    assert main(["check", "--help"]) == 0 and "usage: python -m trainer check" in capsys.readouterr().out
    assert main(["check", "--steps=3"]) == 2 and "a settings file comes first" in capsys.readouterr().out


@pytest.mark.usefixtures("idle_machine")
def test_wrong_settings_are_a_finding_and_cuda_is_not_touched_in_this_process(monkeypatch):
    """A fork after `torch.cuda.is_available()` may not start CUDA."""
    for name in ("is_available", "device_count", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name}"))
    lines: list[str] = []
    command.main((QUICKSTART, "--rollout.group_sise=8"), load, lines.append)
    assert lines[0].startswith("FAIL  settings") and "group_sise" in lines[0] and "1 FAIL" in lines[-1]
    assert len(lines) > 5, "the machine is looked at all the same"


@pytest.mark.parametrize(("smi", "cuda", "status", "text", "step"), [
    (MISMATCH, None, "FAIL", "Driver/library version mismatch", "restart the machine after an update of the driver"),
    (None, "12.8", "WARN", "no nvidia-smi", "--gpus all"),
    (H100.format(newest="12.8"), None, "WARN", "built for CPUs: the cards idle", "make install EXTRA=cuda"),
    (H100.format(newest="12.8"), "13.0", "FAIL", "for CUDA up to 12.8, but torch is built for CUDA 13.0", "newer"),
    (H100.format(newest="13.1"), "12.8", "OK", "570.86.15, for CUDA up to 13.1; torch is built for CUDA 12.8", ""),
])  # fmt: skip
def test_driver_and_torch(tmp_path, monkeypatch, smi, cuda, status, text, step):
    """With a program in place of nvidia-smi that prints what it prints on a machine with cards."""
    if smi:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin" if smi else str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    usable, finding = cards.driver()
    assert finding.status == status and text in finding.text and step in finding.step
    h100 = cards.NvidiaCard(0, "NVIDIA H100 80GB HBM3", 81559 << 20, 4 << 20, "570.86.15", 9.0)
    assert usable == ([h100] if status == "OK" else [])


@pytest.mark.parametrize("row", read_table("trainer/cards"), ids=itemgetter("name"))
def test_cards(monkeypatch, row):
    monkeypatch.setattr(cards, "computing", lambda: (1, CheckFinding("CUDA", "OK", "")))
    given = {"total_gib": 80, "used_gib": 0, "capability": 9.0, **row["card"]}
    sizes = given["total_gib"] << 30, given["used_gib"] << 30
    card = cards.NvidiaCard(0, "NVIDIA H100 80GB HBM3", *sizes, "570.86.15", given["capability"])
    config = Config.model_validate({"placement": row["placement"]}) if "placement" in row else None
    first, _ = cards.use_of_cards([card], config, config and MODELS["135m"])
    assert first.status == row["status"] and row["text"] in first.text and first.step.startswith(row["step"])


@pytest.mark.skipif(torch.version.cuda is not None, reason="of torch without CUDA")
def test_cards_that_do_not_compute():
    """For real: this torch has no CUDA."""
    count, finding = cards.computing()
    assert count == 0 and finding.status == "FAIL" and finding.step.startswith("check CUDA_VISIBLE_DEVICES")


@pytest.fixture
def small_files():
    """Files may have 1 MiB only, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_files(small_files, tmp_path):
    finding = machine.disk(Config(runs_dir=str(tmp_path)), None)
    assert finding.status == "FAIL" and "1,048,576 bytes only (ulimit -f)" in finding.text


def test_a_slow_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SLOW_WRITE", 1e15)
    finding = machine.disk(Config(runs_dir=str(tmp_path / "not" / "there")), None)
    assert finding.status == "WARN" and "which is slow" in finding.text and "faster disk" in finding.step
    assert not list(tmp_path.iterdir())


def test_memory_by_hand(monkeypatch):
    shape, config = MODELS["135m"], Config.model_validate({"rollout": {"cache_bytes": 1 << 30}})
    finding = machine.host_memory(config, shape, False)
    trainers, engines = 16 * 134_515_008 + 4 * 134_515_008, 2 * 134_515_008 + (1 << 30)
    assert size(trainers) in finding.text and size(engines) in finding.text
    monkeypatch.setattr(machine, "free_bytes", lambda: trainers + engines - 1)
    finding = machine.host_memory(config, shape, False)
    assert finding.status == "FAIL" and finding.step.startswith("lower rollout.cache_bytes")
    assert machine.host_memory(config, shape, True).status == "OK", "the cards' line says it"


def test_shared_memory_isolation_and_a_damaged_model(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert machine.shared_memory(True, tmp_path).status == ("OK" if free > machine.SHM_BYTES_GPUS else "FAIL")
    gone = machine.shared_memory(False, tmp_path / "gone")
    assert gone.status == "FAIL" and "No such file" in gone.text
    trusted = machine.isolation(Config.model_validate({"reward": {"sandbox": {"isolation": "none"}}}))
    assert trusted.status == "WARN" and "with the rights of this user" in trusted.text and "required" in trusted.step
    (tmp_path / "config.json").write_text("{")
    damaged = command.model_access(Config.model_validate({"model": {"path": str(tmp_path)}}), None)
    assert damaged.status == "FAIL" and damaged.step.startswith("fetch the model again")
