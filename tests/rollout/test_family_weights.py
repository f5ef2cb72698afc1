"""New weights put into vLLM's own model of each family (family_weights.py): each parameter then holds what vLLM itself
loads from our export of these weights, and what is read back is what the trainers sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import SENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """family -> what went wrong."""
    folder, script = tmp_path_factory.mktemp("families"), Path(__file__).with_name("family_weights.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    subprocess.run([sys.executable, "-W", "ignore", str(script), str(folder), *SENT], env=environment, check=True)
    told: dict[str, list[str]] = json.loads((folder / "found.json").read_text())
    return told


@pytest.mark.parametrize("family", SENT)
def test_updated_weights_are_those_that_vllm_loads(found: dict[str, list[str]], family: str) -> None:
    assert not found[family], "\n".join(found[family])
