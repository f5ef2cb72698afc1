"""Updates that go wrong inside a true vLLM engine: each is found at once, and what is stale is named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights.proof import WeightProof, compare_probe
from shared.errors import SyncMismatch
from tests.rollout.weights.update_scene import UpdateScene, packs, planted, update_scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYER = "model.layers.1."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "all linears": (
        {"skip_packed": ["linears"]},
        r"self_attn\.q_proj\.weight, .* and \d+ more still of the previous version \(dropped\)$",
    ),
    "one linear": (
        {"skip_packed": [LAYER + "mlp.down_proj.weight"]},
        r"sent: model\.layers\.1\.mlp\.down_proj\.weight still of the previous version \(dropped\)$",
    ),
    "a part of a merged linear": (
        {"old": [LAYER + "self_attn.k_proj.weight"]},
        r"sent: model\.layers\.1\.self_attn\.k_proj\.weight still of the previous version \(dropped\)$",
    ),
    "the embedding": (
        {"skip_plain": [EMBEDDING]},
        r"sent: model\.embed_tokens\.weight still of the previous version \(dropped\)$",
    ),
    "a norm": (
        {"skip_plain": [LAYER + "post_attention_layernorm.weight"]},
        r"sent: model\.layers\.1\.post_attention_layernorm\.weight still of the previous version \(dropped\)$",
    ),
    "the head": (
        {"skip_packed": ["head"]},
        r"sent: (model\.embed_tokens|lm_head)\.weight as the head still of the previous version \(dropped\)$",
    ),
    "a rank's rows": (
        {"old": ["all"], "rank": 1},
        r"sent: the rows of trainer rank 1 in model\.embed_tokens\.weight, .* still of the previous version$",
    ),
    "the version before": ({"old": ["all"]}, r"sent: all \d+ changed tensors are those of the previous version: "),
}
MOVES = (0.01, 0.03, 0.1)
UPDATES = 20


def play(folder: Path, family: str, dtype: str, story: Callable[[UpdateScene], Awaitable[None]]) -> None:
    """Run a story with an engine of its own."""

    async def together() -> None:
        async with update_scene(folder, family, dtype) as scene:
            await story(scene)

    asyncio.run(together())


async def inject(scene: UpdateScene, name: str, share: float) -> None:
    """An honest update, then the faulty one, of weights that moved by `share`."""
    plan, message = FAULTS[name]
    proof, eye = WeightProof(scene.dtype), WeightProof(scene.dtype)
    for harm in (False, True):
        scene.move(share)
        with planted(**plan if harm else {}):
            published, updates = await scene.update()
        if not harm:
            proof.check(published, updates, scene.probe)
            eye.compare_moves(published[0], updates[0].probe, 0, scene.probe)
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
        except SyncMismatch as error:
            seen.append(f"{(re.search(r' ([0-9.e+-]+)( apart, above| is above)', str(error)) or ['', '?'])[1]} refused")
    print(f"{scene.dtype} {name}, {share:.0%}: {str(found.value)[62:150]}; probe alone {seen[0]}, its moves {seen[1]}")


def test_each_fault_is_found_at_once_and_named(tmp_path: Path) -> None:
    async def story(scene: UpdateScene) -> None:
        for name in FAULTS:
            await inject(scene, name, MOVES[0])

    play(tmp_path, "LlamaForCausalLM", "bfloat16" if packs(torch.bfloat16) else "float32", story)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_every_fault_by_every_move_is_found_at_once_and_named(tmp_path: Path, family: str, dtype: str) -> None:
    if not packs(getattr(torch, dtype)):
        pytest.skip("vLLM packs no linears of this type on this processor")

    async def story(scene: UpdateScene) -> None:
        for share in MOVES:
            for name in FAULTS:
                await inject(scene, name, share)

    play(tmp_path, family, dtype, story)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("move", ["steps", *MOVES], ids=str)
def test_200_honest_updates_raise_no_alarm(tmp_path: Path, dtype: str, move: Any) -> None:
    async def story(scene: UpdateScene) -> None:
        proof, apart = WeightProof(scene.dtype), list[float]()
        start = [parameter.detach().clone() for parameter in scene.decoder.parameters()]
        for _ in range(200):
            if move == "steps":
                scene.step()
            else:  # around where it began: so many of these in one direction would ruin the model
                scene.restore(start)
                scene.move(move)
            published, updates = await scene.update()
            apart += [found.moved for found in proof.check(published, updates, scene.probe)]
        first = [scored.first for scored in proof.scored.values()]
        print(
            f"{dtype} {move}: first {first}, moves apart: largest {max(apart[1:]):.2e}, mean {sum(apart[1:]) / 199:.2e}"
        )

    play(tmp_path, "Qwen3ForCausalLM", dtype, story)


async def find(scene: UpdateScene, plan: dict[str, Any], change: Callable[[], None]) -> tuple[int, str]:
    """Updates until a fault that lasts is found, from the first that changes a value of the wire; what is said then.
    `change` is called before each."""
    proof = WeightProof(scene.dtype)
    scene.move(0.0)
    proof.check(*await scene.update(), scene.probe)
    with planted(**plan):
        for number in range(1, UPDATES + 1):
            change()
            try:
                proof.check(*await scene.update(), scene.probe)
            except SyncMismatch as error:
                return number, str(error)
    return UPDATES + 1, "nothing was found"


@pytest.mark.skipif(not packs(torch.bfloat16), reason="vLLM packs no bfloat16 linears on this processor")
def test_a_single_value_that_stayed_stale_is_found_at_once(tmp_path: Path) -> None:
    """The smallest change that there is: one value by one step of bfloat16, wherever it is."""

    async def story(scene: UpdateScene) -> None:
        parameters = dict(scene.decoder.named_parameters())
        for name, plan in (
            (LAYER + "mlp.down_proj.weight", "skip_packed"),
            (LAYER + "self_attn.k_proj.weight", "skip_packed"),
            (EMBEDDING, "skip_plain"),
            (LAYER + "input_layernorm.weight", "skip_plain"),
        ):
            for place in (0, 19, 47, 63):
                value = parameters[name].data.view(-1)[place : place + 1]
                done: list[bool] = []

                def change(value: torch.Tensor = value, done: list[bool] = done) -> None:
                    if not done:
                        wire = value.to(torch.bfloat16)
                        value.copy_((wire.view(torch.int16) + 1).view(torch.bfloat16))
                    done.append(True)

                updates, told = await find(scene, {plan: [name]}, change)
                assert updates == 1, (name, place, told)
                assert name in told

    play(tmp_path, "LlamaForCausalLM", "bfloat16", story)


@pytest.mark.skipif(not packs(torch.bfloat16), reason="vLLM packs no bfloat16 linears on this processor")
@pytest.mark.soak
def test_what_stayed_stale_through_true_steps_is_found_within_20_updates(tmp_path: Path) -> None:
    async def story(scene: UpdateScene) -> None:
        for name, parameter in list(scene.decoder.named_parameters()):
            wire = parameter.detach().to(torch.bfloat16)
            changed: list[bool] = []

            def change(
                parameter: torch.Tensor = parameter, wire: torch.Tensor = wire, changed: list[bool] = changed
            ) -> None:
                scene.step()
                changed.append(not torch.equal(parameter.to(torch.bfloat16), wire))

            plan = "skip_packed" if parameter.ndim == 2 and name != EMBEDDING else "skip_plain"
            updates, told = await find(scene, {plan: [name if name != HEAD else "head"]}, change)
            print(f"{name}: {sum(changed)} of {len(changed)} updates changed it; found at {updates}")
            assert name in told if any(changed[:UPDATES]) and updates <= UPDATES else not any(changed), (name, told)

    play(tmp_path, "Qwen3ForCausalLM", "bfloat16", story)
