"""The records of a game of oversight: questions, passages, speeches, verdicts, and what players are asked and say."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, TypeVar

import msgspec

Result = TypeVar("Result")
Role = Literal["agent", "judge"]
Purpose = Literal["verdict", "speech", "choice", "question"]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question with two answers, of which one is right."""

    id: str
    text: str
    answers: tuple[str, str]
    right: int | None
    """the right answer, 1 or 2; None if nobody knows it"""
    article: str = ""
    """what agents may read and the judge may not; "" for a closed question"""

    def swapped(self) -> Question:
        """Return the same question with its answers in the other order."""
        right = None if self.right is None else 3 - self.right
        return msgspec.structs.replace(self, answers=self.answers[::-1], right=right)


class Passage(msgspec.Struct, frozen=True):
    """A quotation in a speech."""

    text: str
    verified: bool
    """whether the article holds it word for word"""


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a debate or a consultancy."""

    speaker: str
    answer: int
    """the answer that it argues for, 1 or 2; 0 for a question of the judge"""
    round: int
    """counted from 1"""
    argument: str
    """what opponent and judge see, with marked passages"""
    thinking: str = ""
    """what nobody else sees"""
    passages: tuple[Passage, ...] = ()
    cut: bool = False
    """whether it was longer than allowed"""


class JudgeVerdict(msgspec.Struct, frozen=True):
    """What a judge decided."""

    answer: int | None
    """1 or 2; None if the reply names none"""
    probability: float | None = None
    """of answer 1, from the log-probs of the reply where the endpoint reports them"""
    reply: str = ""

    def score(self, answer: int | None) -> float:
        """Return 1 if the verdict is `answer`, 0 if it is the other one, and 0.5, a coin's share, if it is none."""
        return 0.5 if self.answer is None else float(self.answer == answer)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a player."""

    role: Role
    purpose: Purpose
    messages: list[dict[str, str]]
    answer: int = 0
    """the answer that the speaker argues for, 0 for none"""
    round: int = 0
    samples: int = 1
    greedy: bool = True
    """whether the most likely reply is wanted, not a sampled one"""


class Said(msgspec.Struct, frozen=True):
    """One reply of a player."""

    text: str
    probability: float | None = None
    """of answer 1 against answer 2, where the reply names one and log-probs are known"""
    tokens: int = 0
    """sampled tokens"""
    prompt_tokens: int = 0


Play = Generator[list[Ask], list[list[Said]], Result]
"""A protocol: yields requests that may be made at the same time, receives [requests][samples] replies, and returns."""
