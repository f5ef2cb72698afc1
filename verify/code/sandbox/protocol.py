"""Exchanges frames with children of sandboxes: one call, or an assertion runner and a candidate that talk through here.

The assertion runner's sandbox runs the test code, the candidate's sandbox the program; questions and answers pass here
as bytes and are not read, but for the first letter of a frame. Both sandboxes have deadlines of their own; a sandbox
that dies raises Lost.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from verify.code.sandbox import codec
from verify.code.sandbox.client import GRACE_S, Ended, Pipe, SandboxHandle, exchange
from verify.code.sandbox.codec import HEADER
from verify.code.tests import Assertions, CallTest, Limits

_TARGETS = (3, 4)
_FRAMES_BYTES = 32 << 20
_MODULE = "solution"


def _pop(pipe: Pipe) -> bytes | None:
    """Take the next whole frame's body out of what was gathered."""
    if not _has_frame(pipe):
        return None
    end = HEADER.size + HEADER.unpack_from(pipe.got)[0]
    body = bytes(pipe.got[HEADER.size : end])
    del pipe.got[:end]
    return body


def _has_frame(pipe: Pipe) -> bool:
    return len(pipe.got) >= HEADER.size and len(pipe.got) >= HEADER.size + HEADER.unpack_from(pipe.got)[0]


def call(sandbox: SandboxHandle, source: str, test: CallTest, wall_s: float, limits: Limits) -> tuple[Ended, Any]:
    """Call a function of a program once, for at most `wall_s`. Raises Lost.

    Returns how the child ended and ["value", tree], ["error", type, text, tree], or None where no answer came.
    """
    question = codec.frame(b"C", [test.function, codec.encode(test.args), codec.encode(test.kwargs)])
    with Pipe(question, limits.output_bytes) as pipe:
        ended = sandbox.run(
            pipe, _TARGETS, wall_s, limits.test_s, memory_bytes=limits.memory_bytes,
            do="serve_calls", arguments=[source, _MODULE, "", list(limits.imports)],
        )  # fmt: skip
        first = None if pipe.flooded else _pop(pipe)  # says that the program was read, or what it raised
        return ended, _read_reply(_pop(pipe) if first and first[:1] == b"R" else first)


def _read_reply(body: bytes | None) -> Any:
    """Decode a reply; None when it is not one."""
    try:
        reply = codec.load(body[1:]) if body else None
    except codec.Malformed:
        return None
    whole = isinstance(reply, list) and reply and len(reply) in (2, 3, 4)
    return reply if whole else None


def raised(reply: Any) -> str:
    """Return what a program raised in one line, "" where a reply says nothing of it."""
    if not (isinstance(reply, list) and reply[0] == "error"):
        return ""
    words = [" ".join(word[:300].split()) for word in reply[1:] if isinstance(word, str)]
    return f"raised {': '.join(filter(None, words))}"[:300]


class AssertionResults(msgspec.Struct):
    """What became of the assertions of one test code."""

    passed: list[bool] | None = None
    """each top-level assertion; None when the talk ended before"""
    reason: str = ""
    refused: bool = False
    """the tests themselves cannot be run this way"""
    candidate: Ended = Ended()


class _Talk:
    """The state of one run of assertions: both sandboxes, their pipes, and the results."""

    def __init__(self, candidate: SandboxHandle, runner: SandboxHandle) -> None:
        self.candidate, self.runner = candidate, runner
        self.ours, self.theirs = Pipe(most_bytes=_FRAMES_BYTES), Pipe(most_bytes=_FRAMES_BYTES)
        self.ours.close_when_sent = self.theirs.close_when_sent = False
        self.running: dict[SandboxHandle, Pipe] = {}
        self.results = AssertionResults()
        self.over = False
        self.asked = self.waiting = 0
        """frames to the program so far, and those that it has not answered yet, be it with a question of its own"""

    def pass_on(self) -> None:
        """Hand every whole frame to its receiver."""
        while (body := _pop(self.theirs)) is not None:
            if body[:1] in (b"C", b"K"):  # a question, or what a function of the tests gave: the program's turn
                self.asked += 1
                self.waiting += 1
                self.ours.out += HEADER.pack(len(body)) + body
            else:
                self.hear(body)
        while (body := _pop(self.ours)) is not None:
            if not self.waiting:  # an answer to nothing: the program talks on its own
                self.ours.flooded = True
                return
            self.waiting -= 1
            self.theirs.out += HEADER.pack(len(body)) + body

    def hear(self, body: bytes) -> None:
        """Take the results from the assertion runner's last frame."""
        self.over = True
        tree = codec.load(body[1:])
        if body[:1] == b"D":
            self.results.passed, self.results.reason = list(tree[0]), tree[1]
        else:
            self.results.refused, self.results.reason = True, tree


def run_assertions(
    candidate: SandboxHandle, runner: SandboxHandle, source: str, test: Assertions, seconds: tuple[float, float],
    memory_bytes: tuple[int, int],
) -> AssertionResults:  # fmt: skip
    """Let the test code ask the program. `seconds`: wall, processor; `memory_bytes`: program, assertion runner. Raises
    Lost."""
    wall_s, cpu_s = seconds
    talk = _Talk(candidate, runner)
    ours, theirs = talk.ours, talk.theirs
    try:
        candidate.begin(
            ours, _TARGETS, wall_s, cpu_s,
            memory_bytes=memory_bytes[0], do="serve_calls", arguments=[source, _MODULE, test.prefix, []],
        )  # fmt: skip
        talk.running[candidate] = ours
        first = _first_frame(talk, wall_s)
        defined = _names(first)
        if defined is not None:
            arguments = [test.code, test.prefix, test.entry_point, defined]
            runner.begin(
                theirs, _TARGETS, wall_s + 1, cpu_s + 1,
                memory_bytes=memory_bytes[1], do="run_assertions", arguments=arguments,
            )  # fmt: skip
            talk.running[runner] = theirs
            _converse(talk, time.monotonic() + wall_s + GRACE_S)
        else:
            talk.results.reason = raised(_read_reply(first))
            exchange(talk.running, wall_s + GRACE_S, lambda: ours.flooded)
        _finish(talk)
        return talk.results
    finally:
        for pipe, sandbox in ((ours, candidate), (theirs, runner)):
            if sandbox not in talk.running and pipe is theirs:
                pipe.close_child_ends()
            pipe.close()


def _first_frame(talk: _Talk, wall_s: float) -> bytes | None:
    """Wait for the first frame, sent when the candidate's program was read; None when it ended before."""
    pipe = talk.ours
    exchange(talk.running, wall_s + GRACE_S, lambda: pipe.flooded or _has_frame(pipe))
    pipe.drain()  # the end of the program may be seen before its message
    return _pop(pipe)


def _names(body: bytes | None) -> list[str] | None:
    """Return the built-in names that a program says it defines; None where it was not read."""
    try:
        tree = codec.load(body[1:]) if body and body[:1] == b"R" else None
    except codec.Malformed:
        return None
    return [name for name in tree if isinstance(name, str)][:200] if isinstance(tree, list) else None


def _converse(talk: _Talk, end: float) -> None:
    """Pass frames on until the assertion runner reports, a child ends, or one sends too much."""
    while not (talk.over or any(sandbox.has_answer() for sandbox in talk.running)):
        exchange(
            talk.running, max(0.01, end - time.monotonic()),
            lambda: any(pipe.flooded or _has_frame(pipe) for pipe in talk.running.values()),
        )  # fmt: skip
        talk.pass_on()
        if talk.ours.flooded or talk.theirs.flooded:
            return
    talk.theirs.drain()
    talk.pass_on()


def _finish(talk: _Talk) -> None:
    """Kill what still runs and read how both children ended."""
    runner_ended = talk.runner in talk.running and talk.runner.has_answer()
    for sandbox in talk.running:
        if not sandbox.has_answer():
            sandbox.cancel()
    ends = {sandbox: sandbox.ended() for sandbox in talk.running}
    talk.results.candidate = ends[talk.candidate]
    if runner_ended and not talk.over and not talk.asked:
        talk.results.refused, talk.results.reason = True, "the tests end before they ask the program anything"
