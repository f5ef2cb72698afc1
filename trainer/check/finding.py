"""One line of `python -m trainer check`."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["OK", "WARN", "FAIL"]


class CheckFinding(NamedTuple):
    """One line of the report."""

    name: str
    status: Status
    text: str
    step: str = ""
    """the next step for the user; "" for an OK"""

    @property
    def line(self) -> str:
        """For people: one line, and the next step on a second."""
        return f"{self.status:5} {self.name:13} {self.text}" + (f"\n{'':19} next: {self.step}" if self.step else "")
