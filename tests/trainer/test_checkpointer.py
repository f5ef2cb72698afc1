"""A checkpoint is written beside training, is waited for as long as its disk takes something, and stops the run or is
only told where it cannot be written, as checkpoint.on_error says."""

import asyncio
import errno
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared import record_file, route_files
from shared.config import Config
from shared.errors import CheckpointError
from shared.progress import Progress
from shared.record_file import Written
from shared.types import Completion, Problem, Prompt
from trainer.checkpoint import ledger_file, writer
from trainer.checkpoint.origin import Origin
from trainer.checkpoint.reader import check_contents, check_names, decode
from trainer.ledger import Ledger
from trainer.stages import Stages
from trainer.timing import PhaseTimer

PROBLEM = Problem("p", "1+1=?", "2")


class Disk:
    """Trainers whose disk takes nothing until it is told to, or is full, and engines without completions (the real
    ones: tests/system)."""

    under_way, full = 0, False

    def __init__(self, taken: bool = False) -> None:
        self.taken = taken

    async def save(self, folder: Path, version: int) -> list[dict[str, int]]:
        (folder / "trainer-0.safetensors").write_bytes(b"half")
        return [{}]

    async def saved(self) -> dict[str, Written] | None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return {} if self.taken else None

    async def snapshot(self, folder: Path) -> dict[str, Written]:
        return {}


def make(runs_dir: Path, disk: Any, stream: io.StringIO | None = None, **settings: Any) -> writer.Checkpointer:
    config = Config.model_validate({"runs_dir": str(runs_dir), **settings})
    ledger, progress = Ledger(Stages(config)), Progress(stream or io.StringIO())
    return writer.Checkpointer(config, ledger, disk, disk, PhaseTimer(), progress, Origin({}, {}))


async def save(checkpointer: writer.Checkpointer) -> None:
    await checkpointer.save()
    await checkpointer.finish()


def test_a_full_disk_stops_the_run_with_the_repair_or_is_only_told(tmp_path):
    disk, stream = Disk(), io.StringIO()
    disk.full = True
    stopping = make(tmp_path, disk, checkpoint={"on_error": "stop"})
    with pytest.raises(CheckpointError, match="disk is full.*checkpoint.keep"):
        asyncio.run(save(stopping))
    assert not list((stopping.config.run_dir / "checkpoints").iterdir())
    going_on = make(tmp_path, disk, stream, checkpoint={"on_error": "continue"})
    asyncio.run(save(going_on))
    assert going_on.failures == 1 and going_on.saved == -1
    assert "disk is full" in " ".join(stream.getvalue().split())


def test_a_run_goes_on_while_a_checkpoint_is_written_and_gets_the_state_of_its_step(tmp_path):
    checkpointer = make(tmp_path, disk := Disk())
    ledger, folder = checkpointer.ledger, tmp_path / "run" / "checkpoints"

    async def go() -> None:
        ledger.open(Prompt(0, PROBLEM, [1]), [7, 8])
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


def test_routes_stay_until_no_checkpoint_that_may_name_them_is_being_written(tmp_path):
    """Group 0 is in the state of step 3, then trained; group 1 was trained before."""
    checkpointer = make(tmp_path, disk := Disk())
    run_dir, ledger = tmp_path / "run", checkpointer.ledger

    def files_in(folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.glob("routes/*/*"))

    async def go() -> None:
        for index in range(2):
            ledger.open(Prompt(index, PROBLEM, [1]), [7])
            routes = [route_files.write(run_dir, f"{index}/0.0.0", b"abcdef", 2)]
            ledger.receive(Completion(index, 0, 7, [1, 2], [-1.0, -1.0], finish_reason="stop", routes=routes))
        ledger.version = 3
        await checkpointer.forget_routes([ledger.groups.pop(1)])
        await checkpointer.save()
        assert files_in(run_dir) == ["routes/0/0.0.0"]
        ledger.version = 4
        await checkpointer.forget_routes([ledger.groups.pop(0)])
        assert files_in(run_dir) == ["routes/0/0.0.0"], "step 3 is being written"
        disk.taken = True
        await checkpointer.save()
        assert files_in(run_dir) == []
        await checkpointer.finish()

    asyncio.run(go())
    three, four = (run_dir / "checkpoints" / f"step_{version}" for version in (3, 4))
    assert files_in(three) == ["routes/0/0.0.0"] and files_in(four) == []
    files = decode(three / writer.MANIFEST, writer.Manifest).files
    (three / "trainer-0.safetensors").unlink()  # the scripted trainers do not name it
    check_names(three, files)
    check_contents(three, files)


@pytest.mark.parametrize(
    ("sizes", "ends"), [([5] * 6, False), ([5, 5, 5, 6, 6, 6, 7, 7, 7, 8], True)], ids=["hangs", "takes something"]
)
def test_a_disk_that_takes_something_is_waited_for(tmp_path, monkeypatch, sizes, ends):
    """sizes: bytes of the checkpoint's folder, at each look, before which a second passes; then the disk has taken all.
    The deadline is one of the settings."""
    checkpointer = make(tmp_path, disk := Disk(), deadlines={"step_s": 3.5})
    seconds, left = [0.0], list(sizes)

    def look(folder: Path) -> int:
        seconds[0] += 1.0
        disk.taken = len(left) == 1
        return left[0] if disk.taken else left.pop(0)

    monkeypatch.setattr(writer, "LOOK_S", 0.001)
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(writer, "bytes_in", look)
    if ends:
        asyncio.run(save(checkpointer))
        assert checkpointer.saved == 0 and seconds[0] > 2 * 3.5
        return
    with pytest.raises(CheckpointError, match=r"version 0' \(raise deadlines\.step_s"):
        asyncio.run(save(checkpointer))


def test_the_ledger_is_encoded_beside_the_loop_a_completion_at_a_time(tmp_path, monkeypatch):
    """So that no encoding of a million tokens keeps the interpreter from the loop."""
    write, threads = ledger_file.write, list[int]()

    def noted(*given: Any) -> Written:
        threads.append(threading.get_ident())
        return write(*given)

    monkeypatch.setattr(ledger_file, "write", noted)
    checkpointer = make(tmp_path, Disk(taken=True))
    checkpointer.ledger.open(Prompt(0, PROBLEM, [1]), [7, 8, 9])
    asyncio.run(save(checkpointer))
    assert len(threads) == 1 and threads != [threading.get_ident()]
    assert len(list(record_file.read(tmp_path / "run" / "checkpoints" / "step_0" / ledger_file.LEDGER))) == 1 + 1 + 3


@pytest.mark.parametrize("dies", [False, True], ids=["all ranks live", "a rank has died"])
def test_a_checkpoint_under_way_outlives_an_error_of_the_run_unless_a_rank_is_dead(tmp_path, dies):
    checkpointer = make(tmp_path, disk := Disk())

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
        disk.taken = not dies
        await asyncio.wait_for(rescue, 600)

    asyncio.run(go())
    assert checkpointer.saved == (-1 if dies else 0)


def test_a_version_that_must_stay_outlives_the_two_that_are_kept(tmp_path, monkeypatch):
    checkpointer = make(tmp_path, Disk(taken=True))
    monkeypatch.setattr(writer, "wanted_versions", lambda config: {1})
    for version in (1, 2, 3, 4):
        checkpointer.ledger.version = version
        asyncio.run(save(checkpointer))
    assert list(writer.folders(tmp_path / "run")) == [1, 3, 4]
