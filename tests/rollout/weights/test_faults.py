"""Updates that go wrong inside a true vLLM engine: each is found at once, and what is stale is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights.proof import WeightProof, compare_probe
from shared.errors import SyncMismatch
from tests.rollout.test_agreement import FAMILIES, make_folder
from tests.rollout.tiny_llama import engine_config
from tests.rollout.weights.update_scene import FaultyLoader, UpdateScene, packs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LAYER = "model.layers.1."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DOWN, KEYS, NORM = (
    LAYER + name for name in ("mlp.down_proj.weight", "self_attn.k_proj.weight", "input_layernorm.weight")
)
DROPPED = r" still of the previous version \(dropped\)$"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "all linears": ({"skip_packed": ["linears"]}, r"self_attn\.q_proj\.weight, .* and \d+ more" + DROPPED),
    "one linear": ({"skip_packed": [DOWN]}, "sent: " + re.escape(DOWN) + DROPPED),
    "a part of a merged linear": ({"old": [KEYS]}, "sent: " + re.escape(KEYS) + DROPPED),
    "the embedding": ({"skip_plain": [EMBEDDING]}, "sent: " + re.escape(EMBEDDING) + DROPPED),
    "a norm": ({"skip_plain": [NORM]}, "sent: " + re.escape(NORM) + DROPPED),
    "the head": ({"skip_packed": ["head"]}, r"sent: (model\.embed_tokens|lm_head)\.weight as the head" + DROPPED),
    "a rank's rows": (
        {"old": ["all"], "rank": 1},
        r"sent: the rows of trainer rank 1 in model\.embed_tokens\.weight, .* still of the previous version$",
    ),
    "the version before": ({"old": ["all"]}, r"sent: all \d+ changed tensors are those of the previous version: "),
}
MOVES = (0.01, 0.03, 0.1)
UPDATES = 20


def started(folder: Path, family: str, dtype: str) -> UpdateScene:
    decoder, config = make_folder(folder / "model", family), engine_config(max_completion_tokens=8)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    return UpdateScene(folder / "model", decoder, config, "rollout.weights.cpu.loader.CpuWeightLoader", FaultyLoader)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpdateScene]:
    dtype = "bfloat16" if packs(torch.bfloat16) else "float32"
    with closing(started(tmp_path_factory.mktemp("scene"), "LlamaForCausalLM", dtype)) as scene:
        yield scene


def inject(scene: UpdateScene, name: str, share: float) -> str:
    """An honest update, then the faulty one, of weights that moved by `share`; what the probe alone would have seen."""
    plan, message = FAULTS[name]
    proof, eye = WeightProof(scene.dtype), WeightProof(scene.dtype)
    scene.move(share)
    published, updates = scene.update()
    proof.check(published, updates, scene.probe)
    eye.compare_moves(published[0], updates[0].probe, 0, scene.probe)
    scene.move(share)
    published, updates = scene.update(**plan)
    with pytest.raises(SyncMismatch) as found:
        proof.check(published, updates, scene.probe)
    assert re.search(message, str(found.value)), found.value
    seen = []
    for check in (
        lambda: compare_probe(published[0].probe, updates[0].probe, 0, scene.dtype).mean,
        lambda: eye.compare_moves(published[0], updates[0].probe, 0, scene.probe),
    ):
        try:
            seen.append(f"{check():.1e} passes")
        except SyncMismatch:
            seen.append("refused")
    return f"{scene.dtype} {name}, {share:.0%}: probe alone {seen[0]}, its moves {seen[1]}"


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_at_once_and_named(scene: UpdateScene, name: str) -> None:
    inject(scene, name, MOVES[0])


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_fault_by_every_move_is_found_at_once_and_named(tmp_path: Path, family: str, dtype: str) -> None:
    if not packs(getattr(torch, dtype)):
        pytest.skip("vLLM packs no linears of this type on this processor")
    with closing(started(tmp_path, family, dtype)) as scene:
        print("\n".join(inject(scene, name, share) for share in MOVES for name in FAULTS))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("move", ["steps", *MOVES], ids=str)
def test_200_honest_updates_raise_no_alarm(tmp_path: Path, dtype: str, move: Any) -> None:
    with closing(started(tmp_path, "Qwen3ForCausalLM", dtype)) as scene:
        proof, apart = WeightProof(dtype), list[float]()
        start = [parameter.detach().clone() for parameter in scene.decoder.parameters()]
        for _ in range(200):
            if move == "steps":
                scene.step()
            else:  # around where it began: so many of these in one direction would ruin the model
                scene.restore(start)
                scene.move(move)
            apart += [found.moved for found in proof.check(*scene.update(), scene.probe)]
    print(f"{dtype} {move}: moves apart: largest {max(apart[1:]):.2e}, mean {sum(apart[1:]) / 199:.2e}")


needs_packed_bfloat16 = pytest.mark.skipif(
    not packs(torch.bfloat16), reason="vLLM packs no bfloat16 linears on this processor"
)


@needs_packed_bfloat16
@pytest.mark.parametrize(
    ("name", "plan"), [(DOWN, "skip_packed"), (KEYS, "skip_packed"), (EMBEDDING, "skip_plain"), (NORM, "skip_plain")]
)
def test_a_single_value_that_stayed_stale_is_found_at_once(scene: UpdateScene, name: str, plan: str) -> None:
    """The smallest change that there is: one value by one step of bfloat16, wherever it is."""
    for place in (0, 19, 47, 63):
        parameter, proof = dict(scene.decoder.named_parameters())[name], WeightProof(scene.dtype)
        value = parameter.data.view(-1)[place : place + 1]
        proof.check(*scene.update(), scene.probe)
        value.copy_((value.to(torch.bfloat16).view(torch.int16) + 1).view(torch.bfloat16))
        published, updates = scene.update(**{plan: [name]})
        with pytest.raises(SyncMismatch, match=re.escape(name)):
            proof.check(published, updates, scene.probe)


@needs_packed_bfloat16
@pytest.mark.soak
def test_what_stayed_stale_through_true_steps_is_found_within_20_updates(tmp_path: Path) -> None:
    with closing(started(tmp_path, "Qwen3ForCausalLM", "bfloat16")) as scene:
        for name, parameter in list(scene.decoder.named_parameters()):
            wire, proof, changed, told = parameter.detach().to(torch.bfloat16), WeightProof(scene.dtype), False, ""
            plan = "skip_packed" if parameter.ndim == 2 and name != EMBEDDING else "skip_plain"
            proof.check(*scene.update(), scene.probe)
            for _ in range(UPDATES):
                scene.step()
                changed = changed or not torch.equal(parameter.to(torch.bfloat16), wire)
                try:
                    proof.check(*scene.update(**{plan: [name if name != HEAD else "head"]}), scene.probe)
                except SyncMismatch as error:
                    told = str(error)
                    break
            assert name in told if changed else told == "", (name, told)
