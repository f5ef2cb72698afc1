"""Opens the dashboard with a launch (`--dashboard`): a child that shows the run folders and ends with the controller.

It is never in the way of a run: nobody waits for it, and one that does not start is a warning.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

from shared.errors import command_of
from shared.progress import Progress

START_S = 90.0
"""in which it must say where it is"""


def open_beside(runs_dir: Path, progress: Progress) -> None:
    """Start the dashboard of a folder of runs from the main thread, with which it ends; show its link."""
    command = [sys.executable, "-m", "dashboard", str(runs_dir), f"--with-parent={os.getpid()}"]
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        progress.warning(f"the dashboard did not start: {error}")
        return
    threading.Thread(target=_tell, args=(child, progress), daemon=True).start()


def _tell(child: subprocess.Popen[bytes], progress: Progress) -> None:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], START_S)
    if ready and (address := child.stdout.readline().decode().strip()):
        progress.note(f"dashboard: {address}")
    else:
        progress.warning(
            f"the dashboard did not start; `{command_of('dashboard')}` with the folder of the runs says why"
        )
