"""The gateway as environments see it: its process is started when it is first needed, and ends with this one.

Nobody but this process has the pipes to it. An episode has a key of its own, which the agent sends with its requests.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import weakref

from environments.gateway.messages import (
    ClientLeft,
    FromGateway,
    GatewayEnded,
    GatewayListens,
    KeyClosed,
    KeyOpened,
    Request,
    StrangersRefused,
    ToGateway,
)
from shared.errors import DeadlineExceeded
from shared.launch import deaths
from shared.launch.sockets import refused
from verify.child_process import frame, kill_group, python_path, read_frame

START_S = 60.0
"""seconds for the gateway to say where it listens"""
ANSWER_S = 15.0
"""seconds for it to know the key of a new episode"""
Told = Request | ClientLeft | KeyOpened | GatewayEnded


class AgentSession:
    """One episode's line to its agent."""

    def __init__(self, gateway: GatewayProcess):
        self.gateway, self.key = gateway, secrets.token_urlsafe(24)
        self.told: asyncio.Queue[Told] = asyncio.Queue()
        """what came from the agent's side and was not read yet"""
        gateway.sessions[self.key] = self
        gateway.send(KeyOpened(self.key))

    @property
    def url(self) -> str:
        """The base URL for the agent's client."""
        return f"{self.gateway.url}/v1"

    def close(self, reason: str) -> None:
        """End the episode: a request of it that waits gets the reason as its error."""
        if self.gateway.sessions.pop(self.key, None) is not None:
            self.gateway.send(KeyClosed(self.key, reason))


class GatewayProcess:
    """A running process, and the episodes that use it. It lives as long as the event loop that started it."""

    def __init__(self, child: asyncio.subprocess.Process):
        self.child = child
        self.url, self.ended, self.how = "", False, ""
        self.sessions: dict[str, AgentSession] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, address: str) -> GatewayProcess:
        """Start the process. address: to listen at, on a free port. Raises DeadlineExceeded, and OSError if it cannot
        listen there."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "environments.gateway.process", str(os.getpid()), address,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip
        made = cls(child)
        try:
            assert child.stdout
            told = await asyncio.wait_for(read_frame(child.stdout, FromGateway), START_S)
        except TimeoutError as error:
            child.kill()
            raise DeadlineExceeded("the environment agent", "start", "the gateway", START_S, setting="") from error
        except EOFError as error:
            said = f"environment.options.agent.address = {address!r}: nothing can listen there (see above)"
            raise OSError(said) from error
        assert isinstance(told, GatewayListens)
        made.url = told.url
        made._reading = asyncio.create_task(made._read_all(), name="gateway")
        return made

    def send(self, message: ToGateway) -> None:
        """Send a message; to a process that has ended, nothing."""
        if not self.ended:
            assert self.child.stdin
            self.child.stdin.write(frame(message))

    async def _read_all(self) -> None:
        """Give each message to its episode, until the process or the loop ends."""
        assert self.child.stdout
        died = False
        try:
            while True:
                told: FromGateway = await read_frame(self.child.stdout, FromGateway)
                if isinstance(told, StrangersRefused):
                    refused.add("a connection without an episode's key, at the gateway for agents", told.count)
                elif not isinstance(told, GatewayListens) and told.key in self.sessions:
                    self.sessions[told.key].told.put_nowait(told)
        except EOFError:
            died = True
        finally:
            self.ended = True
            for session in self.sessions.values():
                session.told.put_nowait(GatewayEnded())
            kill_group(self.child.pid)  # asyncio's own way may take the exit status away from itself
            code = await self.child.wait()
            if died:
                how = self.how or deaths.how(code)
                deaths.helpers.add("the gateway for agents", how, "the next episode starts another")


_started: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[GatewayProcess]]]
_started = weakref.WeakKeyDictionary()


async def open_session(address: str) -> AgentSession:
    """A new episode, whose key is known to the gateway that listens at `address`; that is started unless one runs.
    Raises as `start`."""
    tasks = _started.setdefault(asyncio.get_running_loop(), {})
    task = tasks.get(address)
    if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().ended)):
        tasks[address] = task = asyncio.create_task(GatewayProcess.start(address))
    session = AgentSession(await asyncio.shield(task))
    try:
        try:
            told = await asyncio.wait_for(session.told.get(), ANSWER_S)
        except TimeoutError:
            session.gateway.how = f"gave no answer for {ANSWER_S:g} s: killed"
            kill_group(session.gateway.child.pid)
            told = await session.told.get()
    except asyncio.CancelledError:
        session.close("the episode was given up")
        raise
    if isinstance(told, GatewayEnded):
        session.told.put_nowait(told)  # for whoever waits for the agent's first request
    return session
