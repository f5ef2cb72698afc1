"""Deaths of ranks. Real ranks, real signals: the parent of a node's ranks names each once, and nothing outlives it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.atomic_write import cannot_write
from shared.errors import MORE_FILES, ConfigError, EngineLost, RunError
from shared.launch import deaths
from shared.launch.deaths import deaths_file
from shared.launch.messages import RankFailed
from shared.launch.rpc import raise_failure
from tests.process import ENVIRONMENT, started, until

RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from shared.launch import watchdog
from shared.launch.deaths import RankFile, deaths_file
from shared.launch.ranks import join_node, rank_name

watchdog.die_with_parent()
rank, does = int(os.environ["RANK"]), dict(pair.split("=") for pair in sys.argv[2:])
node, meeting = join_node(), Path(sys.argv[1])
file = RankFile(node.path / f"rank{rank}")
watchdog.keep_phases(file)

def wait_for(condition):
    while not (result := condition()):
        time.sleep(0.01)
    return result

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
(meeting / f"ready-{rank}").write_text(str(os.getpid()))
if do.startswith("ends with"):
    wait_for((meeting / "go on").exists)
    sys.exit(int(do.rpartition(" ")[2]))
if "reports" in do:  # the controller: it ends the launch when it has read of a death
    print("error:", wait_for((meeting / deaths_file(0)).read_text).strip(), flush=True)
    sys.exit(1)
time.sleep(600)
"""
PARENT = """
import os, sys
from pathlib import Path
from shared.launch import node
node.LEAVE_S = float(os.environ["LEAVE_S"])
folder, first, count, *does = sys.argv[1:]
ranks = range(int(first), int(first) + int(count))
world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
sys.exit(node.run_ranks(ranks, [sys.executable, f"{folder}/rank.py", folder, *does], {**os.environ, **world}))
"""
pytestmark = [pytest.mark.timeout(400)]


class Node:
    """A parent with ranks that play what `does` says, e.g. {1: "ends with 3"}."""

    def __init__(self, folder: Path, does: dict[int, str], ranks: range = range(3), leave_s: int = 1):
        (folder / "rank.py").write_text(RANK)
        self.folder = folder
        pairs = [f"{rank}={words}" for rank, words in does.items()]
        options = {"stdin": None, "stderr": subprocess.STDOUT}
        environment = {**ENVIRONMENT, "TMPDIR": str(folder), "LEAVE_S": str(leave_s)}
        self.parent = started(PARENT, folder, ranks.start, len(ranks), *pairs, env=environment, **options)
        self.pids = [self.number(f"ready-{rank}") for rank in ranks if "code" not in does.values()]

    def number(self, name: str) -> int:
        """What a rank has written, once it plays."""
        return int(until(lambda: (path := self.folder / name).exists() and path.read_text()))

    def end(self) -> tuple[int, str]:
        """Exit code of the parent, and all that was printed; all processes are gone."""
        printed, _ = self.parent.communicate(timeout=150)
        for pid in self.pids:
            until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        left = [path.name for path in self.folder.glob("maestrale.*")]
        assert left == [] or self.parent.returncode < 0, "the private folder goes with the launch"
        return self.parent.returncode, printed


def test_a_death_is_reported_to_the_controller_which_ends_the_launch(tmp_path):
    node = Node(tmp_path, {0: "listens reports"})
    os.kill(node.pids[1], signal.SIGKILL)
    code, printed = node.end()
    assert code == 128 + signal.SIGKILL and len(printed.splitlines()) == 1
    rank, text = json.loads(printed.removeprefix("error: "))
    assert rank == 1 and text.startswith(f"trainer 0 (rank 1, pid {node.pids[1]} on ")
    assert "was killed by signal 9 (SIGKILL), in phase 'a phase'" in text
    assert "counted no out-of-memory kill" in text and "the most memory it had was" in text
    assert text.endswith("The same command starts anew")


def test_a_dead_controller_is_named_at_once_and_takes_all_with_it(tmp_path):
    node = Node(tmp_path, {0: "listens", 2: "grandchild"})
    node.pids.append(node.number("grandchild"))  # which a rank has started in its own session
    os.kill(node.pids[0], signal.SIGSEGV)
    code, printed = node.end()
    assert code == 128 + signal.SIGSEGV and len(printed.splitlines()) == 1
    assert printed.startswith(f"error: controller (rank 0, pid {node.pids[0]} on ") and "(SIGSEGV)" in printed


def test_a_rank_that_has_explained_the_end_is_not_contradicted(tmp_path):
    node = Node(tmp_path, {0: "listens", 1: "explains"})  # as one that has killed a controller that hangs
    os.kill(node.pids[0], signal.SIGKILL)
    assert node.end() == (128 + signal.SIGKILL, "")


@pytest.mark.parametrize(("does", "named"), [
    ("code", "trainer or engine (rank 2, pid .* exit code 3.*in phase 'start'"),
    ("ends with 5", "engine 0 (rank 2, pid .* exit code 5.*in phase 'a phase'"),
])  # fmt: skip
def test_before_the_controller_listens_a_death_is_named_here_and_the_controller_asked_to_end(tmp_path, does, named):
    """It may be downloading a model, and would wait for this rank afterwards."""
    node = Node(tmp_path, {0: "quits", 1: "ends with 0", 2: does}, leave_s=140)
    (tmp_path / "go on").touch()
    code, printed = node.end()
    assert code == 143, "the controller says why it ends"
    begin, *words = ("error: " + named).split(".*")
    assert printed.startswith(begin) and all(word in printed for word in words) and len(printed.splitlines()) == 1


def test_on_a_node_without_the_controller_a_death_is_named_there_and_reported(tmp_path):
    node = Node(tmp_path, {1: "listens", 2: "ends with 4"}, range(1, 3))
    (tmp_path / "go on").touch()
    file = tmp_path / deaths_file(1)
    assert json.loads(until(lambda: file.exists() and file.read_bytes()).splitlines()[0])[0] == 2
    os.kill(
        node.pids[0], signal.SIGTERM
    )  # blocked, as the mask of all ranks is: it goes on until the controller ends it
    assert node.parent.poll() is None
    os.kill(node.pids[0], signal.SIGKILL)
    code, printed = node.end()
    assert code == 128 + signal.SIGKILL and printed.startswith("error: engine 0 (rank 2, pid ")
    assert len(file.read_bytes().splitlines()) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_asks_for_the_end_goes_to_the_controller_alone(tmp_path, number, code):
    node = Node(tmp_path, {0: "listens quits"})
    node.parent.send_signal(number)
    assert node.end() == (code, "")


def test_a_launch_that_succeeds_ends_with_0_and_ranks_die_with_their_parent(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    node = Node(tmp_path / "a", dict.fromkeys(range(3), "ends with 0"))
    (tmp_path / "a" / "go on").touch()
    assert node.end() == (0, "")
    node = Node(tmp_path / "b", {})
    node.parent.kill()
    assert node.end()[0] == -signal.SIGKILL


def test_a_rank_whose_parent_died_before_it_began_ends(tmp_path):
    """Another process has adopted it then, and nobody would ever end it."""
    environment = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "TMPDIR": str(tmp_path / "maestrale.1.1.aaaa")}
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    assert subprocess.run(command, timeout=150, env=ENVIRONMENT | environment).returncode == 1


NAMER = """
import os, sys
from pathlib import Path
from shared.launch import deaths, watchdog
file = deaths.RankFile(Path(sys.argv[1])); watchdog.keep_phases(file)
file.about = 'engine 1 (rank 3)', '/runs/é\\n'
watchdog.phase('a long phase ' + 'x' * 5000); watchdog.phase('über')
os.kill(os.getpid(), 9)
"""


def test_what_a_rank_has_named_is_there_after_any_death(tmp_path):
    file = deaths.RankFile(tmp_path / "rank3")
    assert (file.about, file.phase, file.explained) == (("", ""), "", False)
    subprocess.run([sys.executable, "-c", NAMER, str(tmp_path / "rank3")], env=ENVIRONMENT)
    assert (file.about, file.phase, file.explained) == (("engine 1 (rank 3)", "/runs/é\n"), "über", False)
    file.explain()
    assert file.explained and file.phase == "über"
    file.phase = "y" * 5000
    assert file.explained and file.about[0] == "engine 1 (rank 3)" and 0 < len(file.phase) < 5000
    with pytest.raises(ConfigError, match=r"TMPDIR: .*rank0 cannot be written.* is not there"):
        deaths.RankFile(tmp_path / "gone" / "rank0")


def test_memory_is_blamed_only_where_the_kernel_counted_a_kill():
    before = deaths.memory_kills()
    blamed = deaths.advice(-signal.SIGKILL, "trainer", 3 << 30, before - 1)
    assert all(words in blamed for words in ("memory killer has ended", "3.0 GiB", "optimiser.micro_batch_tokens"))
    assert "counted no out-of-memory kill" in deaths.advice(-signal.SIGKILL, "trainer", 3 << 30, before)
    assert deaths.advice(-signal.SIGSEGV, "trainer", 3 << 30, before - 1) == ""


def test_what_the_same_command_would_do(tmp_path):
    (tmp_path / "checkpoints" / "step_11.partial").mkdir(parents=True)
    assert "starts anew" in deaths.again(tmp_path)
    for step in (0, 9, 10):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir()
        (tmp_path / "checkpoints" / f"step_{step}" / "manifest.json").touch()
    assert "goes on from step 10" in deaths.again(tmp_path)


def test_ends_of_helpers_are_told_each_time_at_first_and_ever_more_seldom():
    helpers, counts = deaths.HelperEnds(), []
    for count in range(1, 201):
        helpers.add("a verifier process", "was killed", "another takes its place")
        if news := helpers.news():
            assert news == [f"a verifier process was killed ({count:,} so far): another takes its place"]
            counts.append(count)
    assert counts == [*range(1, 11), 100]
    helpers.add("a verifier process", "gave no answer", "another takes its place")
    assert helpers.news() == ["a verifier process gave no answer (1 so far): another takes its place"]


def test_what_a_rank_raised_is_told_in_one_line_with_the_repair_or_with_its_traceback():
    for kind, message, who, repair in (
        ("OSError", "[Errno 24] Too many open files: '/x'", "trainer rank 1", "Raise the limit of open files"),
        ("MemoryError", "MemoryError", "trainer rank 1", "lower optimiser.micro_batch_tokens"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", "engine rank 2", "lower rollout.cache_bytes"),
        ("OSError", "[Errno 12] Cannot allocate memory", "", "lower rollout.prompts_per_step"),
        ("EngineLost", "could not start: reason", "engine rank 2", ""),  # on purpose
    ):
        with pytest.raises(EngineLost if kind == "EngineLost" else RunError) as raised:
            raise_failure(who, RankFailed(kind=kind, message=message, traceback="Traceback ..."))
        assert "Traceback" not in str(raised.value) and repair in deaths.lacking(str(raised.value))
        assert str(raised.value).startswith(f"{who}: " if who else "")
    with pytest.raises(Exception, match="trainer rank 1: 'x'\nTraceback"):
        raise_failure("trainer rank 1", RankFailed("KeyError", "'x'", "Traceback ..."))
    full = cannot_write(Path("/x"), OSError(24, "Too many open files"))
    assert full.endswith(MORE_FILES) and deaths.lacking(full) == "", "said already"
    assert deaths.lacking("ValueError: 3") == ""
