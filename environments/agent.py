"""The environment "agent": a program of the user's that asks the policy through OpenAI's API, as it would ask a model.

    reset   starts the agent, and waits for its first request, whose messages are the prompt
    step    answers the request with the turn of the policy, and waits for the next one: its new messages are what the
            policy reads next. Or the agent ends, with the reward

An episode is one sequence of tokens, so each request must begin with the messages of the one before and the answer as
it was given; an episode whose agent rewrites its history fails, and says which message differs. The tokens of the
policy are never encoded again. Instead of messages a client may send token ids (gateway/process.py), which must begin
with those of the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from environments.environment import Action, Environment, EnvironmentMessage, Observation, environment, user
from environments.gateway.client import AgentSession, open_session
from environments.gateway.messages import (
    AgentCall,
    AgentMessage,
    AgentTool,
    ChatAsked,
    ClientLeft,
    GatewayEnded,
    RewardReported,
    TokensAsked,
    TurnGiven,
)
from environments.gateway.process import Gateway
from shared.chat_endpoint import FAILURES, ApiEndpoint, HttpStatus, key_headers
from shared.child_process import kill_group
from shared.json_reader import parse_json
from shared.launch import deaths
from shared.named_secrets import complain_of_url, secret_in_command
from shared.section import Section
from shared.supervisor import supervised
from shared.tool_calls import RESULT_CLOSE, RESULT_OPEN, TOOLS_PROMPT, CallReader
from shared.types import Problem, Verdict
from verify.plugins import Failed

OUTPUT_BYTES = 64 << 10
"""Most bytes kept of what an agent prints: its end."""
SERVER_S = 86_400.0
"""seconds that an agent server may work on one episode; environment.episode_s ends it before"""
GRACE_S = 1.0
"""seconds for an agent that has closed its connection to end, so that its error can be reported"""
OVER = "the episode is over"


class AgentOptions(Section):
    """Options of "agent"."""

    command: str = ""
    """a program, started for each episode with OPENAI_BASE_URL and OPENAI_API_KEY, and the problem as JSON on stdin"""
    url: str = ""
    """or the address of a server of agents, to which {"problem", "base_url", "api_key"} is posted for each episode"""
    key_variable: str = ""
    """environment variable with the key of a url; "" for none"""
    reward: Literal["agent", "verifier"] = "agent"
    """"agent": it reports the reward; "verifier": the rewards of the run grade the last turn of the policy"""
    address: str = "127.0.0.1"
    """Address of this machine where the gateway listens; set another if agents run elsewhere. It speaks plain HTTP."""

    def own_contradictions(self) -> Iterator[str]:
        """One of command and url."""
        if bool(self.command) == bool(self.url):
            yield "environment.options.agent: give either command or url"
        if secret := secret_in_command(self.command):
            where = "other users of the machine, the run's files and trackers"
            yield f"environment.options.agent.command holds {secret}, which {where} would show: set it in the " \
                  "environment of the launch, which the agent gets"  # fmt: skip
        yield from complain_of_url("environment.options.agent.url", self.url)
        if self.key_variable and self.command:
            yield "environment.options.agent.key_variable is for a url: a command gets the launch's environment"
        if self.address in ("0.0.0.0", "::"):
            yield "environment.options.agent.address: give the address of one interface, since agents are given it"


class AgentEnd(NamedTuple):
    """How an agent ended."""

    reward: float | None
    """Reward reported by the agent, if any."""
    solved: bool | None
    failure: str
    """"" for an end without an error"""


@environment("agent")
class Agent(Environment):
    """Runs one episode of an agent. The reward is given for the last turn."""

    Options = AgentOptions
    options: AgentOptions

    @classmethod
    async def check(cls, options: AgentOptions) -> None:
        """Raises ConfigError where the variable of the key is not set."""
        cls._key(options)

    @staticmethod
    def _key(options: AgentOptions) -> dict[str, str]:
        return key_headers(options.key_variable, "environment.options.agent.key_variable")

    session: AgentSession | None = None
    running: asyncio.Task[AgentEnd] | None = None

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Start the agent; return its first request. Raises Failed if it makes none that can begin an episode."""
        self.problem, self.turns = problem, 0
        self.history: list[AgentMessage] = []
        self.token_ids: list[int] = []
        self.tools: list[AgentTool] = []
        self.last: Action | None = None
        self.session = session = await open_session(self.options.address)
        start = self._run if self.options.command else self._post
        body = {**msgspec.to_builtins(problem), "seed": seed}
        self.running = asyncio.create_task(start(session, body), name="agent")
        self.asked = asked = await self._next_request()
        if isinstance(asked, RewardReported):
            raise Failed(Verdict.CRASH, "the agent ended before it had asked for a turn")
        if isinstance(asked, TokensAsked):
            self.token_ids = asked.token_ids
            return Observation(token_ids=asked.token_ids)
        self.history, self.tools = asked.messages, asked.tools
        return Observation(opening(asked))

    async def step(self, action: Action) -> Observation:
        """Answer the agent's request; return its next one, or the end. Raises Failed."""
        self.turns, self.last = self.turns + 1, action
        asked = self.asked
        assert self.session and not isinstance(asked, RewardReported)
        if isinstance(asked, TokensAsked):
            self.token_ids = [*self.token_ids, *action.token_ids]
            turn = TurnGiven(asked.key, asked.number, token_ids=action.token_ids, logprobs=action.logprobs)
        else:
            reasoning = action.text.removesuffix(action.response) if action.response != action.text else ""
            text, calls = read_calls(action.response, asked, self.turns)
            turn = TurnGiven(asked.key, asked.number, text, reasoning.strip(), calls)
            self.history = [*self.history, AgentMessage("assistant", text, calls)]
        self.session.gateway.post(Gateway.give, turn)
        self.asked = asked = await self._next_request()
        if isinstance(asked, RewardReported):
            self.session.gateway.post(Gateway.give, TurnGiven(asked.key, asked.number))
            return await self._end(asked.reward, asked.solved)
        if isinstance(asked, TokensAsked):
            new = self._new_tokens(asked)
            self.token_ids = asked.token_ids
            return Observation(token_ids=new)
        messages = self._new_messages(asked)
        self.history = asked.messages
        return Observation(messages)

    async def close(self) -> None:
        """End the agent."""
        if self.session is not None:
            self.session.close(OVER)
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)

    # ---- what the agent does -----------------------------------------------------------------------------------------

    async def _next_request(self) -> ChatAsked | TokensAsked | RewardReported:
        """The agent's next request; its end comes as a reward. Raises Failed."""
        assert self.session and self.running
        waiting = asyncio.ensure_future(self.session.events.get())
        try:
            await asyncio.wait({waiting, self.running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()  # also where the episode is given up
        event = waiting.result() if waiting.done() else None
        if isinstance(event, GatewayEnded):
            raise Failed(Verdict.CRASH, "the gateway's process has ended")
        if event is not None and not isinstance(event, ClientLeft):
            return event
        done, _ = await asyncio.wait({self.running}, timeout=GRACE_S)
        if not done:
            raise Failed(Verdict.CRASH, "the agent closed the connection of its request (the timeout of its client?)")
        end = self.running.result()
        if end.failure:
            raise Failed(Verdict.CRASH, end.failure)
        return RewardReported(self.session.key, -1, math.nan if end.reward is None else end.reward, end.solved)

    async def _end(self, reward: float, solved: bool | None) -> Observation:
        """The end of the episode. Raises Failed without a reward."""
        if self.options.reward == "verifier":
            assert self.last
            grade = await self.grade(self.problem, self.last.text)
            if not grade.verdict.graded:
                raise Failed(grade.verdict, grade.reason)
            return Observation(reward=grade.total, done=True, solved=grade.verdict is Verdict.CORRECT)
        if not math.isfinite(reward):
            how = 'print {"reward": 1.0} as its last line' if self.options.command else 'answer {"reward": 1.0}'
            raise Failed(Verdict.CRASH, f"the agent ended without a reward: let it {how}, or post that to /v1/reward")
        return Observation(reward=reward, done=True, solved=solved)

    def _new_messages(self, asked: ChatAsked) -> list[EnvironmentMessage]:
        """What a request adds to the conversation. Raises Failed where it changes it."""
        for index, was in enumerate(self.history):
            now = asked.messages[index] if index < len(asked.messages) else None
            if now is None or same(was) != same(now):
                became = f"became {shown(now)}" if now else "is missing"
                raise Failed(
                    Verdict.CRASH, f"the agent changed its history: messages[{index}], {shown(was)}, {became}. The "
                    "policy is trained on one sequence: an agent must send back what was said, and add to it",
                )  # fmt: skip
        if asked.tools and asked.tools != self.tools:
            raise Failed(Verdict.CRASH, "the agent changed its tools: the policy was given those of the first request")
        new = asked.messages[len(self.history) :]
        if not new or self.token_ids:
            raise Failed(Verdict.CRASH, "the agent's request adds no message to the ones before")
        return following(new, self.history[-1].calls, len(self.history))

    def _new_tokens(self, asked: TokensAsked) -> list[int]:
        """What a request adds to the tokens of the episode. Raises Failed where it changes them."""
        known, given = self.token_ids, asked.token_ids
        if not known or given[: len(known)] != known:
            same_ids = next((i for i, (a, b) in enumerate(zip(known, given, strict=False)) if a != b), len(given))
            raise Failed(
                Verdict.CRASH, f"the agent's token_ids do not begin with the {len(known)} of the episode, from "
                f"token_ids[{same_ids}] on. Do not render the conversation again; append to what was sent and sampled",
            )  # fmt: skip
        if len(given) == len(known):
            raise Failed(Verdict.CRASH, "the agent's token_ids add nothing to those of the episode")
        return given[len(known) :]

    # ---- how it is run -----------------------------------------------------------------------------------------------

    async def _run(self, session: AgentSession, problem: dict[str, Any]) -> AgentEnd:
        """Run the agent's process to its end; what it has started is killed then, and all when this is cancelled."""
        command = shlex.split(self.options.command)
        variables = {**os.environ, "OPENAI_BASE_URL": session.url, "OPENAI_API_KEY": session.key}
        pipe, kills_before = asyncio.subprocess.PIPE, deaths.memory_kills()
        child = await asyncio.create_subprocess_exec(
            *supervised(command), env=variables, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert child.stdin and child.stdout and child.stderr
        try:
            child.stdin.write(json.dumps(problem).encode() + b"\n")
            child.stdin.close()  # what is written goes out first
            printed, errors, code = await asyncio.gather(_tail(child.stdout), _tail(child.stderr), child.wait())
        finally:
            kill_group(child.pid)
            await child.wait()
            child._transport.close()  # type: ignore[attr-defined] # else its pipes stay open until it is collected
        if code < 0:
            why = deaths.how(code) + deaths.advice(code, "agent", 0, kills_before)
            return AgentEnd(None, None, f"the agent {why}")
        if code:
            lines = errors.strip().splitlines() or ["it said nothing"]
            return AgentEnd(None, None, f"the agent ended with exit code {code}: {lines[-1][:300]}")
        return _read_end(printed.strip().rpartition("\n")[2])

    async def _post(self, session: AgentSession, problem: dict[str, Any]) -> AgentEnd:
        """Ask the server of agents to run one to its end; with status 202 it goes on until it posts its reward."""
        server = ApiEndpoint(self.options.url, "", self._key(self.options), SERVER_S)
        try:
            body = {"problem": problem, "base_url": session.url, "api_key": session.key}
            return _read_end((await server.request("POST", self.options.url, body)).decode("utf-8", "replace"))
        except HttpStatus as error:
            if error.code == 202:
                await asyncio.Event().wait()
            return AgentEnd(None, None, f"the server of agents answered with {error}"[:400])
        except FAILURES as error:
            return AgentEnd(None, None, f"the server of agents did not answer: {type(error).__name__}: {error}"[:400])
        finally:
            await server.close()


async def _tail(stream: asyncio.StreamReader) -> str:
    """The end of what a process prints, once it has closed the pipe."""
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-OUTPUT_BYTES:]
    return kept.decode("utf-8", "replace")


def _read_end(text: str) -> AgentEnd:
    """How an agent ended that printed or answered this text, which may be JSON with its reward."""
    with contextlib.suppress(ValueError, RecursionError):
        end = parse_json(text)
        if isinstance(end, dict) and "reward" in end:
            reward, solved = end["reward"], end.get("solved")
            if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
                return AgentEnd(None, None, f"the agent reported the reward {reward!r:.60}, which is no number")
            return AgentEnd(float(reward), solved if isinstance(solved, bool) else None, "")
    return AgentEnd(None, None, "")


# ---- messages --------------------------------------------------------------------------------------------------------


def opening(asked: ChatAsked) -> list[EnvironmentMessage]:
    """The first request as the beginning of an episode: its system prompt, its tools, and what the user says. Raises
    Failed for a conversation in which the assistant has spoken."""
    made: list[EnvironmentMessage] = []
    for index, message in enumerate(asked.messages):
        if message.role in ("assistant", "tool"):
            raise Failed(
                Verdict.CRASH, f"the agent's first request has a message of role {message.role} (messages[{index}]), "
                "which the policy did not say: put examples into the system prompt",
            )  # fmt: skip
        made.append(EnvironmentMessage("user" if message.role == "user" else "system", message.text))
    if not any(message.role == "user" for message in made):
        raise Failed(Verdict.CRASH, "the agent's first request has no message of the user")
    if asked.tools:
        lines = (msgspec.to_builtins(tool) for tool in asked.tools)
        given = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
        made.append(EnvironmentMessage("system", TOOLS_PROMPT.replace("{given}", given)))
    return made


def following(new: Sequence[AgentMessage], calls: Sequence[AgentCall], first: int) -> list[EnvironmentMessage]:
    """New messages as what the policy reads next, in the form in which serving shows them to a model: results of tools,
    in the order of their calls, are one message of the user. first: their place in the request. Raises Failed."""
    places = {call.id: index for index, call in enumerate(calls)}
    results = [message for message in new if message.role == "tool"]
    for index, message in enumerate(new, start=first):
        if message.role not in ("user", "tool"):
            raise Failed(
                Verdict.CRASH, f"the agent added messages[{index}] of role {message.role}: between two turns of the "
                "policy only the user and tools can speak",
            )  # fmt: skip
        if message.role == "tool" and message.call_id not in places:
            raise Failed(Verdict.CRASH, f"messages[{index}] is the result of {message.call_id!r:.60}, which is no call")
    results.sort(key=lambda message: places[message.call_id])
    text = "\n".join(f"{RESULT_OPEN}\n{message.text}\n{RESULT_CLOSE}" for message in results)
    return [*([user(text)] if results else []), *(user(message.text) for message in new if message.role == "user")]


def read_calls(response: str, asked: ChatAsked, turn: int) -> tuple[str, list[AgentCall]]:
    """The text of a response and its calls, whose ids are the same each time that an episode is repeated."""
    if not asked.tools:
        return response, []
    parts = list(CallReader({tool.name for tool in asked.tools}, asked.most_calls).feed(response, last=True))
    calls = [part for part in parts if not isinstance(part, str)]
    text = "".join(part for part in parts if isinstance(part, str)).strip()
    return text, [AgentCall(f"call_{turn}_{place}", one.name, one.arguments) for place, one in enumerate(calls)]


def same(message: AgentMessage) -> tuple[Any, ...]:
    """What must stay the same of a message: clients may write the JSON of arguments in another way."""
    calls = []
    for call in message.calls:
        try:
            arguments = json.dumps(parse_json(call.arguments), sort_keys=True)
        except (ValueError, RecursionError):
            arguments = call.arguments
        calls.append((call.id, call.name, arguments))
    return message.role, message.text, calls, message.call_id


def shown(message: AgentMessage) -> str:
    """A message in an error."""
    calls = "".join(f" with a call of {call.name}({call.arguments:.60})" for call in message.calls)
    return f"{message.role}: {message.text!r:.120}{calls}"
