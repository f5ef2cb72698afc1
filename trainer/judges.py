"""Text of a completion -> reward, through the verifier pool; stops the run when verifiers fail too often.

What it does not: rules (verify/). Who calls this: controller, evaluate, truth (`parts_of`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.chat import Chat
from shared.config import Config
from shared.types import Completion, Problem, Reward, Verdict
from verify.code.programs import Programs
from verify.format import CONTROL, Parts, check_format, check_tokens
from verify.pool import Pool
from verify.reward import FailureWindow, Scorer


class Judges:
    """Scores completions concurrently; verdicts are keyed by completion, never by position."""

    def __init__(self, config: Config, chat: Chat):
        self.chat = chat
        self.pool = Pool(workers=config.reward.workers, deadline_s=config.reward.deadline_s)
        self.programs = Programs(config.reward.sandbox)
        self.window = FailureWindow(config.reward.max_failure_share)
        self.counts: dict[Verdict, int] = {}
        self.begin_stage(config)

    def begin_stage(self, config: Config) -> None:
        """Score with the rewards of these settings from now on."""
        settings = config.reward.resolved(config.rollout.max_completion_tokens)
        self.scorer = Scorer(settings, self.pool, self.programs)

    async def start(self, problems: Sequence[Problem]) -> str:
        """Start what these problems need; one line about the isolation of programs, "" when there are none.

        Raises SandboxRefused where programs are to be run and the host cannot isolate them.
        """
        await self.pool.start()
        return await self.programs.start() if any(problem.domain == "code" for problem in problems) else ""

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        """The reward of a finished completion, and its text; masked where engines died of it."""
        if completion.finish_reason == "abort":
            return Reward(0.0, 0.0, 0.0, 0.0, 0.0, Verdict.CRASH, reason="given up: engines died of it"), ""
        text = self.chat.think_prefix + self.chat.decode(completion.token_ids)
        parts = parts_of(self.chat, completion.token_ids, problem.domain)
        tokens = len(completion.token_ids)
        reward = await self.scorer.score(problem, text, tokens, parts=parts, group=completion.group)
        self.window.add(reward.verdict)
        self.counts[reward.verdict] = self.counts.get(reward.verdict, 0) + 1
        return reward, text

    async def close(self) -> None:
        """End the verifier processes."""
        await self.pool.close()
        await self.programs.close()


def parts_of(chat: Chat, ids: Sequence[int], domain: str) -> Parts:
    """The format of a completion: by its tokens where the model has control tokens for thoughts, else by its text.

    ids: [tokens] as sampled. The solution of the result is the end of `chat.decode(ids)`.
    """
    control = chat.think_ids
    if control is None or chat.think_prefix.startswith("<think>"):
        return check_format(chat.think_prefix + chat.decode(ids), domain=domain)
    opened = chat.think_prefix.startswith(CONTROL.open)
    return check_tokens(ids, control, chat.decode, opened=opened, domain=domain)
