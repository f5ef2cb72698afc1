"""A checkpoint that cannot be written stops the run, or is only told, as checkpoint.on_error says."""

from __future__ import annotations

import asyncio
import errno
import io
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from shared.errors import CheckpointError
from shared.progress import Progress
from shared.types import Completion
from trainer import checkpoint
from trainer.ledger import Ledger
from trainer.origin import Origin
from shared.record_file import Written
from trainer.stages import Stages
from trainer.timing import PhaseTimer


class FullDisk:
    """Trainers whose shards do not fit, and engines without completions (the real ones: tests/system)."""

    async def save(self, folder: Path, version: int) -> dict[str, Written]:
        (folder / "trainer-0.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    async def snapshot(self) -> list[Completion]:
        return []


def make(runs_dir: Path, on_error: str) -> tuple[checkpoint.Checkpointer, io.StringIO]:
    config = Config.model_validate({"runs_dir": str(runs_dir), "checkpoint": {"on_error": on_error}})
    told, full = io.StringIO(), FullDisk()
    parts: Any = full
    checkpointer = checkpoint.Checkpointer(
        config, Ledger(Stages(config)), parts, parts, PhaseTimer(), Progress(told), Origin({}, {})
    )  # fmt: skip
    return checkpointer, told


def test_a_full_disk_stops_the_run_with_the_repair(tmp_path: Path):
    checkpointer, _ = make(tmp_path, "stop")
    with pytest.raises(CheckpointError, match="disk is full.*checkpoint.keep"):
        asyncio.run(checkpointer.save())
    assert not list((checkpointer.config.run_dir / "checkpoints").iterdir())


def test_a_full_disk_may_only_be_told(tmp_path: Path):
    checkpointer, told = make(tmp_path, "continue")
    asyncio.run(checkpointer.save())
    assert checkpointer.failures == 1 and checkpointer.saved == -1
    assert "disk is full" in " ".join(told.getvalue().split())
