"""Finds the shape of a dense decoder by its well-known name, or in a folder's config.json.

The numbers are those of the published config.json files; a test compares the sum of all parameters with the published
count.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from shared.errors import ConfigError
from shared.model.config import DecoderConfig
from shared.model.folder import load_config


def _decoder(
    family: str, layers: int, hidden: int, intermediate: int, heads: int, key_heads: int, vocab: int,
    head_dim: int = 128, tied: bool = False,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        family=family, vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, layers=layers, heads=heads,
        key_heads=key_heads, head_dim=head_dim, norm_epsilon=1e-5, max_positions=131072, tied=tied,
        qk_norm=family == "qwen3",
    )  # fmt: skip


MODELS = {
    "135m": _decoder("llama", 30, 576, 1536, 9, 3, 49152, head_dim=64, tied=True),
    "8b": _decoder("llama", 32, 4096, 14336, 32, 8, 128256),
    "24b": _decoder("mistral", 40, 5120, 32768, 32, 8, 131072),
    "32b": _decoder("qwen3", 64, 5120, 25600, 64, 8, 151936),
    "70b": _decoder("llama", 80, 8192, 28672, 64, 8, 128256),
    "405b": _decoder("llama", 126, 16384, 53248, 128, 8, 128256),
}
"""SmolLM2-135M, Llama 3.1 8B, Mistral Small 24B, Qwen3 32B, Llama 3.1 70B and 405B"""


def find(name: str) -> DecoderConfig:
    """Return the shape of a known model, or of a Hugging Face folder. Raises ConfigError, ModelError."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    folder = Path(name).expanduser()
    if folder.name == "config.json":
        folder = folder.parent
    if folder.is_dir():
        return DecoderConfig.from_hf(load_config(folder))
    near = difflib.get_close_matches(name.lower(), MODELS, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise ConfigError(
        f"model '{name}' is no folder with a config.json, and none of {', '.join(MODELS)}{hint}; any other shape: "
        "--layers, --hidden, --intermediate, --heads, --key-heads, --vocab"
    )
