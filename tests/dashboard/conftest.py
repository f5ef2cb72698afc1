"""A dashboard as users start it, and runs for it to show."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


class Dashboard:
    """A process of `python -m dashboard`; `url` as it printed it."""

    def __init__(self, folder: Path, *options: str):
        command = [sys.executable, "-m", "dashboard", str(folder), "--port=0", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip().removesuffix("/")
        """without a stroke at its end"""
        assert self.url.startswith("http://127.0.0.1:")

    @property
    def resident_bytes(self) -> int:
        """Its memory now."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def close(self) -> None:
        """End it as Ctrl-C does."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Callable[..., Dashboard]]:
    """Starts dashboards, which end with the module's tests."""
    started: list[Dashboard] = []

    def start(folder: Path, *options: str) -> Dashboard:
        started.append(Dashboard(folder, *options))
        return started[-1]

    yield start
    for one in started:
        one.close()
