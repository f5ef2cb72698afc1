"""Memory of a process and all that it started: proportional set size, so that shared pages count once.

    with Watch(lambda: [tree_bytes(process.pid)]) as watch:
        ...
    watch.peaks

PSS is a process's own pages, and of pages that n processes map a share of 1/n: their sum over all processes is what
they take together. A peak is of samples: what lasts shorter than the interval may be missed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Self

import psutil


def tree_bytes(pid: int) -> int:
    """Return the PSS of a process and all its descendants; those that end meanwhile count nothing."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


class Watch:
    """Samples sizes in a thread, and keeps the largest of each."""

    def __init__(self, sizes: Callable[[], Sequence[int]], interval_s: float = 1.0):
        self.sizes, self.interval_s, self.peaks = sizes, interval_s, list(sizes())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(self.interval_s):
            self.peaks = list(map(max, self.peaks, self.sizes()))
