"""The environment "guess": find a number by guessing, and learn after each guess whether it is higher or lower.

A problem's text says what is asked; the number is drawn from the seed, in [1, numbers]. With 16 numbers and 5 turns
bisection always finds it; one guess finds it once in 16.
"""

from __future__ import annotations

import random
import re

from pydantic import Field

from environments.environment import Action, Environment, Observation, environment, user
from shared.section import Section
from shared.types import Problem


class GuessOptions(Section):
    """Options of "guess"."""

    numbers: int = Field(16, ge=2)
    """the number is from 1 to this"""
    guesses: int = Field(5, ge=1)
    """guesses that are answered"""


@environment("guess")
class Guess(Environment):
    """Rewards 1 for the turn that names the number."""

    Options = GuessOptions
    options: GuessOptions

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Draw the number."""
        self.number, self.left = random.Random(seed).randint(1, self.options.numbers), self.options.guesses
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Compare the last whole number in the response with the one to be found."""
        self.left -= 1
        numbers = re.findall(r"\d+", action.response)
        right, over = bool(numbers) and int(numbers[-1][:9]) == self.number, self.left == 0
        if right or over:
            return Observation(reward=float(right), done=True, solved=right)
        if not numbers:
            return Observation([user("Name a number.")], reward=0.0)
        return Observation([user("higher" if int(numbers[-1][:9]) < self.number else "lower")], reward=0.0)
