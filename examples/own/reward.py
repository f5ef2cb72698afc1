"""A reward of one's own: reasoning that is short."""

from __future__ import annotations

from verify.plugins import Case, reward


@reward("brief")
def brief(case: Case) -> float:
    """1 for reasoning of at most 60 characters, 0 from 120 on."""
    return min(1.0, max(0.0, 2 - len(case.reasoning) / 60))
