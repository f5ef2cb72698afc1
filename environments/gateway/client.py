"""The gateway as environments see it: its process is started when it is first needed, and ends with this one.

Nobody but this process has the pipes to it. An episode has a key of its own, which the agent sends with its requests.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Callable
from typing import Any

from environments.gateway.messages import ClientLeft, GatewayEnded, Request, StrangersRefused
from environments.gateway.process import Gateway
from shared.child_process import Child, ChildLate, ChildLost
from shared.errors import DeadlineExceeded
from shared.launch.sockets import refused

START_S = 60.0
"""seconds for the gateway to say where it listens"""
ANSWER_S = 15.0
"""seconds for it to know the key of a new episode"""
AgentEvent = Request | ClientLeft | GatewayEnded


class AgentSession:
    """One episode's line to its agent."""

    def __init__(self, gateway: GatewayProcess):
        self.gateway, self.key = gateway, secrets.token_urlsafe(24)
        self.events: asyncio.Queue[AgentEvent] = asyncio.Queue()
        """what came from the agent's side and was not read yet"""
        gateway.sessions[self.key] = self

    @property
    def url(self) -> str:
        """The base URL for the agent's client."""
        return f"{self.gateway.url}/v1"

    def close(self, reason: str) -> None:
        """End the episode: a request of it that waits gets the reason as its error."""
        if self.gateway.sessions.pop(self.key, None) is not None:
            self.gateway.post(Gateway.close, self.key, reason)


class GatewayProcess:
    """A running process, and the episodes that use it. It lives as long as the event loop that started it."""

    def __init__(self) -> None:
        self.url = ""
        self.sessions: dict[str, AgentSession] = {}
        self.child = Child(
            Gateway, "the gateway for agents", "the next episode starts another", supervise=False,
            on_event=self._hear, on_end=self._end,
        )  # fmt: skip
        self.post: Callable[..., None] = self.child.post

    @classmethod
    async def start(cls, address: str) -> GatewayProcess:
        """Start the process. address: to listen at, on a free port. Raises DeadlineExceeded, and ConfigError if it
        cannot listen there."""
        gateway = cls()
        try:
            gateway.url = await gateway.child.start(address, deadline_s=START_S)
        except ChildLate as error:
            raise DeadlineExceeded("the environment agent", "start", "the gateway", START_S, setting="") from error
        return gateway

    def _hear(self, event: Any) -> None:
        """Give what came to its episode."""
        if isinstance(event, StrangersRefused):
            refused.add("a connection without an episode's key, at the gateway for agents", event.count)
        elif event.key in self.sessions:
            self.sessions[event.key].events.put_nowait(event)

    def _end(self) -> None:
        for session in self.sessions.values():
            session.events.put_nowait(GatewayEnded())


_started: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[GatewayProcess]]]
_started = weakref.WeakKeyDictionary()


async def open_session(address: str) -> AgentSession:
    """A new episode, whose key is known to the gateway that listens at `address`; that is started unless one runs.
    Raises as `start`."""
    tasks = _started.setdefault(asyncio.get_running_loop(), {})
    task = tasks.get(address)
    if task is None or (task.done() and (task.cancelled() or task.exception() or not task.result().child.alive)):
        tasks[address] = task = asyncio.create_task(GatewayProcess.start(address))
    session = AgentSession(await asyncio.shield(task))
    try:
        await session.gateway.child.call(Gateway.open, session.key, deadline_s=ANSWER_S)
    except (ChildLate, ChildLost):
        await session.gateway.child.end()  # whoever waits for the agent's first request gets GatewayEnded
    except asyncio.CancelledError:
        session.close("the episode was given up")
        raise
    return session
