"""What `python -m trainer` gives the ranks that it starts (that they train: tests/system); and a session: the ranks of
a launch in this process, called by the same clients, with the same proofs."""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples.loop import OPTIONS, graded, loop
from shared.config import Config
from shared.errors import ConfigError, NonFinite, RunError, SyncMismatch
from shared.launch import node
from shared.launch.ranks import Nodes
from shared.model.cpu import processor
from shared.types import MicroBatch
from tests.process import in_fresh_process
from tests.tables import read_table
from tests.trainer.sequences import make_sequence
from trainer.session import Session

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


@pytest.mark.parametrize(("option", "named"), [
    ("--placement.trainers=2", "several trainers"), ("--objective.kl.weight=0.1", "reference policy"),
    ("--reward.corectness=1", "reward.correctness"), ("--model.path=", "model.path is not set"),
])  # fmt: skip
def test_what_a_session_does_not_have_is_refused_before_anything_starts(option, named):
    with pytest.raises(ConfigError, match=named):
        Session("configs/quickstart.toml", option)


def test_a_folder_with_a_run_is_left_alone(tmp_path):
    session = Session("configs/quickstart.toml", f"--runs_dir={tmp_path}", "--name=taken")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds a run already"):
        asyncio.run(session.__aenter__())
    assert (tmp_path / "taken" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert json.loads((tmp_path / "taken" / "lock").read_bytes())["ended"]


def session_with_faults(folder: Path) -> None:
    """A step; a sequence with a NaN; an update whose first tensor changes between the write and the checksums."""

    async def story() -> Session:
        async with Session("configs/quickstart.toml", *OPTIONS, f"--runs_dir={folder}", "--name=stale") as session:
            rank, trainers = session.trainer, session.loop.learner.trainers
            before = [parameter.detach().clone() for parameter in rank.decoder.parameters()]
            groups = [graded(group) for group in await session.sample(session.draw(2))]
            assert (await session.step(groups))["grad_norm"] > 0
            assert any(not torch.equal(a, b) for a, b in zip(before, rank.decoder.parameters(), strict=True))
            with pytest.raises(RunError, match="a step needs publish first: the engine has version 0 of 1"):
                await session.step(groups)

            spoiled = MicroBatch([make_sequence([1, 2, 3, 4], 2, [-1.0, float("nan")], 1.0, 1.0)])
            with pytest.raises(NonFinite, match="log-prob at completion position"):
                await trainers.forward_backward([[spoiled]])

            write = rank.sender.write

            def late(version: int) -> Any:
                try:
                    return write(version)
                finally:
                    next(rank.decoder.parameters()).detach().add_(0.01)

            with mock.patch.object(rank.sender, "write", late), pytest.raises(SyncMismatch, match="does not hold"):
                await session.publish()
        return session

    session = asyncio.run(story())
    assert not dist.is_initialized() and session.trainer.sender is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_session_takes_steps_and_raises_what_its_calls_raise_and_weights_that_do_not_arrive(tmp_path):
    in_fresh_process(session_with_faults, tmp_path)


def learn(folder: Path) -> list[float]:
    """The example, as it stands."""
    return asyncio.run(loop(f"--runs_dir={folder}"))


@pytest.mark.soak  # in make test: the test above has a real engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_learns_with_a_real_engine_and_proves_its_updates(tmp_path):
    means = in_fresh_process(learn, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "loop" / "metrics.jsonl").read_text().splitlines()]
    assert len(means) == len(rows) == 20 and means[-1] > means[0] + 0.2
    assert rows[0]["logprob_difference/mean"] < 1e-4 and max(row["sync/logprob_diff_max"] for row in rows) < 1e-3
    assert all(row["staleness/max"] == 0 for row in rows) and rows[-1]["sync/bytes"] > 0
    assert (tmp_path / "loop" / "latest" / "model.safetensors").is_file()
    assert len(list((tmp_path / "loop" / "rollouts").iterdir())) == 20
