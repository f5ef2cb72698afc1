"""A sandbox pool for tests, where the host offers them."""

from __future__ import annotations

from typing import Any

import pytest

from verify.code.runner import describe_isolation
from verify.code.sandbox.client import SandboxRefused
from verify.code.sandbox_pool import SandboxPool


def opened(**settings: Any) -> SandboxPool:
    """One lease that is known to start. Skips where the host offers no such sandbox."""
    held = SandboxPool(1, **settings)
    try:
        describe_isolation(held)
    except SandboxRefused as error:
        pytest.skip(str(error))
    if held.namespaces != settings.get("namespaces", True):
        held.close()
        pytest.skip("this host allows no namespaces")
    return held
