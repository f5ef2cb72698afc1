"""A folder that we saved, served by true vLLM: the engine's log-probs are the trainer's, family by family, at every
temperature."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import vllm_config
from rollout.local_engine import LocalEngine
from shared.model import hf
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder, initialise
from shared.types import Completion
from tests.families import SENT, config_of, reference
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.rollout.tiny_llama import engine_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "tie_word_embeddings": True},
    "MistralForCausalLM": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "tie_word_embeddings": False, "use_sliding_window": False},
}
TEMPERATURES = (0.6, 1.0, 1.3)
Found = list[tuple[list[int], Completion]]


def make_folder(folder: Path, family: str, **more: int) -> Decoder:
    """A random model of the family, saved by us; weights large enough that distributions are far from uniform."""
    config = {**COMMON, **FAMILIES[family], **more, "architectures": [family]}
    decoder = Decoder(DecoderConfig.from_hf(config))
    initialise(decoder, seed=3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    hf.save_model(folder, config, dict(decoder.named_parameters()), torch.float32)
    return decoder


async def sample(engine: LocalEngine, temperature: float) -> Found:
    """Prompts with a completion of each."""
    prompts = [[1, 7, 3 + index, 9] for index in range(6)]
    tasks = (engine.client.sample(ids, [50 + index], temperature) for index, ids in enumerate(prompts))
    return [(ids, one) for ids, [one] in zip(prompts, await asyncio.gather(*tasks), strict=True)]


def gap(decoder: Any, found: Found, temperature: float = 1.0) -> torch.Tensor:
    """Mean |difference| of the engine's log-probs and the trainer's."""
    batch = pack_from([ids + one.token_ids for ids, one in found], [len(ids) for ids, _ in found])
    with torch.no_grad():
        logprobs, entropy = decoder(batch, temperature)
    assert entropy.mean() > 0.1, "a distribution without entropy would agree by accident"
    return (logprobs - torch.tensor([value for _, one in found for value in one.logprobs])).abs().mean()


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.soak if name != "Qwen3ForCausalLM" else ())
     for name in FAMILIES],
)  # fmt: skip
def test_engine_and_trainer_agree_at_every_temperature(tmp_path, family):
    """In make test: the one with norms of queries; Llama is in the other tests with engines."""
    decoder = make_folder(tmp_path / "model", family)
    stored, loaded = dict(decoder.named_parameters()), dict(load_model(tmp_path / "model").named_parameters())
    assert all(torch.equal(value, loaded[name]) for name, value in stored.items()), "what was saved is what is loaded"

    async def ask() -> list[Found]:
        async with LocalEngine(engine_config(max_completion_tokens=32), str(tmp_path / "model")) as engine:
            return [await sample(engine, temperature) for temperature in TEMPERATURES]

    for temperature, found in zip(TEMPERATURES, asyncio.run(ask()), strict=True):
        assert gap(decoder, found, temperature) < 1e-4, f"{family} at temperature {temperature}"


@pytest.mark.soak  # in make test: tests/rollout/weights/test_faults.py, of an engine in bfloat16
def test_float16_engines_agree_with_the_trainer_better_than_bfloat16(tmp_path, monkeypatch):
    """Both take the trainer's float32 weights in flight; float16 rounds eight times finer (Qi et al. 2025). A head that
    rounds its logits is further off."""
    make_folder(tmp_path / "model", "LlamaForCausalLM")
    decoder = load_model(tmp_path / "model")
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)  # not those of the folder

    async def ask(dtype: str) -> Found:
        config = engine_config(max_completion_tokens=64)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        async with LocalEngine(config, str(tmp_path / "model")) as engine:
            await engine.follow(list(decoder.named_parameters()))
            await engine.update()  # proved by checksums of what was cast
            return await sample(engine, 1.0)

    gaps = {dtype: gap(decoder, asyncio.run(ask(dtype))) for dtype in ("bfloat16", "float16")}
    make = vllm_config.make_vllm_config
    monkeypatch.setattr(vllm_config, "make_vllm_config", lambda *a, hf_overrides, **more: make(*a, **more))
    gaps["rounded logits"] = gap(decoder, asyncio.run(ask("bfloat16")))
    assert gaps["float16"] < 0.25 * gaps["bfloat16"] < 0.2 * gaps["rounded logits"] < 0.1, gaps


@pytest.mark.soak
@pytest.mark.parametrize("family", SENT)
def test_an_engine_computes_with_the_weights_of_a_family(tmp_path, family):
    """Of the modules of transformers: the folder's own weights, and others that were brought in two updates."""
    reference(config_of(family, max_position_embeddings=1024)).save_pretrained(tmp_path)  # an engine takes 640 tokens
    model, gaps = load_model(tmp_path, implementation="transformers"), []

    async def ask() -> None:
        async with LocalEngine(engine_config(max_completion_tokens=40), str(tmp_path)) as engine:
            gaps.append(gap(model, await sample(engine, 1.0)))
            await engine.follow(list(model.named_parameters()))
            for _ in range(2):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.05)
                await engine.update()  # proved by checksums of what the engine computes with
                gaps.append(gap(model, await sample(engine, 1.0)))

    asyncio.run(ask())
    assert max(gaps) < 1e-4, gaps
