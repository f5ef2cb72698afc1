"""The step times of the quickstart, synchronous and ahead (the launches themselves run in the benchmark)."""

import pytest

from benchmarks.speed.ahead import table
from benchmarks.speed.end_to_end import StepTime


def test_a_lead_is_told_beside_the_median_of_the_synchronous_launches() -> None:
    def steps(*seconds: float) -> list[StepTime]:
        return [StepTime(one, 100) for one in seconds]

    rows = table({0: [steps(2, 4), steps(4, 4), steps(5, 5)], 2: [steps(1, 3), steps(3, 3)]})
    assert [(row.name, row.values) for row in rows] == [
        ("quickstart, synchronous: step", [3, 4, 5]),
        ("quickstart, async level 2: step", [2, 3]),
        ("quickstart, async level 2: step time", pytest.approx([0.5, 0.75])),
    ]
