"""The length penalty against the paper's shape."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from verify.reward import length_penalty


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (0, 0.0),
        (31_999, 0.0),
        (32_000, 0.0),
        (34_000, -0.025),
        (36_000, -0.05),
        (40_000, -0.1),
        (40_001, -0.1),
        (10**9, -0.1),
    ],
)
def test_hand_computed_values(tokens: int, penalty: float) -> None:
    assert length_penalty(tokens, 40_000, 8_000) == pytest.approx(penalty, abs=1e-12)


def test_weight_scales_it() -> None:
    assert length_penalty(36_000, 40_000, 8_000, weight=1.0) == pytest.approx(-0.5)
    assert length_penalty(50_000, 40_000, 8_000, weight=0.0) == 0.0


def test_never_rises_with_length() -> None:
    values = [length_penalty(tokens, 100, 32) for tokens in range(140)]
    assert all(later <= earlier for earlier, later in zip(values, values[1:], strict=False))


@pytest.mark.parametrize(("longest", "cache"), [(0, 32), (16, 32), (100, 0)])
def test_impossible_limits_name_the_settings(longest: int, cache: int) -> None:
    with pytest.raises(ConfigError, match=r"reward\.overlong_buffer.*reward\.length_max"):
        length_penalty(10, longest, cache)
