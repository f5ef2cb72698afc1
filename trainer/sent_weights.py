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
from trainer.fsdp import is_sharded, local, rows_of, trained


def scaled(scale: float, rows: Tensor, first: int) -> Tensor:
    """Rows of B as an engine multiplies with them."""
    return rows * scale


class SentWeights:
    """The named parameters that are sent, and how engines' values of some of them are computed."""

    def __init__(self, policy: LanguageModel, merges: bool):
        """merges: engines receive weights, adapters merged."""
        self.adapters = dict(lora.adapters(policy))
        self.rows: dict[str, Tensor] = {}
        """A of the merged linear layers, whole as each of their rows needs it, of the version that is sent"""
        self.merges, self.changes = merges, dict[str, Change]()
        self.named: list[tuple[str, Tensor]] = list(trained(policy))
        if merges and self.adapters:
            self.named = [(name, one) for name, one in policy.named_parameters() if not name.endswith((lora.A, lora.B))]
        for name in self.adapters:
            if merges:
                self.changes[lora.weight_of(name)] = partial(self.merge, name)
            else:
                self.changes[name + lora.B] = partial(scaled, self.adapters[name].scale)

    @torch.no_grad()
    def gather(self) -> None:
        """Before a version is written, where adapters are merged. A collective."""
        for name, layer in self.adapters.items() if self.merges else ():
            a = layer.lora_A.weight.detach()
            if a.ndim == 2:  # experts are cut as their weights are
                self.rows[name] = a.full_tensor() if is_sharded(a) else a

    def merge(self, name: str, rows: Tensor, first: int) -> Tensor:
        """Rows of a frozen weight with its adapter, float32; A and B are rounded as in the layers' own computation."""
        layer = self.adapters[name]

        def own(matrix: Tensor) -> Tensor:
            start = first - rows_of(matrix).first
            return local(matrix)[start : start + len(rows)]

        a, b = self.rows[name] if name in self.rows else own(layer.lora_A.weight), own(layer.lora_B.weight)
        return lora.merged(rows, a.to(rows.dtype), b.to(rows.dtype), layer.scale)
