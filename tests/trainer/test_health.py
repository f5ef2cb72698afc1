"""A run stops when training has plainly died, and for nothing that only looks like it."""

import inspect
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import pytest

from shared.config import Config
from shared.errors import TrainingDied
from shared.types import MicroBatch
from tests.tables import read_table
from tests.trainer.sequences import make_sequence
from trainer.health import check_alive, clipped_rounding, doubt
from trainer.step.batching import BatchPlan, Learned
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped

VOCABULARY = 1000


def learned(
    grad_norm: float = 1.0, advantage: float = 0.5, difference: float = 0.0, surprise: float = 0.4, clipped: float = 0
) -> Learned:
    """A step on one sequence of ten completion tokens."""
    sequence = make_sequence([1] * 12, 2, [-surprise] * 10, advantage, 0.1)
    counts = {"tokens": 10.0, "compared": 10.0, "clipped_low": float(clipped), "clipped_high": 0.0, "masked": 0.0}
    sums = StepSums(counts | {"abs_logprob_difference": 10 * difference}, {}, 0.1, 12)
    plan = BatchPlan([[MicroBatch([sequence]), MicroBatch([])]], 12, 12, 0.0, 0.0)
    return Learned(plan, sums, Stepped(grad_norm, 0.1))


def check(age: int = 0, **given: Any) -> None:
    names = inspect.signature(learned).parameters
    step = learned(**{name: given.pop(name) for name in names if name in given})
    check_alive(step, Config.model_validate(given), VOCABULARY, 7, age)


@pytest.mark.parametrize("case", read_table("trainer/cases", of="health"), ids=itemgetter("name"))
def test_training_that_has_plainly_died_stops_the_run_and_nothing_else_does(case):
    dies = pytest.raises(TrainingDied, match=case["dies"]) if "dies" in case else nullcontext()
    with dies:
        check(**case["step"])


def test_a_policy_that_moves_far_is_warned_of():
    assert not doubt(0.1, 6) and "step 6: logprob_difference/mean is 1.4 nats" in doubt(1.38, 6)


@pytest.mark.parametrize(
    ("clipped", "age", "minibatches", "warns"),
    [(3.5, 0, 1, True), (0.2, 0, 1, True), (0.1, 0, 1, False), (3.5, 1, 1, False), (3.5, 0, 4, False)],
)
def test_bounds_that_act_on_tokens_of_the_very_weights_act_on_rounding(clipped, age, minibatches, warns):
    config = Config.model_validate({"optimiser": {"minibatches": minibatches}, "objective": {"name": "gspo"}})
    line = clipped_rounding(learned(clipped=clipped), config, age)
    assert bool(line) == warns
    assert not warns or f"{clipped / 10:.0%} of the tokens" in line and 'ratio_reference.kind = "old"' in line
