"""CUDA IPC handles: GPU memory of one process, opened by others of its host.

A handle names the GPU by its UUID, because a process may number the GPUs of its node differently.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from shared.errors import ConfigError, RunError


def export_handle(memory: torch.Tensor) -> dict[str, Any]:
    """JSON-able handle of a GPU tensor that is its whole storage. Raises ConfigError under expandable segments."""
    try:
        arguments = memory.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise ConfigError(
            f"GPU memory cannot be shared between processes: {error}. Remove expandable_segments:True from "
            'PYTORCH_CUDA_ALLOC_CONF, or set rollout.transport = "network"'
        ) from error
    packed = [{"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value for value in arguments]
    return {"gpu": str(torch.cuda.get_device_properties(memory.device).uuid), "size": memory.numel(), "storage": packed}


def local_index(gpu: str) -> int:
    """The number by which this process knows the GPU with this UUID. Raises ConfigError if it does not see it."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu:
            return index
    raise ConfigError(
        f"an engine does not see the trainers' GPU {gpu}: make it visible (CUDA_VISIBLE_DEVICES), "
        'or set rollout.transport = "network"'
    )


def import_handle(handle: dict[str, Any]) -> torch.Tensor:
    """[bytes] uint8: the GPU memory of another process of this host."""
    arguments = [base64.b64decode(value["bytes"]) if isinstance(value, dict) else value for value in handle["storage"]]
    arguments[0] = local_index(handle["gpu"])
    with torch.cuda.device(arguments[0]):
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if memory.numel() < handle["size"]:
        raise RunError(f"the shared GPU buffer has {memory.numel()} bytes instead of {handle['size']}")
    return memory[: handle["size"]]
