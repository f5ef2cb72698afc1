"""The JSON files of a Hugging Face model folder, read without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from shared.errors import ModelError, command_of
from shared.json_reader import parse_json

MOST_TOKENS = 1 << 31
"""larger numbers are no token ids"""
MOST_BYTES = 256 << 20
"""of a text file; the largest tokenizer.json have 35 MB"""


def load_config(folder: Path) -> dict[str, Any]:
    """Content of config.json. Raises ModelError for a missing folder or file, or one that is not JSON."""
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist: set model.path to a Hugging Face folder or Hub id")
    config = read_json(folder / "config.json")
    named = config.get("architectures") or []
    for name in (config.get("model_type") or "", *(named if isinstance(named, list) else [named])):
        if not isinstance(name, str):
            raise ModelError(f"{folder / 'config.json'}: {str(name)[:60]} is no name of a model: fetch the file again")
    return config


def newest_export(path: str) -> str:
    """A model's path as it was given, of a run's folder its newest export. Raises ModelError where it has none,
    and for a checkpoint of a run or the folder of all of them."""
    folder = Path(path).expanduser()
    if not path or (folder / "config.json").exists():
        return path
    for checkpoints, step in (folder, ""), (folder.parent, folder.name.removeprefix("step_")):
        run = checkpoints.parent
        if checkpoints.name == "checkpoints" and (run / "config.toml").is_file() and folder.is_dir():
            export = f"{command_of('trainer.export')} {run} {step}".rstrip()
            latest = f"take {run / 'latest'}, or " if (run / "latest").is_dir() else ""
            raise ModelError(f"{path} holds what a run resumes from, no model: {latest}export it first: `{export}`")
    if not (folder / "config.toml").is_file():
        return path
    if not (folder / "latest").is_dir():
        raise ModelError(f"{path} is the folder of a run that has exported no model: train it to its end first")
    return str(Path(path) / "latest")


ModelPath = Annotated[str, AfterValidator(newest_export)]
"""a setting that names a model: its folder, that of a run, or a Hub id"""


def check_files(folder: Path) -> None:
    """Raise ModelError for something in a folder that is read without end: a pipe, a socket, a device, or too long."""
    try:
        for path in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")] if folder.is_dir() else []:
            size = check_regular(path).stat().st_size if path.exists() and path.suffix in (".json", ".jinja") else 0
            if size > MOST_BYTES:
                raise ModelError(f"{path} has {size:,} bytes, more than any such file: fetch it again")
    except OSError as error:
        raise ModelError(f"{folder} cannot be read ({error}): make it readable") from error


def check_tokenizer_files(folder: Path) -> None:
    """The same, and for a config.json or tokenizer_config.json that is not JSON."""
    check_files(folder)
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)


def check_regular(path: Path) -> Path:
    """The path itself. Raises ModelError for one that leads to neither a file nor a folder of a disk."""
    endless = path.exists() and not (path.is_file() or path.is_dir())
    if endless or os.path.realpath(path).startswith(("/proc/", "/sys/")):
        raise ModelError(f"{path} is no regular file, but leads to a pipe or a device: a model's folder has files only")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file of a model folder. Raises ModelError for a missing one, one that is not JSON, and for what
    `check_files` refuses."""
    check_files(path.parent)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        near = max(path.parent.glob(f"*/{path.name}"), key=os.path.getmtime, default=None)
        other = f"did you mean {near.parent}?" if near else "name another"
        raise ModelError(
            f"{path.parent} has no {path.name}: it is not a complete Hugging Face model folder: {other}"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: fetch the file again")
    return content


def token_ids(path: Path, name: str) -> list[int]:
    """The token ids that a JSON file of a model folder has under a name: one, a list, or none. Raises ModelError."""
    value = read_json(path).get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and 0 <= token < MOST_TOKENS for token in ids):
        raise ModelError(f"{path}: {name} = {str(value)[:60]} is no token id, nor a list of some: fetch the file again")
    return ids
