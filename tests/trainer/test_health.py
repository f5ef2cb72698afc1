"""A run stops when training has plainly died, and for nothing that only looks like it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shared.config import Config
from shared.errors import TrainingDied
from shared.types import MicroBatch
from tests.trainer.sequences import make_sequence
from trainer.health import check_alive
from trainer.step.batching import BatchPlan, Learned
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped

VOCABULARY = 1000
GUESS = math.log(VOCABULARY)


def check(
    grad_norm: float = 1.0, advantage: float = 0.5, difference: float = 0.0, surprise: float = 0.4, age: int = 0,
    clipped: int = 0, **settings: Any,
) -> None:  # fmt: skip
    """One sequence of ten completion tokens, as a step found it."""
    sequence = make_sequence([1] * 12, 2, [-surprise] * 10, advantage, 0.1)
    counts = {"tokens": 10.0, "compared": 10.0, "clipped_low": float(clipped), "clipped_high": 0.0, "masked": 0.0}
    sums = StepSums(counts | {"abs_logprob_difference": 10 * difference}, {}, 0.1, 12)
    plan = BatchPlan([[MicroBatch([sequence]), MicroBatch([])]], 12, 12, 0.0, 0.0)
    check_alive(Learned(plan, sums, Stepped(grad_norm, 0.1)), Config.model_validate(settings), VOCABULARY, 7, age)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"grad_norm": 0.0}, r"step 7: grad_norm is exactly 0, though 10 of 10 tokens .*learning_rate"),
        ({"grad_norm": 0.0, "clipped": 7}, "3 of 10 tokens"),
        # the very weights that are trained differ by rounding only
        *[({"difference": 1.1 * rounding, "model": {"dtype": dtype}}, "the very weights that are trained")
          for dtype, rounding in (("float32", 1e-3), ("float16", 0.5), ("bfloat16", 2.5))],
        ({"difference": GUESS - 0.4, "age": 2}, r"step 7: .*2 versions ago are no likelier than a blind guess"),
    ],
)  # fmt: skip
def test_training_that_has_died_stops_the_run(step: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingDied, match=message):
        check(**step)


@pytest.mark.parametrize(
    "step",
    [
        {"grad_norm": 0.0, "advantage": 0.0},
        {"grad_norm": 0.0, "clipped": 10},
        {"grad_norm": 1e-30},
        # equal rewards balance there: their advantage is the reward
        *[{"grad_norm": 0.0, "objective": {"name": name}} for name in ("agro", "spo", "dro", "jepo")],
        *[{"difference": share * rounding, "model": {"dtype": dtype}, **older}
          for dtype, rounding in (("float32", 1e-3), ("float16", 0.5), ("bfloat16", 2.5))
          for share, older in ((0.9, {}), (1.1, {"age": 1}), (1.1, {"optimiser": {"minibatches": 2}}))],
        {"difference": 3.6, "surprise": 2.5, "age": 4},  # a run that learns far too fast
        {"difference": 0.2, "surprise": GUESS, "age": 2},  # one that never was better than a guess
    ],
    ids=str,
)  # fmt: skip
def test_what_only_looks_like_it_does_not(step: dict[str, Any]) -> None:
    check(**step)
