"""The environment "openenv": an episode in an environment server that speaks the wire of OpenEnv (0.10).

A WebSocket at URL/ws for each episode: {"type": "reset", "data": {"seed": 7}} and {"type": "step", "data": ACTION} are
answered with {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": true}}, or with {"type":
"error", "data": {"message", "code"}}. The openenv package is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from environments.environment import Action, Environment, Observation, environment, user
from shared.chat_endpoint import key_headers
from shared.json_reader import parse_json
from shared.named_secrets import complain_of_url
from shared.section import Section
from shared.types import Problem, Verdict
from verify.plugins import Failed

MOST_BYTES = 1 << 20
"""Most bytes of one message of the server."""


class OpenEnvOptions(Section):
    """Options of "openenv"."""

    url: str = ""
    """Address of the server, e.g. http://127.0.0.1:8000."""
    key_variable: str = ""
    """environment variable with the key of the server; "" for none"""
    action: str = ""
    """field of the server's action that gets the response of the policy; "": the response is the action, as JSON"""
    observation: str = ""
    """field of the server's observation that the policy reads; "": all of it, as JSON"""

    def own_contradictions(self) -> Iterator[str]:
        """The address is needed, without a secret."""
        yield from complain_of_url("environment.options.openenv.url", self.url)
        if not self.url.startswith(("http://", "https://")):
            yield "environment.options.openenv.url: give the address of the server, http://HOST:PORT"


@environment("openenv")
class OpenEnv(Environment):
    """The reward is the server's. The policy reads what the server says of a wrong action."""

    Options = OpenEnvOptions
    options: OpenEnvOptions
    socket: ClientConnection | None = None

    @classmethod
    async def check(cls, options: OpenEnvOptions) -> None:
        """Raises ConfigError where the variable of the key is not set."""
        cls._key(options)

    @staticmethod
    def _key(options: OpenEnvOptions) -> dict[str, str]:
        return key_headers(options.key_variable, "environment.options.openenv.key_variable")

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin an episode; what the server shows follows the problem's text. Raises Failed."""
        address = f"ws{self.options.url.removeprefix('http').rstrip('/')}/ws"
        try:
            self.socket = await connect(
                address, max_size=MOST_BYTES, open_timeout=None, additional_headers=self._key(self.options)
            )
        except (OSError, WebSocketException) as error:
            raise Failed(Verdict.CRASH, f"{address} does not answer: {error}"[:300]) from error
        begun = await self._ask("reset", {"seed": seed})
        shown = "\n\n".join(message.text for message in begun.messages)
        return Observation([user(f"{problem.text}\n\n{shown}".strip())] if shown else [])

    async def step(self, action: Action) -> Observation:
        """Let the server answer the response of the policy. Raises Failed."""
        if self.options.action:
            return await self._ask("step", {self.options.action: action.response})
        try:
            fields = parse_json(action.response)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            return Observation([user("Error: answer with one JSON object.")], reward=0.0)
        return await self._ask("step", fields)

    async def close(self) -> None:
        """End the session."""
        if self.socket is not None:
            await self.socket.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> Observation:
        """The server's answer to a message. Raises Failed."""
        assert self.socket
        try:
            await self.socket.send(json.dumps({"type": kind, "data": data}))
            reply = parse_json(await self.socket.recv())
            content = reply["data"]
            if reply["type"] == "error":
                if kind == "step" and content.get("code") == "VALIDATION_ERROR":
                    return Observation([user(f"Error: {content['message']}"[:2000])], reward=0.0)
                raise Failed(Verdict.CRASH, f"the server says of {kind}: {content.get('message')}"[:300])
            seen, reward, done = content["observation"], content.get("reward"), bool(content.get("done"))
            if self.options.observation:
                seen = seen[self.options.observation]
            reward = None if reward is None else float(reward)
        except (OSError, WebSocketException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise Failed(Verdict.CRASH, f"no answer to {kind}: {type(error).__name__}: {error}"[:300]) from error
        text = seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False) if seen else ""
        return Observation([user(text)] if text else [], reward=reward, done=done)
