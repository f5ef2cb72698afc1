"""Calls that hang while hearts beat, and the address at which ranks of other nodes find the controller."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from shared.errors import ConfigError, DeadlineExceeded, EngineLost
from shared.launch import adaptive_deadline, sockets
from shared.launch.messages import RankFailed
from shared.launch.rpc import EngineLink, Hub, raise_failure
from shared.launch.sockets import reachable_address
from tests.shared.test_rpc import RANKS, answer, asked, role, wired, within


def test_a_call_that_hangs_is_noticed_by_what_such_calls_took(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The setting is an hour."""
    monkeypatch.setattr(adaptive_deadline, "LEAST_S", 0.0)

    async def call() -> None:
        async with wired(tmp_path) as (hub, links, _):
            answers = [asyncio.ensure_future(answer(link, lambda number: number or None)) for link in links]
            await hub.call_all(dict.fromkeys(RANKS, asked(1)), 3600)
            hub.patience.longest["Echo.step"] = 1 / 36000  # so that a tenth of the setting, 0.5 s, decides
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="far longer than it ever took"):
                await hub.call_all(dict.fromkeys(RANKS, asked(0)), 5)
            assert time.monotonic() - began > 0.4
            for task in answers:
                task.cancel()

    within(call)


def test_a_rank_whose_engine_starts_again_may_be_late(tmp_path: Path) -> None:
    async def call() -> None:
        async with wired(tmp_path) as (hub, links, _):
            excused = {2}
            answers = [asyncio.ensure_future(answer(links[number], lambda number: number)) for number in (0, 2)]
            asyncio.get_running_loop().call_later(2.5, excused.clear)
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="engine rank 2"):
                await hub.call_all(dict.fromkeys(RANKS, asked(1)), 1.0, lambda: excused)
            assert time.monotonic() - began > 2.5
            for task in answers:
                task.cancel()

    within(call)


def test_what_a_rank_raised_on_purpose_is_told_in_one_line_and_anything_else_with_its_traceback() -> None:
    with pytest.raises(EngineLost) as ours:
        raise_failure("engine rank 2", RankFailed("EngineLost", "could not start: reason", "Traceback ..."))
    assert str(ours.value) == "engine rank 2: could not start: reason"
    with pytest.raises(Exception, match="trainer rank 1: 'x'\nTraceback"):
        raise_failure("trainer rank 1", RankFailed("KeyError", "'x'", "Traceback ..."))


@pytest.mark.parametrize(
    ("master", "means", "expected"),
    [
        ("10.0.0.7", ["10.0.0.7"], "10.0.0.7"),
        ("fd00::7", ["fd00::7"], "[fd00::7]"),
        ("::1", ["::1"], "[::1]"),
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("node0", ["127.0.1.1"], "10.0.0.7"),  # Debian's /etc/hosts: the address from which this host speaks
        ("node0", ["127.0.1.1", "fd00::7"], "[fd00::7]"),
    ],
)
def test_several_nodes_meet_at_an_address_that_others_can_reach(
    monkeypatch: pytest.MonkeyPatch, master: str, means: list[str], expected: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in means])
    monkeypatch.setattr(sockets, "_speaks_from", lambda target: "" if ":" in target else "10.0.0.7")
    monkeypatch.setattr(sockets, "_is_ours", lambda address: True)
    controller = replace(role(0, dist.HashStore()), one_node=False, master=master)
    assert reachable_address(controller) == expected


def test_a_master_that_is_no_address_of_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_speaks_from", lambda target: "")
    with pytest.raises(ConfigError, match="--master-addr"):
        reachable_address(replace(role(0, dist.HashStore()), one_node=False, master="192.0.2.250"))


def test_ranks_meet_over_ipv6() -> None:
    async def meet() -> None:
        store = dist.HashStore()
        hub = Hub(replace(role(0, store), one_node=False, master="::1"))
        receiving = asyncio.ensure_future(hub.receive())
        link = EngineLink(role(1, store))
        await link.register()
        await hub.wait_for_ranks(range(1, 2), 10)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        link.close()
        hub.close()

    within(meet)
