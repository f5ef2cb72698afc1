"""Families of transformers on FSDP2 ranks: one and three give the same gradients (rank_scene.py)."""

from collections import Counter

import pytest
import torch

from shared.model.adapter_folder import merged_weights
from tests.families import FAMILIES
from tests.process import run_ranks
from tests.trainer.conftest import Ranks
from tests.trainer.rank_scene import ADAPTERS, EXPERTS, FamilyScene

FEW = ["qwen3 moe", "gemma4", "qwen3 moe" + EXPERTS + ADAPTERS]
"""a mixture, whose experts are shared out, and layers of several shapes"""
ADAPTED = [
    family + ADAPTERS
    for family in ("qwen3", "gemma3", "gemma4", "olmo3", "phi4", "glm4", "mixtral", "qwen3 moe", "mixtral" + EXPERTS)
]


@pytest.mark.soak  # in make test: our own decoder, in test_fsdp.py
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("families", [FEW, [*FAMILIES, *ADAPTED]], ids=["few", "all"])
def test_gradients_do_not_depend_on_ranks(families, tmp_path):
    """Nor do the merged weights that ranks send where experts have adapters: they are those of the run's exports."""
    run_ranks(tmp_path, *families)
    worlds = {world: Ranks(tmp_path, "families").of(world) for row in FamilyScene.worlds for world in row}
    for family in families:
        single, three = (ranks[0][family] for ranks in worlds.values())
        assert max(float(gradient.abs().max()) for gradient in single.values()) > 1e-3 and three.keys() == single.keys()
        for name, gradient in three.items():
            assert ("lora_" in name) == family.endswith(ADAPTERS)
            gap, size = (gradient.double() - single[name].double()).norm(), single[name].double().norm()
            # ranks get other micro-batches than one rank has, and sum in another order
            assert gap <= 2e-5 * size, f"{family}: {name}"
    adapted = families[-1]
    for ranks in worlds.values():
        merged, rows = dict(merged_weights(tmp_path / adapted, ranks[0]["matrices"], 32 / 3)), Counter[str]()
        for rank in ranks:
            for name, first, values in rank["sent"]:
                torch.testing.assert_close(values, merged[name][first : first + len(values)], rtol=1e-6, atol=1e-7)
                rows[name] += len(values)
        assert rows == {name: len(whole) for name, whole in merged.items()}
