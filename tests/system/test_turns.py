"""A launch in which trainers and engines work in turns trains the same weights as one in which they do not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.system.conftest import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.soak
def test_turns_change_no_bit_of_what_is_trained(start: Start, tmp_path: Path) -> None:
    """Synchronous, with a reference model beside the policy and an evaluation on the way. On a CPU the engines' sleep
    frees nothing, but they lose their version and may not sample before the next update."""
    digests, losses = [], []
    for colocate in ("never", "turns"):
        launch = start(
            tmp_path / colocate, placement__colocate=colocate, rollout__max_async_level=0, steps=2,
            objective__kl__weight=0.01, evaluate__every=1, evaluate__greedy=False,
        )  # fmt: skip
        assert launch.wait() == 0, launch.output[-6000:]
        assert launch.told("shares GPUs with the engines (turns)") is (colocate == "turns")
        digests.append(hashlib.sha256((launch.run_dir / "latest" / "model.safetensors").read_bytes()).hexdigest())
        losses.append(launch.losses())
    assert len(losses[0]) == 2 and any(losses[0]) and losses[0] == losses[1]
    assert digests[0] == digests[1]


@pytest.mark.gpu
@pytest.mark.parametrize("colocate", ["resident", "turns"])
def test_on_one_gpu_trainer_and_engine_share_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, colocate: str
) -> None:
    """Every update is proved as ever."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    launch = start(tmp_path, placement__colocate=colocate, rollout__max_async_level=0, steps=3)
    assert launch.wait() == 0, launch.output[-6000:]
    assert launch.told(f"shares GPUs with the engines ({colocate})") and len(launch.losses()) == 3
