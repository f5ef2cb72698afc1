"""One engine and the verifiers, without a launch: turns a prompt into a group (completions with rewards)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout.sampler import Sampler
from shared.chat import Chat
from shared.config import Config
from shared.messages import GenerateRequest
from shared.types import Completion, Group, Problem, Prompt, Reward
from trainer.data import completion_seed
from trainer.stages import Stages
from verify.scorer import RewardScorer


class Solver:
    """Solves problems with one model. `sampler` gives access to its weights."""

    def __init__(self, config: Config, model_dir: Path, chat: Chat, warn: Callable[[str], None] = lambda text: None):
        """config: model, rollout, reward, sync, deadlines and seed count. warn: gets a line when an engine died."""
        self.config, self.chat = config, chat
        self.sampler = Sampler(config, str(model_dir), warn)
        self.scorer = RewardScorer(Stages(config), chat)

    async def start(self, problems: Sequence[Problem]) -> str:
        """Start the engine and what grading these problems needs; returns a line on the isolation of programs, or "".

        Blocks the event loop for some seconds. Raises ModelError, ConfigError, SandboxRefused.
        """
        await self.sampler.start()
        return await self.scorer.start(problems)

    async def solve(self, prompt: Prompt, samples: int) -> Group:
        """Sample `samples` completions at rollout.temperature and grade them.

        Seeds depend on the run's seed, `prompt.index` and the sample's number alone. The prompt must leave room for
        rollout.max_completion_tokens. Raises what ended the engine, or RunError when the verifiers fail too often.
        """
        rollout, seed = self.config.rollout, self.config.seed
        completions = [
            Completion(group=prompt.index, index=number, seed=completion_seed(seed, prompt.index, number))
            for number in range(samples)
        ]
        await self.sampler.complete(
            [
                GenerateRequest(prompt.token_ids, completion, rollout.max_completion_tokens, rollout.temperature)
                for completion in completions
            ]
        )
        scored = await asyncio.gather(*(self.scorer.score(prompt.problem, completion) for completion in completions))
        rewards: list[Reward | None] = [reward for reward, _ in scored]
        return Group(prompt, completions, rewards, [text for _, text in scored])

    async def close(self) -> None:
        """End all processes. May be called in any state."""
        await self.sampler.close()
        await self.scorer.close()
