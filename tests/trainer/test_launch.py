"""What `python -m trainer` gives the ranks that it starts (that they train is tested in tests/system)."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.config import Config
from shared.launch import node
from shared.launch.ranks import Nodes
from shared.model.cpu import processor


@pytest.mark.parametrize(
    ("installed", "gpu", "before", "expected"),
    [
        ("libtcmalloc_minimal.so.4", False, {}, "libtcmalloc_minimal.so.4"),
        ("libtcmalloc_minimal.so.4", False, {"LD_PRELOAD": "mine.so"}, "mine.so"),
        ("libtcmalloc_minimal.so.4", True, {}, None),
        ("", False, {}, None),
    ],
)
def test_ranks_on_a_cpu_start_with_tcmalloc_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: str, gpu: bool, before: dict[str, str], expected: str | None
) -> None:
    started = []
    monkeypatch.setattr(processor, "spare_allocator", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(node, "run_ranks", lambda *given: started.append(given) or 0)
    monkeypatch.setattr(os, "environ", dict(before))
    command = importlib.import_module("trainer.__main__")  # here: it sets variables as it is imported
    assert command.launch(Config(), ["some.toml"], Nodes()) == 0
    [(ranks, line, environment)] = started
    assert ranks == range(3) and line == [sys.executable, "-m", "trainer.rank_process", "some.toml"]
    assert environment.get("LD_PRELOAD") == expected and environment["OMP_NUM_THREADS"] == "1"


def test_under_torchrun_the_first_process_of_a_node_is_the_parent_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(node, "run_ranks", lambda *given: started.append(given[:2]) or 7)
    command = importlib.import_module("trainer.__main__")
    monkeypatch.setattr(command.watchdog, "die_with_parent", lambda: None)
    for local in range(2):
        for name, value in {"RANK": 3 + local, "LOCAL_RANK": local, "WORLD_SIZE": 5, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        assert command.main(["some.toml", "--seed=3"]) == (7, 0)[local]
    assert started == [(range(3, 5), [sys.executable, "-m", "trainer.rank_process", "some.toml", "--seed=3"])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes=2"], "--master-addr is missing"),
        (["--nnodes=2", "--node-rank=2", "--master-addr=a"], "--node-rank=2: expected 0 to --nnodes - 1, which is 1"),
        (["--nnodes=0"], "--node-rank=0: expected"),
        (["--node_rank", "-1"], "--node-rank=-1: expected"),
        (["--nnodes=2", "--master-addr=a", "--master-port=70000"], "--master-port=70000: expected 1 to 65535"),
        (["--nnodes=9", "--master-addr=a"], "fill only 2 of them"),
        (["--nnodes=two"], "invalid int value: 'two'"),
    ],
)
def test_impossible_nodes_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    command = importlib.import_module("trainer.__main__")
    try:
        code = command.main(["configs/quickstart.toml", *options])
    except SystemExit as end:
        code = int(str(end.code))
    printed = capsys.readouterr().err
    assert code == 2 and message in printed and len(printed.splitlines()) == 1


def test_options_of_nodes_may_stand_anywhere() -> None:
    command = importlib.import_module("trainer.__main__")
    words = ["--nnodes", "2", "a.toml", "--seed=3", "--node_rank=1", "--steps", "7", "--master-addr=::1"]
    assert command.take_nodes(words) == (Nodes(2, 1, "::1", 29500), ["a.toml", "--seed=3", "--steps", "7"])


SWALLOWS = """
import importlib, os, signal, sys
command = importlib.import_module("trainer.__main__")
class Library:
    def find_spec(self, name, *more):
        if name == "verify.plugin_host":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass  # as a library does that looks whether another can be imported
sys.meta_path.insert(0, Library())
command.main(["configs/quickstart.toml"])
print("went on")
"""


@pytest.mark.timeout(900)
def test_a_signal_while_libraries_are_imported_ends_the_launch() -> None:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", SWALLOWS],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        timeout=600,
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"stopped\n")
