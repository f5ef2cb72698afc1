"""The attacks of another user of the machine, and of another host, during real launches: a counter, and nothing else.

    pytest --soak -n 0 tests/system/test_open_doors.py -s

The stranger (stranger.py) is told everything that listens. It is user `nobody`, and also lives in a network namespace
of its own, joined to the launch's address by a veth pair.
"""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.launch import HANG_S, ROOT, Launch, free_port
from tests.system.test_nodes import start_nodes
from tests.verify.test_judges import Server

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed: run this as root"),
]
STRANGER = Path(__file__).with_name("stranger.py")
NOBODY = "65534"
STEPS = 200
GROWTH_BYTES = 200 << 20
NAMESPACE, OURS, THEIRS = "maestrale-test", "10.213.71.1", "10.213.71.2"


@pytest.fixture
def veth():
    """A network namespace, joined to ours by a veth pair."""

    def ip(words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *words.split()], capture_output=True, text=True)

    ip(f"netns del {NAMESPACE}")
    try:
        for words in (
            f"netns add {NAMESPACE}", f"link add mtest0 type veth peer name mtest1 netns {NAMESPACE}",
            f"addr add {OURS}/30 dev mtest0", "link set mtest0 up",
            f"-n {NAMESPACE} addr add {THEIRS}/30 dev mtest1", f"-n {NAMESPACE} link set mtest1 up",
        ):  # fmt: skip
            if (done := ip(words)).returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield
    finally:
        ip(f"netns del {NAMESPACE}")


class Stranger:
    """The attacker beside a launch."""

    def __init__(
        self, launches: list[Launch], host: str, inside: str = "", stores: tuple[int, ...] = (),
        others: list[psutil.Process] | None = None,
    ):  # fmt: skip
        """inside: its network namespace. others: servers that are asked by the launch, and attacked as well."""
        agents = [psutil.Process(launch.process.pid) for launch in launches]
        processes = [each for agent in agents for each in (agent, *agent.children(recursive=True))]
        self.ports: dict[int, tuple[str, str]] = {}
        """port -> (address, command) of everything that listens"""
        sockets, files, runs = set(), set(), set()
        for process in (*processes, *(others or [])):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                for line in process.net_connections("tcp"):
                    if line.status == psutil.CONN_LISTEN:
                        self.ports[line.laddr.port] = (line.laddr.ip, " ".join(process.cmdline()[:6]))
                if process in processes:
                    sockets |= {line.laddr for line in process.net_connections("unix") if line.laddr}
                    files |= {f"/proc/{process.pid}/fd/{entry}" for entry in os.listdir(f"/proc/{process.pid}/fd")}
                    runs.add(process.environ().get("TORCHELASTIC_RUN_ID", "none"))
        folders = {os.path.dirname(path) for path in sockets if path[0] != "@"} - {"/tmp"}
        files |= {f"{folder}/{name}" for folder in folders for name in os.listdir(folder)}
        near = [(ip if ip not in ("0.0.0.0", "::") else host, port) for port, (ip, _) in self.ports.items()]
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.report = Path(tempfile.mkdtemp(prefix="stranger-")) / "report.json"
        os.chmod(self.report.parent, 0o777)
        target = {
            "addresses": [address for address in near if not inside or address[0] not in ("127.0.0.1", "::1")],
            "victim": self.victim.pid, "hostname": os.uname().nodename, "sockets": sorted(sockets),
            "files": sorted(files), "runs": sorted(runs), "stores": stores, "report": str(self.report),
        }  # fmt: skip
        nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        self.process = subprocess.Popen(
            [*(["ip", "netns", "exec", inside] if inside else []), *nobody, sys.executable, STRANGER,
             json.dumps(target)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"},
        )  # fmt: skip

    def leave(self) -> None:
        for process in (self.process, self.victim):
            process.kill()
            process.wait()


def judged(launches: list[Launch], stranger: Stranger, enough: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Wait until the launch is over, which is asked to end when there are `enough` attacks; what the stranger found."""
    controller, asked = psutil.Process(launches[0].rank_pid(0)), False
    before = largest = controller.memory_info().rss
    while launches[0].process.poll() is None:
        if not asked and enough():
            asked = True
            launches[0].process.terminate()
        assert stranger.process.poll() is None and stranger.victim.poll() is None
        with contextlib.suppress(psutil.NoSuchProcess):
            largest = max(largest, controller.memory_info().rss)
        time.sleep(0.1)
    for launch in launches:
        assert launch.wait() == (128 + signal.SIGTERM if asked else 0), launch.output[-4000:]
    assert stranger.victim.poll() is None, "a process that is none of the launch was killed"
    report, rows = json.loads(stranger.report.read_text()), launches[0].metrics()
    print(f"\nattacked by user {report['uid']} in {report['rounds']} rounds; listening on TCP: {stranger.ports}")
    print(f"  it held {report['connected']} idle connections, got rid of {report['sent'] >> 20} MiB of one message")
    print(f"  the controller grew by {(largest - before) >> 20} MiB, counted {rows[-1]['messages/refused']} refusals")
    assert report["store"] == {} and report["opened"] == [] and report["rounds"] > 0
    assert largest - before < GROWTH_BYTES
    assert launches[0].trained_prompts() == list(range(4 * len(rows))), "every group once"
    assert len(rows) == STEPS or enough()
    assert all(row["completions/aborted"] == 0 for row in rows)
    return report


def test_another_host(start, tmp_path, veth):
    """A rank counts as hung after 20 s, which is shorter than the attacks."""
    slow = {"rollout__max_sequences": 2, "rollout__max_completion_tokens": 120, "checkpoint__every": 40}
    launches = start_nodes(start, tmp_path, (2, 1), 1, 1, OURS, steps=STEPS, deadlines__sync_s=40, **slow)
    launches[0].until_step(2)
    [port] = {int(word.partition("=")[2]) for word in psutil.Process(launches[0].process.pid).cmdline()
              if word.startswith("--master-port=")}  # fmt: skip
    stranger = Stranger(launches, OURS, NAMESPACE, stores=(port,))
    try:
        judged(launches, stranger)
        assert launches[0].metrics()[-1]["messages/refused"] > 0
        assert launches[0].output.count("refused: ") == 1, "one warning"
    finally:
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
def judge():
    served = Server()
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture
def tools():
    """A server of MCP over HTTP, and its address."""
    port, end = free_port(), time.monotonic() + HANG_S
    child = subprocess.Popen([sys.executable, str(ROOT / "tests/environments/mcp_server.py"), str(port)])
    while not psutil.Process(child.pid).net_connections("tcp"):
        assert time.monotonic() < end and child.poll() is None
        time.sleep(0.1)
    yield psutil.Process(child.pid), f"http://127.0.0.1:{port}/mcp"
    child.kill()
    child.wait()


def test_all_wings(start, seasoned, tmp_path, veth, judge, tools):
    """Gateway (on an address that other hosts reach), dashboard, judge and MCP over HTTP; a stranger on each side."""
    (tmp_path / "agent.py").write_text(AGENT)
    model = Path(shutil.copytree((seasoned / "latest").resolve(), tmp_path / "model"))
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
    launch.until_step(2)
    launch.until(lambda: launch.told("dashboard:", "token="))
    servers = [tools[0], psutil.Process()]
    strangers = [Stranger([launch], "127.0.0.1", others=servers), Stranger([launch], OURS, NAMESPACE)]
    try:
        near = judged([launch], strangers[0], lambda: all(each.report.exists() for each in strangers))
        far = json.loads(strangers[1].report.read_text())
        others = {str(line.laddr.port) for server in servers for line in server.net_connections("tcp")}
        assert [line for line in near["read"] + far["read"] if line.split()[0] not in others] == []
        doors = {command: address for address, command in strangers[0].ports.values()}
        assert any("environments.gateway.process:Gateway" in command for command in doors)
        assert any("-m dashboard" in command for command in doors)
        gateway = [address for command, address in doors.items() if "Gateway" in command]
        assert {*doors.values()} - {*gateway} <= {"127.0.0.1"}, "no other host reaches anything else"
        assert launch.metrics()[-1]["messages/refused"] > 0, "the gateway counts its strangers"
        assert judge.seen and any("agent" in str(group) for group in launch.groups())
    finally:
        for stranger in strangers:
            stranger.leave()
