"""The environment "retry": the policy answers, is asked to look again, and answers a second time.

Source: Training Language Models to Self-Correct via Reinforcement Learning (SCoRe, 2409.12917), section 5: the reward
of the second turn is r2 + alpha (r2 - r1), where r1 and r2 say whether the two answers are right, so that copying a
right answer earns r2 and making a wrong one right earns more. The first turn has reward r1.
"""

from __future__ import annotations

from pydantic import Field

from environments.environment import Action, Environment, Observation, environment, user
from shared.section import Section
from shared.types import Problem, Verdict
from verify.plugins import Failed


class RetryOptions(Section):
    """Options of "retry"."""

    instruction: str = (
        "There might be an error in the solution above because of lack of understanding of the question. Please "
        "correct the error, if any, and rewrite the solution."
    )
    """Text between the two answers, in the paper's words."""
    alpha: float = Field(1.0, ge=0)
    """weight of the progress r2 - r1"""
    first: float = Field(1.0, ge=0)
    """weight of the first answer's reward"""


@environment("retry")
class Retry(Environment):
    """Grades both answers with the verifier of the problem's domain."""

    Options = RetryOptions
    options: RetryOptions

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Keep the problem; its text is the prompt."""
        self.problem, self.first = problem, None
        return Observation()

    first: float | None
    """whether the first answer was right, None before it"""

    async def step(self, action: Action) -> Observation:
        """Grade the answer. Raises Failed where the verifier gives no grade."""
        grade = await self.grade(self.problem, action.text)
        if not grade.verdict.graded:
            raise Failed(grade.verdict, grade.reason)
        right = float(grade.verdict is Verdict.CORRECT)
        if self.first is None:
            self.first = right
            return Observation([user(self.options.instruction)], reward=self.options.first * right)
        first = self.first
        return Observation(
            reward=right + self.options.alpha * (right - first),
            done=True,
            solved=bool(right),
            info={
                "first_right": first,
                "second_right": right,
                "made_right": float(right > first),
                "made_wrong": float(right < first),
                "progress": right - first,
            },
        )
