"""The learning rate of every step, by hand."""

import pytest

from shared.sections import Optimiser
from trainer.schedule import learning_rate, warm_and_decay


def test_learning_rate_warms_up_to_the_peak_and_decays_to_its_share() -> None:
    rates = [warm_and_decay(step, 7, 1.0, 2, 0.2) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_learning_rate_without_warm_up_or_decay_is_constant() -> None:
    settings = Optimiser(learning_rate=3e-4, warmup_steps=0, min_lr_ratio=1.0)
    assert {learning_rate(step, 5, settings) for step in range(9)} == {3e-4}


def test_a_run_shorter_than_its_warm_up_still_has_rates() -> None:
    assert [warm_and_decay(step, 2, 1.0, 5, 0.0) for step in range(2)] == pytest.approx([0.2, 0.4])
    assert warm_and_decay(0, 1, 1.0, 0, 0.5) == 1.0
    assert warm_and_decay(0, 0, 1.0, 0, 0.5) == 1.0
