"""The dashboard that a launch opens: its link, and its end with what opened it (test_acceptance.py: a whole launch)."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.dashboard.conftest import ROOT, Link
from tests.dashboard.run_folders import write_foreign
from trainer.settings import load

pytestmark = pytest.mark.slow
OPENER = """import sys, time
from pathlib import Path
from shared.progress import Progress
from trainer.dashboard import open_beside
open_beside(Path(sys.argv[1]), Progress())
time.sleep(120)
"""


@contextmanager
def opened(folder: Path) -> Iterator[str]:
    """The line that a process shows that opens a dashboard; the process is killed."""
    command = [sys.executable, "-c", OPENER, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def test_it_ends_with_the_process_that_opened_it(tmp_path):
    write_foreign(tmp_path / "old")
    with opened(tmp_path) as line:
        assert "dashboard: " in line
        link = Link(line)
        runs = httpx.get(f"{link.url}/api/runs", headers=link.headers, timeout=60).json()["runs"]
        assert runs[0]["name"] == "old"
    with pytest.raises(httpx.TransportError):
        while True:
            httpx.get(f"{link.url}/api/runs", timeout=60)
            time.sleep(0.1)


def test_one_that_does_not_start_is_a_warning(tmp_path):
    with opened(tmp_path / "none") as line:
        assert "the dashboard did not start" in line


def test_the_option_is_no_setting():
    settings = str(ROOT / "configs/quickstart.toml")
    assert load(settings, ["--dashboard", "--steps=7"]) == load(settings, ["--steps=7"])
