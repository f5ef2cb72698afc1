"""Settings of the stage `sample`: its options, the settings of a run, the model's limits and its fingerprint."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shared import settings_file

if TYPE_CHECKING:
    from shared.config import Config

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once, when it is imported

SAMPLES = 16
BLOCKS, BLOCK_BYTES = 64, 1 << 14
"""number and size of the blocks of a weight file that identify it: a training step changes every block"""
OPTIONS = [
    # option, setting, help
    ("--temperature", "rollout.temperature", "sampling temperature"),
    ("--max-completion-tokens", "rollout.max_completion_tokens", "a completion is cut at this length"),
    ("--system-prompt", "data.system_prompt", '"magistral", "" for none, or the text itself'),
    ("--seed", "seed", "another seed gives other samples"),
    ("--max-sequences", "rollout.max_sequences", "completions that the engine decodes at once"),
    ("--cache-bytes", "rollout.cache_bytes", "KV cache of the engine, bytes"),
]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model and the sampling."""
    parser.add_argument("--model", required=True, metavar="FOLDER", help="Hugging Face folder or Hub id")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help=f"per problem (default {SAMPLES})")
    parser.add_argument("--config", type=Path, metavar="RUN.toml", help="settings of a run (default: the defaults)")
    for option, key, help_text in OPTIONS:
        default = settings_file.SETTINGS[key].field.get_default()
        shown = f" (default {default})" if len(str(default)) < 20 else ""
        parser.add_argument(option, metavar="X", help=f"{help_text}{shown}, or that of --config")


def make_config(path: Path | None, overrides: dict[str, str], model_dir: Path) -> Config:
    """Return the settings to sample with: those of the file, overridden by options (key -> text), for this model.

    Rewards that do not decide whether an answer is right are disabled. Raises ConfigError, ModelError.
    """
    from shared.model import hf

    table = {} if path is None else settings_file.read_toml(path)
    origin: dict[str, str] = {}
    options = {key: option for option, key, _ in OPTIONS}
    for key, text in overrides.items():
        settings_file.put(table, key, settings_file.parse_value(key, text))
        origin[key] = options[key]
    described = hf.load_config(model_dir)
    if path is None:
        positions = described.get("max_position_embeddings", 4096)
        settings_file.put(table, "model.max_tokens", positions)
        origin["model.max_tokens"] = f"{model_dir}/config.json: max_position_embeddings"
        if "float32" in (described.get("dtype"), described.get("torch_dtype")):
            settings_file.put(table, "model.dtype", "float32")
    off = {"model.path": str(model_dir), "reward.length": 0.0, "reward.max_failure_share": 1.0}
    for key, value in {**off, "reward.extra": {}, "reward.log_sigmoid": {}, "reward.plugins": []}.items():
        settings_file.put(table, key, value)
    return settings_file.check(table, str(path or "options"), origin)


def digest_model(folder: Path) -> str:
    """Return a digest, 16 hexadecimal digits, of config.json and of each weight file's size and 64 spread blocks."""
    from shared.model import hf

    made = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(hf.weight_files(folder)):
        size = path.stat().st_size
        made.update(f"{path.name} {size}".encode())
        with path.open("rb") as stream:
            for block in range(BLOCKS):
                stream.seek(block * size // BLOCKS)
                made.update(stream.read(BLOCK_BYTES))
    return made.hexdigest()
