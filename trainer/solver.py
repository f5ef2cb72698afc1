"""One engine and the verifiers, without a launch: turns a prompt into a group (completions with rewards)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout.local_engine import LocalEngine
from shared.chat import Chat
from shared.config import Config
from shared.types import Group, Problem, Prompt, Reward
from trainer.data.data_source import completion_seed
from trainer.stages import Stages
from verify.scorer import RewardScorer


class Solver:
    """Solves problems with one model. `engine` gives access to its weights."""

    def __init__(self, config: Config, model_dir: Path, chat: Chat, warn: Callable[[str], None] = lambda text: None):
        """config: model, rollout, reward, sync, deadlines and seed count. warn: gets a line when an engine died."""
        self.config, self.chat = config, chat
        self.engine = LocalEngine(config, str(model_dir), warn, chat.stop_ids)
        self.stages = Stages(config)
        self.scorer = RewardScorer(self.stages, chat)

    async def start(self, problems: Sequence[Problem]) -> str:
        """Start the engine and what grading these problems needs; returns a line on the isolation of programs, or "".

        Blocks the event loop for some seconds. Raises ModelError, ConfigError, SandboxRefused.
        """
        await self.engine.start()
        return await self.scorer.start(problems)

    async def solve(self, prompt: Prompt, samples: int) -> Group:
        """Sample `samples` completions at rollout.temperature and grade them.

        Seeds depend on the run's seed, `prompt.index` and the sample's number alone. The prompt must leave room for
        rollout.max_completion_tokens. Raises what ended the engine, or RunError when the verifiers fail too often.
        """
        seeds = [completion_seed(self.config.seed, prompt.index, number) for number in range(samples)]
        completions = await self.engine.sample(prompt.token_ids, seeds)
        scored = await asyncio.gather(*(self.scorer.score(prompt.problem, completion) for completion in completions))
        rewards: list[Reward | None] = [reward for reward, _ in scored]
        return Group(prompt, completions, rewards, [text for _, text in scored])

    async def close(self) -> None:
        """End all processes. May be called in any state."""
        await self.engine.close()
        await self.scorer.close()
