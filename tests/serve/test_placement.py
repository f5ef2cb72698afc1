"""What the server hands to vLLM: a share of the GPU's memory, several GPUs, quantised weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serve import settings, vllm_engine
from serve.vllm_engine import VllmEngine
from shared.errors import ConfigError
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
