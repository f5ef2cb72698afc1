"""Starts a process for each experiment tracker of the setting `trackers` (dashboard/track.py, docs/trackers.md).

It reads the run folder as anybody may. Nothing here or in the run waits for it before the run has ended.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution

from shared.config import Config
from shared.errors import install_command
from shared.launch.deaths import how

END_S = 60
"""seconds that trackers have to write or upload the rest once the run has ended"""


def not_installed(config: Config) -> Iterator[str]:
    """Yield a line for each tracker that is named and whose package is missing."""
    for name in config.trackers:
        try:
            distribution(name)
        except PackageNotFoundError:
            yield f'trackers names "{name}", but its package is not installed: {install_command(name)}'


def start_trackers(config: Config, warn: Callable[[str], None]) -> None:
    """Start them for a run whose lock this process has. At its end, this process waits END_S for them, and kills those
    that go on. warn: shows a line to the user, from a thread."""
    folder, watchers = config.run_dir / "trackers", []
    for name in dict.fromkeys(config.trackers):
        command = [sys.executable, "-m", "dashboard.track", str(config.run_dir), name, f"--within={END_S}"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{name}.log").open("wb") as log:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            warn(f"tracker {name} did not start ({error}); metrics.jsonl has everything")
            continue
        again = f"`python -m dashboard.track {config.run_dir} {name}` sends what it lacks"

        def watch(child: subprocess.Popen[bytes] = child, name: str = name, again: str = again) -> None:
            if code := child.wait():
                end = how(code) if code < 0 else f"has ended with exit code {code}"
                warn(f"tracker {name} {end}: trackers/{name}.log of the run says more, and {again}")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        watchers.append((child, watcher))
    if watchers:
        atexit.register(_wait, watchers)


def _wait(watchers: list[tuple[subprocess.Popen[bytes], threading.Thread]]) -> None:
    """Wait for END_S, for all of them together, until they have ended."""
    until = time.monotonic() + END_S
    for child, watcher in watchers:
        watcher.join(max(until - time.monotonic(), 0.0))
        child.kill()
        watcher.join(1.0)
