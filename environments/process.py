"""The process in which environments of plug-in files run: what hangs or exits there harms nothing else.

A `Child` (shared/child_process.py) of the host runs an `EnvironmentProcess` there. What environments print goes to
standard error. The kernel's out-of-memory killer takes this process first.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from environments.environment import ENVIRONMENTS, OPTIONS, Action, Environment, Observation, load_ready, made
from environments.environment import call as run
from shared.clean_text import clean
from shared.errors import ConfigError
from shared.launch.calls import call
from shared.sections import RewardWeights
from shared.served import Served, line_of
from shared.types import Problem, Reward, Verdict
from shared.user_file import run_file
from verify.plugins import Failed, checked_options
from verify.reward import score

ANSWER_BYTES = 1 << 20
"""most bytes of an observation, encoded"""
THREADS = 256
"""methods that are not `async` and run at once"""


class Answered(msgspec.Struct):
    """The outcome of a call: an observation, or why there is none."""

    observation: Observation | None
    verdict: Verdict = Verdict.CRASH
    reason: str = ""
    stuck: bool = False
    """a thread works on, which only the end of the process can stop"""

    def __post_init__(self) -> None:
        self.reason = clean(self.reason)


async def answered(name: str, work: Awaitable[Any], deadline_s: float, files: list[str]) -> Answered:
    """The reply to a call, whatever the environment raised or returned, at the deadline at the latest unless something
    blocks the event loop. work: no task, which would let SystemExit end the loop."""
    limit, started = asyncio.timeout(deadline_s), time.monotonic()
    late = Answered(None, Verdict.TIMEOUT, f"environment {name}: no answer after {deadline_s:g} s")
    try:
        async with limit:
            observation = await work
        if time.monotonic() - started > deadline_s:  # it has blocked the event loop meanwhile
            return late
        if not isinstance(observation, Observation):
            return Answered(None, reason=f"environment {name}: returned {observation!r:.80}, no Observation")
        observation = msgspec.convert(msgspec.to_builtins(observation), Observation)  # raises for wrong types
        size = len(msgspec.msgpack.encode(observation))
        if not all(map(math.isfinite, (observation.reward or 0.0, *observation.info.values()))):
            return Answered(None, reason=f"environment {name}: gave a number that is not finite")
    except Failed as failed:
        return Answered(None, failed.verdict, f"environment {name}: {failed}")
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises, sys.exit too, costs its episode only
        if limit.expired():
            return late
        reason, line = f"environment {name}: {type(error).__name__}: {error}"[:400], line_of(error, files)
        return Answered(None, reason=f"{reason} ({line})" if line else reason)
    if size > ANSWER_BYTES:
        return Answered(None, reason=f"environment {name}: answered {size:,} bytes, of {ANSWER_BYTES:,} allowed")
    return Answered(observation)


class EnvironmentProcess(Served):
    """Runs the instances of the environments of plug-in files."""

    answer_bytes = 2 * ANSWER_BYTES
    expendable = True

    @call("run the files", deadline=60.0)
    def begin(self, options: dict[str, dict[str, Any]], rewards: dict[str, Any], files: list[str]) -> dict[str, bool]:
        """Run the files; returns what they define, name -> `Environment.verified`. options: environment.options.
        rewards: the section [reward], for `grade`. Raises ConfigError."""
        self.files, self.options = files, options
        self.rewards = RewardWeights.model_validate(rewards)
        self.instances: dict[int, tuple[str, Environment]] = {}
        self._threads: ThreadPoolExecutor | None = None
        load_ready()
        for file in files:
            run_file(Path(file), "environment.plugins")
        homes = {kind.home for kind in ENVIRONMENTS.values()}
        if empty := [file for file in files if file not in homes]:
            repair = 'write @environment("NAME") above a class of it'
            raise ConfigError(f"environment.plugins: {empty[0]} was read, and registers no environment: {repair}")
        kinds = [kind for kind in ENVIRONMENTS.values() if kind.home in files]
        for kind in kinds:
            checked_options(OPTIONS, kind.name, kind.make.Options, options.get(kind.name, {}))
        return {kind.name: kind.make.verified for kind in kinds}

    @call("reset", deadline=60.0)
    async def reset(self, instance: int, name: str, problem: Problem, seed: int, deadline_s: float) -> Answered:
        """Make an instance and ask it to begin an episode."""

        async def grade(problem: Problem, text: str) -> Reward:
            return await asyncio.to_thread(score, problem, text, self.rewards)

        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS)
            asyncio.get_running_loop().set_default_executor(self._threads)
        try:
            environment = made(ENVIRONMENTS[name].make, name, self.options.get(name, {}), grade, self.rewards)
        except BaseException as error:  # noqa: BLE001 - as in `answered`
            return Answered(None, reason=f"environment {name}: {type(error).__name__}: {error}")
        self.instances[instance] = name, environment
        return await self._answered(name, environment.reset, (problem, seed), deadline_s)

    @call("step", deadline=60.0)
    async def step(self, instance: int, action: Action, deadline_s: float) -> Answered:
        """Ask an instance to answer a turn."""
        name, environment = self.instances[instance]
        return await self._answered(name, environment.step, (action,), deadline_s)

    async def _answered(
        self, name: str, method: Callable[..., Any], arguments: tuple[Any, ...], deadline_s: float
    ) -> Answered:
        reply = await answered(name, run(method, *arguments), deadline_s, self.files)
        reply.stuck = reply.verdict is Verdict.TIMEOUT and not inspect.iscoroutinefunction(method)
        return reply

    @call("close", deadline=60.0)
    async def close(self, instance: int) -> None:
        """End an episode; what the environment raises then is only printed."""
        if (known := self.instances.pop(instance, None)) is not None:
            try:
                await run(known[1].close)
            except Exception:  # noqa: BLE001 - it is over, whatever goes wrong
                traceback.print_exc()
