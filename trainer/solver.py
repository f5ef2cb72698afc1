"""One engine and the verifiers, without a launch: turns a prompt into a group (completions with rewards)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout.local_engine import LocalEngine
from shared.chat import Chat
from shared.config import Config
from shared.types import Completion, Group, Problem, Prompt
from trainer.data.data_source import completion_seed
from trainer.stages import Stages
from verify.scorer import RewardScorer


class Solver:
    """Solves problems with one model. `engine` gives access to its weights."""

    def __init__(
        self, config: Config, model_dir: Path, chat: Chat, warn: Callable[[str], None] = lambda text: None,
        scorer: RewardScorer | None = None,
    ):  # fmt: skip
        """config: model, rollout, reward, sync, deadlines and seed count. warn: gets a line when an engine died.
        scorer: None for one of its own."""
        self.config, self.chat = config, chat
        self.engine = LocalEngine(config, str(model_dir), warn, chat.stop_ids)
        self.scorer = scorer or RewardScorer(Stages(config), chat)

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
        group = Group(prompt, completions, [None] * samples, [""] * samples)

        async def score(completion: Completion) -> None:
            reward, text = await self.scorer.score(prompt.problem, completion)
            for settled in await self.scorer.settle(group, completion, reward, text):
                group.rewards[settled.completion.index] = settled.reward
                group.texts[settled.completion.index] = settled.text

        await asyncio.gather(*map(score, completions))
        return group

    async def close(self) -> None:
        """End all processes. May be called in any state."""
        await self.engine.close()
        await self.scorer.close()
