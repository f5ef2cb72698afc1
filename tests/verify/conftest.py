"""What several files of this room share."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from verify.code.runner import describe_isolation
from verify.code.sandbox.client import SandboxRefused
from verify.code.sandbox_pool import SandboxPool


@pytest.fixture
def open_folder():
    """A folder that every user may write."""
    with tempfile.TemporaryDirectory(prefix="open-", dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def opened(**settings: Any) -> SandboxPool:
    """One lease that is known to start. Skips where the host offers no such sandbox."""
    pool = SandboxPool(1, **settings)
    try:
        describe_isolation(pool)
    except SandboxRefused as error:
        pytest.skip(str(error))
    if pool.namespaces != settings.get("namespaces", True):
        pool.close()
        pytest.skip("this host allows no namespaces")
    return pool
