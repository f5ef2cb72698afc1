"""Memory of a process and all that it started: proportional set size, so that shared pages count once.

    with Watch(process.pid) as watch:
        ...
    watch.peak_bytes

PSS is a process's own pages, and of pages that n processes map a share of 1/n: their sum over all processes is what
they take together. The peak is of samples: what lasts shorter than the interval may be missed.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import psutil

INTERVAL_S = 1.0


def pss_bytes(text: str) -> int:
    """From the content of /proc/PID/smaps_rollup. Raises ValueError without a Pss line."""
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise ValueError("smaps_rollup has no line Pss")


def tree_bytes(pid: int) -> int:
    """PSS of a process and all its descendants; those that end meanwhile count nothing."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(OSError, ValueError):
                total += pss_bytes(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
    return total


class Watch:
    """Samples in a thread until its end."""

    def __init__(self, pid: int, interval_s: float = INTERVAL_S):
        self.pid, self.interval_s = pid, interval_s
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.is_set():
            self.peak_bytes = max(self.peak_bytes, tree_bytes(self.pid))
            self._ended.wait(self.interval_s)
