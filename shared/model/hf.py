"""Finds, checks, reads and saves Hugging Face model folders. safetensors only; nothing pickled is ever opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared.atomic_write import cannot_write, flush
from shared.errors import CheckpointError, ModelError
from shared.model.config import DecoderConfig
from shared.model.folder import load_config as load_config  # callers say hf.load_config
from shared.model.folder import newest_export, read_json
from shared.model.implementation import VISION_LANGUAGE, make_model, read_shape
from shared.model.stored_names import split_stored
from shared.user_file import missing

SHARD_BYTES = 5_000_000_000
"""a weight file is closed before it grows beyond this"""
TYPES = ("F32", "BF16", "F16", "F64")
"""accepted types of weights; others are quantised or no weights, and rounding them would give another model"""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""files of the tokenizer, and of the image processor of a vision-language model"""


def resolve(path_or_hub_id: str, setting: str = "model.path") -> Path:
    """Folder of a model: the path itself, a run's newest export, or a Hub id ("owner/name") fetched into its cache.

    `setting` is named in errors. Raises ModelError when there is no such folder, or the Hub does not give it.
    """
    folder = Path(newest_export(path_or_hub_id)).expanduser()
    if folder.is_dir():
        return folder
    near = missing(folder, "folder", "*/")
    if not may_be_hub_id(path_or_hub_id):
        raise ModelError(f"{setting} = '{path_or_hub_id}': {near}, and it is no Hub id (owner/name)")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*"]
    try:
        return Path(snapshot_download(path_or_hub_id, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises errors of several libraries
        raise ModelError(
            f"{setting} = '{path_or_hub_id}': {near}, and the Hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}). Offline: "
            f"fetch it elsewhere with 'hf download {path_or_hub_id}', copy the folder here and set {setting} to it"
        ) from error


def may_be_hub_id(text: str) -> bool:
    """Whether a name may be one of the Hub: "owner/name"."""
    parts = text.split("/")
    return len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~") and not text.endswith(".gguf")


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """File -> names of the tensors to take from it. Raises ModelError when there is no readable set of weights."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX} has no weight_map: fetch the file again")
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(folder / Path(str(file)).name, []).append(name)
    elif (folder / WEIGHTS).is_file():
        with _open(folder / WEIGHTS) as tensors:
            files = {folder / WEIGHTS: list(tensors.keys())}
    else:
        pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
        if pickled:
            raise ModelError(
                f"{folder} holds its weights only as pickle files ({pickled[0]}), which can run code when opened and "
                "are refused. Convert them to safetensors where you trust them: from transformers import "
                "AutoModelForCausalLM as M; M.from_pretrained(SOURCE).save_pretrained(TARGET)"
            )
        raise ModelError(f"{folder} has no {WEIGHTS} and no {INDEX}: fetch the weights again")
    for path in files:
        if not path.is_file():
            raise ModelError(f"{folder / INDEX} names {path.name}, which is missing: fetch the file again")
    return files


def check(folder: Path) -> None:
    """Raise ModelError unless config.json and every weight file are there and whole, and the weights those that
    config.json asks for, where it is of an architecture known here and not quantised. Reads headers only."""
    config = load_config(folder)
    _open_all(weight_files(folder))
    if "quantization_config" in config:
        return
    try:
        shapes = _shapes(DecoderConfig.from_hf(config), config)
    except ModelError:
        return  # vLLM serves more architectures than can be trained, and checks them itself
    _fitting(folder, shapes)


def check_trainable(folder: Path, implementation: str = "auto", max_tokens: int = 0) -> None:
    """Raise ModelError unless the folder holds exactly the weights that its config.json asks for, of a model that the
    implementation has (`read_shape`). Reads headers only, and allocates nothing."""
    _fitting(folder, shapes_of(folder, implementation, max_tokens))


def shapes_of(folder: Path, implementation: str = "auto", max_tokens: int = 0) -> dict[str, torch.Size]:
    """Name -> shape of every tensor that the model of a folder needs of it. Raises ModelError."""
    config = load_config(folder)
    return _shapes(read_shape(config, implementation, max_tokens), config)


def _shapes(shape: DecoderConfig, config: Mapping[str, Any]) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in make_model(shape, config).stored()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}): fetch the file again") from error


def _open_all(files: Mapping[Path, list[str]]) -> dict[Path, Any]:
    """Open weight files. Raises ModelError for a damaged one, and for one that lacks tensors that are taken from it."""
    opened = {path: _open(path) for path in files}
    for path, names in files.items():
        stored = set(opened[path].keys())
        if absent := [name for name in names if name not in stored]:
            raise ModelError(f"{path} lacks the tensor {absent[0]} that the index places there: fetch the file again")
    return opened


def iterate_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Yield every (name, tensor) that `shapes` asks for, one at a time, as stored; a mixture's experts of a layer
    together (stored_names.py).

    All names, shapes and types are checked before the first is yielded: ModelError lists what is missing, superfluous
    or another. Ignored: rotary tables, a stored head when `shapes` has none (tied embeddings), and what a
    vision-language model has in addition to its text part.
    """
    files, parts = _fitting(folder, shapes)
    for name, shape in shapes.items():
        if list(parts[name]) == [name]:
            yield name, files[name].get_tensor(name)
            continue
        whole = torch.empty(shape, dtype=files[next(iter(parts[name]))].get_tensor(next(iter(parts[name]))).dtype)
        for stored_name, rows in split_stored(name, whole, files):
            rows.copy_(files[stored_name].get_tensor(stored_name))
        yield name, whole


def _fitting(folder: Path, shapes: Mapping[str, torch.Size]) -> tuple[dict[str, Any], dict[str, dict[str, torch.Size]]]:
    """Return stored name -> opened file, and name -> {stored name: shape}. Raises ModelError unless everything fits."""
    files = weight_files(folder)
    stored_names = {name for names in files.values() for name in names}
    parts = {
        name: {part: rows.shape for part, rows in split_stored(name, torch.empty(shape, device="meta"), stored_names)}
        for name, shape in shapes.items()
    }
    expected = {part: shape for stored in parts.values() for part, shape in stored.items()}
    unknown = {name for name in stored_names - set(expected) if not _spare(name)}
    if load_config(folder).get("model_type") in VISION_LANGUAGE:
        home = next(iter(parts["model.embed_tokens.weight"])).removesuffix("embed_tokens.weight")
        unknown = {name for name in unknown if name.startswith(home)}
    problems = _differences("lacks", set(expected) - stored_names) + _differences("has unknown", unknown)
    if problems:
        raise ModelError(f"{folder}: the weights do not fit config.json: {'; '.join(problems)}")
    opened = _open_all(files)
    for path, names in files.items():
        for name in set(names) & set(expected):
            tensor = opened[path].get_slice(name)
            if (shape := tensor.get_shape()) != list(expected[name]):
                problems.append(f"{name} has shape {shape}, config.json asks for {list(expected[name])}")
            if (kind := tensor.get_dtype()) not in TYPES:
                problems.append(
                    f"{name} is of type {kind}: training needs the unquantised weights ({', '.join(TYPES)})"
                )
    if problems:
        raise ModelError(f"{folder}: {'; '.join(sorted(problems)[:4])}{' ...' if len(problems) > 4 else ''}")
    return {name: opened[path] for path, names in files.items() for name in names}, parts


def _spare(name: str) -> bool:
    """Whether a stored tensor is left out where the model has none of that name: a rotary table, or a tied head."""
    return name.endswith("rotary_emb.inv_freq") or name in ("lm_head.weight", "language_model.lm_head.weight")


def _differences(verb: str, names: set[str]) -> list[str]:
    shown = sorted(names)
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return [f"{verb} {', '.join(shown[:4])}{more}"] if shown else []


def save_trained(folder: Path, start: Path, state: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Write a model that was trained from the folder `start` as that one is: its config.json, tokenizer and names, and
    as they were those of its tensors that `state` (name, tensor) does not have. Raises CheckpointError."""
    _save(folder, load_config(start), _as_stored(start, state, dtype), dtype, start)


def _as_stored(start: Path, state: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    files = weight_files(start)
    left = {name: path for path, names in files.items() for name in names}
    stored = set(left)
    for name, tensor in state:
        for stored_name, rows in split_stored(name, tensor, stored):
            left.pop(stored_name, None)
            yield stored_name, rows.to(dtype)
    for name, path in left.items():
        if not _spare(name):
            yield name, _open(path).get_tensor(name)


def save_model(
    folder: Path,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer_from: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers, vLLM and a run read: safetensors, config.json, tokenizer if given.

    `state` may be a generator of (name, tensor): one shard at a time is held in memory. Written aside and renamed: the
    folder is complete or absent, and one that was there stays until then. Raises CheckpointError when the disk fails.
    """
    pairs = state.items() if isinstance(state, Mapping) else state
    _save(folder, config, ((name, tensor.to(dtype)) for name, tensor in pairs), dtype, tokenizer_from, shard_bytes)


def _save(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer_from: Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    with writing_folder(folder) as partial:
        _write_shards(partial, tensors, shard_bytes)
        plain = {key: value for key, value in config.items() if key != "torch_dtype"}
        write_json(partial / "config.json", plain | {"dtype": str(dtype).removeprefix("torch.")})
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, partial)


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """Make a folder to write into, which takes this one's place at the block's end, flushed. Raises CheckpointError."""
    partial, old = (folder.with_name(f".{folder.name}.{word}") for word in ("partial", "old"))
    try:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors makes files that only their owner can read
            flush(path)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno:
            raise CheckpointError(f"the model in {cannot_write(folder, error)}") from error
        raise CheckpointError(
            f"the model could not be written to {folder} ({error}): free disk space or set another runs_dir"
        ) from error
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0

    def close_shard() -> None:
        save_file(pending, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        stored = tensor.detach().cpu().contiguous()
        if pending and pending_bytes + stored.nbytes > shard_bytes:
            close_shard()
            pending_bytes = 0
        pending[name] = stored
        pending_bytes += stored.nbytes
        total += stored.nbytes
    close_shard()
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / WEIGHTS)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a model folder."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation settings. Raises ModelError when the source has no tokenizer."""
    present = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json"} & set(present):
        raise ModelError(f"{source} has no tokenizer (tokenizer.json): fetch it from where the model came from")
    target.mkdir(parents=True, exist_ok=True)
    for name in present:
        if (source / name).resolve() != (target / name).resolve():
            shutil.copyfile(source / name, target / name)
