"""Tools that the server itself runs in a chat, as an episode of training runs them: the same calls, limits and tokens.

    the model ends a turn -> its calls are run, their results follow the turn as tokens, and it goes on
                          -> a turn without a call is the answer

Nothing that was sampled is encoded again. A turn that is cut, or ended by a stop of the request, ends the response.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import replace
from typing import Any

from environments.environment import Observation, action_of, find, made
from environments.process import answered
from environments.tools import JoinedTools, ToolEnvironment, calls_in
from serve.engine import ServingEngine
from serve.errors import ApiError
from serve.generation import generate, remaining
from serve.plan import ExecutedCall, GenerationPlan, Response
from serve.reasoning import Chunk
from serve.system_prompts import PromptRenderer
from shared.environment_settings import EnvironmentSettings
from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.tool_calls import ParsedCall, ToolDefinition, signatures
from shared.types import Problem, Reward

STEP_S = EnvironmentSettings().step_s
"""seconds for all calls of a turn"""


async def _no_grade(problem: Problem, text: str) -> Reward:
    raise RuntimeError("nothing is graded while a model is served")


class ServerTools:
    """The tools of the environments that the settings name."""

    def __init__(self, wanted: Mapping[str, Mapping[str, Any]], most_turns: int, result_tokens: int, most_tokens: int):
        """most_tokens: of a prompt and its completion. Raises ConfigError for unknown names and wrong options."""
        self.wanted, self.most_turns = wanted, most_turns
        self.result_tokens, self.most_tokens = result_tokens, most_tokens
        self.definitions: list[ToolDefinition] = []
        """known after `start`"""
        self._make()

    def _make(self) -> JoinedTools:
        parts = []
        for name, options in self.wanted.items():
            known = find(name)
            assert known is not None
            one = made(known.make, name, options, _no_grade, RewardWeights())
            if not isinstance(one, ToolEnvironment):
                raise ConfigError(f"tools = {name}: the environment {name} has no tools")
            parts.append(one)
        return JoinedTools(parts)

    async def start(self, prompts: PromptRenderer) -> None:
        """Begin an episode, to learn the tools. Raises ConfigError where that fails or a tool spells a control token of
        the model, and ModelError where the chat template cannot show results."""
        prompts.chat.bridge([("tool", "?")])
        one = self._make()
        try:
            reply = await answered("tools", one.reset(Problem("", "", ""), 0), STEP_S, [])
            if reply.observation is None:
                raise ConfigError(f"tools = {', '.join(self.wanted)}: {reply.reason}")
            self.definitions = one.definitions
            added, text = prompts.chat.tokenizer.added_tokens_decoder.values(), signatures(self.definitions)
            if control := next((token.content for token in added if token.special and token.content in text), ""):
                raise ConfigError(f"tools = {', '.join(self.wanted)}: a description spells the control token {control}")
        finally:
            await one.close()

    async def _ask(self, work: Awaitable[Observation]) -> Observation:
        """What the tools answer. Raises ApiError where that costs an episode in training: they died, or took long."""
        reply = await answered("tools", work, STEP_S, [])
        if reply.observation is None:
            raise ApiError(502, f"the tools of this server failed: {reply.reason}", code="tool_failed", retry=False)
        return reply.observation

    async def generate(
        self, engine: ServingEngine, prompts: PromptRenderer, plan: GenerationPlan, response: Response
    ) -> AsyncGenerator[Chunk | ExecutedCall, None]:
        """Sample one response with all its turns, as `generation.generate` samples one turn. Raises ApiError."""
        one, names = self._make(), frozenset(tool.name for tool in self.definitions)
        plan = replace(plan, tools=names, most_calls=sys.maxsize)
        try:
            await self._ask(one.reset(Problem("", "", ""), plan.sampling.seed or 0))
            for turn in range(1, self.most_turns + 1):
                thought, tries = response.thinking_tokens, response.tries
                async with contextlib.aclosing(_turn(engine, prompts, plan, response)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                response.tries = max(response.tries, tries)
                ended = response.finish_reason in ("stop", "tool_calls") and response.stop_reason is None
                response.calls.clear()
                if not ended:
                    break
                response.finish_reason, ids = "stop", response.context
                if ids[-1] not in prompts.chat.stop_ids:
                    ids = [*ids, prompts.chat.eos_id]
                action = action_of(prompts.chat, ids[len(plan.prompt_ids) :], [])
                observation = await self._ask(one.step(action))
                if observation.done:
                    break
                for part, message in zip(calls_in(action.response, names), observation.messages, strict=True):
                    call = ParsedCall("", "", part) if isinstance(part, str) else part
                    response.executed.append(ExecutedCall(call, message.text))
                    yield response.executed[-1]
                said = [(message.role, message.text) for message in observation.messages]
                following = ids + prompts.chat.bridge(said, self.result_tokens, ids[-1])
                sampling = remaining(plan.sampling, len(ids) - len(plan.prompt_ids))
                most = min(sampling.max_tokens, self.most_tokens - len(following))
                if most < 1 or turn == self.most_turns:
                    response.finish_reason = "length"
                    break
                budget = plan.thinking_budget
                if budget is not None:
                    budget = max(budget - (response.thinking_tokens - thought), 0)
                sampling = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
                plan = replace(plan, prompt_ids=following, sampling=sampling, thinking_budget=budget)
        finally:
            await one.close()


async def _turn(
    engine: ServingEngine, prompts: PromptRenderer, plan: GenerationPlan, response: Response
) -> AsyncGenerator[Chunk, None]:
    """Sample one turn, without its calls. A blank line stands before its texts where earlier turns have some."""
    gaps = {True: "\n\n" if response.reasoning else "", False: "\n\n" if response.answer else ""}
    response.sampled_reasoning += gaps[True]
    async with contextlib.aclosing(generate(engine, prompts, plan, response)) as found:
        async for chunk in found:
            if isinstance(chunk, ParsedCall):
                continue
            text = gaps[chunk.thinking] + chunk.text
            if chunk.thinking:
                response.reasoning = response.reasoning.removesuffix(chunk.text) + text
            else:
                response.answer = response.answer.removesuffix(chunk.text) + text
            gaps[chunk.thinking] = ""
            yield chunk._replace(text=text)
