"""What the server hands to vLLM: a share of the GPU's memory, several GPUs, quantised weights."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.quickstart.prepare import Options, make_tiny_model
from serve import settings, vllm_engine
from serve.engine import SamplingParameters
from serve.vllm_engine import VllmEngine
from shared.errors import ConfigError
from shared.model import hf
from tests.rollout.tiny_llama import random_weights, write_model

PROMPT = [5, 61, 7, 300, 12, 9, 42, 42, 7]
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISED = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {**INT8, "strategy": "channel", "dynamic": False},
        "input_activations": {**INT8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip


class Asked(Exception):
    """The settings for vLLM were made."""


def handed_over(monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: int, **values: Any) -> dict[str, Any]:
    """Arguments of make_vllm_config for a server with these settings."""
    found: dict[str, Any] = {}

    def note(model_dir: str, **arguments: Any) -> None:
        found.update(arguments)
        raise Asked

    monkeypatch.setattr(vllm_engine, "make_vllm_config", note)
    monkeypatch.setattr(vllm_engine, "prepare_environment", lambda *_: None)
    monkeypatch.setitem(sys.modules, "serve.vllm_parts", SimpleNamespace(StepLLM=None, EngineSettings=dict))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    given = settings.load(model=str(folder), **values)
    engine = VllmEngine(
        str(folder), max_tokens=64, max_sequences=4, cache_bytes=given.cache_bytes, dtype=given.dtype,
        gpu_share=given.gpu_memory_utilization, tensor_parallel=given.tensor_parallel, quantization=given.quantization,
    )  # fmt: skip
    with pytest.raises(Asked):
        engine._begin()
    return found


def test_settings_reach_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_model(tmp_path, random_weights(0))
    plain = handed_over(monkeypatch, folder, 1)
    assert (plain["cache_bytes"], plain["gpu_memory_utilization"], plain["tensor_parallel"]) == (None, 0.92, 1)
    assert "quantization" not in plain
    beside = handed_over(
        monkeypatch, folder, 4, gpu_memory_utilization=0.3, tensor_parallel=4, quantization="fp8", cache_bytes=5
    )
    assert (beside["cache_bytes"], beside["gpu_memory_utilization"]) == (5, 0.3)
    assert (beside["tensor_parallel"], beside["quantization"]) == (4, "fp8")
    assert "gpu_memory_utilization" not in handed_over(monkeypatch, folder, 0)
    with pytest.raises(ConfigError, match="tensor_parallel = 3: this process sees 2 GPUs"):
        handed_over(monkeypatch, folder, 2, tensor_parallel=3)


def quantise(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of the layers as 8-bit integers with a scale for each row."""
    found = {}
    for name, weight in weights.items():
        if "proj" in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            found[name], found[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
        else:
            found[name] = weight
    return found


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_quantised_checkpoint_is_served_as_it_is(tmp_path: Path) -> None:
    """Real engines: its log-probs are those of the weights that it was made from, but for the rounding."""

    async def logprobs(folder: Path) -> list[float]:
        hf.check(folder)  # as the server does before it starts one
        engine = VllmEngine(str(folder), max_tokens=64, max_sequences=4, cache_bytes=64 << 20, dtype="bfloat16")
        await engine.start()
        try:
            sampling = SamplingParameters(max_tokens=1, prompt_logprobs=0)
            [delta] = [delta async for delta in engine.generate(PROMPT, sampling) if delta.prompt_logprobs]
            return [ranked[0].logprob for ranked in delta.prompt_logprobs]
        finally:
            await engine.stop()

    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    make_tiny_model(plain, Options(), 0)
    shutil.copytree(plain, quantised)
    save_file(quantise(load_file(plain / "model.safetensors")), quantised / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED}))
    expected, found = asyncio.run(logprobs(plain)), asyncio.run(logprobs(quantised))
    differences = [abs(one - other) for one, other in zip(expected, found, strict=True)]
    assert 0 < max(differences) < 0.3
