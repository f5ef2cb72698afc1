"""Adapters on disk as PEFT writes them: adapter_config.json, and their matrices in adapter_model.safetensors.

PEFT, transformers and vLLM read such a folder together with the model that it was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared.errors import ModelError
from shared.model import hf
from shared.model.folder import read_json
from shared.model.lora import EXPERT_TENSORS, EXPERTS, MARK, A, B, merge, split_name, weight_of
from shared.user_file import missing

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""before the names of the model's own layers"""
INNER = ".base_layer"
"""after a module of experts, in the names of the first of its adapted tensors: PEFT wraps one around the other"""
MOST = 1 << 20
"""limit of r and lora_alpha"""
UNKNOWN = ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")
"""settings of PEFT that change what an adapter is, or add to it, and are refused unless they are off"""


@dataclass(frozen=True)
class AdapterSettings:
    """What adapter_config.json says of an adapter."""

    rank: int
    alpha: float
    targets: list[str]
    """last parts of the names of its layers"""
    base: str
    """the model it was trained on: a folder or Hub id"""
    experts: bool = False
    """whether a mixture's experts have adapters, too"""


def save_adapter(folder: Path, matrices: Mapping[str, Tensor], rank: int, alpha: float, base: str) -> None:
    """Write a folder that PEFT and vLLM read, complete or not at all. matrices: name -> A or B, kept in float32.
    Raises CheckpointError when the disk fails."""
    layers = {split_name(name)[0] for name, value in matrices.items() if value.ndim == 2}
    targets = sorted({layer.rpartition(".")[2] for layer in layers})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "target_modules": targets, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip
    if any(value.ndim == 3 for value in matrices.values()):
        settings["target_parameters"] = [f"{EXPERTS}.{tensor}" for tensor in EXPERT_TENSORS]
    forms = dict(peft_form(name, value.detach()) for name, value in matrices.items())
    stored = {PREFIX + name: value.to("cpu", torch.float32).contiguous() for name, value in forms.items()}
    with hf.writing_folder(folder) as partial:
        save_file(stored, partial / WEIGHTS, metadata={"format": "pt"})
        hf.write_json(partial / CONFIG, settings)


def peft_form(name: str, value: Tensor) -> tuple[str, Tensor]:
    """Name and value of A or B as PEFT stores them: of experts [experts * rank, in] and [out, rank * experts]."""
    if value.ndim == 2:
        return name, value
    layer, end = split_name(name)
    module, _, last = weight_of(layer).rpartition(".")
    flat = value.flatten(0, 1) if end == A else value.permute(1, 2, 0).flatten(1)
    return f"{module}{INNER if last == EXPERT_TENSORS[0] else ''}{end}", flat


def own_form(name: str, value: Tensor, rank: int) -> tuple[str, Tensor]:
    """The other way round. Raises RuntimeError where the value's sides are no multiple of the rank."""
    layer, end = split_name(name)
    module = layer.removesuffix(INNER)
    if module.rpartition(".")[2] != EXPERTS:
        return name, value
    last = EXPERT_TENSORS[0 if layer.endswith(INNER) else 1]
    each = value.unflatten(0, (-1, rank)) if end == A else value.unflatten(1, (rank, -1)).permute(2, 0, 1)
    return f"{module}.{MARK}{last}{end}", each.contiguous()


def read_settings(folder: Path) -> AdapterSettings:
    """Read adapter_config.json. Raises ModelError for a folder that holds no adapter, or one of another kind."""
    if not folder.is_dir():
        raise ModelError(f"adapter {folder}: {missing(folder, 'folder', '*/')}")
    settings = read_json(folder / CONFIG)
    on = [name for name in UNKNOWN if settings.get(name)]
    if settings.get("peft_type") != "LORA" or settings.get("bias", "none") != "none" or on:
        what = on[0] if on else f"peft_type {settings.get('peft_type')}, bias {settings.get('bias')}"
        raise ModelError(f"{folder} is not a plain LoRA adapter ({what} is not supported)")
    rank, alpha, targets = settings.get("r", 0), settings.get("lora_alpha"), settings.get("target_modules") or []
    listed = settings.get("target_parameters") or []
    tensors = sorted(str(one).rpartition(".")[2] for one in (listed if isinstance(listed, list) else [listed]))
    if tensors and tensors != sorted(EXPERT_TENSORS):
        both = " and ".join(EXPERT_TENSORS)
        raise ModelError(f"{folder} adapts {', '.join(tensors)}: adapters of experts are those of {both}")
    sound = isinstance(rank, int) and 0 < rank < MOST and bool(targets or tensors)
    if not sound or not isinstance(alpha, int | float) or not 0 < alpha < MOST:
        raise ModelError(
            f"{folder / CONFIG} lacks r, lora_alpha or target_modules, or they are no sizes: fetch the file again"
        )
    names = [targets] if isinstance(targets, str) else [str(target) for target in targets]
    return AdapterSettings(
        int(rank), float(alpha), names, str(settings.get("base_model_name_or_path") or ""), bool(tensors)
    )


def read_matrices(folder: Path) -> dict[str, Tensor]:
    """Name, as the model names its layers -> A or B as stored. Raises ModelError for a damaged or foreign file."""
    path, rank = folder / WEIGHTS, read_settings(folder).rank
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch the adapter again") from error
    matrices = {}
    for name, value in tensors.items():
        try:
            own, each = own_form(name.removeprefix(PREFIX), value, rank)
            ranks = each.shape[-2 if name.endswith(A) else -1]
        except (RuntimeError, IndexError):
            ranks = 0
        if not (name.startswith(PREFIX) and name.endswith((A, B))) or ranks != rank:
            raise ModelError(f"{path}: {name} of shape {tuple(value.shape)} is no matrix of an adapter of rank {rank}")
        matrices[own] = each
    return matrices


def merged_weights(model_dir: Path, matrices: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of the model in a folder with adapters added to it, one at a time. matrices: name -> A or B.
    Raises ModelError for a folder that does not fit, and for adapters of layers that it lacks."""
    shapes = hf.shapes_of(model_dir)
    for name in matrices:
        if (needed := weight_of(split_name(name)[0])) not in shapes:
            raise ModelError(f"the adapter's {name} needs {needed}, which the model in {model_dir} lacks")
    for name, weight in hf.iterate_weights(model_dir, shapes):
        yield name, merge(name, weight, matrices, scale)


def check_fits(folder: Path, model_dir: Path) -> None:
    """Raise ModelError unless every matrix of an adapter's folder has a layer of its size in the model. The shapes of
    the model are those of its config.json; of an architecture that is not known here nothing is compared."""
    matrices = read_matrices(folder)
    try:
        shapes = hf.shapes_of(model_dir)
    except ModelError:
        return
    for name, value in matrices.items():
        shape = shapes.get(weight_of(split_name(name)[0]))
        side = -1 if name.endswith(A) else -2
        if shape is None or value.shape[side] != shape[side]:
            raise ModelError(f"{folder} is not an adapter of {model_dir}: {name} has shape {tuple(value.shape)}")
