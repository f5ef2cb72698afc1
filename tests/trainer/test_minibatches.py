"""Several optimiser steps on one batch: whole groups, and the numbers of all steps as one."""

from __future__ import annotations

import pytest

from shared.types import Group, MicroBatch, Problem, Prompt
from trainer.step.batching import BatchPlan, Learned, combine, split
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped


def group(index: int) -> Group:
    return Group(Prompt(index, Problem("p", "?", "1"), [1]), [], [])


def test_minibatches_hold_whole_groups_in_order():
    groups = [group(index) for index in range(6)]
    parts = split(groups, 3)
    assert [[g.prompt.index for g in part] for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert split(groups, 1) == [groups]
    with pytest.raises(ValueError, match="6 groups cannot be cut into 4"):
        split(groups, 4)


def test_numbers_of_two_steps_are_added_or_averaged():
    def step(loss: float, tokens: float, ratio: float, norm: float) -> Learned:
        plan = BatchPlan([[MicroBatch([])], [MicroBatch([])]], tokens=int(tokens), stored_tokens=5, padding_share=0.2,
                    imbalance=0.0)  # fmt: skip
        sums = {"loss": loss, "tokens": tokens, "entropy": 2 * tokens}
        return Learned(plan, StepSums(sums, {"ratio": ratio}, 1.5, int(tokens)), Stepped(norm, 0.5))

    both = combine([step(0.2, 10, 1.1, 1.0), step(0.4, 30, 1.4, 3.0)])
    assert both.sums.sums == {"loss": pytest.approx(0.3), "tokens": 40, "entropy": 80}
    assert both.sums.maxima == {"ratio": 1.4} and both.sums.seconds == 3.0
    assert both.stepped == Stepped(2.0, 1.0)
    assert [len(share) for share in both.plan.micro_batches] == [2, 2] and both.plan.tokens == 40
    one = step(0.2, 10, 1.1, 1.0)
    assert combine([one]) is one
