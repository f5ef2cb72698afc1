"""A checkpoint that cannot be written stops the run, or is only told, as checkpoint.on_error says."""

from __future__ import annotations

import asyncio
import errno
import io
import threading
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config import Config
from shared.errors import CheckpointError
from shared.progress import Progress
from shared.record_file import Written
from shared.types import Completion, Group, Problem, Prompt, VersionSpan
from trainer.checkpoint import ledger_file, writer
from trainer.checkpoint.origin import Origin
from trainer.ledger import Ledger
from trainer.stages import Stages
from trainer.timing import PhaseTimer


class FullDisk:
    """Trainers whose shards do not fit, and engines without completions (the real ones: tests/system)."""

    under_way = 0

    async def save(self, folder: Path, version: int) -> list[dict[str, int]]:
        (folder / "trainer-0.safetensors").write_bytes(b"half")
        return [{}]

    async def saved(self) -> dict[str, Written] | None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def snapshot(self, folder: Path) -> dict[str, Written]:
        return {}


def make(runs_dir: Path, on_error: str) -> tuple[writer.Checkpointer, io.StringIO]:
    config = Config.model_validate({"runs_dir": str(runs_dir), "checkpoint": {"on_error": on_error}})
    told, full = io.StringIO(), FullDisk()
    parts: Any = full
    checkpointer = writer.Checkpointer(
        config, Ledger(Stages(config)), parts, parts, PhaseTimer(), Progress(told), Origin({}, {})
    )  # fmt: skip
    return checkpointer, told


async def save(checkpointer: writer.Checkpointer) -> None:
    await checkpointer.save()
    await checkpointer.finish()


def test_a_full_disk_stops_the_run_with_the_repair(tmp_path: Path):
    checkpointer, _ = make(tmp_path, "stop")
    with pytest.raises(CheckpointError, match="disk is full.*checkpoint.keep"):
        asyncio.run(save(checkpointer))
    assert not list((checkpointer.config.run_dir / "checkpoints").iterdir())


def test_a_full_disk_may_only_be_told(tmp_path: Path):
    checkpointer, told = make(tmp_path, "continue")
    asyncio.run(save(checkpointer))
    assert checkpointer.failures == 1 and checkpointer.saved == -1
    assert "disk is full" in " ".join(told.getvalue().split())


class SlowDisk(FullDisk):
    """Trainers whose disk takes nothing more until it is told to, as a file system that hangs."""

    def __init__(self) -> None:
        self.taken = False

    async def saved(self) -> dict[str, Written] | None:
        return {} if self.taken else None


def on_slow_disk(tmp_path: Path, on_error: str, **settings: Any) -> tuple[writer.Checkpointer, SlowDisk]:
    checkpointer, _ = make(tmp_path, on_error)
    disk: Any = SlowDisk()
    checkpointer.trainers = checkpointer.engines = disk
    config = checkpointer.config
    checkpointer.config = config.model_copy(update={"deadlines": config.deadlines.model_copy(update=settings)})
    return checkpointer, disk


def test_a_run_goes_on_while_a_checkpoint_is_written_and_gets_the_state_of_its_step(tmp_path: Path):
    checkpointer, disk = on_slow_disk(tmp_path, "stop")
    ledger, folder = checkpointer.ledger, tmp_path / "run" / "checkpoints"

    async def go() -> None:
        ledger.open(Prompt(0, Problem("p", "1+1=?", "2"), [1]), [7, 8])
        ledger.version = 3
        await checkpointer.save()
        ledger.receive(Completion(0, 1, 8, [1, 2], [-1.0, -1.0], finish_reason="stop"))
        ledger.version = 4
        await checkpointer.save_if_due()
        assert [path.name for path in folder.iterdir()] == ["step_3.partial"] and checkpointer.saved == -1
        disk.taken = True
        await checkpointer.save()  # the one before ends first
        assert checkpointer.saved == 3
        await checkpointer.finish()

    asyncio.run(go())
    assert checkpointer.saved == 4
    (three,), (four,) = (ledger_file.read(folder / f"step_{version}").groups for version in (3, 4))
    assert [c.finish_reason for c in three.completions] == [None, None]
    assert [c.finish_reason for c in four.completions] == [None, "stop"]


class ScriptedDisk:
    """The clock and the bytes of a checkpoint's folder: at each look a second has passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, disk: SlowDisk, sizes: Sequence[int]):
        """sizes: at each look, of which the last one stays; the disk has taken all once they are used up."""
        self.disk, self.sizes, self.seconds = disk, list(sizes), 0.0
        monkeypatch.setattr(writer, "LOOK_S", 0.001)
        monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        monkeypatch.setattr(writer, "bytes_in", self.look)

    def look(self, folder: Path) -> int:
        self.seconds += 1.0
        if len(self.sizes) > 1:
            return self.sizes.pop(0)
        self.disk.taken = True
        return self.sizes[0]


def test_a_disk_that_hangs_is_named_after_a_deadline_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, disk = on_slow_disk(tmp_path, "stop", step_s=3.5)
    ScriptedDisk(monkeypatch, disk, [5] * 6)
    with pytest.raises(CheckpointError, match=r"version 0' \(raise deadlines\.step_s"):
        asyncio.run(save(checkpointer))


def test_a_disk_is_waited_for_as_long_as_it_takes_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, disk = on_slow_disk(tmp_path, "stop", step_s=3.5)
    clock = ScriptedDisk(monkeypatch, disk, [5, 5, 5, 6, 6, 6, 7, 7, 7, 8])
    asyncio.run(save(checkpointer))
    assert checkpointer.saved == 0 and clock.seconds > 2 * 3.5


def test_the_ledger_is_encoded_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, disk = on_slow_disk(tmp_path, "stop")
    disk.taken, write, threads = True, ledger_file.write, list[int]()

    def noted(*given: Any) -> Written:
        threads.append(threading.get_ident())
        return write(*given)

    monkeypatch.setattr(ledger_file, "write", noted)
    asyncio.run(save(checkpointer))
    assert len(threads) == 1 and threads != [threading.get_ident()]


async def longest_hold(work: Awaitable[None]) -> float:
    """Seconds that the loop was kept from a task that wants to run every 5 ms, at most, while `work` was done."""
    ending, longest = asyncio.ensure_future(work), 0.0
    while not ending.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - before - 0.005)
    await ending
    return longest


@pytest.mark.soak  # it measures time; in make test: the test above
def test_a_ledger_of_100_m_open_tokens_does_not_hold_the_loop(tmp_path: Path) -> None:
    """All completions share their lists, which saves 7 GB of memory, and no work of encoding."""
    checkpointer, disk = on_slow_disk(tmp_path, "stop")
    disk.taken, tokens, completions = True, 12_000, 8334
    ids, logprobs = [100_000 + number for number in range(tokens)], [-0.1 - number for number in range(tokens)]
    problem, ledger = Problem("p", "1+1=?", "2"), checkpointer.ledger
    for index in range(completions // 16 + 1):
        ended = [Completion(index, n, 0, ids, logprobs, [VersionSpan(0, 0, tokens)], "stop") for n in range(16)]
        ledger.groups[index] = Group(Prompt(index, problem, [1] * 64), ended, [None] * 16, ["word " * tokens] * 16)
        ledger._taken_after[index] = 0

    async def go() -> float:
        return await longest_hold(save(checkpointer))

    longest_s = asyncio.run(go())
    written = (tmp_path / "run" / "checkpoints" / "step_0" / ledger_file.LEDGER).stat().st_size
    print(f"{completions * tokens:,} tokens, {written:,} bytes: the loop waited for {1e3 * longest_s:.0f} ms at most")
    assert written > 12 * completions * tokens and longest_s < 0.1


@pytest.mark.parametrize("dies", [False, True], ids=["all ranks live", "a rank has died"])
def test_a_checkpoint_under_way_outlives_an_error_of_the_run_unless_a_rank_is_dead(tmp_path: Path, dies: bool):
    checkpointer, disk = on_slow_disk(tmp_path, "stop")

    async def go() -> None:
        await checkpointer.save()
        loop = asyncio.ensure_future(checkpointer.finish())
        await asyncio.sleep(0)
        loop.cancel()  # as a task group does with the other loops when one fails
        await asyncio.gather(loop, return_exceptions=True)
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rescue = asyncio.ensure_future(checkpointer.rescue([lost]))
        await asyncio.sleep(0)
        assert not rescue.done()
        if dies:
            lost.set_result(None)
        else:
            disk.taken = True
        await asyncio.wait_for(rescue, 600)

    asyncio.run(go())
    assert checkpointer.saved == (-1 if dies else 0)


def test_a_version_that_must_stay_outlives_the_two_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, disk = on_slow_disk(tmp_path, "stop")
    disk.taken = True
    monkeypatch.setattr(writer, "wanted_versions", lambda config: {1})
    for version in (1, 2, 3, 4):
        checkpointer.ledger.version = version
        asyncio.run(save(checkpointer))
    assert list(writer.folders(tmp_path / "run")) == [1, 3, 4]
