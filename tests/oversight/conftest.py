"""Servers of scripted players."""

from tests.evaluation.conftest import plain as plain
