"""What engines receive of a policy: its weights; its adapters alone; or its weights with the adapters merged into them.

Every rank computes the values of its own rows, when they are written and when their checksums are taken.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rollout.weights.layout import Change
from shared.model import lora
from shared.model.language_model import LanguageModel
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

    @torch.no_grad()
    def gather(self) -> None:
        """Gather what the rows of this version need, before it is written. A collective."""
        for layer, linear in self.merged.items():
            a = linear.lora_A.weight.detach()
            if a.ndim == 2:  # those of experts are cut as their weights are
                self.gathered[layer] = a.full_tensor() if is_sharded(a) else a

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
