"""What `python -m trainer` gives the ranks that it starts (that they train is tested in tests/system)."""

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import run as torchrun

from shared.config import Config
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
    monkeypatch.setattr(torchrun, "run", lambda arguments: started.append((arguments, dict(os.environ))))
    monkeypatch.setattr(os, "environ", dict(before))
    command = importlib.import_module("trainer.__main__")  # here: it sets variables as it is imported
    assert command.launch(Config(), ["some.toml"]) == 0
    [(arguments, environment)] = started
    assert arguments.training_script_args == ["some.toml"] and arguments.nproc_per_node == str(Config().world_size)
    # no store on TCP: torch unpickles what any local user writes there
    assert (arguments.rdzv_backend, arguments.rdzv_conf, arguments.standalone) == ("c10d", "store_type=file", False)
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert arguments.rdzv_endpoint.startswith(environment["TMPDIR"] + "/")
    assert not os.path.exists(environment["TMPDIR"]), "the private folder goes with the launch"
    assert environment.get("LD_PRELOAD") == expected and environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("exit_codes", "code", "told"),
    [
        ({1: -9, 0: 143}, 137, "error: trainer 0 (rank 1) was killed by signal 9 (SIGKILL)"),  # before anybody knew it
        ({0: -9, 1: -15, 2: -15}, 137, "error: controller (rank 0) was killed by signal 9 (SIGKILL)"),
        ({1: -9, 0: 1}, 137, ""),  # the controller told it
        ({0: -9, 1: 1, 2: 1}, 137, ""),  # a rank beside it told it
        ({0: 2, 1: -15}, 2, ""),
        ({2: -11, 0: 130}, 139, "error: engine 0 (rank 2) was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_the_launcher_tells_a_death_that_no_rank_could_tell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, exit_codes: dict[int, int], code: int, told: str
) -> None:
    command = importlib.import_module("trainer.__main__")
    assert command._tell_silent_death(exit_codes, Config(runs_dir=str(tmp_path)), 0) == code
    found = capsys.readouterr().err
    assert found.startswith(told) if told else not found
    assert not told or "The same command starts anew" in found


@pytest.mark.parametrize(("codes", "first"), [({0: 1, 2: -9}, 2), ({0: 2, 1: -15, 2: -15}, 0)])
def test_of_ranks_that_ended_in_one_second_the_killed_one_was_first(codes: dict[int, int], first: int) -> None:
    """SIGTERM is torchrun's answer to a rank that failed before."""
    ended = {rank: SimpleNamespace(timestamp=7, exitcode=code) for rank, code in codes.items()}
    command = importlib.import_module("trainer.__main__")
    assert command.ordered(SimpleNamespace(failures=ended))[0][0] == first


def test_torchrun_says_nothing_of_its_own_after_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    """Its "Received 2 death signal" stood before what the run says."""
    from torch.distributed.elastic.agent.server import api

    levels = {name: logging.getLogger(name).level for name in [*logging.Logger.manager.loggerDict]}
    try:
        api.logger.setLevel(logging.WARNING)  # as torch sets it at import
        importlib.import_module("trainer.__main__").silence_torchrun()
        api.logger.warning("Received %s death signal, shutting down workers", 2)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert "death signal" not in capfd.readouterr().err


SWALLOWS = """
import importlib, os, signal, sys
from shared.config import Config
command = importlib.import_module("trainer.__main__")
class Library:
    def find_spec(self, name, *more):
        if name == "torch.distributed.run":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass  # as a library does that looks whether another can be imported
sys.meta_path.insert(0, Library())
command.launch(Config(), ["no-such-file.toml"])
print("went on")
"""


def test_a_signal_while_libraries_are_imported_ends_the_launch() -> None:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", SWALLOWS], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, timeout=150
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"stopped\n")
