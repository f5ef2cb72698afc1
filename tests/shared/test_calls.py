"""One declaration a call: what a rank can be asked, and what is refused on both sides. On the wire: test_rpc.py."""

import asyncio

import msgspec
import pytest

from shared.errors import RunError
from shared.launch.calls import CallReply, RequestDecoder, call, encode, request
from shared.launch.messages import RankFailed
from shared.sections import Deadlines


class Counted(msgspec.Struct):
    letters: int


class Counter:
    """A rank, as a whole."""

    longest = 0

    @call("count of {word}", deadline="step")
    async def count(self, word: str, times: int = 1) -> Counted:
        return Counted(len(word) * times)

    @call("end", deadline=3, last=True)
    def end(self) -> str:
        return "ended"

    def not_a_call(self) -> None:
        raise AssertionError


decode = RequestDecoder(Counter)


def test_the_decorated_method_is_the_message_and_its_answer():
    asked, end = (
        decode(encode(made.message)) for made in (request(Counter.count, "four", times=2), request(Counter.end))
    )
    assert (asked.phase, asked.call.last, asked.call.seconds(Deadlines(step_s=77))) == ("count of four", False, 77)
    assert (end.phase, end.call.last, end.call.seconds(Deadlines())) == ("end", True, 3)
    assert asyncio.run(asked.run(Counter())) == Counted(8)
    assert decode(encode(request(Counter.count, "four").message)).message.times == 1
    for answer in (CallReply(Counted(8)), RankFailed("RunError", "why")):
        assert asked.call.decode_answer(encode(answer)) == answer
    assert Counter().end() == "ended", "and still a method"


@pytest.mark.parametrize("content", [
    {"type": "count", "word": 4}, {"type": "count"}, {"type": "count", "word": "x", "times": "2"}, {"word": "x"},
    {"type": "not_a_call"}, {"type": "__init__"}, [1, 2], msgspec.Raw(b"\x91" * 100_000),
])  # fmt: skip
def test_an_unknown_method_and_arguments_of_another_type_are_refused(content):
    with pytest.raises(RunError, match="Counter cannot read a call"):
        decode(content if isinstance(content, msgspec.Raw) else msgspec.msgpack.encode(content))


@pytest.mark.parametrize(("method", "arguments", "error"), [
    (Counter.count, {}, TypeError), (Counter.count, {"word": "x", "length": 3}, TypeError),
    (Counter.not_a_call, {}, AttributeError),
])  # fmt: skip
def test_arguments_that_do_not_fit_the_method_are_an_error_of_the_caller(method, arguments, error):
    with pytest.raises(error):
        request(method, **arguments)
