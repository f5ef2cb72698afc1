"""The environment "feedback": the policy writes a program, reads which test failed and how, and repairs it.

Source: Teaching Large Language Models to Self-Debug (2304.05128), section 4, with messages of tests. An episode ends
with the first program that passes, or with the last attempt; the verifier grades that one, with the usual rewards.
"""

from __future__ import annotations

from pydantic import Field

from environments.environment import Action, Environment, Observation, environment, user
from shared.section import Section
from shared.types import Problem, Verdict
from verify.plugins import Failed
from verify.verifiers import verifier_for


class FeedbackOptions(Section):
    """Options of "feedback"."""

    attempts: int = Field(3, ge=2)
    """programs that are written at most; environment.max_turns ends an episode, too"""
    instruction: str = "{message}\n\nRepair the program, and write the whole of it again."
    """Text after a wrong program; {message} is the verifier's message about it."""


@environment("feedback")
class Feedback(Environment):
    """Tells what the verifier of the domain "code" says of a program that is wrong."""

    verified = True
    Options = FeedbackOptions
    options: FeedbackOptions

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Keep the problem; its text is the prompt. Raises Failed for a problem without tests: of others, what the
        verifier says names the answer."""
        if verifier_for(problem).answer_in != "code block":
            raise Failed(Verdict.UNVERIFIABLE, f'"feedback" is for problems of the domain "code", not {problem.domain}')
        self.problem, self.left = problem, self.options.attempts
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Run the tests, unless it was the last attempt. info: whether the program is right. Raises Failed where the
        verifier gives no grade."""
        self.left -= 1
        if self.left == 0:
            return Observation(done=True)
        grade = await self.grade(self.problem, action.text)
        if not grade.verdict.graded:
            raise Failed(grade.verdict, grade.reason)
        right = grade.verdict is Verdict.CORRECT
        messages = [] if right else [user(self.options.instruction.replace("{message}", grade.reason))]
        return Observation(messages, done=right, info={"right": float(right)})
