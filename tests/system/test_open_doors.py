"""The attacks of another user of the machine, and of another host, during real launches: a counter, and nothing else.

    pytest --soak -n 0 tests/system/test_open_doors.py -s

The stranger (stranger.py) is told everything that listens. It is user `nobody`, and on several nodes also lives in a
network namespace of its own, joined to the launch's address by a veth pair.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.conftest import Start
from tests.system.launch import ROOT, Launch, free_port
from tests.verify.test_judges import Server

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
STRANGER = Path(__file__).with_name("stranger.py")
NOBODY = 65534
STEPS = 200
SLOW = {"steps": STEPS, "rollout__max_sequences": 2, "rollout__max_completion_tokens": 120, "checkpoint__every": 40,
        "deadlines__sync_s": 40}  # fmt: skip
"""so that all attacks have time; a rank counts as hung after half of the deadline, which is shorter than they are"""
GROWTH_BYTES = 200 << 20
NAMESPACE, OURS, THEIRS = "maestrale-test", "10.213.71.1", "10.213.71.2"


@pytest.fixture(autouse=True)
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("another user is needed: run this as root")


@pytest.fixture
def veth() -> Iterator[None]:
    """A network namespace, joined to ours by a veth pair."""

    def ip(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    ip("netns", "del", NAMESPACE)
    if (made := ip("netns", "add", NAMESPACE)).returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        for words in (
            f"link add mtest0 type veth peer name mtest1 netns {NAMESPACE}", f"addr add {OURS}/30 dev mtest0",
            "link set mtest0 up", f"-n {NAMESPACE} addr add {THEIRS}/30 dev mtest1",
            f"-n {NAMESPACE} link set mtest1 up",
        ):  # fmt: skip
            if (done := ip(*words.split())).returncode:
                pytest.skip(f"no veth pairs here: {done.stderr.strip()}")
        yield
    finally:
        ip("netns", "del", NAMESPACE)


def processes(launches: list[Launch]) -> list[psutil.Process]:
    agents = [psutil.Process(launch.process.pid) for launch in launches]
    return [one for agent in agents for one in (agent, *agent.children(recursive=True))]


def listening(found: list[psutil.Process]) -> dict[int, tuple[str, str]]:
    """port -> (address, command) of everything that listens."""
    ports = {}
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # an agent that has ended
            for line in process.net_connections("tcp"):
                if line.status == psutil.CONN_LISTEN:
                    ports[line.laddr.port] = (line.laddr.ip, " ".join(process.cmdline()[:6]))
    return ports


def belongings(found: list[psutil.Process]) -> tuple[list[str], list[str]]:
    """(Unix sockets, files and memory) of these processes by path."""
    sockets, files = set(), set()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            sockets |= {line.laddr for line in process.net_connections("unix") if line.laddr}
            files |= {f"/proc/{process.pid}/fd/{entry.name}" for entry in os.scandir(f"/proc/{process.pid}/fd")}
    folders = {os.path.dirname(path) for path in sockets if path[0] != "@"}
    files |= {f"{folder}/{name}" for folder in folders if folder != "/tmp" for name in os.listdir(folder)}
    return sorted(sockets), sorted(files)


def run_ids(found: list[psutil.Process]) -> set[str]:
    """torchrun's names of the launches."""
    names = set()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(process.environ().get("TORCHELASTIC_RUN_ID", "none"))
    return names


class Stranger:
    """The attacker beside a launch."""

    def __init__(
        self, launches: list[Launch], host: str, inside: str = "", stores: tuple[int, ...] = (),
        others: list[psutil.Process] | None = None,
    ):  # fmt: skip
        """inside: its network namespace. others: servers that are asked by the launch, and attacked as well."""
        found = processes(launches)
        ports = listening([*found, *(others or [])])
        near = [(ip if ip not in ("0.0.0.0", "::") else host, port) for port, (ip, _) in ports.items()]
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.report = Path(tempfile.mkdtemp(prefix="stranger-")) / "report.json"
        os.chmod(self.report.parent, 0o777)
        sockets, files = belongings(found)
        target = {
            "addresses": [address for address in near if not inside or address[0] not in ("127.0.0.1", "::1")],
            "victim": self.victim.pid, "hostname": os.uname().nodename, "sockets": sockets, "files": files,
            "runs": sorted(run_ids(found)), "stores": stores, "report": str(self.report),
        }  # fmt: skip
        self.ports = ports
        where = ["ip", "netns", "exec", inside] if inside else []
        self.process = subprocess.Popen(
            [*where, "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", sys.executable,
             str(STRANGER), json.dumps(target)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"},
        )  # fmt: skip

    def watch(self, launches: list[Launch], enough: Callable[[], bool] = lambda: False) -> tuple[dict[str, Any], int]:
        """Until the launch is over: (what the stranger got hold of, largest growth of the controller in bytes). It is
        asked to end when there are `enough` attacks."""
        controller = psutil.Process(launches[0].rank_pid(0))
        before = largest = controller.memory_info().rss
        asked = False
        while launches[0].process.poll() is None:
            if not asked and enough():
                asked = True
                launches[0].process.terminate()
            assert self.process.poll() is None and self.victim.poll() is None
            with contextlib.suppress(psutil.NoSuchProcess):
                largest = max(largest, controller.memory_info().rss)
            time.sleep(0.1)
        for launch in launches:
            assert launch.wait(60) == (128 + signal.SIGTERM if asked else 0), (
                f"the stranger ended the launch:\n{launch.output[-4000:]}"
            )
        assert self.victim.poll() is None, "a process that is none of the launch was killed"
        return json.loads(self.report.read_text()), largest - before

    def leave(self) -> None:
        for process in (self.process, self.victim):
            process.kill()
            process.wait()


def judged(
    name: str, launches: list[Launch], stranger: Stranger, enough: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    found, growth = stranger.watch(launches, enough)
    rows = launches[0].metrics()
    refused = rows[-1]["messages/refused"]
    print(f"\n{name}, attacked by user {found['uid']} in {found['rounds']} rounds of all attacks")
    print(f"  listening on TCP: {stranger.ports or 'nothing'}")
    print(f"  it read from the store: {sorted(found['store'])}, opened: {found['opened']}")
    print(f"  it held {found['connected']} idle connections, got rid of {found['sent'] >> 20} MiB of one message")
    print(f"  the controller grew by {growth >> 20} MiB, counted {refused} refusals, ended with exit code 0")
    assert found["store"] == {} and found["opened"] == [] and found["rounds"] > 0
    assert growth < GROWTH_BYTES
    assert launches[0].trained_prompts() == list(range(4 * len(rows))), "every group once"
    assert len(rows) == STEPS or enough()
    assert all(row["completions/aborted"] == 0 for row in rows)
    return found


def test_another_user_of_the_machine(start: Start, tmp_path: Path) -> None:
    launch = start(tmp_path, command="trainer", **SLOW)
    launch.until_step(2)
    stranger = Stranger([launch], "127.0.0.1")
    try:
        judged("one node", [launch], stranger)
        assert {address for address, _ in stranger.ports.values()} <= {"127.0.0.1"}, "gloo's"
        assert launch.metrics()[-1]["messages/refused"] == 0, "nobody gets as far as to be refused"
    finally:
        if launch.process.poll() is None:
            launch.kill()
        stranger.leave()


def test_another_host(start: Start, tmp_path: Path, veth: None) -> None:
    port = free_port()
    launches = []
    for node, ranks in enumerate((2, 1)):
        where = ("--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={ranks}", f"--master-addr={OURS}",
                 f"--master-port={port}")  # fmt: skip
        (tmp_path / f"node{node}").mkdir()
        launches.append(start(tmp_path, torchrun=where, log_dir=tmp_path / f"node{node}", **SLOW))
    launches[0].until_step(2)
    stranger = Stranger(launches, OURS, NAMESPACE, stores=(port,))
    try:
        judged("several nodes, from another network namespace", launches, stranger)
        assert launches[0].metrics()[-1]["messages/refused"] > 0
        assert launches[0].output.count("refused: ") == 1, "one warning"
    finally:
        for launch in launches:
            if launch.process.poll() is None:
                launch.kill()
        stranger.leave()


AGENT = """
import json, os, sys, urllib.request
problem = json.loads(sys.stdin.readline())
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": problem["text"]}]}).encode()
head = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
said = json.loads(urllib.request.urlopen(asked, timeout=100).read())["choices"][0]["message"]["content"]
print(json.dumps({"reward": len(said) % 7 / 7}))
"""


@pytest.fixture
def judge() -> Iterator[Server]:
    served = Server()
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture
def tools() -> Iterator[tuple[psutil.Process, str]]:
    """A server of MCP over HTTP, and its address."""
    port = free_port()
    child = subprocess.Popen([sys.executable, str(ROOT / "tests/environments/mcp_server.py"), str(port)])
    end = time.monotonic() + 60
    while not psutil.Process(child.pid).net_connections("tcp"):
        assert time.monotonic() < end and child.poll() is None
        time.sleep(0.1)
    yield psutil.Process(child.pid), f"http://127.0.0.1:{port}/mcp"
    child.kill()
    child.wait()


def test_all_wings(
    start: Start, seasoned: Path, tmp_path: Path, veth: None, judge: Server, tools: tuple[psutil.Process, str]
) -> None:
    """Gateway (on an address that other hosts reach), dashboard, judge and MCP over HTTP; a stranger on each side."""
    (tmp_path / "agent.py").write_text(AGENT)
    model = shutil.copytree((seasoned / "latest").resolve(), tmp_path / "model")
    sizes = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1024}  # for tools
    (model / "config.json").write_text(json.dumps(sizes))
    for file in ("train.jsonl", "validation.jsonl"):
        rows = [json.loads(line) for line in (seasoned / "made" / file).read_text().splitlines()]
        kinds = [{**row, "environment": ("agent", "mcp")[number % 2]} for number, row in enumerate(rows)]
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in kinds))
    agent = f"{{ command = '{sys.executable} -S {tmp_path}/agent.py', address = '{OURS}' }}"
    launch = start(
        tmp_path, command="trainer", options=("--dashboard",), steps=9999, checkpoint__every=50, deadlines__sync_s=240,
        data__train=str(tmp_path / "train.jsonl"), data__validation=str(tmp_path / "validation.jsonl"),
        environment__options=f"{{ agent = {agent}, mcp = {{ url = '{tools[1]}', tools = ['add'] }} }}",
        model__path=str(model), model__max_tokens=1024, environment__max_turns=2, reward__extra="{ llm_judge = 0.2 }",
        reward__judge__url=judge.url, reward__judge__model="scripted",
    )  # fmt: skip
    strangers: list[Stranger] = []
    try:
        launch.until_step(2)
        launch.until(lambda: launch.told("dashboard:", "token="))
        servers = [tools[0], psutil.Process()]
        strangers.append(Stranger([launch], "127.0.0.1", others=servers))
        strangers.append(Stranger([launch], OURS, NAMESPACE))
        found = [
            judged("all wings", [launch], strangers[0], lambda: all(each.report.exists() for each in strangers)),
            json.loads(strangers[1].report.read_text()),
        ]
        print(f"from another network namespace: {strangers[1].ports}, {found[1]}")
        others = {str(line.laddr.port) for server in servers for line in server.net_connections("tcp")}
        assert [line for one in found for line in one["read"] if line.split()[0] not in others] == []
        commands = " ".join(command for _, command in strangers[0].ports.values())
        assert "environments.gateway.process:Gateway" in commands and "-m dashboard" in commands, commands
        assert launch.metrics()[-1]["messages/refused"] > 0, "the gateway counts its strangers"
        assert judge.seen and any("agent" in str(group) for group in launch.groups())
    finally:
        if launch.process.poll() is None:
            launch.kill()
        for stranger in strangers:
            stranger.leave()
