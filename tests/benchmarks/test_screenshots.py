"""The pictures of the pages are drawn by their command."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.browser import chromium

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_picture_of_the_chat_page_is_drawn(tmp_path: Path) -> None:
    with chromium():
        pass  # skips the test where there is none
    options = ["--quick", f"--out={tmp_path}", f"--run={tmp_path / 'none'}"]
    command = [sys.executable, "-m", "benchmarks", "screenshots", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pictures = sorted((tmp_path / "quick").iterdir())
    assert [one.name for one in pictures] == ["chat_dark.png", "chat_desktop.png", "chat_narrow.png"]
    assert all(one.read_bytes().startswith(b"\x89PNG") and one.stat().st_size > 20_000 for one in pictures)
