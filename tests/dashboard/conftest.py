"""A dashboard as users start it, and runs for it to show."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


class Link:
    """The link that a dashboard or a launch printed, as a visitor wants it."""

    def __init__(self, printed: str):
        [(self.url, self.token)] = re.findall(r"(http://127\.0\.0\.1:\d+)/\?token=([\w-]{32})$", printed.strip())
        self.headers = {"Authorization": f"Bearer {self.token}"}


class Dashboard:
    """A process of `python -m dashboard`."""

    def __init__(self, folder: Path, *options: str):
        command = [sys.executable, "-m", "dashboard", str(folder), "--port=0", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.link = Link(self.process.stdout.readline())
        self.url, self.token = self.link.url, self.link.token

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="module")
def dashboard():
    started: list[Dashboard] = []

    def start(folder: Path, *options: str) -> Dashboard:
        started.append(Dashboard(folder, *options))
        return started[-1]

    yield start
    for one in started:
        one.close()
