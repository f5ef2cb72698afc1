"""The weight transfer over the network alone: in any order of meeting, with engines that die."""

import json
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rollout.weights.network import NetworkSender
from tests.rollout.weights.chain_rank import Play, command

LARGE_BYTES = 2 * (65536 * 256 + 16 * 2048 * 1024 + 1024)
SLOT_BYTES = 2 * 65536 * 256
OTHER_BYTES = 24 << 20
"""what a receiver may hold beside its slots: threads, gloo's and the checksum's own memory"""
Rows = list[dict[str, Any]]


def run_ranks(folder: Path, *plays: Play, deadline_s: float = 800) -> Rows:
    """Run every rank in a process of its own, the trainers first, until all end without an error; they meet in a file
    of the folder. What they measured, rank by rank."""
    agents, lines = [], list[str]()
    for rank in range(plays[0].trainers + max(play.engines for play in plays)):
        values = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)}
        log = tempfile.TemporaryFile()  # noqa: SIM115 - read below
        line = command(folder, *plays)
        agents.append((subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=values), log))
    end = time.monotonic() + deadline_s
    try:
        while any(agent.poll() is None for agent, _ in agents) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        for agent, log in agents:
            agent.terminate()
            agent.wait(60)
            log.seek(0)
            lines.append(log.read().decode(errors="replace"))
    assert [agent.returncode for agent, _ in agents] == [0] * len(agents), "\n".join(text[-3000:] for text in lines)
    return [json.loads(line) for text in lines for line in text.splitlines() if line.startswith('{"rank"')]


def test_a_version_that_was_written_over_is_not_sent_again():
    """Two buffers hold versions 4 and 5; the engine that asked for 3 has died since."""
    store = dist.HashStore()
    for number, version in enumerate((3, 4), 1):
        store.set(f"transfer/request/{number}", str(version))
    sender: Any = SimpleNamespace(
        changed=threading.Condition(), closed=False, newest=5, announced=5, served=0, store=store
    )
    assert NetworkSender._decide(sender) == 4 and sender.served == 2


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    """What the same processes measured: of a large model; of late ranks, one of which dies; of ranks of one host."""
    large, late = Play(2, 2, large=True), Play(2, 2, meetings=2, versions=3, delay_s=0.3, die=(0, 1, 3))
    results = run_ranks(tmp_path_factory.mktemp("plays"), large, late, Play(2, 1, versions=3, transport="auto"))
    first, second, third = ([row for row in results if row["play"] == act] for act in range(3))
    return first, second, third


@pytest.mark.soak  # in make test: one engine and the trainers of a launch, and a receiver alone
@pytest.mark.timeout(1000)
def test_engines_and_trainers_meet_in_any_order_and_one_engine_dies_on_the_way(plays):
    assert [(row["rank"], row["meeting"]) for row in plays[1]] == [(r, m) for r in range(4) for m in range(2)]


@pytest.mark.soak  # in make test: one engine and the trainers of a launch, and a receiver alone
@pytest.mark.timeout(1000)
def test_on_one_host_an_engine_reads_the_memory_of_the_trainers_who_gather_nothing(plays):
    *trainers, engine = plays[2]
    assert engine["transport"] == "shm" and sum(rank["own"] for rank in trainers) == engine["payload"]
    assert all(rank["own"] < engine["payload"] for rank in trainers)


@pytest.mark.soak  # in make test: one engine and the trainers of a launch, and a receiver alone
@pytest.mark.timeout(1000)
def test_each_trainer_sends_its_rows_once_and_a_receiver_holds_two_tensors(plays):
    trainers, engines = plays[0][:2], plays[0][2:]
    assert all(one["sent"] == 2 * one["own"] for one in trainers), "two versions"
    assert sum(one["own"] for one in trainers) == LARGE_BYTES
    assert sorted(one["sent"] >= 2 * LARGE_BYTES for one in engines) == [False, True], "the last has nobody behind it"
    assert all(one["grown"] < 2 * SLOT_BYTES + OTHER_BYTES for one in engines), engines


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("play", [
    Play(2, 2, meetings=200, delay_s=0.3), Play(3, 3, meetings=200, delay_s=0.3),
    Play(2, 3, meetings=50, versions=4, delay_s=0.2, die=(1, 2, 2)),
], ids=["2", "3", "an engine process dies in the middle of a delivery"])  # fmt: skip
def test_many_meetings_with_random_delays(tmp_path, play):
    results = run_ranks(tmp_path, play, deadline_s=1700)
    assert len(results) == play.meetings * (play.trainers + play.engines)
