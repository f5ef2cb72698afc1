"""The process in which plug-in files of rewards run: what hangs, exits or exhausts memory there harms nothing else.

Started as `python -m verify.plugin_child PARENT_PID STACK_DESCRIPTOR FILE...`. Frames on stdin and stdout as in
`worker.py`: first a `Loaded`, then for each `Describe` a `Description`, and for each `Call` a `Begun` and a `Value`.
What the functions print goes to standard error. On SIGUSR1 the current stack is written to STACK_DESCRIPTOR, whatever
the process is busy with. The kernel's out-of-memory killer takes this process first.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Problem, Verdict
from shared.user_file import run_file
from verify import plugins
from verify.worker import HEADER, die_with_parent, frame, read_exactly


class Described(msgspec.Struct):
    """One reward that the files define, under the given settings."""

    name: str
    floor: float
    deadline_s: float
    place: str
    """file and line of the function"""


class Loaded(msgspec.Struct, tag=True):
    """Sent when the files have been run."""


class Refused(msgspec.Struct, tag=True):
    """Sent when a file cannot be run, or a reward cannot be made."""

    reason: str


class Description(msgspec.Struct, tag=True):
    """Reply to `Describe`: all rewards of the files."""

    rewards: list[Described]


class Begun(msgspec.Struct, tag=True):
    """Sent when a call begins."""

    number: int


class Value(msgspec.Struct, tag=True):
    """The outcome of a call: a number, or why there is none."""

    number: int
    value: float | None
    verdict: Verdict = Verdict.CORRECT
    reason: str = ""


Said = Loaded | Refused | Description | Begun | Value


class Describe(msgspec.Struct, tag=True):
    """Asks for a `Description` under the given settings."""

    settings: str


class Call(msgspec.Struct, tag=True):
    """Asks for the value of one case."""

    number: int
    settings: str
    """JSON of the [reward] section"""
    name: str
    problem: Problem
    thoughts: str
    solution: str
    answer: str
    tokens: int
    verdict: Verdict
    share: float


Asked = Describe | Call


@lru_cache(maxsize=64)
def settings_of(text: str) -> RewardWeights:
    """Parse the JSON of the [reward] section."""
    return RewardWeights.model_validate_json(text)


@lru_cache(maxsize=256)
def function_of(name: str, settings: str) -> plugins.Function:
    """Return the function of a reward under the given settings, which is made once."""
    return plugins.REWARDS[name].make(settings_of(settings))


def line_of(error: BaseException, files: list[str]) -> str:
    """Return "FILE:LINE in FUNCTION" of the innermost frame of an error that is in one of the files, "" for none."""
    found = [at for at in traceback.extract_tb(error.__traceback__) if at.filename in files]
    return f"{found[-1].filename}:{found[-1].lineno} in {found[-1].name}" if found else ""


class Child:
    """Runs the reward functions of plug-in files at the requests of the host."""

    def __init__(self, replies: int, files: list[str]):
        self.replies, self.files = replies, files
        self.running: set[asyncio.Task[None]] = set()

    def say(self, message: Said) -> None:
        """Send a message to the host as a frame."""
        data = frame(message)
        while data:
            data = data[os.write(self.replies, data) :]

    def load(self) -> bool:
        """Run the files; return False when one cannot be run."""
        try:
            for module in plugins.READY:
                importlib.import_module(module)
            for file in self.files:
                run_file(Path(file), "reward.plugins")
        except ConfigError as error:
            self.say(Refused(str(error)))
            return False
        except BaseException as error:  # noqa: BLE001 - sys.exit in a file too: the host tells the user
            self.say(Refused(f"reward.plugins: {self._told(error, 'a file')}"))
            return False
        self.say(Loaded())
        return True

    def describe(self, settings: str) -> None:
        """Send the rewards that the files define."""
        try:
            found = [self._described(known, settings) for known in plugins.REWARDS.values() if known.home in self.files]
            self.say(Description(found))
        except ConfigError as error:
            self.say(Refused(str(error)))
        except BaseException as error:  # noqa: BLE001 - as above
            self.say(Refused(f"reward.plugins: {self._told(error, 'a reward')}"))

    def _described(self, known: plugins.Registered, settings: str) -> Described:
        weights = settings_of(settings)
        plugins.read_options(known.name, known.options, weights)
        function = function_of(known.name, settings)
        code = getattr(getattr(function, "func", function), "__code__", None)
        place = f"{known.home}:{code.co_firstlineno}" if inspect.iscode(code) else known.home
        return Described(known.name, float(known.lowest(weights)), known.deadline_s(weights), place)

    def _told(self, error: BaseException, what: str) -> str:
        place = line_of(error, self.files)
        return f"{place or what} fails with {type(error).__name__}: {error}"[:500]

    async def call(self, asked: Call) -> None:
        """Call one reward function and send its value, or why there is none."""
        settings = settings_of(asked.settings)
        parts = (asked.problem, asked.thoughts, asked.solution, asked.answer, asked.tokens, asked.verdict, asked.share)
        deadline_s = plugins.REWARDS[asked.name].deadline_s(settings)
        self.say(Begun(asked.number))
        try:
            value: Any = function_of(asked.name, asked.settings)(plugins.Case(*parts, settings))
            if inspect.isawaitable(value):
                value = await asyncio.wait_for(value, deadline_s)
        except TimeoutError:
            reply = Value(asked.number, None, Verdict.TIMEOUT, f"no value after {deadline_s:g} s")
        except plugins.Failed as error:
            reply = Value(asked.number, None, error.verdict, str(error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises, sys.exit too, is told by the host
            place = line_of(error, self.files)
            said = f"{type(error).__name__}: {error}"[:400]
            reply = Value(asked.number, None, Verdict.CRASH, f"{said} ({place})" if place else said)
        else:
            usable = isinstance(value, int | float)
            reply = Value(asked.number, float(value) if usable else None)
            if not usable:
                reply.verdict, reply.reason = Verdict.CRASH, f"returned {value!r:.80}, which is no number"
        self.say(reply)

    def begin(self, body: bytes) -> None:
        """Handle the body of a frame: describe the rewards, or start a call."""
        asked = msgspec.msgpack.decode(body, type=Asked)
        if isinstance(asked, Describe):
            self.describe(asked.settings)
            return
        task = asyncio.get_running_loop().create_task(self.call(asked))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def serve(self, requests: int) -> None:
        """Answer requests until the host closes its end."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def listen() -> None:
            while (header := read_exactly(requests, HEADER.size)) is not None:
                body = read_exactly(requests, HEADER.unpack(header)[0])
                if body is None:
                    break
                loop.call_soon_threadsafe(self.begin, body)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=listen, daemon=True).start()
        await ended.wait()


def main() -> None:
    """Entry point of the process."""
    parent, stack, *files = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=int(stack), all_threads=False)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    child = Child(replies, files)
    with suppress(BrokenPipeError, KeyboardInterrupt):
        if child.load():
            asyncio.run(child.serve(requests))
    os._exit(0)


if __name__ == "__main__":
    main()
