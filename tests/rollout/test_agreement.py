"""A folder that we saved, served by true vLLM: the engine's log-probs are the trainer's, family by family, at every
temperature."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine import Engine
from rollout.local_engine import LocalEngine
from shared.launch.messages import GenerateRequest
from shared.model import hf
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder, initialise
from shared.types import Completion
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.rollout.tiny_llama import engine_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

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


def make_folder(folder: Path, family: str) -> Decoder:
    """A random model of the family, saved by us; weights large enough that distributions are far from uniform."""
    config = {**COMMON, **FAMILIES[family], "architectures": [family]}
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


async def sample(folder: Path) -> list[tuple[float, GenerateRequest]]:
    """Some completions at each temperature from an engine started on the folder."""
    engine = Engine(engine_config(), str(folder), rank=0, engine=0)
    await engine.start()
    ended: list[GenerateRequest] = []
    engine.outputs.on_finished = ended.append
    requests = [
        GenerateRequest([1, 7, 3 + index, 9], Completion(group=k, index=index, seed=50 + index), 24, temperature)
        for k, temperature in enumerate(TEMPERATURES)
        for index in range(6)
    ]
    await engine.generate(requests)
    async with asyncio.timeout(240):
        while len(ended) < len(requests):
            await asyncio.sleep(0.01)
    await engine.stop()
    return [(request.temperature, request) for request in ended]


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_at_every_temperature(tmp_path: Path, family: str):
    decoder = make_folder(tmp_path / "model", family)
    loaded = load_model(tmp_path / "model")
    for temperature, request in asyncio.run(sample(tmp_path / "model")):
        tokens = request.prompt_ids + request.completion.token_ids
        batch = pack_from([tokens], [len(request.prompt_ids)])
        with torch.no_grad():
            own, entropy = loaded(batch, temperature)
            original, _ = decoder(batch, temperature)
        assert torch.equal(own, original), "what was saved is what is loaded"
        difference = (own - torch.tensor(request.completion.logprobs)).abs()
        assert difference.mean() < 1e-4, f"{family} at temperature {temperature}"
        assert entropy.mean() > 0.1, "a distribution without entropy would agree by accident"


async def sample_updated(folder: Path, dtype: str, decoder: Decoder) -> list[tuple[list[int], Completion]]:
    """Prompts and completions from an engine of another type than the folder's, after it was brought the weights of
    `decoder`."""
    config = engine_config(max_completion_tokens=64)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    prompts = [[1, 7, 3 + index, 9] for index in range(8)]
    async with LocalEngine(config, str(folder)) as engine:
        await engine.follow(list(decoder.named_parameters()))
        await engine.update()  # proved by checksums of what was cast
        found = await asyncio.gather(*(engine.sample(ids, [50 + index]) for index, ids in enumerate(prompts)))
    return [(ids, completion) for ids, [completion] in zip(prompts, found, strict=True)]


def test_float16_engines_agree_with_the_trainer_better_than_bfloat16(tmp_path: Path):
    """Both take the trainer's float32 weights in flight; float16 rounds eight times finer (Qi et al. 2025)."""
    make_folder(tmp_path / "model", "LlamaForCausalLM")
    decoder = load_model(tmp_path / "model")
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)  # not those of the folder
    gaps = {}
    for dtype in ("bfloat16", "float16"):
        found = asyncio.run(sample_updated(tmp_path / "model", dtype, decoder))
        batch = pack_from([ids + completion.token_ids for ids, completion in found], [len(ids) for ids, _ in found])
        with torch.no_grad():
            own, entropy = decoder(batch)
        told = torch.tensor([value for _, completion in found for value in completion.logprobs])
        gaps[dtype] = float((own - told).abs().mean())
        assert entropy.mean() > 0.1, "a distribution without entropy would agree by accident"
    assert gaps["float16"] < 0.25 * gaps["bfloat16"], gaps
    assert gaps["bfloat16"] < 0.1, gaps
