"""What `python -m trainer` gives the ranks that it starts (that they train: tests/system)."""

import importlib
import os
import subprocess
import sys
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.config import Config
from shared.launch import node
from shared.launch.ranks import Nodes
from shared.model.cpu import processor
from tests.tables import read_table
from trainer import rank_process

ALLOCATOR = "libtcmalloc_minimal.so.4"
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


@pytest.fixture
def command():
    """Imported late: it sets variables as it is imported."""
    return importlib.import_module("trainer.__main__")


@pytest.fixture
def started(monkeypatch):
    """(ranks, command, environment) of the ranks that would have been started; they end with 7."""
    given: list[Any] = []
    monkeypatch.setattr(node, "run_ranks", lambda *arguments: given.append(arguments) or 7)
    monkeypatch.setattr("trainer.data.sources.check_sources", lambda config: None)  # of settings without a model
    return given


@pytest.mark.parametrize(("installed", "gpu", "before", "expected"), [
    (ALLOCATOR, False, {}, ALLOCATOR), (ALLOCATOR, False, {"LD_PRELOAD": "mine.so"}, "mine.so"),
    (ALLOCATOR, True, {}, None), ("", False, {}, None),
])  # fmt: skip
def test_ranks_on_a_cpu_start_with_tcmalloc_where_it_is_installed(
    monkeypatch, command, started, installed, gpu,
    before, expected
):  # fmt: skip
    monkeypatch.setattr(processor, "spare_allocator", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(os, "environ", dict(before))
    assert command.launch(Config(), ["some.toml"], Nodes()) == 7
    [(ranks, line, environment)] = started
    assert ranks == range(3) and line == [sys.executable, "-m", "trainer.rank_process", "some.toml"]
    assert environment.get("LD_PRELOAD") == expected and environment["OMP_NUM_THREADS"] == "1"


def test_under_torchrun_the_first_process_of_a_node_is_the_parent_of_its_ranks(monkeypatch, command, started):
    monkeypatch.setattr(command.watchdog, "die_with_parent", lambda: None)
    for local in range(2):
        for name, value in {"RANK": 3 + local, "LOCAL_RANK": local, "WORLD_SIZE": 5, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        assert command.main(["some.toml", "--seed=3"]) == (7, 0)[local]
    [(ranks, line, _)] = started
    assert ranks == range(3, 5) and line == [sys.executable, "-m", "trainer.rank_process", "some.toml", "--seed=3"]


@pytest.mark.parametrize("case", read_table("trainer/cases", of="nodes"), ids=itemgetter("name"))
def test_impossible_nodes_are_refused(command, capsys, case):
    try:
        code = command.main(["configs/quickstart.toml", *case["options"]])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr().err
    assert code == 2 and case["message"] in printed and len(printed.splitlines()) == 1


def test_options_of_nodes_may_stand_anywhere(command):
    words = ["--nnodes", "2", "a.toml", "--seed=3", "--node_rank=1", "--steps", "7", "--master-addr=::1"]
    assert command.take_nodes(words) == (Nodes(2, 1, "::1", 29500), ["a.toml", "--seed=3", "--steps", "7"])


@pytest.mark.timeout(900)
def test_a_signal_while_libraries_are_imported_ends_the_launch(root):
    words, environment = [sys.executable, "-c", SWALLOWS], {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, timeout=600, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"stopped\n")


@pytest.mark.parametrize(("folders", "says"), [
    ((), "before the first checkpoint: the same command begins anew"), (("step_7.damaged",), "begins anew"),
    (("step_0",), "from step 0"), (("step_8", "step_12", "step_4"), "from step 12"),
    (("step_12", "step_60"), "stopped; its steps are done: the same command only evaluates and exports what is"),
])  # fmt: skip
def test_after_a_stop_it_says_from_where_the_run_goes_on(tmp_path, folders, says):
    for name in folders:
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    launch = SimpleNamespace(config=Config.model_validate({"name": "run", "runs_dir": str(tmp_path), "steps": 60}))
    assert says in rank_process._stopped(launch) and "anew" in rank_process._stopped(None)  # type: ignore[arg-type]
