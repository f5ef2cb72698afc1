"""What engines receive of a policy: its weights; its adapters alone; or its weights with the adapters merged into them.

Every rank computes the values of its own rows, when they are written and when their checksums are taken.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.weights.checksum import MODULUS, checksum_rows
from rollout.weights.layout import Change
from shared.errors import SyncMismatch
from shared.model import lora
from shared.model.language_model import LanguageModel
from shared.model.parallel import cut_of
from trainer.step.fsdp import is_sharded, local, rows_of, trained


class SentWeights:
    """The named parameters that are sent, and how engines' values of some of them are computed. Adapters are merged
    where experts have some: the layers compute that way then (shared/model/lora.py)."""

    def __init__(self, policy: LanguageModel):
        self.named: list[tuple[str, Tensor]] = list(trained(policy))
        self.changes: dict[str, Change] = {}
        self.merged = dict(lora.adapters(policy))
        """layer -> its adapter, where weights are sent with them merged"""
        self.gathered: dict[str, Tensor] = {}
        """layer -> A [rank, in], whole as each row of the weight needs it, of the version that is sent"""
        if any(isinstance(one, lora.ExpertsAdapter) for one in self.merged.values()):
            self.named = [(name, one) for name, one in policy.named_parameters() if not name.endswith((lora.A, lora.B))]
            self.changes = {lora.weight_of(layer): partial(self.merge, layer) for layer in self.merged}
        else:
            self.changes = {layer + lora.B: partial(scale, one.scale) for layer, one in self.merged.items()}
            self.merged = {}
        self.columns = {name: one for name, one in self.named if (cut := cut_of(one)) is not None and cut.dim == 1}
        """of which tensor peers have other columns"""
        self.joined: dict[str, tuple[int, Tensor]] = {}
        """their name -> (number of the first, rows of this rank, whole), while a version is written"""
        self.changes |= {name: partial(self.join, name) for name in self.columns}

    @torch.no_grad()
    def gather(self) -> None:
        """Gather what the rows of this version need, before it is written. A collective."""
        self.joined = {name: join_columns(name, one) for name, one in self.columns.items()}
        for layer, linear in self.merged.items():
            a = linear.lora_A.weight.detach()
            if a.ndim == 2:  # those of experts are cut as their weights are
                self.gathered[layer] = a.full_tensor() if is_sharded(a) else a

    def join(self, name: str, rows: Tensor, first: int) -> Tensor:
        """Whole rows, for those of which this rank has some columns."""
        start, joined = self.joined[name]
        return joined[first - start : first - start + len(rows)]

    def merge(self, layer: str, rows: Tensor, first: int) -> Tensor:
        """Rows of a frozen weight with its adapter, float32; A and B are rounded as in the layers' own computation."""
        linear = self.merged[layer]

        def own(matrix: Tensor) -> Tensor:
            start = first - rows_of(matrix).start
            return local(matrix)[start : start + len(rows)]

        a, b = self.gathered[layer] if layer in self.gathered else own(linear.lora_A.weight), own(linear.lora_B.weight)
        return lora.merged(rows, a.to(rows.dtype), b.to(rows.dtype), linear.scale)


def scale(factor: float, rows: Tensor, first: int) -> Tensor:
    """Rows of B as an engine multiplies with them."""
    return rows * factor


def join_columns(name: str, parameter: Tensor) -> tuple[int, Tensor]:
    """(number of the first, a rank's part of the rows whole) of a parameter of which it has some columns of more rows.
    Raises SyncMismatch where they are not what the peers have. A collective of the peers."""
    cut, held = cut_of(parameter), local(parameter.detach())
    assert cut is not None and cut.size is not None
    group, rank, size = cut.peers
    bounds = [len(held) * number // size for number in range(size + 1)]
    widths = torch.zeros(size, dtype=torch.int64, device=held.device)
    widths[rank] = held.shape[1]
    dist.all_reduce(widths, group=group)
    own, counts = bounds[rank + 1] - bounds[rank], widths.tolist()
    blocks = held.new_empty(own * cut.size)
    sent = [(after - before) * held.shape[1] for before, after in pairwise(bounds)]
    dist.all_to_all_single(blocks, held.flatten(), [own * count for count in counts], sent, group=group)
    parts = blocks.split([own * count for count in counts])
    joined = torch.cat([part.view(own, count) for part, count in zip(parts, counts, strict=True)], 1)
    first = rows_of(parameter).start
    before, after = (
        checksum_rows(rows, start, rows.dtype, rows.element_size()) if len(rows) else 0
        for start, rows in ((first, held), (first + bounds[rank], joined))
    )
    lost = (before - after + MODULUS // 2) % MODULUS - MODULUS // 2  # as an int64, whose sums wrap
    dist.all_reduce(total := torch.tensor(lost, device=held.device), group=group)
    if int(total):
        raise SyncMismatch(f"rows of {name} that were joined for the engines are not those that the trainers have")
    return first + bounds[rank], joined
