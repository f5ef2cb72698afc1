"""Deadlines follow what waits took, and never exceed the setting."""

from __future__ import annotations

import pytest

from shared.launch.adaptive_deadline import AdaptiveDeadline


@pytest.mark.parametrize(
    ("setting_s", "took_s", "expected_s"),
    [
        (3600, [], 3600),  # the first: all of the setting
        (3600, [2.0, 1.0], 360),  # a tenth of the setting
        (3600, [50.0, 1.0], 500),  # ten times the longest
        (3600, [1000.0], 3600),
        (900, [0.1], 120),  # a busy machine
        (20, [0.1], 20),
    ],
)
def test_a_deadline_is_ten_times_the_longest_so_far_within_bounds(
    setting_s: float, took_s: list[float], expected_s: float
) -> None:
    patience = AdaptiveDeadline()
    for seconds in took_s:
        patience.took("Accumulate", seconds)
    assert patience("Accumulate", setting_s) == expected_s
    assert patience("Publish", setting_s) == setting_s, "each kind of its own"
