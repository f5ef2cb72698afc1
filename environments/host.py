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
import os
import sys
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

import msgspec

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
from environments.process import (
    ANSWER_BYTES,
    Answered,
    CloseCall,
    EnvironmentCall,
    EnvironmentReply,
    FilesLoaded,
    ProcessSettings,
    ResetCall,
    StepCall,
    answered,
)
from shared.environment_settings import EnvironmentSettings
from shared.errors import ConfigError
from shared.launch import deaths
from shared.sections import RewardWeights
from shared.supervisor import supervised
from shared.types import Problem, Verdict
from verify.child_process import FilesRefused, frame, kill_group, python_path, read_frame
from verify.plugins import Failed, checked_options

START_S = 60.0
"""seconds for running the files"""
GRACE_S = 2.0
"""seconds beyond a deadline, before a process that does not keep it is killed"""
Key = tuple[int, int]
"""(group, index) of an episode's completion"""


class InstanceLost(Exception):
    """The process of the instance ended through no fault that is known to be its own."""


class _Process:
    """One child process, and the calls that it has not answered."""

    def __init__(self, settings: str, files: tuple[str, ...], dead: bool = False):
        """settings: JSON of `ProcessSettings`. dead: not to be started before it is needed."""
        self.settings, self.files = settings, files
        self.child: asyncio.subprocess.Process | None = None
        self.waiting: dict[int, asyncio.Future[Answered]] = {}
        self.dead, self.leaving, self.how = dead, False, ""
        self.kills_before = deaths.memory_kills()
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> FilesLoaded:
        """Start the process and run the files in it. Raises ConfigError; then, and where it is cancelled, the process
        is dead."""
        try:
            return await self._start()
        except BaseException:
            self.kill()
            raise

    async def _start(self) -> FilesLoaded:
        self.child = await asyncio.create_subprocess_exec(
            *supervised([sys.executable, "-m", "environments.process", self.settings, *self.files]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        names = ", ".join(self.files)
        try:
            said = await asyncio.wait_for(self._read_one(), START_S)
        except TimeoutError as error:
            raise ConfigError(f"environment.plugins: {names} does not come to an end in {START_S:g} s") from error
        except EOFError as error:
            raise ConfigError(f"environment.plugins: {names} ends its process: it {await self._end()}") from error
        if isinstance(said, FilesRefused):
            raise ConfigError(said.reason)
        assert isinstance(said, FilesLoaded)
        self._reading = asyncio.create_task(self._read(), name="environments' answers")
        return said

    async def _read_one(self) -> EnvironmentReply:
        """The next message. Raises EOFError at the end, and for a frame that is too long or none."""
        assert self.child and self.child.stdout
        reply: EnvironmentReply = await read_frame(self.child.stdout, EnvironmentReply, 2 * ANSWER_BYTES)
        return reply

    async def _read(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                said = await self._read_one()
                if not isinstance(said, Answered):
                    break
                future = self.waiting.pop(said.number, None)
                if future is not None and not future.done():
                    future.set_result(said)
        how = await self._end()
        self.how = self.how or how
        if not self.leaving:
            deaths.helpers.add("a process of environment.plugins", self.how, "its episodes are repeated in another")
        left, self.waiting = self.waiting, {}
        for future in left.values():
            if not future.done():
                future.set_exception(InstanceLost(self.how))

    async def _end(self) -> str:
        assert self.child
        self.kill()
        code = await self.child.wait()
        return deaths.how(code) + deaths.advice(code, "agent", 0, self.kills_before)

    def send(self, asked: EnvironmentCall) -> None:
        """Send a message. Raises InstanceLost when the process has ended."""
        if self.dead:
            raise InstanceLost(self.how or "killed")
        assert self.child and self.child.stdin
        self.child.stdin.write(frame(asked))

    async def ask(self, asked: ResetCall | StepCall, alone: bool) -> Answered:
        """The reply to a call. Raises InstanceLost. A process that answers nothing any more is killed: that is a reply
        TIMEOUT of the call if nothing else was asked, else nobody knows whose fault it is."""
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self.waiting[asked.number] = future
        try:
            self.send(asked)
            reply = await asyncio.wait_for(future, asked.deadline_s + GRACE_S)
            if reply.stuck:
                self.kill("was killed: a method that is not async worked on after its deadline")
            return reply
        except TimeoutError as error:
            reason = f"no answer after {asked.deadline_s:g} s: killed"
            self.kill("gave no answer in time: killed")
            if not alone:
                raise InstanceLost(reason) from error
            return Answered(asked.number, None, Verdict.TIMEOUT, reason)
        finally:
            self.waiting.pop(asked.number, None)

    async def end(self) -> None:
        """Kill the process, and wait until it is gone."""
        self.kill()
        if self._reading is not None:
            await self._reading

    def kill(self, how: str = "") -> None:
        """SIGKILL the process and what it started. how: it ended, where that is why."""
        self.dead, self.how = True, self.how or how
        if self.child is not None:
            kill_group(self.child.pid)


class EnvironmentHost:
    """Makes, steps and closes the instances of environments, each known by its key."""

    def __init__(self, settings: EnvironmentSettings, rewards: RewardWeights, grade: Grade):
        """rewards: of the run, for `Environment.grade` in other processes. grade: the same in this one."""
        self.settings, self.rewards, self.grade = settings, rewards, grade
        self._instances: dict[Key, tuple[str, Environment | tuple[_Process, int]]] = {}
        self.others: dict[str, bool] = {}
        """environments of the plug-in files: name -> whether a verifier grades"""
        self._processes: list[_Process] = []
        self._starting = asyncio.Lock()
        self.alone = asyncio.Lock()
        """to be held for a call with `alone`, and until its instance has answered"""
        self._numbers, self._places = itertools.count(), itertools.count()

    async def start(self, names: Iterable[str]) -> None:
        """Start the processes of plug-in files, and look up the environments of these names. Raises ConfigError for a
        file that cannot be run, an unknown name, and wrong options; also what `Environment.check` raises."""
        files = []
        for file in self.settings.plugins:
            if not (path := Path(file).resolve()).is_file():
                raise ConfigError(f"environment.plugins names '{file}': there is no such file")
            files.append(str(path))
        if files:
            told = ProcessSettings(dict(self.settings.options), self.rewards.model_dump(mode="json"))
            settings = msgspec.json.encode(told).decode()
            self._processes = [_Process(settings, tuple(files)) for _ in range(self.settings.processes)]
            for process in self._processes:
                self.others = (await process.start()).verified
            self._processes.append(_Process(settings, tuple(files), dead=True))  # for instances that are asked alone
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

    def verified(self, name: str) -> bool:
        """Whether a verifier grades the last turn of episodes in this environment."""
        known = find(name, self.others)
        return self.others[name] if known is None else known.make.verified

    def alive(self, key: Key) -> bool:
        """Whether the instance exists."""
        found = self._instances.get(key)
        return found is not None and not (isinstance(found[1], tuple) and found[1][0].dead)

    async def reset(self, key: Key, problem: Problem, seed: int, deadline_s: float, alone: bool = False) -> Observation:
        """Make an instance that begins an episode. Raises Failed, or InstanceLost."""
        await self.close(key)
        name, number = problem.environment, next(self._numbers)
        if (known := find(name, self.others)) is not None:
            one = made(known.make, name, self.settings.options.get(name, {}), self.grade, self.rewards)
            self._instances[key] = name, one
            return await self._wait(name, number, call(one.reset, problem, seed), deadline_s)
        process = await self._living(-1 if alone else next(self._places) % self.settings.processes)
        self._instances[key] = name, (process, number)
        return _checked(await process.ask(ResetCall(number, number, name, problem, seed, deadline_s), alone), name)

    async def step(self, key: Key, action: Action, deadline_s: float, alone: bool = False) -> Observation:
        """Let the instance answer a turn. Raises Failed, or InstanceLost."""
        name, one = self._instances[key]
        number = next(self._numbers)
        if isinstance(one, Environment):
            return await self._wait(name, number, call(one.step, action), deadline_s)
        process, instance = one
        return _checked(await process.ask(StepCall(number, instance, action, deadline_s), alone), name)

    async def close(self, key: Key) -> None:
        """End an instance, if it exists."""
        if (found := self._instances.pop(key, None)) is None:
            return
        with contextlib.suppress(Exception):
            if isinstance(found[1], Environment):
                await asyncio.wait_for(call(found[1].close), self.settings.step_s)
            else:
                found[1][0].send(CloseCall(found[1][1]))

    async def end(self) -> None:
        """Close all instances and end the processes."""
        for key in list(self._instances):
            await self.close(key)
        for process in self._processes:
            process.leaving = True
            await process.end()

    async def _wait(self, name: str, number: int, work: Awaitable[Any], deadline_s: float) -> Observation:
        return _checked(await answered(number, name, work, deadline_s, []), name)

    async def _living(self, place: int) -> _Process:
        """The process at this place, a new one if it has ended."""
        async with self._starting:
            if self._processes[place].dead:
                last = self._processes[place]
                await last.end()
                self._processes[place] = process = _Process(last.settings, last.files)
                try:
                    await process.start()
                except ConfigError as error:
                    raise Failed(Verdict.CRASH, str(error)) from error
            return self._processes[place]


def _checked(reply: Answered, name: str) -> Observation:
    if reply.observation is None:
        reason = reply.reason if reply.reason.startswith("environment") else f"environment {name}: {reply.reason}"
        raise Failed(reply.verdict, reason)
    return reply.observation
