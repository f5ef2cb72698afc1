"""Adapters in a true vLLM engine: updates in flight, what it computes with, and updates that go wrong."""

import asyncio
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights.proof import WeightProof
from shared.errors import RunError, SyncMismatch
from shared.model import lora
from shared.model.language_model import LanguageModel
from tests.families import FAMILIES, config_of, reference
from tests.model_folder import load_model
from tests.rollout.test_agreement import make_folder
from tests.rollout.tiny_llama import assert_computed_with, engine_config
from tests.rollout.weights.update_scene import UpdateScene, fault  # before those of vLLM: it prepares the environment
from trainer.step.reference import fill

# isort: split
from rollout.weights.adapters import AdapterSlot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANK, ALPHA = 4, 12.0
LAYER = "model.layers.1."
WITHIN = 1e-3
"""of the worst of a thousand tokens, nats: other adapters are whole nats away (measured: 2.5e-4, 1e-5 on average)"""


class FaultySlot(AdapterSlot):
    """Does what the page says: skip = matrices left out, swap = two that change places, twice = matrices scaled twice,
    old = everything left out."""

    def place(self, name: str, whole: torch.Tensor) -> None:
        planned = fault()
        if name in planned.get("skip", []) or planned.get("old"):
            return
        if name in (pair := planned.get("swap", [])):
            name = pair[1 - pair.index(name)]
        super().place(name, whole * (ALPHA / RANK) if name in planned.get("twice", []) else whole)


def started(folder: Path, family: str = "LlamaForCausalLM") -> UpdateScene:
    """An engine that keeps its model, and two trainer ranks whose adapters it follows."""
    if family in FAMILIES:
        reference(config_of(family, max_position_embeddings=1024)).save_pretrained(folder)
        decoder = load_model(folder, implementation="transformers")
    else:
        decoder = make_folder(folder, family)
    lora.attach(decoder, RANK, ALPHA)
    begin(decoder)
    config = engine_config(max_completion_tokens=60)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": RANK, "alpha": ALPHA})})
    return UpdateScene(folder, decoder, config, "rollout.weights.vllm_backend.AdapterSlot", FaultySlot)


def begin(decoder: LanguageModel) -> None:
    """Give the adapters their first values: moves of other tests would add up to logits that no tolerance is for."""
    shapes = {name: each.shape for name, each in decoder.named_parameters() if each.requires_grad}
    fill(decoder, lora.first_values(shapes, seed=3))


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    with closing(started(tmp_path_factory.mktemp("model"))) as scene:
        yield scene


@pytest.fixture
def proof(scene):
    """It has seen an honest update."""
    proof = WeightProof(scene.dtype)
    begin(scene.decoder)
    move(scene, 0.2)
    proof.check(*scene.update(), scene.probe)
    return proof


def move(scene: UpdateScene, size: float) -> None:
    """Move every matrix of the adapters by noise, B from zero on."""
    with torch.no_grad():
        for _, each in scene.decoder.named_parameters():
            if each.requires_grad:
                each.add_(torch.randn(each.shape, generator=scene.generator) * size * each.shape[1] ** -0.5)


def follow(scene: UpdateScene, limit: float) -> None:
    """Three versions, of which each is what the engine computes with at once, also with a prompt whose keys and values
    of an older version are cached; before the first the engine has the model of the folder."""
    begin(scene.decoder)
    proof, prompt = WeightProof(scene.dtype), list(range(3, 100))
    for _ in range(3):
        move(scene, 0.5)
        [checked] = proof.check(*scene.update(), scene.probe)
        assert checked.mean < limit
        completions = scene.sample()
        assert_computed_with(scene.decoder, [(prompt, one) for one in completions], WITHIN)
        assert {span.version for one in completions for span in one.spans} == {scene.version}


@pytest.mark.parametrize("family", ["here", pytest.param("Qwen2ForCausalLM", marks=pytest.mark.soak)])
def test_the_engine_computes_with_each_version_at_once(scene, tmp_path, family):
    """An engine whose adapters have not come yet computes with the model of the folder."""
    other = scene if family == "here" else started(tmp_path, family)
    with pytest.MonkeyPatch.context() as patch:
        for _, layer in lora.adapters(other.decoder):
            patch.setattr(layer, "scale", 0.0)
        assert_computed_with(other.decoder, [(list(range(3, 100)), one) for one in other.before], WITHIN)
    follow(other, 1e-5)
    sent = sum(each.numel() for _, each in other.decoder.named_parameters() if each.requires_grad)
    assert sum(part.bytes for part in other.update()[0]) == 4 * sent
    if other is not scene:
        other.close()


def test_a_running_request_goes_on_with_new_adapters(scene):
    async def story() -> list[Any]:
        sampling = asyncio.ensure_future(scene.engine.sample([5] * 40, range(4)))
        running = scene.engine.rank.engine.outputs.running
        for number in range(1, 4):
            while not sampling.done() and not any(len(x.completion.token_ids) > 5 * number for x in running.values()):
                await asyncio.sleep(0.001)
            move(scene, 0.2)
            published, updates = await scene.publish()
            WeightProof(scene.dtype).check(published, updates, scene.probe)
        return await sampling

    scene.update()
    completions = scene.runner.run(story())
    versions = {span.version for completion in completions for span in completion.spans}
    assert len(completions) == 4 and len(versions) > 1 and not any(one.restarts for one in completions)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4", "olmo3", "phi4", "glm4", "mixtral", "qwen3 moe"])
def test_adapters_of_modules_of_transformers_reach_the_engine(tmp_path, family):
    """Also layers that are fused in the folder (Phi-4, GLM-4), vLLM's own module of transformers (OLMo 3) and the
    attention of mixtures; a matrix that is left out stops the run, and one without a layer."""
    with closing(started(tmp_path, family)) as scene:
        follow(scene, 3e-5)
        proof = WeightProof(scene.dtype)
        proof.check(*scene.update(), scene.probe)
        dropped = next(name for name, _ in lora.adapters(scene.decoder) if name.startswith(LAYER)) + lora.B
        move(scene, 0.5)
        published, updates = scene.update(skip=[dropped])
        with pytest.raises(SyncMismatch, match=rf"{re.escape(dropped)} still of the previous version \(dropped\)$"):
            proof.check(published, updates, scene.probe)
        descriptions = [sender.describe() for sender in scene.senders]
        descriptions[0]["layout"]["places"][0][0] = "model.layers.9.self_attn.q_proj" + lora.A
        with pytest.raises(RunError, match=r"no place for .*layers.9"):
            scene.runner.run(scene.engine.attach(descriptions))


A_OF_UP, B_OF_V = LAYER + "mlp.up_proj" + lora.A, LAYER + "self_attn.v_proj" + lora.B
B_OF_DOWN = LAYER + "mlp.down_proj" + lora.B
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a dropped A": ({"skip": [A_OF_UP]}, rf"sent: {re.escape(A_OF_UP)} still of the previous version \(dropped\)$"),
    "a dropped B": ({"skip": [B_OF_V]}, rf"sent: {re.escape(B_OF_V)} still of the previous version \(dropped\)$"),
    "two layers swapped": (
        {"swap": [B_OF_DOWN, B_OF_DOWN.replace("layers.1", "layers.0")]},
        r"sent: model\.layers\.0\.mlp\.down_proj\.lora_B\.weight and model\.layers\.1\.\S+ are swapped$",
    ),
    "the version before": ({"old": True}, r"sent: all \d+ changed tensors are those of the previous version: "),
    "a scale that is applied twice": (
        {"twice": [B_OF_DOWN]},
        rf"sent: {re.escape(B_OF_DOWN)} differ \(dropped or damaged\)$",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_at_once_and_named(scene, proof, name):
    plan, message = FAULTS[name]
    move(scene, 0.2)
    published, updates = scene.update(**plan)
    with pytest.raises(SyncMismatch, match=message):
        proof.check(published, updates, scene.probe)


@pytest.mark.parametrize("harm", ["no adapter", "scale"])
def test_an_engine_that_answers_without_the_adapters_or_with_another_scale_is_found_by_the_probe(
    scene, proof, monkeypatch, harm
):
    """The matrices in the slot are right then; only what the model computes is not."""
    move(scene, 0.5)
    if harm == "no adapter":
        monkeypatch.setattr("rollout.engine.adapter_request", lambda: None)
    else:  # the trainers compute with another scale than they send
        for _, layer in lora.adapters(scene.decoder):
            monkeypatch.setattr(layer, "scale", 1.5 * layer.scale)
    published, updates = scene.update()
    with pytest.raises(SyncMismatch, match="disagree about the same weights|does not compute with version"):
        proof.check(published, updates, scene.probe)
