"""A tiny random Llama on disk, and the settings of an engine that serves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config import Config

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY, STOP = 64, 3, 2, 1, 160, 512, 511


def tiny_shapes(tied: bool = True) -> list[tuple[str, tuple[int, ...]]]:
    """Hugging Face names and shapes of the tiny Llama, in named_parameters order."""
    head = HIDDEN // HEADS
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes += [
            (f"{prefix}.self_attn.q_proj.weight", (HEADS * head, HIDDEN)),
            (f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * head, HIDDEN)),
            (f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * head, HIDDEN)),
            (f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * head)),
            (f"{prefix}.mlp.gate_proj.weight", (INNER, HIDDEN)),
            (f"{prefix}.mlp.up_proj.weight", (INNER, HIDDEN)),
            (f"{prefix}.mlp.down_proj.weight", (HIDDEN, INNER)),
            (f"{prefix}.input_layernorm.weight", (HIDDEN,)),
            (f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)),
        ]
    shapes.append(("model.norm.weight", (HIDDEN,)))
    return shapes if tied else [*shapes, ("lm_head.weight", (VOCABULARY, HIDDEN))]


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """fp32 weights large enough that other weights give other greedy tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tiny_shapes():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * (0.4 if "embed" in name else shape[1] ** -0.5)
    return weights


def write_model(folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Path:
    """Write a Hugging Face folder without tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": STOP,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: w.to(dtype).contiguous() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read them back."""
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with the weights of seed 0."""
    return write_model(tmp_path_factory.mktemp("model") / "seed0", random_weights(0))


def engine_config(**rollout: object) -> Config:
    """Settings of a small fp32 engine."""
    return Config.model_validate(
        {
            "model": {"dtype": "float32", "max_tokens": 640},
            "rollout": {"cache_bytes": 32 << 20, "max_completion_tokens": 512, "max_sequences": 64, **rollout},
        }
    )
