"""The JSON files of a Hugging Face model folder, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ModelError


def load_config(folder: Path) -> dict[str, Any]:
    """Content of config.json. Raises ModelError for a missing folder or file, or one that is not JSON."""
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist: set model.path to a Hugging Face folder or Hub id")
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file of a model folder. Raises ModelError for a missing one, or one that is not JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a complete Hugging Face model folder") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: fetch the file again")
    return content
