"""The process in which plug-in files run, with their rewards and verifiers: what hangs, exits or exhausts memory there
harms nothing else.

Started as `python -m verify.plugin_process STACK_DESCRIPTOR FILE...`. Frames on stdin and stdout as in
`child_process.py`: first a `FilesRead`, then for each `Describe` a `Description`, for each other message a `Begun`
and a `Value`. What the functions print goes to standard error. On SIGUSR1 the current stack is written to
STACK_DESCRIPTOR, whatever the process is busy with. The kernel's out-of-memory killer takes this process first.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import signal
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from shared.chat import AnswerFormat
from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Problem, Verdict
from shared.user_file import run_file
from verify import plugins, verifiers
from verify.child_process import FilesRefused, frame, handle_frames, line_of, run_child, write_all


class Described(msgspec.Struct):
    """One reward that the files define, under the given settings."""

    name: str
    floor: float
    deadline_s: float
    place: str
    """file and line of the function"""
    group: bool = False


class DescribedVerifier(msgspec.Struct):
    """One verifier that the files define; the fields are those of `verifiers.Verifier`."""

    domain: str
    ground_truth: verifiers.GroundTruth
    answer_in: verifiers.AnswerIn
    form: AnswerFormat
    verifies: bool
    home: str
    place: str
    """file and line of the function"""


class FilesRead(msgspec.Struct, tag=True):
    """Sent when the files have been run."""


class Description(msgspec.Struct, tag=True):
    """Reply to `Describe`: all rewards and verifiers of the files."""

    rewards: list[Described]
    verifiers: list[DescribedVerifier]


class Begun(msgspec.Struct, tag=True):
    """Sent when a call begins."""

    number: int


class Value(msgspec.Struct, tag=True):
    """The outcome of a call: numbers, or why there are none."""

    number: int
    values: list[float] | None
    """[cases] of a reward; a single one of a verification"""
    verdict: Verdict = Verdict.CORRECT
    reason: str = ""


Said = FilesRead | FilesRefused | Description | Begun | Value


class Describe(msgspec.Struct, tag=True):
    """Asks for a `Description` under the given settings."""

    settings: str


class RewardCall(msgspec.Struct, tag=True):
    """Asks for the value of one case, or for those of the cases of a group."""

    number: int
    settings: str
    """JSON of the [reward] section"""
    name: str
    cases: list[tuple[Problem, str, str, str, int, Verdict, float, int]]
    """the fields of each `plugins.Case` in their order, without the settings"""


class Verification(msgspec.Struct, tag=True):
    """Asks whether an answer is right, as a number: the share of it that is."""

    number: int
    settings: str
    domain: str
    answer: verifiers.Answer


Asked = Describe | RewardCall | Verification


@lru_cache(maxsize=64)
def settings_of(text: str) -> RewardWeights:
    """Parse the JSON of the [reward] section."""
    return RewardWeights.model_validate_json(text)


@lru_cache(maxsize=256)
def function_of(name: str, settings: str) -> plugins.Function:
    """Return the function of a reward under the given settings, which is made once."""
    return plugins.REWARDS[name].make(settings_of(settings))


def _place(function: Any, home: str) -> str:
    code = getattr(getattr(function, "func", function), "__code__", None)
    return f"{home}:{code.co_firstlineno}" if inspect.iscode(code) else home


def _begin(asked: RewardCall | Verification, settings: RewardWeights) -> Any:
    """Call the function; returns its value, or what must be awaited."""
    if isinstance(asked, Verification):
        return verifiers.VERIFIERS[asked.domain].function(asked.answer)
    function = function_of(asked.name, asked.settings)
    cases = [plugins.Case(*fields[:7], settings, fields[7]) for fields in asked.cases]
    return function(cases if plugins.REWARDS[asked.name].group else cases[0])


def _value(asked: RewardCall | Verification, value: Any) -> Value:
    """The reply that holds a value, or says what it is instead of a number, or of one for each case of a group."""
    values, count, instead = [value], 1, "which is no number"
    if isinstance(asked, RewardCall) and plugins.REWARDS[asked.name].group:
        values, count = list(value) if isinstance(value, list | tuple) else [], len(asked.cases)
        instead = f"not a list of {count} numbers"
    if len(values) == count and all(isinstance(one, int | float) for one in values):
        return Value(asked.number, list(map(float, values)))
    return Value(asked.number, None, Verdict.CRASH, f"returned {value!r:.80}, {instead}")


class PluginProcess:
    """Runs the functions of plug-in files at the requests of the host."""

    def __init__(self, replies: int, files: list[str]):
        self.replies, self.files = replies, files
        self.running: set[asyncio.Task[None]] = set()

    def say(self, message: Said) -> None:
        """Send a message to the host as a frame."""
        write_all(self.replies, frame(message))

    def load(self) -> bool:
        """Run the files; return False when one cannot be run."""
        try:
            for module in plugins.READY:
                importlib.import_module(module)
            verifiers.known_domains()  # all are loaded, so that a name which is taken is noticed
            for file in self.files:
                run_file(Path(file), "reward.plugins")
        except ConfigError as error:
            self.say(FilesRefused(str(error)))
            return False
        except BaseException as error:  # noqa: BLE001 - sys.exit in a file too: the host reports it
            self.say(FilesRefused(f"reward.plugins: {self._told(error, 'a file')}"))
            return False
        self.say(FilesRead())
        return True

    def describe(self, settings: str) -> None:
        """Send the rewards that the files define."""
        try:
            rewards = [
                self._described(known, settings) for known in plugins.REWARDS.values() if known.home in self.files
            ]
            own = [known for known in verifiers.VERIFIERS.values() if known.home in self.files]
            self.say(Description(rewards, [self._described_verifier(known) for known in own]))
        except ConfigError as error:
            self.say(FilesRefused(str(error)))
        except BaseException as error:  # noqa: BLE001 - as above
            self.say(FilesRefused(f"reward.plugins: {self._told(error, 'a reward')}"))

    def _described(self, known: plugins.Registered, settings: str) -> Described:
        weights = settings_of(settings)
        plugins.read_options(known.name, known.options, weights)
        place = _place(function_of(known.name, settings), known.home)
        return Described(known.name, float(known.lowest(weights)), known.deadline_s(weights), place, known.group)

    def _described_verifier(self, known: verifiers.Verifier) -> DescribedVerifier:
        place = _place(known.function, known.home)
        if known.needs or known.validate is not None:
            raise ConfigError(
                f"reward.plugins: the verifier of '{known.domain}' ({place}) gives 'needs' or 'validate', which only "
                "verifiers of this project can: leave them out"
            )
        return DescribedVerifier(
            known.domain, known.ground_truth, known.answer_in, known.form, known.verifies, known.home, place
        )

    def _told(self, error: BaseException, what: str) -> str:
        place = line_of(error, self.files)
        return f"{place or what} fails with {type(error).__name__}: {error}"[:500]

    async def call(self, asked: RewardCall | Verification) -> None:
        """Call one function and send its value, or why there is none."""
        settings = settings_of(asked.settings)
        deadline_s = settings.deadline_s
        if isinstance(asked, RewardCall):
            deadline_s = plugins.REWARDS[asked.name].deadline_s(settings)
        self.say(Begun(asked.number))
        try:
            value = _begin(asked, settings)
            if inspect.isawaitable(value):
                value = await asyncio.wait_for(value, deadline_s)
        except TimeoutError:
            reply = Value(asked.number, None, Verdict.TIMEOUT, f"no value after {deadline_s:g} s")
        except plugins.Failed as error:
            reply = Value(asked.number, None, error.verdict, str(error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises, sys.exit too, is reported by the host
            place = line_of(error, self.files)
            failure = f"{type(error).__name__}: {error}"[:400]
            reply = Value(asked.number, None, Verdict.CRASH, f"{failure} ({place})" if place else failure)
        else:
            reply = _value(asked, value)
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


def serve(requests: int, replies: int) -> None:
    """Run the files, and answer requests until the host closes its end."""
    stack, *files = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1, file=int(stack), all_threads=False)
    process = PluginProcess(replies, files)
    if process.load():
        asyncio.run(handle_frames(requests, process.begin))


if __name__ == "__main__":
    run_child(os.getppid(), serve, expendable=True)
