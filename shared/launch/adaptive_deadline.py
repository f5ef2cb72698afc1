"""Derives the deadline of a wait from how long such waits took: a hang is noticed after minutes, not hours.

    deadline = min(setting, max(LEAST_S, setting / 10, OFTEN * longest so far))

The first wait of a kind may last as long as the setting.
"""

from __future__ import annotations

OFTEN = 10
LEAST_S = 120.0
"""least deadline: time for a busy disk, a shared processor, a long completion"""


class AdaptiveDeadline:
    """Keeps the longest wait of each kind. Example: `patience("Call", 3600)`, and then `patience.took("Call", 4.2)`."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def __call__(self, kind: str, setting_s: float) -> float:
        """Return the deadline in seconds of a wait of this kind."""
        longest_s = self.longest.get(kind)
        return setting_s if longest_s is None else min(setting_s, max(LEAST_S, setting_s / 10, OFTEN * longest_s))

    def took(self, kind: str, seconds: float) -> None:
        """Record that a wait of this kind succeeded after `seconds`."""
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)
