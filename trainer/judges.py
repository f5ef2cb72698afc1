"""Text of a completion -> reward, through the verifier pool; stops the run when verifiers fail too often.

What it does not: rules (verify/). Who calls this: controller, evaluate.
"""

from __future__ import annotations

from shared.chat import Chat
from shared.config import Config
from shared.types import Completion, Problem, Reward, Verdict
from verify.pool import Pool
from verify.reward import FailureWindow, score


class Judges:
    """Scores completions concurrently; verdicts are keyed by completion, never by position."""

    def __init__(self, config: Config, chat: Chat):
        self.chat = chat
        limit = config.reward.length_max or config.rollout.max_completion_tokens
        self.weights = config.reward.model_copy(update={"length_max": limit})
        self.pool = Pool(workers=config.reward.workers, deadline_s=config.reward.deadline_s)
        self.window = FailureWindow(config.reward.max_failure_share)
        self.counts: dict[Verdict, int] = {}

    async def start(self) -> None:
        """Start the verifier processes."""
        await self.pool.start()

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        """The reward of a finished completion, and its text."""
        text = self.chat.think_prefix + self.chat.decode(completion.token_ids)
        reward = await score(problem, text, len(completion.token_ids), self.weights, self.pool)
        self.window.add(reward.verdict)
        self.counts[reward.verdict] = self.counts.get(reward.verdict, 0) + 1
        return reward, text

    async def close(self) -> None:
        """End the verifier processes."""
        await self.pool.close()
