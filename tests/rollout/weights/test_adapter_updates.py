"""Adapters in a true vLLM engine: updates in flight, what it computes with, and updates that go wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollout.local_engine import LocalEngine  # first: it prepares the environment for vLLM

# isort: split
import pytest
import torch

from rollout.weights.adapters import AdapterSlot
from rollout.weights.proof import WeightProof
from rollout.worker import EngineRank
from shared.errors import RunError, SyncMismatch
from shared.model import lora
from shared.model.language_model import LanguageModel
from tests.families import FAMILIES, config_of, reference
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.rollout.test_agreement import make_folder
from tests.rollout.tiny_llama import engine_config
from tests.rollout.weights.update_scene import UpdateScene, fault, planted
from trainer.step.reference import fill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
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


@asynccontextmanager
async def adapter_scene(folder: Path, family: str = "LlamaForCausalLM", **rollout: Any) -> AsyncIterator[UpdateScene]:
    """An engine that keeps its model, and two trainer ranks whose adapters it follows."""
    if family in FAMILIES:
        reference(config_of(family, max_position_embeddings=1024)).save_pretrained(folder / "model")
        decoder = load_model(folder / "model", implementation="transformers")
    else:
        decoder = make_folder(folder / "model", family)
    lora.attach(decoder, RANK, ALPHA)
    shapes = {name: each.shape for name, each in decoder.named_parameters() if each.requires_grad}
    fill(decoder, lora.first_values(shapes, seed=3))
    config = engine_config(**rollout)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": RANK, "alpha": ALPHA})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout.weights.vllm_backend.AdapterSlot", FaultySlot)
        async with LocalEngine(config, str(folder / "model")) as engine:
            scene = UpdateScene(decoder, "float32", engine)
            await engine.client.call(EngineRank.attach, [sender.describe() for sender in scene.senders])
            yield scene
            for sender in scene.senders:
                sender.close()


def logprob_gap(decoder: LanguageModel, prompt: list[int], completions: list[Any]) -> float:
    """Largest |difference| between the engine's log-probs of completions and the decoder's."""
    sequences = [prompt + one.token_ids for one in completions]
    with torch.no_grad():
        scored = decoder(pack_from(sequences, [len(prompt)] * len(sequences)))[0]
    return float((scored - torch.tensor([value for one in completions for value in one.logprobs])).abs().max())


@pytest.mark.parametrize("family", ["LlamaForCausalLM", pytest.param("Qwen2ForCausalLM", marks=pytest.mark.soak)])
def test_the_engine_computes_with_each_version_at_once(tmp_path: Path, family: str) -> None:
    """Also with a prompt whose keys and values of an older version are cached."""

    async def story() -> None:
        async with adapter_scene(tmp_path, family, max_completion_tokens=60) as scene:
            proof, prompt = WeightProof(scene.dtype), list(range(3, 100))
            before = await scene.engine.sample(prompt, [1, 2])
            assert logprob_gap(scene.decoder, prompt, before) < WITHIN  # no adapter yet: the model of the folder
            for version in range(4):
                if version:
                    move(scene, 0.5)
                published, updates = await scene.update()
                [found] = proof.check(published, updates, scene.probe)
                assert found.mean < 1e-5
                completions = await scene.engine.sample(prompt, [1, 2])
                assert logprob_gap(scene.decoder, prompt, completions) < WITHIN
                assert {one.version for completion in completions for one in completion.spans} == {version}
            sent = sum(each.numel() for _, each in scene.decoder.named_parameters() if each.requires_grad)
            assert sum(part.bytes for part in published) == 4 * sent

    asyncio.run(story())


def move(scene: UpdateScene, size: float) -> None:
    """Move every matrix of the adapters by noise, B from zero on."""
    with torch.no_grad():
        for _, each in scene.decoder.named_parameters():
            if each.requires_grad:
                each.add_(torch.randn(each.shape, generator=scene.generator) * size * each.shape[1] ** -0.5)


def test_a_running_request_goes_on_with_new_adapters(tmp_path: Path) -> None:
    async def story() -> None:
        async with adapter_scene(tmp_path, max_completion_tokens=150) as scene:
            await scene.update()
            sampling = asyncio.ensure_future(scene.engine.sample([5] * 40, range(4)))
            for _ in range(5):
                while not any(len(one.completion.token_ids) > 3 for one in running(scene)):
                    await asyncio.sleep(0.01)
                move(scene, 0.2)
                published, updates = await scene.update()
                WeightProof(scene.dtype).check(published, updates, scene.probe)
            completions = await sampling
            versions = {one.version for completion in completions for one in completion.spans}
            assert len(completions) == 4 and len(versions) > 1 and not any(one.restarts for one in completions)

    asyncio.run(story())


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4", "olmo3", "phi4", "glm4", "mixtral", "qwen3 moe"])
def test_adapters_of_modules_of_transformers_reach_the_engine(tmp_path: Path, family: str) -> None:
    """Also layers that are fused in the folder (Phi-4, GLM-4), vLLM's own module of transformers (OLMo 3) and the
    attention of mixtures; a matrix that is left out stops the run."""

    async def story() -> None:
        async with adapter_scene(tmp_path, family, max_completion_tokens=40) as scene:
            proof, prompt = WeightProof(scene.dtype), list(range(3, 100))
            for version in range(3):
                if version:
                    move(scene, 0.5)
                [found] = proof.check(*await scene.update(), scene.probe)
                gap = logprob_gap(scene.decoder, prompt, await scene.engine.sample(prompt, [1, 2]))
                print(f"{family}, version {version}: probe {found.mean:.1e}, sampled tokens at most {gap:.1e}")
                assert found.mean < 3e-5 and gap < WITHIN
            dropped = next(name for name, _ in lora.adapters(scene.decoder) if name.startswith(LAYER)) + lora.B
            move(scene, 0.5)
            with planted(skip=[dropped]):
                published, updates = await scene.update()
            with pytest.raises(SyncMismatch, match=rf"{re.escape(dropped)} still of the previous version \(dropped\)$"):
                proof.check(published, updates, scene.probe)

    asyncio.run(story())


def running(scene: UpdateScene) -> Any:
    return scene.engine.rank.engine.outputs.running.values()


A_OF_UP, B_OF_V, B_OF_DOWN = (
    LAYER + "mlp.up_proj" + lora.A,
    LAYER + "self_attn.v_proj" + lora.B,
    LAYER + "mlp.down_proj" + lora.B,
)
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


def test_each_fault_is_found_at_once_and_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with adapter_scene(tmp_path) as scene:
            for plan, message in FAULTS.values():
                proof = WeightProof(scene.dtype)
                for harm in (False, True):
                    move(scene, 0.2)
                    with planted(**plan if harm else {}):
                        published, updates = await scene.update()
                    if not harm:
                        proof.check(published, updates, scene.probe)
                with pytest.raises(SyncMismatch) as found:
                    proof.check(published, updates, scene.probe)
                assert re.search(message, str(found.value)), found.value

    asyncio.run(story())


def test_an_engine_that_answers_without_the_adapters_or_with_another_scale_is_found_by_the_probe(
    tmp_path: Path,
) -> None:
    """The matrices in the slot are right then; only what the model computes is not."""

    async def story() -> None:
        async with adapter_scene(tmp_path) as scene:
            for harm in ("no adapter", "scale"):
                proof = WeightProof(scene.dtype)
                move(scene, 0.5)
                proof.check(*await scene.update(), scene.probe)
                move(scene, 0.5)
                with pytest.MonkeyPatch.context() as patch:
                    if harm == "no adapter":
                        patch.setattr("rollout.engine.adapter_request", lambda: None)
                    else:  # the trainers compute with another scale than they send
                        for _, layer in lora.adapters(scene.decoder):
                            patch.setattr(layer, "scale", 1.5 * layer.scale)
                    published, updates = await scene.update()
                with pytest.raises(SyncMismatch, match="disagree about the same weights|does not compute with version"):
                    proof.check(published, updates, scene.probe)

    asyncio.run(story())


def test_matrices_that_the_model_has_no_layer_for_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with adapter_scene(tmp_path) as scene:
            description = scene.senders[0].describe()
            description["layout"]["places"][0][0] = "model.layers.9.self_attn.q_proj" + lora.A
            with pytest.raises(RunError, match=r"no place for \['model.layers.0.self_attn.q_proj.lora_B.*layers.9"):
                await scene.engine.client.call(EngineRank.attach, [description, scene.senders[1].describe()])

    asyncio.run(story())
