"""Routes of completions under way: a file for each turn or snapshot, in order; a full disk loses nothing."""

import asyncio
import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine import Engine
from rollout.output_collector import OutputCollector
from rollout.routes import RouteKeeper
from rollout.trial import Trial
from rollout.worker import EngineRank
from shared import record_file, route_files
from shared.errors import DiskError
from shared.launch.batch_queue import BatchQueue
from shared.launch.messages import Finished, GenerateRequest
from shared.types import Completion
from tests.asynchronous import asynchronous


def routed(first: int, tokens: int) -> np.ndarray:
    """[tokens, 1 layer, 2 experts] of tokens from `first` on."""
    return np.arange(2 * first, 2 * (first + tokens), dtype=np.uint8).reshape(tokens, 1, 2)


def content(tokens: int) -> bytes:
    return bytes(range(2 * tokens))


def read(run_dir: Path, completion: Completion) -> list[bytes]:
    return [row for file in completion.routes for row in route_files.read(run_dir, file)]


@asynchronous
async def test_a_completion_that_goes_on_gets_a_file_for_what_follows(tmp_path):
    keeper, completion = RouteKeeper(tmp_path), Completion(7, 4, 0)
    keeper.add(completion, routed(0, 5))
    await keeper.put_away([completion])
    keeper.add(completion, routed(5, 1))  # its engine dies here: its rank keeps what has come
    assert keeper.known(completion) == 6
    keeper.add(completion, routed(6, 2))
    again = RouteKeeper(tmp_path)  # another rank, after a resume from here
    await keeper.put_away([completion, Completion(8, 0, 0)])
    assert again.known(completion) == 8
    again.add(completion, routed(8, 1))
    await again.put_away([completion])
    assert [(file.name, file.tokens) for file in completion.routes] == [("7/4.0.0", 5), ("7/4.0.5", 3), ("7/4.0.8", 1)]
    assert b"".join(read(tmp_path, completion)) == content(9)


@asynchronous
async def test_a_snapshot_has_the_tokens_of_its_moment_though_the_completion_ends_meanwhile(tmp_path, monkeypatch):
    keeper, completion = RouteKeeper(tmp_path), Completion(7, 4, 0)
    written, write = threading.Event(), route_files.write

    def wait(*given: Any) -> Any:
        assert written.wait(60)
        return write(*given)

    monkeypatch.setattr(route_files, "write", wait)
    keeper.add(completion, routed(0, 3))
    snapshot = asyncio.ensure_future(keeper.put_away([completion]))
    await asyncio.sleep(0)
    keeper.add(completion, routed(3, 2))
    end = asyncio.ensure_future(keeper.put_away([completion]))
    await asyncio.sleep(0.05)
    written.set()
    [seen], [whole] = await snapshot, await end
    assert [file.tokens for file in seen] == [3] and [file.tokens for file in whole] == [3, 2]
    assert completion.routes == whole and b"".join(read(tmp_path, completion)) == content(5)


def rank_at(run_dir: Path, sent: list[Any]) -> EngineRank:
    """A rank without an engine process, whose messages go to `sent`."""

    async def send(call_id: int, message: Any) -> None:
        sent.append(message)

    rank, engine = EngineRank.__new__(EngineRank), Engine.__new__(Engine)
    engine.outputs, engine.trial = OutputCollector(0, run_dir), Trial()
    rank.engine, rank.events, rank.link = engine, BatchQueue(), SimpleNamespace(send=send)  # type: ignore[assignment]
    rank.config, rank.role = SimpleNamespace(run_dir=run_dir), SimpleNamespace(rank_in_role=0)  # type: ignore[assignment]
    return rank


@asynchronous
async def test_a_rank_writes_routes_before_it_reports_and_into_a_checkpoint(tmp_path):
    """Completion 0 ends, completion 1 goes on; one outside of training is in no checkpoint."""
    rank, partial = rank_at(tmp_path, sent := list[Any]()), tmp_path / "checkpoints" / "step_1.partial"
    partial.mkdir(parents=True)
    ended, going, other = Completion(7, 0, 0, finish_reason="stop"), Completion(7, 1, 0), Completion(-1, 0, 0)
    for completion in (ended, going, other):
        rank.engine.outputs.routes.add(completion, routed(0, 3))
    rank.engine.outputs.running |= {str(one.group): GenerateRequest([1], one, 9, 1.0) for one in (going, other)}
    rank.events.put(ended)
    reporting = asyncio.ensure_future(rank.report())
    while not sent:
        await asyncio.sleep(0.001)
    reporting.cancel()
    assert isinstance(sent[0], Finished)
    [reported] = sent[0].completions
    assert b"".join(read(tmp_path, reported)) == content(3)

    written = await rank.snapshot(str(partial))
    assert sorted(written) == ["engine-0.msgpack", "routes/7/1.0.0"]
    assert (partial / "routes/7/1.0.0").read_bytes() == content(3)
    records = list(record_file.read(partial / "engine-0.msgpack"))
    [saved] = [msgspec.msgpack.decode(record, type=Completion) for record in records]
    assert saved.routes == going.routes and saved.index == 1

    going.routes = []
    rank.engine.outputs.routes.add(going, routed(0, 3))
    (tmp_path / "routes" / "7").rename(tmp_path / "elsewhere")
    (tmp_path / "routes" / "7").write_text("in the way")
    with pytest.raises(DiskError, match="routes/7"):  # which the rank survives
        await rank.snapshot(str(partial))


@asynchronous
async def test_a_disk_that_is_full_for_a_moment_loses_nothing(tmp_path, monkeypatch):
    keeper, completion, write = RouteKeeper(tmp_path), Completion(7, 4, 0), route_files.write

    def fail(*_: Any) -> Any:
        raise DiskError(errno.ENOSPC, "full")

    keeper.add(completion, routed(0, 3))
    monkeypatch.setattr(route_files, "write", fail)
    with pytest.raises(DiskError):
        await keeper.put_away([completion])
    keeper.add(completion, routed(3, 1))
    assert completion.routes == [] and keeper.known(completion) == 4
    monkeypatch.setattr(route_files, "write", write)
    await keeper.put_away([completion])
    assert b"".join(read(tmp_path, completion)) == content(4)
