"""A session: the ranks of a launch in this process, called by the same clients, with the same proofs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples.loop import OPTIONS, graded, loop
from shared.errors import ConfigError, NonFinite, RunError, SyncMismatch
from shared.types import MicroBatch
from tests.process import in_fresh_process
from tests.trainer.sequences import make_sequence
from trainer.session import Session


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--placement.trainers=2", "several trainers"),
        ("--objective.kl.weight=0.1", "reference policy"),
        ("--reward.corectness=1", "reward.correctness"),
        ("--model.path=", "model.path is not set"),
    ],
)
def test_what_a_session_does_not_have_is_refused_before_anything_starts(option: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Session("configs/quickstart.toml", option)


def test_a_folder_with_a_run_is_left_alone(tmp_path: Path) -> None:
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
                written = write(version)
                with torch.no_grad():
                    next(rank.decoder.parameters()).add_(0.01)
                return written

            with mock.patch.object(rank.sender, "write", late), pytest.raises(SyncMismatch, match="does not hold"):
                await session.publish()
        return session

    session = asyncio.run(story())
    assert not dist.is_initialized() and session.trainer.sender is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_session_takes_steps_and_raises_what_its_calls_raise_and_weights_that_do_not_arrive(tmp_path: Path) -> None:
    in_fresh_process(session_with_faults, tmp_path)


def learn(folder: Path) -> list[float]:
    """The example, as it stands."""
    return asyncio.run(loop(f"--runs_dir={folder}"))


@pytest.mark.soak  # in make test: the test above has a real engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_learns_with_a_real_engine_and_proves_its_updates(tmp_path: Path) -> None:
    means = in_fresh_process(learn, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "loop" / "metrics.jsonl").read_text().splitlines()]
    assert len(means) == len(rows) == 20 and means[-1] > means[0] + 0.2
    assert rows[0]["logprob_difference/mean"] < 1e-4 and max(row["sync/logprob_diff_max"] for row in rows) < 1e-3
    assert all(row["staleness/max"] == 0 for row in rows) and rows[-1]["sync/bytes"] > 0
    assert (tmp_path / "loop" / "latest" / "model.safetensors").is_file()
    assert len(list((tmp_path / "loop" / "rollouts").iterdir())) == 20
