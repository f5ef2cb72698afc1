"""How good a judge is, measured while it judges: on problems whose true answer it is not shown.

accuracy        share of its decisions that the verifier confirms: a score above 1/2 for a right answer, the right
                one of a right and a wrong response
position bias   share of the first places that it chose, less 1/2: each pair is asked in both orders, so that a fair
                judge has 0, one that always takes the first 1/2
agreement       share of equal decisions: with the other judges about a response, with itself about both orders
tokens          of a verdict on two answers: prompt and reply of the judge
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

from shared.errors import RunError
from shared.judge_settings import Judge

KEPT = 400
LEAST = 100
"""decisions before which no judge is called bad"""


class Measurement:
    """The last decisions of one judge."""

    def __init__(self, name: str, judge: Judge):
        self.name, self.judge = name, judge
        self.right: deque[float] = deque(maxlen=KEPT)
        """1 for a decision that the verifier confirms"""
        self.first: deque[float] = deque(maxlen=KEPT)
        """1 where the response that stood first was chosen"""
        self.agreed: deque[float] = deque(maxlen=KEPT)
        """1 for equal decisions"""
        self.tokens: deque[float] = deque(maxlen=KEPT)
        """that a judge of debates or answers read and sampled for a verdict"""

    @property
    def metrics(self) -> dict[str, float]:
        """What is known, by the name of its metric."""
        found = {"accuracy": self.right, "position_bias": self.first, "agreement": self.agreed, "tokens": self.tokens}
        row = {f"judge/{self.name}/{name}": fmean(values) for name, values in found.items() if values}
        if self.first:
            row[f"judge/{self.name}/position_bias"] -= 0.5
        return row

    def check(self) -> None:
        """Raise RunError for a judge that is right too seldom, or prefers a place too much."""
        row, where = self.metrics, f"reward.judges.{self.name}"
        accuracy, bias = row.get(f"judge/{self.name}/accuracy", 1.0), row.get(f"judge/{self.name}/position_bias", 0.0)
        if len(self.right) >= LEAST and accuracy < self.judge.least_accuracy:
            raise RunError(
                f"the judge {self.name} is right on {accuracy:.1%} of the last {len(self.right)} answers that are "
                f"known but hidden from it; asked for: {where}.least_accuracy = {self.judge.least_accuracy:g}. Take a "
                "better model, improve its instructions, or lower that"
            )
        if len(self.first) >= LEAST and abs(bias) > self.judge.most_bias:
            raise RunError(
                f"the judge {self.name} chose the first response in {bias + 0.5:.1%} of the last {len(self.first)} "
                f"questions, each asked in both orders; allowed: {where}.most_bias = {self.judge.most_bias:g}. Take a "
                "better model, or raise that"
            )
