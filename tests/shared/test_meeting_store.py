"""The store of a launch on several nodes: what torch's own stores do, behind a key."""

import datetime
import errno
import fcntl
import threading

import pytest
import torch.distributed as dist
import zmq

from shared import atomic_write
from shared.launch.meeting_store import DOOR, MeetingServer, MeetingStore
from tests.process import started

RANK = """
import sys, datetime
from pathlib import Path
import torch, torch.distributed as dist
from shared.launch.meeting_store import MeetingStore
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
store = MeetingStore(folder)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
group = dist.new_group([0, 2])
sums = torch.tensor([float(rank)])
dist.all_reduce(sums)
if rank != 1:
    dist.all_reduce(sums, group=group)
dist.barrier()
print(sums.item())
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path):
    MeetingServer(tmp_path, "127.0.0.1").start()
    return tmp_path


def test_it_answers_as_torchs_own_store_does(folder):
    ours, theirs = MeetingStore(folder), dist.HashStore()
    for store in (ours, theirs):
        store.set("a", "1")
        store.append("list", "x")
        store.append("list", b"y\0")
    for ask in (
        lambda store: store.get("a"), lambda store: store.add("n", 3), lambda store: store.add("n", -1),
        lambda store: store.check(["a", "n"]), lambda store: store.check(["a", "b"]), lambda store: store.get("list"),
        lambda store: store.compare_set("a", "2", "3"), lambda store: store.compare_set("a", "1", "3"),
        lambda store: store.get("a"), lambda store: store.compare_set("new", "", "4"),
        lambda store: store.delete_key("a"), lambda store: store.delete_key("a"), lambda store: store.check(["a"]),
    ):  # fmt: skip
        assert ask(ours) == ask(theirs)


def test_a_value_is_waited_for_and_a_wait_ends_with_a_name(folder):
    store, values = MeetingStore(folder), list[bytes]()
    waiting = threading.Thread(target=lambda: values.append(store.get("late")))
    waiting.start()
    assert store.add("meanwhile", 1) == 1, "another thread's wait is in nobody's way"
    store.set("late", b"now")
    waiting.join(60)
    assert values == [b"now"]
    with pytest.raises(dist.DistStoreError, match="no answer within 0.05 s from rank 0's store at tcp://.* never"):
        store.wait(["never"], datetime.timedelta(seconds=0.05))
    assert store.get("late") == b"now", "an answer that comes late is not taken for another"


@pytest.mark.slow
def test_process_groups_form_over_it(folder):
    ranks = [started(RANK, rank, folder) for rank in range(3)]
    assert [float(rank.communicate(timeout=300)[0]) for rank in ranks] == [6.0, 3.0, 6.0]


@pytest.mark.slow
def test_nobody_without_the_servers_key_is_heard(folder):
    """A stranger knows the address, and every key but this one."""
    endpoint, _ = (folder / DOOR).read_text().split()
    MeetingStore(folder).set("a", "1")
    context = zmq.Context()
    for key in (None, zmq.curve_keypair()[0]):
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            if key is not None:
                socket.curve_serverkey = key
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(endpoint)
            socket.send(b"\x93\x01\xa5check\x91\xa1a")
            assert not socket.poll(500)
    assert MeetingStore(folder).get("a") == b"1"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_refuses_nothing(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, "no locks here")

    with (tmp_path / "file").open("w") as file:
        assert atomic_write.take_lock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", refuse)
        assert not atomic_write.take_lock(file, fcntl.LOCK_EX)
        code = errno.EIO
        with pytest.raises(OSError, match="no locks here"):
            atomic_write.take_lock(file, fcntl.LOCK_EX)
