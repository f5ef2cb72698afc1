"""The weight transfer over the network alone: in any order of meeting, over throttled links, with engines that die.

Links are throttled by the kernel: each rank lives in a network namespace of its own, whose veth pair to a bridge has a
token bucket (tc tbf) of 100 MB/s in both directions. That needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch.distributed as dist

from rollout.weights.network import NetworkSender
from tests.rollout.weights.chain_rank import Play, settings

SCRIPT = Path(__file__).with_name("chain_rank.py")
RATE, BURST = 100_000_000, 256 << 10
"""bytes/s of a link, bytes of its bucket"""
LARGE_BYTES = 2 * (65536 * 256 + 16 * 2048 * 1024 + 1024)
SLOT_BYTES = 2 * 65536 * 256
OTHER_BYTES = 24 << 20
"""what a receiver may hold beside its slots: threads, gloo's and the checksum's own memory"""


def start(words: list[str], **environment: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a process; returns it and the file with its output."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    log = tempfile.TemporaryFile()  # noqa: SIM115 - read by `gather`
    return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=values), log


def gather(agents: list[tuple[subprocess.Popen[bytes], IO[bytes]]], deadline_s: float) -> list[dict[str, Any]]:
    """Wait until all end without an error; returns what the ranks measured, agent by agent."""
    end, told = time.monotonic() + deadline_s, []
    try:
        while any(agent.poll() is None for agent, _ in agents) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        for agent, log in agents:
            agent.terminate()
            agent.wait(60)
            log.seek(0)
            told.append(log.read().decode(errors="replace"))
    assert [agent.returncode for agent, _ in agents] == [0] * len(agents), "\n".join(text[-3000:] for text in told)
    return [json.loads(line) for text in told for line in text.splitlines() if line.startswith('{"rank"')]


def run_ranks(play: Play, deadline_s: float) -> list[dict[str, Any]]:
    """Run every rank in a process of its own, the trainers first; they meet in a file of the play's folder."""
    words = [sys.executable, str(SCRIPT), settings(play)]
    return gather([start(words, RANK=str(rank)) for rank in range(play.trainers + play.engines)], deadline_s)


def test_a_version_that_was_written_over_is_not_sent_again() -> None:
    """Two buffers hold versions 4 and 5; the engine that asked for 3 has died since."""
    store = dist.HashStore()
    for number, version in enumerate((3, 4), 1):
        store.set(f"transfer/request/{number}", str(version))
    sender: Any = SimpleNamespace(
        changed=threading.Condition(), closed=False, newest=5, announced=5, served=0, store=store
    )
    assert NetworkSender._decide(sender) == 4 and sender.served == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_and_trainers_meet_in_any_order_and_one_engine_dies_on_the_way(tmp_path: Path) -> None:
    found = run_ranks(Play(str(tmp_path), 2, 2, meetings=3, versions=3, delay_s=0.3, die=(0, 1, 3)), 280)
    assert len(found) == 3 * 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_one_host_an_engine_reads_the_memory_of_the_trainers_who_gather_nothing(tmp_path: Path) -> None:
    *trainers, engine = run_ranks(Play(str(tmp_path), 2, 1, versions=3, transport="auto"), 280)
    assert engine["transport"] == "shm" and sum(rank["own"] for rank in trainers) == engine["payload"]
    assert all(rank["own"] < engine["payload"] for rank in trainers)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [2, 3])
def test_two_hundred_meetings_with_random_delays(tmp_path: Path, count: int) -> None:
    found = run_ranks(Play(str(tmp_path), count, count, meetings=200, delay_s=0.3), 1700)
    assert len(found) == 200 * 2 * count


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_meetings_in_which_an_engine_process_dies_in_the_middle_of_a_delivery(tmp_path: Path) -> None:
    found = run_ranks(Play(str(tmp_path), 2, 3, meetings=50, versions=4, delay_s=0.2, die=(1, 2, 2)), 1700)
    assert len(found) == 50 * 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_trainer_sends_its_rows_once_and_a_receiver_holds_two_tensors(tmp_path: Path) -> None:
    found = run_ranks(Play(str(tmp_path), 2, 2, large=True), 280)
    trainers, engines = found[:2], found[2:]
    assert all(one["sent"] == 2 * one["own"] for one in trainers), "two versions"
    assert sum(one["own"] for one in trainers) == LARGE_BYTES
    assert sorted(one["sent"] >= 2 * LARGE_BYTES for one in engines) == [False, True], "the last has nobody behind it"
    assert all(one["grown"] < 2 * SLOT_BYTES + OTHER_BYTES for one in engines), engines


def tool(*words: str) -> None:
    """Run a command; skips the test where it is not allowed."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no throttled links here: {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def links() -> Iterator[list[str]]:
    """Names of six network namespaces on one bridge, each behind a link of RATE in both directions."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces are needed: run this as root")
    names = [f"mlink{number}" for number in range(6)]
    switch = "mswitch"
    limit = ("tbf", "rate", f"{8 * RATE}bit", "burst", str(BURST), "latency", "50ms")

    def remove() -> None:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    remove()
    try:
        tool("ip", "netns", "add", switch)
        tool("ip", "-n", switch, "link", "add", "dev", "bridge0", "type", "bridge")
        tool("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(names):
            tool("ip", "netns", "add", name)
            port = f"port{number}"
            tool("ip", "-n", switch, "link", "add", "dev", port, "type", "veth", "peer", "name", "link0", "netns", name)
            tool("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            tool("ip", "-n", name, "addr", "add", f"10.213.72.{number + 1}/24", "dev", "link0")
            for device in ("lo", "link0"):
                tool("ip", "-n", name, "link", "set", device, "up")
            tool("ip", "netns", "exec", switch, "tc", "qdisc", "add", "dev", port, "root", *limit)
            tool("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "link0", "root", *limit)
        yield names
    finally:
        remove()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_delivery_over_throttled_links_takes_as_long_to_four_engines_as_to_one(
    tmp_path: Path, links: list[str]
) -> None:
    slowest = {}
    for engines in (1, 2, 4):
        folder = tmp_path / str(engines)
        folder.mkdir()
        play = settings(Play(str(folder), 2, engines, versions=4, large=True))
        ranks = [
            start(
                ["ip", "netns", "exec", links[rank], sys.executable, str(SCRIPT), play],
                RANK=str(rank), GLOO_SOCKET_IFNAME="link0",
            )
            for rank in range(2 + engines)
        ]  # fmt: skip
        found = gather(ranks, 200)
        versions = zip(*(one["seconds"] for one in found[2:]), strict=True)
        slowest[engines] = min(max(of_engines) for of_engines in list(versions)[1:])  # the first has the meeting in it
        print(f"{engines} engines: {slowest[engines]:.2f} s, sent by trainers {[one['sent'] for one in found[:2]]}")
        assert sum(one["sent"] for one in found[:2]) == 4 * LARGE_BYTES, "each row leaves its trainer once a version"
        assert slowest[engines] > 0.9 * LARGE_BYTES / RATE, "the links were not throttled"
    assert max(slowest.values()) < 1.3 * min(slowest.values()), slowest
