"""How long a wait may last, from what such waits have taken so far: a hang is noticed after minutes, not hours.

    deadline = min(setting, max(LEAST_S, setting / 10, OFTEN * longest so far))

The first wait of a kind has all of the setting.
"""

from __future__ import annotations

OFTEN = 10
LEAST_S = 120.0
"""a busy disk, a shared processor, a long completion"""


class Patience:
    """Example: `deadline_s = patience("Accumulate", 3600)`, and afterwards `patience.took("Accumulate", 4.2)`."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def __call__(self, kind: str, setting_s: float) -> float:
        """Seconds."""
        longest_s = self.longest.get(kind)
        return setting_s if longest_s is None else min(setting_s, max(LEAST_S, setting_s / 10, OFTEN * longest_s))

    def took(self, kind: str, seconds: float) -> None:
        """A wait of this kind has ended well."""
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)
