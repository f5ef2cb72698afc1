"""Random Llamas of several sizes in Hugging Face's names and files, with a tied head, for engines and trainers.

Speed does not depend on the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken

from examples.quickstart import tiny_model
from examples.quickstart.prepare import Options, texts_of
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder

SCALE = 0.02
"""standard deviation of the weights"""
END, PAD = (tiny_model.CONTROL.index(name) for name in (tiny_model.END, tiny_model.PAD))
"""ids in the quickstart's tokenizer, which `write_tokenizer` brings"""


class Shape(NamedTuple):
    """Widths and counts, in Hugging Face's sense. Heads have hidden / heads channels."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes in the order of a model's parameters."""
        with torch.device("meta"):
            return [(name, tuple(value.shape)) for name, value in Decoder(self.decoder).named_parameters()]

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return self.decoder.parameters

    @property
    def decoder(self) -> DecoderConfig:
        """The same for our decoder."""
        return DecoderConfig.from_hf(self.config())

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "vocab_size": self.vocabulary, "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "hidden_act": "silu",
            "tie_word_embeddings": True, "eos_token_id": END, "pad_token_id": PAD, "torch_dtype": "bfloat16",
        }  # fmt: skip


SMOLLM2_135M = Shape(hidden=576, layers=30, heads=9, kv_heads=3, inner=1536, vocabulary=49152)


def _draw(shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, size in shape.tensors():
        yield name, SCALE * torch.randn(size, generator=generator)


def random_weights(shape: Shape) -> dict[str, torch.nn.Parameter]:
    """Draw float32 master weights, always the same."""
    return {name: torch.nn.Parameter(value) for name, value in _draw(shape)}


def write_model(folder: Path, shape: Shape, end: int = END) -> str:
    """Write a folder that vLLM loads, with the same weights in bfloat16; one tensor at a time is float32. end: the id
    that ends a completion; the size of the vocabulary, which nothing samples, for completions that go on."""
    (folder / "config.json").write_text(json.dumps(shape.config() | {"eos_token_id": end}))
    halves = {name: value.to(torch.bfloat16) for name, value in _draw(shape)}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def write_tokenizer(folder: Path, shape: Shape, spare: bool = True) -> None:
    """Write the quickstart's tokenizer and chat template. spare: with tokens up to the whole vocabulary, so that any
    sampled id has a text; loading it takes seconds."""
    tokenizer = tiny_model.train_tokenizer(texts_of(Options(languages=["en"])))
    count = shape.vocabulary - tokenizer.get_vocab_size() if spare else 0
    tokenizer.add_tokens([AddedToken(f"<word {number}>", normalized=False) for number in range(count)])
    tiny_model.write_tokenizer(folder, tokenizer, shape.config()["max_position_embeddings"])
