"""Calls the rewards and verifiers of plug-in files in a process of their own, and names the file, the line and the
fault.

Each set of files has one process, which belongs to the event loop of a thread: it may be called from any thread and any
event loop. A function that does not return is found by its deadline, one that ends the process by that end: the process
is killed and started again, that call fails with the line that ran, and calls that had not begun are repeated.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any

from shared.child_process import Child, ChildLate, ChildLost
from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Verdict
from verify.plugin_process import Described, DescribedVerifier, Description, PluginProcess, Value
from verify.plugins import Case, Failed
from verify.verifiers import Answer, Verifier

START_S = 60.0
"""seconds for running the files, and for making the rewards"""
SILENCE_S = 60.0
"""seconds beyond the longest deadline in which a process must send something while a call waits for its turn"""
GRACE_S = 2.0
"""seconds beyond a function's deadline, which its own process enforces where the function awaits"""
ATTEMPTS = 20
"""tries for a call that never begins because others end the process before it"""


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all hosts of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="plugin-host", daemon=True).start()
    return loop


class Host:
    """Runs the rewards of a set of plug-in files in one child process."""

    def __init__(self, files: tuple[str, ...]):
        """Start the process. Raises ConfigError, with the line, for a file that cannot be run, exits or hangs."""
        self.files, self._starting = files, asyncio.Lock()
        self._longest_s = 0.0
        """longest deadline of a function that was called"""
        who, then = "the process of reward.plugins", "another takes its place"
        self._child = Child(PluginProcess, who, then, files=files, memory_kind="plug-in")
        self._wait(self._living())

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, _loop()).result()

    async def _living(self) -> None:
        """Start the process if it has ended. Raises ConfigError."""
        names = ", ".join(self.files)
        async with self._starting:
            if self._child.alive:
                return
            try:
                await self._child.start(list(self.files), deadline_s=START_S)
            except ChildLate as late:
                raise ConfigError(
                    f"reward.plugins: {late.line or names} does not come to an end: stopped after {START_S:g} s while "
                    "loading"
                ) from late
            except ChildLost as lost:
                raise ConfigError(f"reward.plugins: {names} ended its process while loading: it {lost}") from lost

    def close(self) -> None:
        """End the process."""
        self._wait(self._child.end())

    def describe(self, settings: RewardWeights) -> Description:
        """Return what the files define. Raises ConfigError when a reward cannot be made under these settings."""
        description: Description = self._wait(self._describe(settings.model_dump_json()))
        return description

    async def _describe(self, settings: str) -> Description:
        for last in (False, True):  # a call may just have ended the process
            await self._living()
            try:
                description: Description = await self._child.call(PluginProcess.describe, settings, deadline_s=START_S)
                return description
            except ChildLate as late:
                where = late.line or ", ".join(self.files)
                raise ConfigError(
                    f"reward.plugins: {where} does not come to an end: stopped after {START_S:g} s while loading"
                ) from late
            except ChildLost as lost:
                if last:
                    names = ", ".join(self.files)
                    raise ConfigError(f"reward.plugins: {names} ended its process while loading: it {lost}") from lost
        raise AssertionError

    async def value(self, known: Described, case: Case) -> float:
        """Return the value of one case. Raises Failed when there is none."""
        return (await self.values(known, [case]))[0]

    async def values(self, known: Described, cases: Sequence[Case]) -> list[float]:
        """Return [completions] the values of the cases of a group. Raises Failed when there are none."""
        settings, what = cases[0].settings.model_dump_json(), f"reward {known.name} ({known.where})"
        fields = [(*case[:7], *case[8:]) for case in cases]
        return await self._call(what, known.deadline_s, PluginProcess.reward, settings, known.name, fields)

    def verifier(self, known: DescribedVerifier, settings: RewardWeights) -> Verifier:
        """Return the verifier that asks this process."""
        function = functools.partial(self.verify, known, settings)
        form, verifies, home = known.form, known.verifies, known.home
        return Verifier(known.domain, function, known.ground_truth, known.answer_in, "", form, None, verifies, home)

    async def verify(self, known: DescribedVerifier, settings: RewardWeights, answer: Answer) -> float:
        """Return the share of an answer that is right, in [0, 1]. Raises Failed when there is none."""
        text, what = settings.model_dump_json(), f"verifier of {known.domain} ({known.where})"
        (share,) = await self._call(what, settings.deadline_s, PluginProcess.verify, text, known.domain, answer)
        if not 0 <= share <= 1:
            raise Failed(Verdict.CRASH, f"{what}: returned {share:g}, not a share from 0 to 1")
        return share

    async def _call(self, what: str, deadline_s: float, method: Callable[..., Any], *arguments: Any) -> list[float]:
        work = self._called(what, deadline_s, method, *arguments)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))

    async def _called(self, what: str, deadline_s: float, method: Callable[..., Any], *arguments: Any) -> list[float]:
        """Call a function; again where its process ended before it had begun, which is another call's fault."""
        self._longest_s = max(self._longest_s, deadline_s)
        for attempt in range(ATTEMPTS):
            try:
                await self._living()
                silence_s = self._longest_s + SILENCE_S
                value: Value = await self._child.call(
                    method, *arguments, deadline_s=deadline_s + GRACE_S, silence_s=silence_s
                )
                break
            except ConfigError as error:
                raise Failed(Verdict.CRASH, f"{what}: {error}") from error
            except ChildLate as late:
                at = f", it was at {late.line}" if late.line else ""
                raise Failed(Verdict.TIMEOUT, f"{what}: no value after {deadline_s:g} s{at}") from late
            except ChildLost as lost:
                if lost.begun or attempt == ATTEMPTS - 1:
                    raise Failed(Verdict.CRASH, f"{what}: its process {lost}") from lost
        if value.values is None:
            raise Failed(value.verdict, f"{what}: {value.reason}")
        return value.values


def close_hosts() -> None:
    """End the processes of all hosts; a host that is used again starts a new one."""
    for host in _hosts.values():
        host.close()


_hosts: dict[tuple[str, ...], Host] = {}
"""files -> their host"""


def host_of(files: tuple[str, ...]) -> Host:
    """Return the host of these files (absolute paths), of which this process has one. Raises ConfigError."""
    if files not in _hosts:
        _hosts[files] = Host(files)
    return _hosts[files]
