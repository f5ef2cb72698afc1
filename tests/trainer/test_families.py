"""Families of transformers on FSDP2 ranks: one, two and three give the same gradients (family_scene.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.model.adapter_folder import merged_weights
from tests.families import FAMILIES
from tests.trainer.family_scene import ADAPTERS, EXPERTS, WORLDS

pytestmark = pytest.mark.slow
FEW = ["qwen3 moe", "gemma4", "qwen3 moe" + EXPERTS + ADAPTERS]
"""a mixture, whose experts are shared out, and layers of several shapes"""
ADAPTED = [
    family + ADAPTERS
    for family in ("qwen3", "gemma3", "gemma4", "olmo3", "phi4", "glm4", "mixtral", "qwen3 moe", "mixtral" + EXPERTS)
]
WITHIN = 2e-5
"""of a gradient's norm: ranks get other micro-batches than one rank has, and sum in another order"""


def assert_ranks_agree(folder: Path, families: list[str]) -> None:
    """Run the scene, and compare each gradient with that of one rank."""
    script = Path(__file__).with_name("family_scene.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    subprocess.run([sys.executable, str(script), str(folder), *families], env=environment, check=True)
    for family in families:
        expected = load_file(folder / f"{family}-1.safetensors")
        assert max(float(one.abs().max()) for one in expected.values()) > 1e-3
        for world in WORLDS[1:]:
            found = load_file(folder / f"{family}-{world}.safetensors")
            assert found.keys() == expected.keys()
            assert all(("lora_" in name) == family.endswith(ADAPTERS) for name in found)
            for name, gradient in found.items():
                gap = (gradient.double() - expected[name].double()).norm()
                assert gap <= WITHIN * expected[name].double().norm(), f"{family} on {world} ranks: {name}"


@pytest.mark.timeout(400)
def test_gradients_do_not_depend_on_ranks(tmp_path: Path) -> None:
    """Nor do the merged weights that ranks send where experts have adapters: they are those of the run's exports."""
    sent: dict[tuple[int, str], int] = {}
    assert_ranks_agree(tmp_path, FEW)
    for world in WORLDS:
        matrices = load_file(tmp_path / f"matrices-{world}.safetensors")
        merged = dict(merged_weights(tmp_path / FEW[-1], matrices, 32 / 3))
        for rank in range(world):
            for key, rows in load_file(tmp_path / f"sent-{rank}-{world}.safetensors").items():
                name, first = key.split()
                expected = merged[name][int(first) : int(first) + len(rows)]
                torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)
                sent[world, name] = sent.get((world, name), 0) + len(rows)
        assert {name for one, name in sent if one == world} == merged.keys()
        assert all(sent[world, name] == len(whole) for name, whole in merged.items())


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_gradients_of_every_family_do_not_depend_on_ranks(tmp_path: Path) -> None:
    assert_ranks_agree(tmp_path, [*FAMILIES, *ADAPTED])
