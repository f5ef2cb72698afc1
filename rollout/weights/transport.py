"""Chooses how a trainer rank's weights travel: through host memory, GPU memory or the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from rollout.weights.cuda_ipc import DeviceWeightSender
from rollout.weights.layout import Change, own_pieces, plan_layout, unique_shapes
from rollout.weights.sender import HostWeightSender, WeightSender
from shared.errors import ConfigError


def make_sender(
    transport: str, named_parameters: list[tuple[str, torch.Tensor]], dtype: torch.dtype, *, rank: int, world: int,
    store: dist.Store, engines: int, changes: Mapping[str, Change] | None = None,
) -> WeightSender:  # fmt: skip
    """Make the sender of trainer rank `rank` of `world`. Every rank calls it once, at about the same time.

    transport: "auto", "shm", "cuda_ipc" or "network" (rollout.transport). named_parameters: Hugging Face names and the
    fp32 master weights (FSDP2 DTensors sharded on dimension 0, or plain tensors with one rank); the tensors stay the
    same objects, updated in place. changes: name -> what engines hold, where that is something else. Raises ConfigError
    if the transport does not fit the device.
    """
    layout = plan_layout(unique_shapes(named_parameters), dtype, world)
    pieces = own_pieces(named_parameters, rank)
    pieces = [replace(piece, change=changes.get(piece.name)) for piece in pieces] if changes else pieces
    device = pieces[0].local.device if pieces else torch.device("cpu")
    if device.type == "cuda":
        return DeviceWeightSender(transport, layout, pieces, rank, store, engines)
    if transport == "cuda_ipc":
        raise ConfigError('rollout.transport = "cuda_ipc" needs trainers on GPUs: use "auto" or "shm" on the CPU')
    return HostWeightSender(transport, layout, pieces, rank, store, engines)
