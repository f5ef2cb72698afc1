"""Routes of completions under way: one file a turn or snapshot, in order, nothing twice, nothing lost by a full disk."""

import asyncio
import errno
import threading
from typing import Any

import numpy as np
import pytest

from rollout.route_keeper import RouteKeeper
from shared import route_files
from shared.errors import DiskError
from shared.types import Completion
from tests.asynchronous import asynchronous


def routed(first: int, tokens: int) -> np.ndarray:
    """[tokens, 1 layer, 2 experts] of tokens from `first` on."""
    return np.arange(2 * first, 2 * (first + tokens), dtype=np.uint8).reshape(tokens, 1, 2)


def content(tokens: int) -> bytes:
    return bytes(range(2 * tokens))


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
    assert b"".join(route_files.read(tmp_path, completion.routes)) == content(9)


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
    assert completion.routes == whole and b"".join(route_files.read(tmp_path, whole)) == content(5)


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
    assert b"".join(route_files.read(tmp_path, completion.routes)) == content(4)
