"""`python -m trainer check`: each kind of trouble, planted for real where one can: line and next step."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config import Config
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


def findings(text: str) -> dict[str, dict[str, str]]:
    """What --json printed, by name."""
    return {row["name"]: row for row in json.loads(text.splitlines()[-1])["findings"]}


def trainer_check(*words: str, before: str = "", **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command with --json. before: shell commands in a mount namespace of its own, ahead of it."""
    command = [sys.executable, "-m", "trainer", "check", *words, "--json"]
    if before:
        wrapped = [sys.executable, "-c", NO_ISOLATION, *command[1:]]
        command = ["unshare", "--mount", "sh", "-ec", f'{before}\nexec "$@"', "sh", *wrapped]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
                          env={**os.environ, **environment})  # fmt: skip
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, findings(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_trouble_of_a_machine_is_found_with_its_next_step(tmp_path: Path) -> None:
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
        code, found = trainer_check(
            QUICKSTART, f"--data.train={data}", f"--runs_dir={runs}", "--prepare.script=", "--model.path=no/model",
            before=plant, MASTER_PORT=str(port), HF_HUB_OFFLINE="1",
        )  # fmt: skip
    assert code == 1
    for name, text, step in (
        ("shared memory", "/dev/shm has 1.0 MiB free, 16.0 MiB are needed", "docker run --shm-size=8g"),
        ("compiler", "g++ is missing: C++ programs of the model are not graded", "apt install g++"),
        (
            "disk",
            f"{runs}: 8.0 MiB free, checkpoints and exports take 2.0 GiB",
            "free disk space, or set another runs_dir",
        ),
        ("isolation", "this host cannot isolate untrusted programs", "allow user namespaces"),
        ("ports", f"port {port} cannot be had (Address already in use)", f"--master-port={port + 1} on every node"),
        ("model", "'no/model' is no folder, and the Hub does not give it", "hf download"),
        (
            "data",
            f"data.validation = '{runs}/quickstart/made/validation.jsonl': there is no such file",
            "correct the path",
        ),
    ):
        row = found[name]
        assert row["status"] == "FAIL" and text in row["text"] and step in row["next"], row
    assert found["settings"]["status"] == found["packages"]["status"] == found["memory"]["status"] == "OK"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_this_machine_has_no_trouble(tmp_path: Path) -> None:
    code, found = trainer_check(QUICKSTART, f"--runs_dir={tmp_path}")
    assert code == 0, found
    of_cards = ["cards", "CUDA"] if torch.cuda.is_available() else []
    assert list(found) == ["settings", "packages", "driver", *of_cards, "memory", "shared memory", "compiler",
                           "isolation", "disk", "ports", "data", "SFT", "template", "model"]  # fmt: skip
    assert all(row["next"] for row in found.values() if row["status"] != "OK")
    assert "made at the start by examples/quickstart/prepare.py" in found["model"]["text"]


def shown(*words: str) -> list[str]:
    lines: list[str] = []
    command.main(words, load, lines.append)
    return lines


def only(monkeypatch: pytest.MonkeyPatch, *kept: str) -> None:
    """Leave out the other examinations, which take seconds."""
    for name in ("packages", "host_memory", "shared_memory", "compilers", "isolation", "disk", "ports"):
        if name not in kept:
            monkeypatch.setattr(machine, name, lambda *_, name=name: CheckFinding(name, "OK", ""))


def test_lines_exit_code_and_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch)
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["OK", "packages"] and "0 WARN, 0 FAIL" in out
    monkeypatch.setattr(machine, "ports", lambda: CheckFinding("ports", "FAIL", "port 1 is taken", "end it"))
    monkeypatch.setattr(machine, "disk", lambda *_: CheckFinding("disk", "WARN", "slow", "a faster one"))
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  ports         port 1 is taken\n                    next: end it" in out and "1 WARN, 1 FAIL" in out


def test_settings_that_are_wrong_are_one_of_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    lines = shown(QUICKSTART, "--rollout.group_sise=8")
    assert lines[0].startswith("FAIL  settings") and "group_sise" in lines[0] and "1 FAIL" in lines[-1]
    assert len(lines) > 5, "the machine is looked at all the same"


def test_help_and_an_option_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0 and "usage: python -m trainer check" in capsys.readouterr().out
    assert main(["check", "--steps=3"]) == 2 and "a settings file comes first" in capsys.readouterr().out


def test_cuda_is_not_touched_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork after `torch.cuda.is_available()` may not start CUDA."""
    only(monkeypatch)
    for name in ("is_available", "device_count", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name}"))
    assert len(shown(QUICKSTART)) > 5


# ---- cards ----


def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """An nvidia-smi that prints what a machine with cards prints."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


H100 = "0, NVIDIA H100 80GB HBM3, 81559, {used}, 570.86.15, {capability}"


def smi(used: int = 4, capability: str = "9.0", newest: str = "12.8") -> str:
    listed = H100.format(used=used, capability=capability)
    return f'case "$1" in --query*) echo "{listed}";; *) echo "| Driver Version: 570  CUDA Version: {newest} |";; esac'


def test_a_driver_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found, told = cards.driver()
    assert not found and told.status == "FAIL" and "Driver/library version mismatch" in told.text
    assert "restart the machine after an update of the driver" in told.step


@pytest.mark.parametrize(
    ("cuda", "newest", "status", "text", "step"),
    [(None, "12.8", "WARN", "built for CPUs: the cards idle", "make install EXTRA=cuda"),
     ("13.0", "12.8", "FAIL", "for CUDA up to 12.8, but torch is built for CUDA 13.0", "install a newer driver"),
     ("12.8", "13.1", "OK", "570.86.15, for CUDA up to 13.1; torch is built for CUDA 12.8", "")],
)  # fmt: skip
def test_driver_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, newest: str, status: str, text: str, step: str
) -> None:
    fake_smi(tmp_path, monkeypatch, smi(newest=newest))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found, told = cards.driver()
    assert told.status == status and text in told.text and told.step.startswith(step)
    assert found == (
        [cards.NvidiaCard(0, "NVIDIA H100 80GB HBM3", 81559 << 20, 4 << 20, "570.86.15", 9.0)] if cuda == "12.8" else []
    )


def test_torch_for_cuda_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    _, told = cards.driver()
    assert told.status == "WARN" and "no nvidia-smi" in told.text and "--gpus all" in told.step


CARD = cards.NvidiaCard(0, "NVIDIA H100 80GB HBM3", 80 << 30, 0, "570.86.15", 9.0)


@pytest.mark.parametrize(
    ("card", "settings", "status", "text", "step"),
    [(CARD, {}, "OK", "trainers and engines share them (resident)", ""),
     (CARD, {"placement": {"colocate": "never"}}, "WARN", "the settings place ranks on 2 GPUs, 1 are visible",
      "lower placement.trainers"),
     (CARD, {"placement": {"engines": 2}}, "WARN", "the settings place ranks on 3 GPUs, 1 are visible", "lower"),
     (CARD._replace(total_bytes=5 << 30), {}, "FAIL", "do they fit", "change what it names"),
     (CARD._replace(capability=7.5), {}, "FAIL", "compute capability 7.5, bfloat16 needs 8.0", "hide it"),
     (CARD._replace(used_bytes=20 << 30), None, "WARN", "20.0 GiB of card 0 are taken", "end what runs there"),
     (CARD._replace(total_bytes=1 << 30), {"placement": {"colocate": "never"}}, "FAIL",
      "a trainer takes 3.5 GiB before activations", "change what it names"),
     (CARD, None, "OK", "0: NVIDIA H100 80GB HBM3 80.0 GiB", "")],
)  # fmt: skip
def test_cards(
    monkeypatch: pytest.MonkeyPatch, card: cards.NvidiaCard, settings: Any, status: str, text: str, step: str
) -> None:
    from lab.plan.scenario import MODELS

    monkeypatch.setattr(cards, "computing", lambda: (1, CheckFinding("CUDA", "OK", "")))
    config = None if settings is None else Config.model_validate(settings)
    first, _ = cards.use_of_cards([card], config, None if config is None else MODELS["135m"])
    assert first.status == status and text in first.text and first.step.startswith(step)


@pytest.mark.skipif(torch.version.cuda is not None, reason="of torch without CUDA")
def test_cards_that_do_not_compute() -> None:
    """For real: this torch has no CUDA."""
    count, told = cards.computing()
    assert count == 0 and told.status == "FAIL" and told.step.startswith("check CUDA_VISIBLE_DEVICES")


# ---- host ----


def test_several_gpus_need_more_shared_memory(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert machine.shared_memory(True, tmp_path).status == ("OK" if free > machine.SHM_BYTES_GPUS else "FAIL")
    gone = machine.shared_memory(False, tmp_path / "gone")
    assert gone.status == "FAIL" and "No such file" in gone.text


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files may have 1 MiB only, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_files(small_files: None, tmp_path: Path) -> None:
    told = machine.disk(Config(runs_dir=str(tmp_path)), None)
    assert (
        told.status == "FAIL" and "1,048,576 bytes only (ulimit -f)" in told.text and told.step.startswith("free disk")
    )


def test_a_slow_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "SLOW_WRITE", 1e15)
    told = machine.disk(Config(runs_dir=str(tmp_path / "not" / "there")), None)
    assert told.status == "WARN" and "which is slow" in told.text and "faster disk" in told.step
    assert not list(tmp_path.iterdir())


def test_memory_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.plan.scenario import MODELS

    shape, config = MODELS["135m"], Config.model_validate({"rollout": {"cache_bytes": 1 << 30}})
    told = machine.host_memory(config, shape, False)
    trainers, engines = 16 * 134_515_008 + 4 * 134_515_008, 2 * 134_515_008 + (1 << 30)
    assert size(trainers) in told.text and size(engines) in told.text
    monkeypatch.setattr(machine, "free_bytes", lambda: trainers + engines - 1)
    told = machine.host_memory(config, shape, False)
    assert told.status == "FAIL" and told.step.startswith("lower rollout.cache_bytes")
    assert machine.host_memory(config, shape, True).status == "OK", "the cards' line says it"


def test_programs_on_trust(tmp_path: Path) -> None:
    told = machine.isolation(Config.model_validate({"reward": {"sandbox": {"isolation": "none"}}}))
    assert told.status == "WARN" and "with the rights of this user" in told.text and "required" in told.step


def test_a_damaged_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    config = Config.model_validate({"model": {"path": str(tmp_path)}})
    told = command.model_access(config, None)
    assert told.status == "FAIL" and told.step.startswith("fetch the model again")
