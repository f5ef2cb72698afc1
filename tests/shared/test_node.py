"""Real ranks, real signals: the parent of a node's ranks names each death once, and nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.launch.deaths import deaths_file

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from shared.launch import watchdog
from shared.launch.deaths import RankFile, deaths_file, only_note_requests, requested
from shared.launch.ranks import join_node, rank_name

watchdog.die_with_parent()
rank, does = int(os.environ["RANK"]), dict(pair.split("=") for pair in sys.argv[2:])
node, meeting = join_node(), Path(sys.argv[1])
file = RankFile(node.path / f"rank{rank}")
watchdog.keep_phases(file)

def say(word):
    (meeting / f"{word}-{rank}").write_text(str(os.getpid()))

def wait_for(word):
    while not (meeting / word).exists():
        time.sleep(0.01)

do = does.get(str(rank), "wait")
if do == "code":
    sys.exit(3)
file.about = rank_name(rank, 1), str(meeting)
watchdog.phase("a phase")
if os.environ["LOCAL_RANK"] == "0":
    (node.path / "deaths").symlink_to(meeting / deaths_file(rank))
if "grandchild" in do:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (meeting / "grandchild").write_text(str(child.pid))
if "explains" in do:
    file.explain()
if "listens" in do:
    (meeting / deaths_file(rank)).touch()
if "quits" in do:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])
say("ready")
if do.startswith("ends with"):
    wait_for("go on")
    sys.exit(int(do.rpartition(" ")[2]))
if "reports" in do:  # the controller: it ends the launch when it has read of a death
    while not (text := (meeting / deaths_file(0)).read_text()):
        time.sleep(0.01)
    print("error:", text.strip(), flush=True)
    sys.exit(1)
time.sleep(600)
"""
PARENT = """
import os, sys
from pathlib import Path
from shared.launch import node
node.LEAVE_S = 1.0
folder, first, count, *does = sys.argv[1:]
ranks = range(int(first), int(first) + int(count))
world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
sys.exit(node.run_ranks(ranks, [sys.executable, f"{folder}/rank.py", folder, *does], {**os.environ, **world}))
"""


class Node:
    """A parent with ranks that play what `does` says: Node(folder, ranks, {1: "ends with 3"})."""

    def __init__(self, folder: Path, ranks: range, does: dict[int, str]):
        (folder / "rank.py").write_text(RANK)
        self.folder, self.ranks, self.does = folder, ranks, does
        pairs = [f"{rank}={words}" for rank, words in does.items()]
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(folder), str(ranks.start), str(len(ranks)), *pairs],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        )  # fmt: skip

    def pid(self, rank: int) -> int:
        """Pid of a rank, once it plays."""
        return self.number(f"ready-{rank}")

    def number(self, name: str) -> int:
        end = time.monotonic() + 60
        while not (self.folder / name).exists() or not (text := (self.folder / name).read_text()):
            assert time.monotonic() < end, self.parent.communicate()[0]
            time.sleep(0.01)
        return int(text)

    def all_ready(self) -> list[int]:
        return [self.pid(rank) for rank in self.ranks if self.does.get(rank) != "code"]

    def end(self) -> tuple[int, str]:
        """Exit code of the parent, and all that was printed."""
        printed, _ = self.parent.communicate(timeout=60)
        left = [path.name for path in self.folder.glob("maestrale.*")]
        assert left == [] or self.parent.returncode < 0, "the private folder goes with the launch"
        return self.parent.returncode, printed


Begin = Callable[..., Node]
pytestmark = [pytest.mark.timeout(120)]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    def start(does: dict[int, str], ranks: range = range(3)) -> Node:
        return Node(tmp_path, ranks, does)

    return start


def gone(pid: int) -> bool:
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_death_is_reported_to_the_controller_which_ends_the_launch(begin: Begin) -> None:
    node = begin({0: "listens reports"})
    pids = node.all_ready()
    os.kill(pids[1], signal.SIGKILL)
    code, printed = node.end()
    assert code == 128 + signal.SIGKILL
    [line] = printed.splitlines()
    rank, text = json.loads(line.removeprefix("error: "))
    assert rank == 1 and text.startswith(f"trainer 0 (rank 1, pid {pids[1]} on ")
    assert "was killed by signal 9 (SIGKILL), in phase 'a phase'" in text
    assert "counted no out-of-memory kill" in text and "the most memory it had was" in text
    assert text.endswith("The same command starts anew")
    assert all(map(gone, pids))


def test_a_dead_controller_is_named_at_once_and_takes_all_with_it(begin: Begin) -> None:
    node = begin({0: "listens", 2: "grandchild"})
    pids = [*node.all_ready(), node.number("grandchild")]
    os.kill(pids[0], signal.SIGSEGV)
    code, printed = node.end()
    assert code == 128 + signal.SIGSEGV
    assert printed.startswith(f"error: controller (rank 0, pid {pids[0]} on ") and "(SIGSEGV)" in printed
    assert len(printed.splitlines()) == 1 and all(map(gone, pids)), "also what a rank has started in its own session"


def test_a_rank_that_has_explained_the_end_is_not_contradicted(begin: Begin) -> None:
    node = begin({0: "listens", 1: "explains"})  # as one that has killed a controller that hangs
    pids = node.all_ready()
    os.kill(pids[0], signal.SIGKILL)
    assert node.end() == (128 + signal.SIGKILL, "")


@pytest.mark.parametrize("does", ["code", "ends with 5"])
def test_before_the_controller_listens_a_death_is_named_here_and_the_controller_asked_to_end(
    begin: Begin, tmp_path: Path, does: str
) -> None:
    """It may be downloading a model, and would wait for this rank afterwards."""
    node = begin({0: "quits", 2: does})
    if does != "code":  # else the controller may end before it plays
        node.all_ready()
    (tmp_path / "go on").touch()
    code, printed = node.end()
    name, number, phase = ("trainer or engine", 3, "start") if does == "code" else ("engine 0", 5, "a phase")
    assert code == 143, "the controller says why it ends"
    assert printed.startswith(f"error: {name} (rank 2, pid ") and f"ended with exit code {number}" in printed
    assert f"in phase '{phase}'" in printed and len(printed.splitlines()) == 1


def test_on_a_node_without_the_controller_a_death_is_named_there_and_reported(begin: Begin, tmp_path: Path) -> None:
    node = begin({1: "listens", 2: "ends with 4"}, range(1, 3))
    pids = node.all_ready()
    (tmp_path / "go on").touch()
    [line] = read_lines(tmp_path / deaths_file(1))
    assert json.loads(line)[0] == 2
    os.kill(pids[0], signal.SIGTERM)  # blocked, as the mask of all ranks is: it goes on until the controller ends it
    assert node.parent.poll() is None
    os.kill(pids[0], signal.SIGKILL)
    code, printed = node.end()
    assert code == 128 + signal.SIGKILL and printed.startswith("error: engine 0 (rank 2, pid ")
    assert len(read_lines(tmp_path / deaths_file(1))) == 2


def read_lines(path: Path) -> list[bytes]:
    end = time.monotonic() + 60
    while not path.exists() or not (lines := path.read_bytes().splitlines()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return lines


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_asks_for_the_end_goes_to_the_controller_alone(begin: Begin, number: int, code: int) -> None:
    node = begin({0: "listens quits"})
    pids = node.all_ready()
    node.parent.send_signal(number)
    assert node.end() == (code, "") and all(map(gone, pids))


def test_a_launch_that_succeeds_ends_with_0(begin: Begin, tmp_path: Path) -> None:
    node = begin(dict.fromkeys(range(3), "ends with 0"))
    node.all_ready()
    (tmp_path / "go on").touch()
    assert node.end() == (0, "")


def test_ranks_die_with_their_parent(begin: Begin) -> None:
    node = begin({})
    pids = node.all_ready()
    node.parent.kill()
    assert node.end()[0] == -signal.SIGKILL and all(map(gone, pids))


def test_a_rank_whose_parent_died_before_it_began_ends(begin: Begin, tmp_path: Path) -> None:
    """Another process has adopted it then, and nobody would ever end it."""
    alone = subprocess.run(
        [sys.executable, "-c", RANK, str(tmp_path)], timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3",
             "TMPDIR": str(tmp_path / "maestrale.1.1.aaaa")},
    )  # fmt: skip
    assert alone.returncode == 1
