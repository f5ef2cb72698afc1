"""Trainer ranks with adapters, on one and on two real ranks (see worker_scene.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.model import lora
from shared.model.adapter_folder import read_matrices, read_settings
from shared.model.cpu.processor import multiplies_bfloat16_fast
from shared.model.decoder import Decoder
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.trainer.rank_data import SHAPE
from tests.trainer.test_rank import RANKS, replies, total
from tests.trainer.worker_scene import PROBE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LOAD, BEGAN, REFERENCE, TRAIN, STEP, AGAIN, STEP_AGAIN, PUBLISH, SAVE, MERGED, ALONE, LATER, MOVE, MOVED, STOP = range(
    15
)


def adapter_parameters() -> int:
    decoder = Decoder(SHAPE)
    lora.attach(decoder, 3, 6.0)
    return sum(each.numel() for each in decoder.parameters() if each.requires_grad)


def test_only_adapters_travel_and_are_kept(scene: Any) -> None:
    count, names = adapter_parameters(), set[str]()
    for world in (1, 2):
        for rank in range(world):
            found = replies(scene, world, rank, "adapters")
            assert found[LOAD]["parameters"] == 9358 + count
            assert "rank 3, alpha 6" in found[LOAD]["description"]["adapters"]
            shard = load_file(scene.folder / f"adapters-{world}" / f"trainer-{rank}-of-{world}.safetensors")
            names |= shard.keys()
        assert sum(replies(scene, world, rank, "adapters")[PUBLISH]["bytes"] for rank in range(world)) == 4 * count
    assert len(names) == 3 * 2 * 7 * SHAPE.layers and all("lora_" in name for name in names)


def test_ranks_take_the_same_steps_and_the_reference_is_the_frozen_model(scene: Any) -> None:
    for call in (TRAIN, AGAIN, LATER, MOVED):
        for name in ("loss", "entropy", "regularisation", "reference_log_ratio"):
            one, two = (total(scene, world, "adapters", call, name) for world in (1, 2))
            assert two == pytest.approx(one, rel=1e-4, abs=1e-4), (call, name)
    one, two = (replies(scene, world, 0, "adapters")[STEP_AGAIN]["grad_norm"] for world in (1, 2))
    assert two == pytest.approx(one, rel=1e-5) and one > 0
    assert total(scene, 1, "adapters", TRAIN, "reference_log_ratio") == 0, "B is zero"
    assert abs(total(scene, 1, "adapters", LATER, "reference_log_ratio")) > 0.01
    assert total(scene, 1, "adapters", MOVED, "reference_log_ratio") == 0, "the reference is the policy now"


def test_exports_are_the_frozen_weights_with_the_adapters_added(scene: Any) -> None:
    base = load_file(scene.folder / "model" / "model.safetensors")
    for world in (1, 2):
        assert not any(
            value.any() for name, value in read_matrices(scene.folder / f"began-{world}").items() if lora.B in name
        )
        assert read_settings(scene.folder / f"alone-{world}").rank == 3
        matrices = read_matrices(scene.folder / f"alone-{world}")
        merged = load_file(scene.folder / f"merged-{world}" / "model.safetensors")
        changed = 0
        for name, weight in base.items():
            layer = name.removesuffix(".weight")
            added = 2 * matrices[layer + lora.B] @ matrices[layer + lora.A] if layer + lora.A in matrices else 0
            torch.testing.assert_close(merged[name], weight + added, rtol=0, atol=1e-7)
            changed += not torch.equal(merged[name], weight)
        assert changed == 7 * SHAPE.layers


def test_the_probe_is_scored_as_the_merged_export_does(scene: Any) -> None:
    for world in (1, 2):
        scored = load_model(scene.folder / f"merged-{world}")(pack_from(PROBE, [1, 1]))[0].tolist()
        assert sum(replies(scene, world, 0, "adapters")[PUBLISH]["probe"], []) == pytest.approx(scored, abs=1e-5)


def test_a_resume_goes_on_bitwise_the_same(scene: Any) -> None:
    for world, rank in RANKS:
        first, second = replies(scene, world, rank, "adapters"), replies(scene, world, rank, "adapters resumed")
        assert first[PUBLISH]["checksums"] == second[2]["checksums"] and first[PUBLISH]["probe"] == second[2]["probe"]
        assert first[LATER]["sums"] == second[3]["sums"]


def test_frozen_weights_in_bfloat16_learn_with_float32_adapters(scene: Any) -> None:
    for world, rank in RANKS:
        found = replies(scene, world, rank, "adapters rounded")
        assert found[LOAD]["description"]["master weights"] == found[LOAD]["description"]["moments"] == "float32"
        assert found[2]["grad_norm"] > 0
        assert found[LOAD]["slow_dtype"] is not multiplies_bfloat16_fast("cpu")
    exact = replies(scene, 1, 0, "adapters")[TRAIN]["sums"]["entropy"]
    for world in (1, 2):
        assert total(scene, world, "adapters rounded", 1, "entropy") == pytest.approx(exact, rel=0.02)
