"""Servers of scripted players."""

from __future__ import annotations

from tests.evaluation.conftest import plain as plain
