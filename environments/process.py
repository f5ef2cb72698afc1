"""The process in which environments of plug-in files run: what hangs or exits there harms nothing else.

Started as `python -m environments.process SETTINGS FILE...`. Frames on stdin and stdout as in
`verify/child_process.py`: it sends `FilesLoaded` or `FilesRefused`, then for each `ResetCall` and `StepCall` an
`Answered`. What environments print goes to standard error. The kernel's out-of-memory killer takes this process first.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
import time
import traceback
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from environments.environment import ENVIRONMENTS, OPTIONS, Action, Environment, Observation, call, load_ready, made
from shared.clean_text import clean
from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from shared.user_file import run_file
from verify.child_process import FilesRefused, frame, handle_frames, line_of, run_child, write_all
from verify.plugins import Failed, checked_options
from verify.reward import score

ANSWER_BYTES = 1 << 20
"""most bytes of an observation, encoded"""
THREADS = 256
"""methods that are not `async` and run at once"""


class ProcessSettings(msgspec.Struct):
    """What the process is told at its start, as JSON."""

    options: dict[str, dict[str, Any]]
    """environment.options"""
    rewards: dict[str, Any]
    """the [reward] section, for `grade`"""


class FilesLoaded(msgspec.Struct, tag=True):
    """Sent when the files have been run: the environments that they define."""

    verified: dict[str, bool]
    """name -> `Environment.verified`"""


class Answered(msgspec.Struct, tag=True):
    """The outcome of a call: an observation, or why there is none."""

    number: int
    observation: Observation | None
    verdict: Verdict = Verdict.CRASH
    reason: str = ""
    stuck: bool = False
    """a thread works on, which only the end of the process can stop"""

    def __post_init__(self) -> None:
        self.reason = clean(self.reason)


EnvironmentReply = FilesLoaded | FilesRefused | Answered


class ResetCall(msgspec.Struct, tag=True):
    """Makes an instance and asks it to begin an episode."""

    number: int
    instance: int
    name: str
    problem: Problem
    seed: int
    deadline_s: float


class StepCall(msgspec.Struct, tag=True):
    """Asks an instance to answer a turn."""

    number: int
    instance: int
    action: Action
    deadline_s: float


class CloseCall(msgspec.Struct, tag=True):
    """The instance is needed no more. Gets no reply."""

    instance: int


EnvironmentCall = ResetCall | StepCall | CloseCall


async def answered(number: int, name: str, work: Awaitable[Any], deadline_s: float, files: list[str]) -> Answered:
    """The reply to a call, whatever the environment raised or returned, at the deadline at the latest unless something
    blocks the event loop. work: no task, which would let SystemExit end the loop."""
    limit, started = asyncio.timeout(deadline_s), time.monotonic()
    late = Answered(number, None, Verdict.TIMEOUT, f"environment {name}: no answer after {deadline_s:g} s")
    try:
        async with limit:
            observation = await work
        if time.monotonic() - started > deadline_s:  # it has blocked the event loop meanwhile
            return late
        if not isinstance(observation, Observation):
            return Answered(number, None, reason=f"environment {name}: returned {observation!r:.80}, no Observation")
        observation = msgspec.convert(msgspec.to_builtins(observation), Observation)  # raises for wrong types
        size = len(msgspec.msgpack.encode(observation))
        if not all(map(math.isfinite, (observation.reward or 0.0, *observation.info.values()))):
            return Answered(number, None, reason=f"environment {name}: gave a number that is not finite")
    except Failed as failed:
        return Answered(number, None, failed.verdict, f"environment {name}: {failed}")
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises, sys.exit too, costs its episode only
        if limit.expired():
            return late
        said, place = f"environment {name}: {type(error).__name__}: {error}"[:400], line_of(error, files)
        return Answered(number, None, reason=f"{said} ({place})" if place else said)
    if size > ANSWER_BYTES:
        return Answered(
            number, None, reason=f"environment {name}: answered {size:,} bytes, of {ANSWER_BYTES:,} allowed"
        )
    return Answered(number, observation)


class EnvironmentProcess:
    """Runs the instances of the files' environments at the requests of the host."""

    def __init__(self, replies: int, settings: ProcessSettings, files: list[str]):
        self.replies, self.files, self.options = replies, files, settings.options
        self.rewards = RewardWeights.model_validate(settings.rewards)
        self.instances: dict[int, tuple[str, Environment]] = {}
        self.running: set[asyncio.Task[None]] = set()

    def say(self, message: EnvironmentReply) -> None:
        """Send a message to the host as a frame."""
        write_all(self.replies, frame(message))

    def load(self) -> bool:
        """Run the files; return False when one cannot be run."""
        try:
            load_ready()
            for file in self.files:
                run_file(Path(file), "environment.plugins")
            own = [one for one in ENVIRONMENTS.values() if one.home in self.files]
            for one in own:
                checked_options(OPTIONS, one.name, one.make.Options, self.options.get(one.name, {}))
        except ConfigError as error:
            self.say(FilesRefused(str(error)))
            return False
        self.say(FilesLoaded({one.name: one.make.verified for one in own}))
        return True

    async def handle(self, asked: ResetCall | StepCall) -> None:
        """Make one call and send its outcome."""
        if isinstance(asked, ResetCall):

            async def grade(problem: Problem, text: str) -> Reward:
                return await asyncio.to_thread(score, problem, text, self.rewards)

            name = asked.name
            try:
                one = made(ENVIRONMENTS[name].make, name, self.options.get(name, {}), grade, self.rewards)
            except BaseException as error:  # noqa: BLE001 - as in `answered`
                self.say(Answered(asked.number, None, reason=f"environment {name}: {type(error).__name__}: {error}"))
                return
            self.instances[asked.instance] = name, one
            waits, work = inspect.iscoroutinefunction(one.reset), call(one.reset, asked.problem, asked.seed)
        else:
            name, one = self.instances[asked.instance]
            waits, work = inspect.iscoroutinefunction(one.step), call(one.step, asked.action)
        reply = await answered(asked.number, name, work, asked.deadline_s, self.files)
        reply.stuck = reply.verdict is Verdict.TIMEOUT and not waits
        self.say(reply)

    async def close(self, instance: int) -> None:
        """End an episode; what the environment raises then is only printed."""
        if (found := self.instances.pop(instance, None)) is not None:
            try:
                await call(found[1].close)
            except Exception:  # noqa: BLE001 - it is over, whatever goes wrong
                traceback.print_exc()

    def begin(self, body: bytes) -> None:
        """Handle the body of a frame."""
        asked = msgspec.msgpack.decode(body, type=EnvironmentCall)
        work = self.close(asked.instance) if isinstance(asked, CloseCall) else self.handle(asked)
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def serve(self, requests: int) -> None:
        """Handle requests until the host closes its end."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        await handle_frames(requests, self.begin)


def serve(requests: int, replies: int) -> None:
    """Run the files, and handle requests until the host closes its end."""
    settings, *files = sys.argv[1:]
    process = EnvironmentProcess(replies, msgspec.json.decode(settings, type=ProcessSettings), files)
    if process.load():
        asyncio.run(process.serve(requests))


if __name__ == "__main__":
    run_child(os.getppid(), serve, expendable=True)
