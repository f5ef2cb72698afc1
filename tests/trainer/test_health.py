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


def check(
    grad_norm: float = 1.0, advantage: float = 0.5, difference: float = 0.0, surprise: float = 0.4, age: int = 0,
    clipped: int = 0, **settings: Any,
) -> None:  # fmt: skip
    """One sequence of ten completion tokens, as a step found it."""
    sequence = make_sequence([1] * 12, 2, [-surprise] * 10, advantage, 0.1)
    sums = {
        "tokens": 10.0, "compared": 10.0, "clipped_low": float(clipped), "clipped_high": 0.0, "masked": 0.0,
        "abs_logprob_difference": 10 * difference,
    }  # fmt: skip
    learned = Learned(
        BatchPlan([[MicroBatch([sequence]), MicroBatch([])]], 12, 12, 0.0, 0.0), StepSums(sums, {}, 0.1, 12),
        Stepped(grad_norm, 0.1),
    )  # fmt: skip
    check_alive(learned, Config.model_validate(settings), VOCABULARY, 7, age)


def test_a_gradient_of_exactly_nothing_with_a_signal_stops_the_run() -> None:
    with pytest.raises(TrainingDied, match=r"step 7: grad_norm is exactly 0, though 10 of 10 tokens .*learning_rate"):
        check(grad_norm=0.0)
    with pytest.raises(TrainingDied, match="3 of 10 tokens"):
        check(grad_norm=0.0, clipped=7)


def test_no_gradient_without_a_signal_is_honest() -> None:
    check(grad_norm=0.0, advantage=0.0)
    check(grad_norm=0.0, clipped=10)
    check(grad_norm=1e-30)
    for name in ("agro", "spo", "dro", "jepo"):
        check(grad_norm=0.0, objective={"name": name})  # equal rewards balance there: their advantage is the reward


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-3), ("float16", 0.5), ("bfloat16", 2.5)])
def test_the_same_weights_may_differ_by_rounding_only(dtype: str, rounding: float) -> None:
    check(difference=rounding * 0.9, model={"dtype": dtype})
    with pytest.raises(TrainingDied, match="the very weights that are trained"):
        check(difference=rounding * 1.1, model={"dtype": dtype})
    check(difference=rounding * 1.1, model={"dtype": dtype}, age=1)
    check(difference=rounding * 1.1, model={"dtype": dtype}, optimiser={"minibatches": 2})


def test_old_data_may_be_far_but_not_as_unlikely_as_by_guessing() -> None:
    guess = math.log(VOCABULARY)
    check(difference=3.6, surprise=2.5, age=4)  # a run that learns far too fast
    check(difference=0.2, surprise=guess, age=2)  # one that never was better than a guess
    with pytest.raises(TrainingDied, match=r"step 7: .*sampled 2 versions ago are no likelier than a blind guess"):
        check(difference=guess - 0.4, surprise=0.4, age=2)
