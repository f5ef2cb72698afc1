"""One declaration a call: what a rank can be asked, and what is refused on both sides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import DeadlineExceeded, RunError
from shared.launch import rpc
from shared.launch.calls import CallReply, RankClient, RequestDecoder, call, encode, request
from shared.launch.messages import RankFailed
from shared.launch.sockets import refused
from shared.sections import Deadlines
from tests.asynchronous import asynchronous
from tests.shared.test_rpc import ENOUGH_S, RANKS, refusals, wired


class Counted(msgspec.Struct):
    """A record as a result."""

    letters: int


class Counter:
    """A rank, as a whole."""

    longest = 0

    @call("count of {word}", deadline="step")
    async def count(self, word: str, times: int = 1) -> Counted:
        return Counted(len(word) * times)

    @call("name", deadline=60)
    def name(self) -> str:
        return "counter"

    @call("silence", deadline=0.5)
    def silence(self) -> None: ...

    @call("end", deadline=3, last=True)
    def end(self) -> None: ...

    def not_a_call(self) -> None:
        raise AssertionError


decode = RequestDecoder(Counter)


def test_the_decorated_method_is_the_message_and_its_answer() -> None:
    asked = decode(encode(request(Counter.count, "four", times=2).message))
    assert asked.phase == "count of four" and not asked.call.last
    assert asyncio.run(asked.run(Counter())) == Counted(8)
    assert decode(encode(request(Counter.count, "four").message)).message.times == 1  # type: ignore[attr-defined]
    assert asked.call.decode_answer(encode(CallReply(Counted(8)))) == CallReply(Counted(8))
    assert asked.call.decode_answer(encode(RankFailed("RunError", "why"))) == RankFailed("RunError", "why")
    assert Counter().name() == "counter", "and still a method"
    assert decode(encode(request(Counter.end).message)).call.last


def test_a_deadline_is_a_setting_or_a_number() -> None:
    deadlines = Deadlines(step_s=77)
    assert request(Counter.count, "x").call.seconds(deadlines) == 77
    assert request(Counter.end).call.seconds(deadlines) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"type": "count", "word": 4}, r"Counter cannot read a call: Expected `str`, got `int` - at `\$\.word`"),
        ({"type": "count"}, "missing required field `word`"),
        ({"type": "count", "word": "x", "times": "2"}, r"at `\$\.times`"),
        ({"type": "not_a_call"}, "Invalid value 'not_a_call'"),
        ({"type": "__init__"}, "Invalid value '__init__'"),
        ({"word": "x"}, "missing required field `type`"),
        ([1, 2], "Expected `object`, got `array`"),
    ],
)
def test_an_unknown_method_and_arguments_of_another_type_are_refused(content: Any, said: str) -> None:
    with pytest.raises(RunError, match=said):
        decode(msgspec.msgpack.encode(content))
    with pytest.raises(RunError, match="cannot read a call"):
        decode(b"\x91" * 100_000)


def test_arguments_that_do_not_fit_the_method_are_an_error_of_the_caller() -> None:
    ask: Any = request
    with pytest.raises(TypeError):
        ask(Counter.count)
    with pytest.raises(TypeError):
        ask(Counter.count, "x", length=3)
    with pytest.raises(AttributeError):
        ask(Counter.not_a_call)


async def serve(link: rpc.EngineLink, wrong: Any = None) -> None:
    """Answer `count` as it should be, `name` with `wrong`, and `silence` not at all."""
    async for call_id, asked in link.calls(Counter):
        if asked.call.method.__name__ == "count":
            await link.send(call_id, CallReply(await asked.run(Counter())))
        elif asked.call.method.__name__ == "name":
            await link.send(call_id, CallReply(wrong))


@asynchronous
async def test_a_client_calls_all_ranks_and_names_the_call_that_is_late_or_answered_wrongly(tmp_path: Path) -> None:
    async with wired(tmp_path) as (hub, links, _):
        client = RankClient(hub, RANKS, Deadlines())
        serving = [asyncio.ensure_future(serve(link, wrong=5)) for link in links]
        assert await client.call(Counter.count, "abc") == [Counted(3)] * 3
        each = [request(Counter.count, "a" * rank) for rank in RANKS]
        assert [counted.letters for counted in await client.call_each(each)] == list(RANKS)
        with pytest.raises(RunError, match=r"engine rank \d answered 'name' wrongly: Expected `str`, got `int`"):
            await client.call(Counter.name)
        with pytest.raises(DeadlineExceeded, match=r"engine rank 1, .*in phase 'silence' \(no setting") as late:
            await client.call(Counter.silence)
        assert late.value.deadline_s == 0.5
        for task in serving:
            task.cancel()


@asynchronous
async def test_a_call_that_cannot_be_read_is_reported_to_the_caller(tmp_path: Path) -> None:
    ask: Any = request
    async with wired(tmp_path) as (hub, links, _):
        serving = asyncio.ensure_future(serve(links[0]))
        with pytest.raises(RunError, match="engine rank 1: Counter cannot read a call: Expected `str`, got `int`"):
            await hub.call(1, ask(Counter.count, 4), ENOUGH_S)
        with pytest.raises(RunError, match="cannot read a call"):
            await serving


@asynchronous
async def test_an_answer_above_the_limit_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "MESSAGE_BYTES", 3 << 20)
    async with wired(tmp_path) as (hub, links, _):
        before = refused.total
        serving = asyncio.ensure_future(serve(links[0], wrong="x" * (4 << 20)))
        with pytest.raises(DeadlineExceeded, match="in phase 'name'"):
            await hub.call(1, request(Counter.name), 1.0)
        assert await refusals(before + 1) == before + 1
        assert await hub.call(1, request(Counter.count, "abc"), ENOUGH_S) == Counted(3), "the next call is as ever"
        serving.cancel()
