"""A step on two ranks is that of one, whatever carries the collectives: NCCL on two GPUs, and the same over gloo on the
CPU, so that this code is known to work."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shared.model.decoder import Decoder, initialise
from tests.trainer.rank_data import MAGISTRAL, SHAPE, deal, make_sequences
from tests.trainer.rank_scene import gradients, make_model
from trainer.step import fsdp, optimiser
from trainer.step.forward_backward import forward_backward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANKS, CUT = 2, 4
WIDE = replace(SHAPE, head_dim=16)
"""the scenes' shape, with heads that FlashAttention takes"""
DEADLINE_S = 600.0
NEAR = {"float32": 2e-5, "bfloat16": 0.05}
"""relative distance of a gradient from float32 on one CPU rank, by the type of the products"""


def rank_of(kind: str, rank: int, folder: Path, compute: str) -> tuple[float, dict[str, Tensor], str]:
    """One rank, in a process of its own: (norm over all shards, gradients on the CPU, name of the backend)."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    mesh = fsdp.join(dist.FileStore(str(folder / "store"), RANKS), rank, RANKS, device, DEADLINE_S)
    decoder = make_model(mesh, compute, device=str(device), shape=WIDE)
    batches = deal(make_sequences("group_tokens"), CUT, rank, RANKS)
    forward_backward(decoder, batches, 1.0, MAGISTRAL)
    norm = optimiser.clip(decoder, 1e9, mesh.get_group())
    found = {name: gradient.cpu() for name, gradient in gradients(decoder).items()}
    backend = dist.get_backend(mesh.get_group())
    fsdp.leave()
    return norm, found, backend


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu(2))])
def test_two_ranks_take_the_step_of_one(kind: str, backend: str, compute: str, tmp_path: Path) -> None:
    alone = Decoder(WIDE)
    initialise(alone, seed=1)
    forward_backward(alone, deal(make_sequences("group_tokens"), CUT, 0, 1), 1.0, MAGISTRAL)
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as ranks:
        asked = [ranks.submit(rank_of, kind, rank, tmp_path, compute) for rank in range(RANKS)]
        found = [one.result(DEADLINE_S) for one in asked]
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    whole = float(torch.stack([gradient.norm() for gradient in expected.values() if gradient is not None]).norm())
    for norm, held, used in found:
        assert used == backend and held.keys() == expected.keys()
        assert norm == pytest.approx(whole, rel=NEAR[compute])
        for name, gradient in held.items():
            wanted = expected[name]
            assert wanted is not None
            assert float((gradient - wanted).norm()) <= NEAR[compute] * whole, name
