"""What is written is on the disk: the rename that follows never points to data that a crash can lose.

What it does not: write (callers write beside the final name and rename). Who calls this: hf, checkpoint, shards.
"""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Return when the content of the file, or the entries of the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
