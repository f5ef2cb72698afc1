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

from examples.loop import OPTIONS, loop
from rollout.local_engine import LocalConnection, LocalRank
from shared.config import Config
from shared.errors import ConfigError, NonFinite, RunError, SyncMismatch
from shared.types import MicroBatch
from tests.process import in_fresh_process
from tests.trainer.rank_data import make_folder, make_sequences
from tests.trainer.sequences import make_sequence
from trainer.client import TrainerClient
from trainer.session import Session
from trainer.step.batching import plan_batch
from trainer.step.rank import TrainerRank

SETTINGS = {"model": {"dtype": "float32"}, "optimiser": {"compute_dtype": "float32"}, "rollout": {"transport": "shm"}}


def take_steps(folder: Path) -> None:
    """Load, learn, meet a NaN, end."""
    make_folder(folder / "model", seed=1)
    config = Config.model_validate(SETTINGS)
    rank, link = TrainerRank(config, LocalRank(torch.device("cpu"), dist.HashStore())), LocalConnection("the trainer")
    trainers = TrainerClient(link, range(1), config)
    plan = plan_batch(make_sequences("group_tokens"), 1, 8192).micro_batches

    async def story() -> None:
        serving = asyncio.create_task(link.serve(rank))
        [loaded] = await trainers.call(TrainerRank.load, str(folder / "model"), None)
        assert loaded.parameters > 0
        before = [parameter.detach().clone() for parameter in rank.decoder.parameters()]
        assert (await trainers.forward_backward(plan)).tokens > 0
        assert (await trainers.step(1e-2)).grad_norm > 0
        assert any(not torch.equal(a, b) for a, b in zip(before, rank.decoder.parameters(), strict=True))
        spoiled = MicroBatch([make_sequence([1, 2, 3, 4], 2, [-1.0, float("nan")], 1.0, 1.0)])
        with pytest.raises(NonFinite, match="log-prob at completion position"):
            await trainers.forward_backward([[spoiled]])
        await trainers.call(TrainerRank.stop)
        await serving

    asyncio.run(story())
    assert not dist.is_initialized() and rank.sender is None


@pytest.mark.slow
def test_a_trainer_of_this_process_takes_steps_and_raises_what_its_calls_raise(tmp_path: Path) -> None:
    in_fresh_process(take_steps, tmp_path)


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


def stale(folder: Path) -> None:
    """An update whose first tensor changes between the write and the checksums."""

    async def story() -> None:
        async with Session("configs/quickstart.toml", *OPTIONS, f"--runs_dir={folder}", "--name=stale") as session:
            rank = session.trainer
            write = rank.sender.write

            def late(version: int) -> Any:
                written = write(version)
                with torch.no_grad():
                    next(rank.decoder.parameters()).add_(0.01)
                return written

            await session.step(groups := await session.sample(session.draw(2)))
            with pytest.raises(RunError, match="a step needs publish first: the engine has version 0 of 1"):
                await session.step(groups)
            with mock.patch.object(rank.sender, "write", late), pytest.raises(SyncMismatch, match="does not hold"):
                await session.publish()

    asyncio.run(story())


def learn(folder: Path) -> list[float]:
    """The example, as it stands."""
    return asyncio.run(loop(f"--runs_dir={folder}"))


@pytest.mark.soak  # in make test: the test below has a real engine
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_that_do_not_arrive_end_the_session(tmp_path: Path) -> None:
    in_fresh_process(stale, tmp_path)
