"""What the gateway's process says to the environments, and the turns that it is given."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class AgentCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON"""


class AgentMessage(msgspec.Struct, frozen=True):
    """One message of an agent's conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    text: str
    calls: list[AgentCall] = []
    call_id: str = ""
    """In a message of role "tool": id of the call that it answers."""


class AgentTool(msgspec.Struct, frozen=True):
    """A tool that the policy may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON schema of its arguments"""


class ChatAsked(msgspec.Struct, tag=True):
    """An agent asks for the next turn of its conversation."""

    key: str
    number: int
    messages: list[AgentMessage]
    tools: list[AgentTool] = []
    most_calls: int = 32


class TokensAsked(msgspec.Struct, tag=True):
    """A client that renders the conversation itself asks for the next turn."""

    key: str
    number: int
    token_ids: list[int]


class RewardReported(msgspec.Struct, tag=True):
    """An agent reports the reward of its episode, which ends it."""

    key: str
    number: int
    reward: float
    solved: bool | None = None


class ClientLeft(msgspec.Struct, tag=True):
    """The client has closed the connection of a request that was not answered."""

    key: str


class GatewayEnded(msgspec.Struct, tag=True):
    """The gateway's process has ended; not sent: the side that notices reports it to all episodes."""


class StrangersRefused(msgspec.Struct, tag=True):
    """Requests and connections without the key of an episode, since the last report."""

    count: int


class TurnGiven(msgspec.Struct):
    """The turn of the policy that a request asked for; empty for one that reported the reward."""

    key: str
    number: int
    text: str = ""
    """The text after the reasoning, without its calls."""
    reasoning: str = ""
    calls: list[AgentCall] = []
    token_ids: list[int] = []
    logprobs: list[float] = []


Request = ChatAsked | TokensAsked | RewardReported
FromGateway = Request | ClientLeft | StrangersRefused
