"""New weights put into vLLM's own model of each family (family_weights.py): each parameter then holds what vLLM itself
loads from our export of these weights, and what is read back is what the trainers sent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import SENT, VISION_LANGUAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FEW = ["qwen3 moe", "gemma4"]
"""a mixture, whose experts lie in the order of a kernel, and layers of several shapes; vLLM takes ten seconds to look
at an architecture for the first time"""


def assert_same(folder: Path, families: list[str]) -> None:
    """Run the script on these families."""
    script = Path(__file__).with_name("family_weights.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    subprocess.run([sys.executable, "-W", "ignore", str(script), str(folder), *families], env=environment, check=True)
    found = json.loads((folder / "found.json").read_text())
    assert found == {family: [] for family in families}, "\n".join(sum(found.values(), []))


def test_updated_weights_are_those_that_vllm_loads(tmp_path: Path) -> None:
    assert_same(tmp_path, FEW)


@pytest.mark.soak
@pytest.mark.parametrize("family", [family for family in SENT if family not in FEW])
def test_updated_weights_of_every_family(tmp_path: Path, family: str) -> None:
    assert_same(tmp_path, [family])


@pytest.mark.soak
@pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="vLLM needs torchvision for these")
@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_updated_weights_of_text_parts(tmp_path: Path, family: str) -> None:
    assert_same(tmp_path, [family])
