"""Updates that go wrong inside a true vLLM engine: each is found at once, and what is stale is named."""

import re
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights.layout import buffer_of
from rollout.weights.proof import WeightProof
from shared.errors import SyncMismatch
from tests.rollout.test_agreement import FAMILIES, make_folder
from tests.rollout.tiny_llama import engine_config
from tests.rollout.weights.update_scene import FaultyLoader, UpdateScene, packs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LAYER = "model.layers.1."
EMBEDDING = "model.embed_tokens.weight"
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


def started(folder: Path, family: str, dtype: str) -> UpdateScene:
    decoder, config = make_folder(folder / "model", family), engine_config(max_completion_tokens=32)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    return UpdateScene(folder / "model", decoder, config, "rollout.weights.cpu.loader.CpuWeightLoader", FaultyLoader)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    dtype = "bfloat16" if packs(torch.bfloat16) else "float32"
    with closing(started(tmp_path_factory.mktemp("scene"), "LlamaForCausalLM", dtype)) as scene:
        yield scene


def inject(scene: UpdateScene, name: str, share: float) -> None:
    """An honest update, then the faulty one, of weights that moved by `share`."""
    (plan, message), proof = FAULTS[name], WeightProof(scene.dtype)
    scene.move(share)
    proof.check(*scene.update(), scene.probe)
    scene.move(share)
    published, updates = scene.update(**plan)
    with pytest.raises(SyncMismatch) as found:
        proof.check(published, updates, scene.probe)
    assert re.search(message, str(found.value)), found.value


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_at_once_and_named(scene, name):
    inject(scene, name, 0.01)


def test_tensors_that_the_trainers_write_in_each_others_place_are_named(scene, monkeypatch):
    """What is compared are the trainers' weights, not what they wrote."""
    names, proof = [LAYER + f"self_attn.{kind}_proj.weight" for kind in "oq"], WeightProof(scene.dtype)
    proof.check(*scene.update(), scene.probe)
    spoiled = buffer_of(scene.version + 1)

    def misplaced(target: Any, swap: dict[int, int], buffer: int, number: int) -> torch.Tensor:
        written: torch.Tensor = target(buffer, swap.get(number, number) if buffer == spoiled else number)
        return written

    for sender in scene.senders:
        first, second = ([piece.name for piece in sender.pieces].index(name) for name in names)

        monkeypatch.setattr(sender, "target", partial(misplaced, sender.target, {first: second, second: first}))
    scene.move(0.01)
    published, updates = scene.update()
    with pytest.raises(SyncMismatch, match=" and ".join(map(re.escape, names)) + " are swapped$"):
        proof.check(published, updates, scene.probe)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_fault_by_every_move_is_found_at_once_and_named(tmp_path, family, dtype):
    if not packs(getattr(torch, dtype)):
        pytest.skip("vLLM packs no linears of this type on this processor")
    with closing(started(tmp_path, family, dtype)) as scene:
        for share in (0.01, 0.03, 0.1):
            for name in FAULTS:
                inject(scene, name, share)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("move", ["steps", "noise"])
def test_200_honest_updates_raise_no_alarm(tmp_path, dtype, move):
    with closing(started(tmp_path, "Qwen3ForCausalLM", dtype)) as scene:
        proof, apart = WeightProof(dtype), list[float]()
        for _ in range(200):
            scene.step() if move == "steps" else scene.move(0.01)
            apart += [found.moved for found in proof.check(*scene.update(), scene.probe)]
    print(f"{dtype} {move}: moves apart: largest {max(apart[1:]):.2e}, mean {sum(apart[1:]) / 199:.2e}")


@pytest.mark.skipif(not packs(torch.bfloat16), reason="vLLM packs no bfloat16 linears on this processor")
@pytest.mark.parametrize(
    ("name", "plan"), [(DOWN, "skip_packed"), (KEYS, "skip_packed"), (EMBEDDING, "skip_plain"), (NORM, "skip_plain")]
)
def test_a_single_value_that_stayed_stale_is_found_at_once(scene, name, plan):
    """The smallest change that there is: one value by one step of bfloat16, wherever it is."""
    for place in (0, 19, 47, 63):
        parameter, proof = dict(scene.decoder.named_parameters())[name], WeightProof(scene.dtype)
        value = parameter.data.view(-1)[place : place + 1]
        proof.check(*scene.update(), scene.probe)
        value.copy_((value.to(torch.bfloat16).view(torch.int16) + 1).view(torch.bfloat16))
        published, updates = scene.update(**{plan: [name]})
        with pytest.raises(SyncMismatch, match=re.escape(name)):
            proof.check(published, updates, scene.probe)
