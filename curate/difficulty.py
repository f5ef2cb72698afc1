"""Stage `difficulty`: drops problems that the sampled model never solves, or solves too often.

The pass rate stays in the row, so that a run can select by it (data.pass_rate = [least, most], stages of a schedule).
Source: Magistral (2506.10910), section 4.1, which prints no thresholds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from curate.samples import is_open, read_pass_rate
from curate.stage import Command, Decision, Kept, Rejected, Show
from shared.errors import ConfigError
from shared.jsonl import Row

MOST = 0.9
NEVER, SELDOM, OFTEN, UNKNOWN = "never solved", "too seldom solved", "too often solved", "not graded"

EXPLANATION = """
input: rows with "pass_rate", as the stage sample writes it.
reasons: never solved (0), too seldom solved (below --least), too often solved (above --most), not graded (the verifier
understood none of the completions, or not the answer). Open problems ("domain": "open") pass: nobody knows.
A weak model alone throws away problems that are hard but valid: the command two-stage trains a better grader first.

example:
  python -m curate difficulty sampled.jsonl --out learnable.jsonl --most 0.9
"""


class Difficulty:
    """The stage `difficulty`: keeps problems whose pass rate lies between two thresholds."""

    name = "difficulty"
    under_way = 256

    def __init__(self, least: float = 0.0, most: float = MOST, without_samples: bool = False):
        """Raises ConfigError unless 0 <= least <= most <= 1."""
        if not 0 <= least <= most <= 1:
            raise ConfigError(f"--least = {least:g} and --most = {most:g}: must be 0 <= least <= most <= 1")
        self.least, self.most, self.without_samples = least, most, without_samples

    @property
    def settings(self) -> dict[str, Any]:
        """The thresholds, and whether samples are left out."""
        return {"least": self.least, "most": self.most, "without_samples": self.without_samples}

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Check that every row has a pass rate; open problems need none. Raises DataError."""
        for row in rows:
            if not is_open(row.fields):
                read_pass_rate(row)

    async def judge(self, index: int, row: Row) -> Decision:
        """Compare the row's pass rate with the thresholds."""
        left_out = ("samples",) if self.without_samples else ()
        kept = Kept([{name: value for name, value in row.fields.items() if name not in left_out}])
        if is_open(row.fields):
            return kept
        rate = read_pass_rate(row)
        if rate is None:
            return Rejected(UNKNOWN, "no completion could be graded")
        if rate == 0:
            return Rejected(NEVER, "pass rate 0")
        if rate < self.least:
            return Rejected(SELDOM, f"pass rate {rate:.3g} is below {self.least:g}")
        if rate > self.most:
            return Rejected(OFTEN, f"pass rate {rate:.3g} is above {self.most:g}")
        return kept

    async def close(self) -> None:
        """Do nothing; nothing was started."""


def add_thresholds(parser: argparse.ArgumentParser) -> None:
    """Add --least and --most."""
    parser.add_argument("--least", type=float, default=0.0, metavar="RATE", help="reject a lower pass rate (default 0)")
    parser.add_argument("--most", type=float, default=MOST, metavar="RATE", help=f"and a higher one (default {MOST})")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the thresholds and --without-samples."""
    add_thresholds(parser)
    parser.add_argument("--without-samples", action="store_true", help='leave "samples" out of the rows written')


COMMAND = Command(
    summary="drop problems that are never, or too often, solved",
    explanation=EXPLANATION,
    add_options=add_options,
    make=lambda options: Difficulty(options.least, options.most, options.without_samples),
)
