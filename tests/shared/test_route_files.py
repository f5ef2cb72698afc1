"""Routes in files: read back as written, never trained without; checkpoints hold them, a resume has them again."""

import errno
import os
from pathlib import Path

import pytest

from shared import route_files
from shared.errors import CheckpointError, RunError
from shared.types import MicroBatch, RouteFile, TrainSequence


def rows(seed: int, tokens: int) -> bytes:
    return bytes((seed + 7 * number) % 64 for number in range(6 * tokens))


def write(run_dir: Path, index: int = 0, group: int = 7) -> list[RouteFile]:
    """A completion of two turns: 3 tokens, then 2."""
    parts = ((0, 3), (3, 2))
    return [route_files.write(run_dir, f"{group}/{index}.0.{at}", rows(index + at, n), n) for at, n in parts]


def test_a_trainer_reads_what_the_engine_wrote_in_order(tmp_path):
    sequences = [TrainSequence([1] * 6, bytes([0, 1, 1, 1, 1, 1]), 1.0, route_files=write(tmp_path, 1)),
                 TrainSequence([1] * 6, bytes([0, 1, 1, 1, 1, 1]), 1.0)]  # fmt: skip
    route_files.read_all(tmp_path, [MicroBatch(sequences), MicroBatch([])])
    content = rows(1, 3) + rows(4, 2)
    assert sequences[0].routes == [content[start : start + 6] for start in range(0, 30, 6)]
    assert sequences[1].routes == []


def plant(path: Path, fault: str) -> None:
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes((path.parent.parent / "7" / "5.0.3").read_bytes())


@pytest.mark.parametrize(("fault", "why"), [
    ("missing", "has 0 bytes, not the 12 that were written .No such file"),
    ("truncated", "has 11 bytes, not the 12 that"), ("of another completion", "has 12 bytes, not the 12 that"),
])  # fmt: skip
def test_a_file_that_is_not_what_was_written_stops_the_step_by_name(tmp_path, fault, why):
    files = write(tmp_path, 4)
    write(tmp_path, 5)
    plant(path := tmp_path / "routes" / "7" / "4.0.3", fault)
    sequence = TrainSequence([1] * 6, bytes([0, 1, 1, 1, 1, 1]), 1.0, route_files=files)
    with pytest.raises(RunError, match=rf"group 7, completion 4: {path} {why}.*newest checkpoint.*router_replay"):
        route_files.read_all(tmp_path, [MicroBatch([sequence])])
    assert sequence.routes == [], "nothing is trained without"


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "a disk without"])
def test_a_checkpoint_has_its_files_whatever_becomes_of_the_run(tmp_path, monkeypatch, links):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    files, checkpoint = write(tmp_path), tmp_path / "checkpoints" / "step_1"
    saved = route_files.save(tmp_path, files, checkpoint)
    assert route_files.save(tmp_path, files, checkpoint) == saved, "ledger and engine both name them"
    assert sorted(saved) == ["routes/7/0.0.0", "routes/7/0.0.3"] and saved["routes/7/0.0.3"].bytes == 12
    assert (checkpoint / "routes/7/0.0.0").stat().st_nlink == (2 if links else 1)
    route_files.write(tmp_path, "7/0.0.3", b"other", 1)  # as after a resume from an earlier step
    write(tmp_path, group=8)
    route_files.restore(tmp_path, checkpoint)
    assert b"".join(row for file in files for row in route_files.read(tmp_path, file)) == rows(0, 3) + rows(3, 2)
    assert [path.name for path in (tmp_path / "routes").iterdir()] == ["7"], "later groups are sampled anew"
    route_files.remove(tmp_path, [7, 9])
    assert not list((tmp_path / "routes").iterdir()) and len(list(checkpoint.glob("routes/7/*"))) == 2
    route_files.restore(tmp_path, None)
    assert not (tmp_path / "routes").exists()


def test_a_checkpoint_is_not_written_without_a_file_that_it_names(tmp_path):
    files = write(tmp_path)
    plant(tmp_path / "routes" / "7" / "0.0.3", "missing")
    with pytest.raises(CheckpointError, match=r"routes could not be linked into step_1.*7/0\.0\.3"):
        route_files.save(tmp_path, files, tmp_path / "checkpoints" / "step_1")
