"""The process that runs SymPy on behalf of the answer checker: a `Child` (shared/child_process.py) of it.

It dies with the thread that started it, has 2 GB of address space, no core file, no file output, and nothing it prints
is seen.
"""

from __future__ import annotations

import resource

import msgspec

from shared.launch.calls import call
from shared.served import Served
from shared.types import Verdict

MAX_ADDRESS_BYTES = 2 << 30


class Reply(msgspec.Struct, array_like=True):
    """The verdict on a pair, and how much memory the process holds now."""

    verdict: Verdict
    rss_bytes: int


def limit_memory() -> None:
    """Limit the address space of this process, and let it write no files."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


class CheckerProcess(Served):
    """Compares one pair of answers after the other."""

    answer_bytes = 1 << 16
    prints = False

    @call("load SymPy", deadline=120.0)
    def begin(self) -> Reply:
        """Load what takes a second, so that no deadline counts it; the reply is to a pair of its own."""
        from verify.math.algebra import equal  # mpmath: only this process pays for it
        from verify.math.calculus import load

        self.equal = equal
        verdict = equal(r"\frac{1}{2}x+\sqrt{3}", r"\sqrt{3}+\frac{x}{2}")
        load()
        limit_memory()
        return Reply(verdict, _rss_bytes())

    @call("compare", deadline=5.0)
    def compare(self, ground_truth: str, answer: str) -> Reply:
        """Compare a pair; CRASH where SymPy raises."""
        try:
            return Reply(self.equal(ground_truth, answer), _rss_bytes())
        except Exception:  # noqa: BLE001 - SymPy raises what it likes; the checker counts it and tries once more
            return Reply(Verdict.CRASH, _rss_bytes())
