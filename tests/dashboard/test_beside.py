"""The dashboard that a launch opens: its link, and its end with what opened it (test_launch.py: a whole launch)."""

from __future__ import annotations

import subprocess
import sys
import time
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


def opened(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that opened a dashboard, and the line that it showed."""
    command = [sys.executable, "-c", OPENER, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


def test_it_ends_with_the_process_that_opened_it(tmp_path: Path) -> None:
    write_foreign(tmp_path / "old")
    process, line = opened(tmp_path)
    assert "dashboard: " in line
    link = Link(line)
    found = httpx.get(f"{link.url}/api/runs", headers=link.headers, timeout=60)
    assert found.json()["runs"][0]["name"] == "old"
    process.kill()
    process.communicate()
    end = time.monotonic() + 120
    with pytest.raises(httpx.TransportError):
        while time.monotonic() < end:
            httpx.get(f"{link.url}/api/runs", timeout=60)
            time.sleep(0.1)


def test_one_that_does_not_start_is_a_warning(tmp_path: Path) -> None:
    process, line = opened(tmp_path / "none")
    process.kill()
    process.communicate()
    assert "the dashboard did not start" in line


def test_the_option_is_no_setting() -> None:
    settings = str(ROOT / "configs/quickstart.toml")
    assert load(settings, ["--dashboard", "--steps=7"]) == load(settings, ["--steps=7"])
