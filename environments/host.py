"""Runs the instances of environments: those of this project in the caller's event loop, those of plug-in files in
processes that can be killed.

A call that exceeds its deadline or raises has failed, and costs its episode only. A process that answers nothing any
more, or in which a thread hangs, is killed; one that ends is replaced. The other instances in it are lost, which
`alive` says, and the caller makes them again by resetting and repeating their actions. An instance that was being asked
when its process ended may be the reason: it is asked again `alone`, one such at a time and in a process apart, so that
it takes no other with it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.environment import (
    OPTIONS,
    Action,
    Environment,
    Grade,
    Observation,
    UnknownEnvironment,
    call,
    find,
    made,
)
from environments.process import Answered, EnvironmentProcess, answered
from shared.child_process import Child, ChildLate, ChildLost
from shared.environment_settings import EnvironmentSettings
from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Problem, Verdict
from shared.user_file import missing
from verify.plugins import Failed, checked_options

START_S = 60.0
"""seconds for running the files"""
GRACE_S = 2.0
"""seconds beyond a deadline, before a process that does not keep it is killed"""
WHO, THEN = "a process of environment.plugins", "its episodes are repeated in another"
Key = tuple[int, int]
"""(group, index) of an episode's completion"""


class InstanceLost(Exception):
    """The process of the instance ended through no fault that is known to be its own."""


@dataclass(frozen=True)
class _Instance:
    """An instance in a process."""

    process: Child
    generation: int
    number: int

    @property
    def alive(self) -> bool:
        return self.process.alive and self.process.generation == self.generation

    async def ask(self, method: Callable[..., Any], *arguments: Any, alone: bool) -> Answered:
        """Call a method whose last argument is its deadline. Raises InstanceLost. A process that answers nothing any
        more is killed: that is an answer TIMEOUT of the call if nothing else was asked, else nobody knows whose fault
        it is."""
        if not self.alive:
            raise InstanceLost(self.process.how or "killed")
        deadline_s = arguments[-1]
        try:
            reply: Answered = await self.process.call(method, *arguments, deadline_s=deadline_s + GRACE_S)
        except ChildLate as error:
            reason = f"no answer after {deadline_s:g} s: killed"
            if not alone:
                raise InstanceLost(reason) from error
            return Answered(None, Verdict.TIMEOUT, reason)
        except ChildLost as error:
            raise InstanceLost(str(error)) from error
        if reply.stuck:
            self.process.kill("was killed: a method that is not async worked on after its deadline")
        return reply


class EnvironmentHost:
    """Makes, steps and closes the instances of environments, each known by its key."""

    def __init__(self, settings: EnvironmentSettings, rewards: RewardWeights, grade: Grade):
        """rewards: of the run, for `Environment.grade` in other processes. grade: the same in this one."""
        self.settings, self.rewards, self.grade = settings, rewards, grade
        self._instances: dict[Key, tuple[str, Environment | _Instance]] = {}
        self.others: dict[str, bool] = {}
        """environments of the plug-in files: name -> whether a verifier grades"""
        self._processes: list[Child] = []
        self._files: list[str] = []
        self._starting = asyncio.Lock()
        self.alone = asyncio.Lock()
        """to be held for a call with `alone`, and until its instance has answered"""
        self._numbers, self._places = itertools.count(), itertools.count()

    async def start(self, names: Iterable[str]) -> None:
        """Start the processes of plug-in files, and look up the environments of these names. Raises ConfigError for a
        file that cannot be run, an unknown name, and wrong options; also what `Environment.check` raises."""
        for file in self.settings.plugins:
            if not (path := Path(file).resolve()).is_file():
                raise ConfigError(f"environment.plugins names '{file}': {missing(path)}")
            self._files.append(str(path))
        if self._files:
            count = self.settings.processes + 1  # the last is for instances that are asked alone, and starts then
            self._processes = [Child(EnvironmentProcess, WHO, THEN, memory_kind="agent") for _ in range(count)]
            for process in self._processes[:-1]:
                self.others = await self._run_files(process)
        for name in names:
            if (known := find(name, self.others)) is not None:
                given = self.settings.options.get(name, {})
                options = checked_options(OPTIONS, name, known.make.Options, given)
                await known.make.check(options)
        for name in self.settings.options:
            try:
                find(name, self.others)
            except UnknownEnvironment as error:
                raise ConfigError(f"{OPTIONS}.{name}: {error}") from error

    async def _run_files(self, process: Child) -> dict[str, bool]:
        """Start a process, and run the files in it. Raises ConfigError."""
        rewards, names = self.rewards.model_dump(mode="json"), ", ".join(self._files)
        try:
            verified: dict[str, bool] = await process.start(
                dict(self.settings.options), rewards, self._files, deadline_s=START_S
            )
        except ChildLate as error:
            raise ConfigError(f"environment.plugins: {names} does not come to an end in {START_S:g} s") from error
        except ChildLost as error:
            raise ConfigError(f"environment.plugins: {names} ends its process: it {error}") from error
        return verified

    def verified(self, name: str) -> bool:
        """Whether a verifier grades the last turn of episodes in this environment."""
        known = find(name, self.others)
        return self.others[name] if known is None else known.make.verified

    def alive(self, key: Key) -> bool:
        """Whether the instance exists."""
        _, instance = self._instances.get(key, ("", None))
        return instance.alive if isinstance(instance, _Instance) else instance is not None

    async def reset(self, key: Key, problem: Problem, seed: int, deadline_s: float, alone: bool = False) -> Observation:
        """Make an instance that begins an episode. Raises Failed, or InstanceLost."""
        await self.close(key)
        name = problem.environment
        if (known := find(name, self.others)) is not None:
            environment = made(known.make, name, self.settings.options.get(name, {}), self.grade, self.rewards)
            self._instances[key] = name, environment
            return _checked(await answered(name, call(environment.reset, problem, seed), deadline_s, []), name)
        process = await self._living(-1 if alone else next(self._places) % self.settings.processes)
        instance = _Instance(process, process.generation, next(self._numbers))
        self._instances[key] = name, instance
        reset, number = EnvironmentProcess.reset, instance.number
        return _checked(await instance.ask(reset, number, name, problem, seed, deadline_s, alone=alone), name)

    async def step(self, key: Key, action: Action, deadline_s: float, alone: bool = False) -> Observation:
        """Let the instance answer a turn. Raises Failed, or InstanceLost."""
        name, instance = self._instances[key]
        if isinstance(instance, Environment):
            return _checked(await answered(name, call(instance.step, action), deadline_s, []), name)
        step = EnvironmentProcess.step
        return _checked(await instance.ask(step, instance.number, action, deadline_s, alone=alone), name)

    async def close(self, key: Key) -> None:
        """End an instance, if it exists."""
        _, instance = self._instances.pop(key, ("", None))
        with contextlib.suppress(Exception):
            if isinstance(instance, Environment):
                await asyncio.wait_for(call(instance.close), self.settings.step_s)
            elif instance is not None and instance.alive:
                instance.process.post(EnvironmentProcess.close, instance.number)

    async def end(self) -> None:
        """Close all instances and end the processes."""
        for key in list(self._instances):
            await self.close(key)
        for process in self._processes:
            await process.end()

    async def _living(self, index: int) -> Child:
        """The process at this place, started again if it has ended."""
        process = self._processes[index]
        async with self._starting:
            if not process.alive:
                try:
                    await self._run_files(process)
                except ConfigError as error:
                    raise Failed(Verdict.CRASH, str(error)) from error
        return process


def _checked(reply: Answered, name: str) -> Observation:
    if reply.observation is None:
        reason = reply.reason if reply.reason.startswith("environment") else f"environment {name}: {reply.reason}"
        raise Failed(reply.verdict, reason)
    return reply.observation
