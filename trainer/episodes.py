"""Episodes: what happens between two turns of a completion whose problem has an environment.

    the engine ends a turn -> the environment answers -> its words follow the turn as tokens, and the engine goes on
                                                      -> or the episode is over, and is scored

The completion holds everything: the turns that have ended, with the tokens between them. An instance that is lost (its
process died, or the launch was resumed) is made again by resetting and repeating the turns, and must say the same
tokens again; otherwise the completion starts anew. Nothing that was sampled is encoded again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable

from msgspec.structs import replace

from environments.environment import Action, Observation, action_of
from environments.host import EnvironmentHost, InstanceLost, Key
from shared.chat import Chat
from shared.config import Config
from shared.errors import ConfigError, ModelError
from shared.types import Completion, Problem, Prompt, Reward, Turn, TurnText, Verdict
from trainer.data.data_source import PromptFormat, completion_seed
from trainer.objectives.registry import objective_of
from verify.plugins import Failed
from verify.scorer import RewardScorer

ATTEMPTS = 3
"""tries to get an answer from instances that are lost, and to repeat an episode that does not repeat"""
FAILURES = {Verdict.TIMEOUT: "timeout"}
"""verdict -> finish reason of an episode whose environment failed; others are a crash"""


class NotRepeatable(Exception):
    """An environment that was made again answers the same turns with other tokens."""


class Episodes:
    """Opens episodes, and lets environments answer turns."""

    def __init__(self, config: Config, prompts: PromptFormat, scorer: RewardScorer):
        self.config, self.prompts, self.scorer = config, prompts, scorer
        self.settings = config.environment
        self.host = EnvironmentHost(self.settings, config.reward, self._grade)
        self._opened = itertools.count(-1, -1)
        self.added: dict[str, int] = {}
        """environment -> tokens that it adds to a problem's prompt, such as the description of its tools"""

    @property
    def chat(self) -> Chat:
        """The chat format."""
        return self.prompts.chat

    async def _grade(self, problem: Problem, text: str) -> Reward:
        return await self.scorer.scorer.score(problem, text, None)

    async def start(self, problems: Iterable[Problem]) -> None:
        """Start what the environments of these problems need. Raises ConfigError, also for an objective that cannot be
        trained on episodes, and ModelError for a chat template that changes its history where that is not allowed."""
        named = {problem.environment for problem in problems if problem.environment}
        if not named:
            return
        for stage in self.config.every_stage if self.config.mode == "rl" else ():
            if refusal := objective_of(stage).refusal(min(named)):
                raise ConfigError(refusal)
        await self.host.start(sorted(named))
        if self.settings.history == "template":
            self.chat.check_history()
        self.chat.bridge([("user", "?")])

    async def close(self) -> None:
        """End all instances and their processes."""
        await self.host.end()

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def seed(self, prompt: Prompt) -> int:
        """Seed of the environments of a group."""
        return completion_seed(self.config.seed, prompt.index, -1)

    async def try_beginnings(self, problems: Iterable[Problem]) -> None:
        """Begin an episode of the shortest problem of each environment, for `added`; one that fails is left to the run.
        Raises ConfigError where its prompt leaves no room for a turn."""
        most, longest_first = self.config.model.max_tokens, sorted(problems, key=lambda each: -len(each.text))
        for name, problem in {each.environment: each for each in longest_first if each.environment}.items():
            plain = Prompt(0, problem, self.prompts.prompt_of(problem))
            try:
                count = len((await self._begun(plain)).token_ids)
            except Failed:
                continue
            self.added[name] = added = max(0, count - len(plain.token_ids))
            if count + 1 >= most:
                raise ConfigError(
                    f"the shortest prompt of environment {name} has {count:,} tokens, {added:,} of them from the "
                    f"environment (its tools), and model.max_tokens = {most:,} leaves no room for an answer: raise it "
                    "(a model with a longer context), or offer fewer tools"
                )

    async def open(self, prompt: Prompt) -> Prompt:
        """The prompt as the environment begins it; the same without one. Raises Failed."""
        if not prompt.problem.environment:
            return prompt
        opened, most = await self._begun(prompt), self.config.model.max_tokens
        if len(opened.token_ids) + 1 < most:
            return opened
        raise Failed(Verdict.CRASH, f"the prompt with what the environment adds exceeds model.max_tokens = {most:,}")

    async def _begun(self, prompt: Prompt) -> Prompt:
        key = prompt.index, next(self._opened)  # an instance of its own, for the prompt alone
        try:
            observation = await self._tried(
                prompt.problem.environment, self.settings.episode_s, lambda alone: self._reset(prompt, key, alone)
            )
            return replace(prompt, token_ids=self._prompt_ids(prompt, observation))
        finally:
            await self.host.close(key)

    async def open_all(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts as their environments begin them; those whose environment fails are reported and left out."""
        if not any(prompt.problem.environment for prompt in prompts):
            return prompts
        results = await asyncio.gather(*(self.open(prompt) for prompt in prompts), return_exceptions=True)
        opened: list[Prompt] = []
        for prompt, result in zip(prompts, results, strict=True):
            if isinstance(result, Failed):
                self.scorer.failed(prompt.problem, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                opened.append(result)
        return opened

    async def _reset(self, prompt: Prompt, key: Key, alone: bool) -> Observation:
        return await self.host.reset(key, prompt.problem, self.seed(prompt), self.settings.step_s, alone)

    async def _tried(self, name: str, most_s: float, ask: Callable[[bool], Awaitable[Observation]]) -> Observation:
        """What an environment answers; where its process ends meanwhile, what it answers when it is asked alone. Raises
        Failed, NotRepeatable."""
        how = ""
        for attempt in range(ATTEMPTS):
            try:
                if not attempt:
                    return await ask(False)
                async with asyncio.timeout(most_s), self.host.alone:
                    return await ask(True)
            except InstanceLost as lost:
                how = str(lost)
            except TimeoutError as error:
                raise Failed(Verdict.TIMEOUT, f"environment {name}: not asked again in {most_s:.0f} s") from error
        raise Failed(Verdict.CRASH, f"environment {name}: its process ended {ATTEMPTS} times ({how})")

    def _prompt_ids(self, prompt: Prompt, observation: Observation) -> list[int]:
        """[prompt_tokens] of the problem with what `reset` said."""
        if observation.token_ids is not None:
            return self._known(observation.token_ids)
        texts = [message.text for message in observation.messages if message.role != "system"]
        system = [message.text for message in observation.messages if message.role == "system"]
        if not texts and not system:
            return prompt.token_ids
        text = "\n\n".join(texts) or prompt.problem.text
        try:
            return self.prompts.prompt_of(prompt.problem, text, system)
        except ModelError as error:
            raise Failed(Verdict.CRASH, str(error)) from error

    # ---- turns -------------------------------------------------------------------------------------------------------

    def end_turn(self, completion: Completion) -> Completion:
        """The completion with the turn that its engine has just ended among its turns: it waits for the environment,
        unless the turn was cut or given up, which ends the episode."""
        turn = Turn(completion.turn_start, len(completion.token_ids))
        reason = None if completion.finish_reason == "stop" else completion.finish_reason
        return replace(completion, turns=[*completion.turns, turn], finish_reason=reason)

    async def advance(self, prompt: Prompt, completion: Completion) -> Completion:
        """Let the environment answer the turn that has ended: the completion goes on after its words, or is over."""
        key = completion.group, completion.index
        if completion.waiting:
            try:
                completion = await self._answered(prompt, completion, key)
            except Failed as failed:
                last = replace(completion.turns[-1], failure=str(failed))
                reason = FAILURES.get(failed.verdict, "crash")
                completion = replace(completion, turns=[*completion.turns[:-1], last], finish_reason=reason)
            except NotRepeatable:
                await self.host.close(key)
                return Completion(completion.group, completion.index, completion.seed, anew=completion.anew + 1)
        if completion.finish_reason is not None:
            await self.host.close(key)
            last = completion.turns[-1]
            if last.reward is None and not self.host.verified(prompt.problem.environment):
                completion = replace(completion, turns=[*completion.turns[:-1], replace(last, reward=0.0)])
        return completion

    async def play(
        self, prompt: Prompt, completion: Completion, sample: Callable[[Completion], Awaitable[Completion]]
    ) -> Completion:
        """The whole episode. sample: lets an engine go on with a completion until its turn ends."""
        while completion.finish_reason is None:
            completion = await self.advance(prompt, self.end_turn(await sample(completion)))
        return completion

    async def _answered(self, prompt: Prompt, completion: Completion, key: Key) -> Completion:
        started = time.monotonic()
        observation = await self._step(prompt, completion, key)
        turn = replace(
            completion.turns[-1], reward=observation.reward, solved=observation.solved,
            seconds=time.monotonic() - started, info=observation.info,
        )  # fmt: skip
        if self.host.verified(prompt.problem.environment):
            turn = replace(turn, reward=None)
        completion = replace(completion, turns=[*completion.turns[:-1], turn])
        if observation.done or len(completion.turns) >= self.settings.max_turns:
            return replace(completion, finish_reason="stop")
        ids = self._observed(observation, completion.token_ids[-1])
        token_ids = [*completion.token_ids, *ids]
        room = self.config.model.max_tokens - len(prompt.token_ids) - len(token_ids)
        left = self.scorer.stages.now.rollout.max_completion_tokens - completion.sampled_tokens
        if room < 1 or left < 1:
            return replace(completion, finish_reason="length")
        return replace(completion, token_ids=token_ids, logprobs=[*completion.logprobs, *[0.0] * len(ids)])

    async def _step(self, prompt: Prompt, completion: Completion, key: Key) -> Observation:
        """The environment's answer to the last turn. Raises Failed, NotRepeatable."""
        left = self.settings.episode_s - sum(turn.seconds for turn in completion.turns)
        if left <= 0:
            raise Failed(Verdict.TIMEOUT, f"no end after environment.episode_s = {self.settings.episode_s:g}")

        async def ask(alone: bool) -> Observation:
            if not self.host.alive(key):
                await self._make(prompt, completion, key, alone)
            action = self._action(completion, completion.turns[-1])
            return await self.host.step(key, action, min(left, self.settings.step_s), alone)

        return await self._tried(prompt.problem.environment, left, ask)

    async def _make(self, prompt: Prompt, completion: Completion, key: Key, alone: bool) -> None:
        """Make the instance of an episode, and bring it to where the episode is. Raises Failed, NotRepeatable."""
        step_s, before = self.settings.step_s, completion.turns[:-1]
        observation = await self._reset(prompt, key, alone)
        if self._prompt_ids(prompt, observation) != prompt.token_ids:
            raise Failed(Verdict.CRASH, "reset says other things for the same seed: derive everything from it")
        for turn, following in zip(before, completion.turns[1:], strict=True):
            observation = await self.host.step(key, self._action(completion, turn), step_s, alone)
            between, ended = completion.token_ids[turn.end : following.start], completion.token_ids[turn.end - 1]
            if observation.done or self._observed(observation, ended) != between:
                if completion.anew + 1 >= ATTEMPTS:
                    raise Failed(Verdict.CRASH, f"it did not repeat itself {ATTEMPTS} times")
                raise NotRepeatable

    def _action(self, completion: Completion, turn: Turn) -> Action:
        span = slice(turn.start, turn.end)
        return action_of(self.chat, completion.token_ids[span], completion.logprobs[span])

    def _observed(self, observation: Observation, ended: int) -> list[int]:
        """[tokens] between a turn and the next one. ended: the token that ended the turn."""
        if (ids := observation.token_ids) is not None:
            if len(ids) > self.settings.observation_tokens:
                raise Failed(Verdict.CRASH, f"{len(ids)} tokens exceed environment.observation_tokens")
            return self._known(ids)
        messages = [(message.role, message.text) for message in observation.messages] or [("user", "")]
        try:
            return self._known(self.chat.bridge(messages, self.settings.observation_tokens, ended))
        except ModelError as error:  # a role that the template does not know
            raise Failed(Verdict.CRASH, str(error)) from error

    def _known(self, ids: list[int]) -> list[int]:
        """The ids; raises Failed for none, and for one that is none of the vocabulary."""
        if not ids or not 0 <= min(ids) <= max(ids) < len(self.chat.tokenizer):
            raise Failed(
                Verdict.CRASH, f"token ids must lie from 0 to {len(self.chat.tokenizer) - 1}, and there be any"
            )
        return ids


def turns_of(prompts: PromptFormat, prompt: Prompt, completion: Completion) -> list[TurnText]:
    """What was said in an episode, in order: the policy's words are the tokens of `Completion.turns`, its environment's
    those between them, and the prompt where `reset` made another one than the problem's text."""
    problem, chat, texts, here = prompt.problem, prompts.chat, list[TurnText](), 0
    if prompt.token_ids != prompts.prompt_of(problem):
        texts.append(TurnText("environment", chat.decode(prompt.token_ids)))
    for turn in completion.turns:
        if turn.start > here:
            texts.append(TurnText("environment", chat.decode_bridge(completion.token_ids[here : turn.start])))
        words = chat.think_prefix + chat.decode(completion.token_ids[turn.start : turn.end])
        texts.append(TurnText("policy", words if turn.end else "", turn.reward, turn.failure))
        here = turn.end
    return texts


def failed_start(completion: Completion, failed: Failed) -> Completion:
    """The completion of an episode that its environment could not begin."""
    return replace(
        completion, turns=[Turn(0, 0, failure=str(failed))], finish_reason=FAILURES.get(failed.verdict, "crash")
    )
