"""Seats for tests, where the host offers them."""

from __future__ import annotations

from typing import Any

import pytest

from verify.code.sandbox.client import SandboxRefused
from verify.code.seats import Seats
from verify.program import isolation


def opened(**settings: Any) -> Seats:
    """One seat that is known to start. Skips where the host offers no such box."""
    held = Seats(1, **settings)
    try:
        isolation(held)
    except SandboxRefused as error:
        pytest.skip(str(error))
    if held.namespaces != settings.get("namespaces", True):
        held.close()
        pytest.skip("this host allows no namespaces")
    return held
