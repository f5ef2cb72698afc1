"""The adapters of a vLLM engine: the slot of its LoRA layers that is written in place, version by version.

vLLM keeps the frozen model as it loaded it; each of its LoRA layers holds A and B of every slot. An update writes a
version's matrices over those before, between two steps, so that requests that run go on with them, and what is read
back afterwards are these same matrices, with which the layers multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers import RowParallelLinearWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from rollout.weights.checksum import MODULUS, checksum_rows
from rollout.weights.layout import Layout
from shared.errors import ModelError
from shared.model.lora import A, B

ADAPTER_ID = 1
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""ranks of a slot that vLLM offers; a smaller adapter leaves the rest zero"""


def engine_arguments(rank: int, layers: list[str], slots: int = 1) -> dict[str, Any]:
    """Arguments for an engine with slots for adapters of at most `rank`. layers: names of the adapted ones, their last
    parts: others, the head above all, would multiply by zeros."""
    slot_rank = next(each for each in RANKS if each >= rank)
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": slot_rank, "lora_target_modules": layers}


def adapter_request() -> LoRARequest:
    """What a request for the policy names. Its name stays the same: that no keys and values of an older version are
    used again is the work of the cache salt, which holds the version (vLLM's cache knows adapters by name only)."""
    return LoRARequest("policy", ADAPTER_ID, "in memory")


@dataclass(frozen=True)
class Matrix:
    """A or B of one layer in the slot: `memory` is what this worker has of it, a view."""

    memory: torch.Tensor
    """[rank, columns] of an A, [rows, rank] of a B"""
    first_row: int
    first_column: int

    def place(self, whole: torch.Tensor) -> None:
        """Write this worker's part of a whole matrix."""
        rows, columns = self.memory.shape
        if whole.shape != self.memory.shape:
            whole = whole[self.first_row : self.first_row + rows, self.first_column : self.first_column + columns]
        self.memory.copy_(whole, non_blocking=True)


class AdapterSlot:
    """One adapter's slot in all LoRA layers of a worker's model."""

    def __init__(self, model: Any, layout: Layout):
        """Take the slot, set to zero. Raises ModelError if a tensor of the layout fits no layer."""
        self.layout = layout
        manager = model.lora_manager
        shared = getattr(getattr(model, "config", None), "attention_k_eq_v", False)  # Gemma 4
        if shared and any(name.endswith(".k_proj" + A) for name in layout.places):
            raise ModelError("lora.targets: keys of this model are its values too: name layers without k_proj")
        if ADAPTER_ID not in manager.list_adapters():
            nothing = LoRALayerWeights("none", 1, 1, torch.zeros(1, 1), torch.zeros(1, 1))  # vLLM looks at a first one
            manager.add_adapter(LoRAModel(ADAPTER_ID, 1, {"none": nothing}))
            # vLLM forgets all adapters after an update, since the model below may have changed: here only they change
            manager.remove_all_adapters = lambda: None
        manager.activate_adapter(ADAPTER_ID)
        slot: int = manager.lora_index_to_id.index(ADAPTER_ID)
        self.matrices: dict[str, list[Matrix]] = {}
        for path, module in manager.modules.items():
            parent, _, last = path.rpartition(".")
            parts, before = manager.packed_modules_mapping.get(last, [last]), 0
            fused = path + A in layout.places and last in manager.packed_modules_mapping  # in the folder too (GLM-4)
            if fused and module.tp_size > 1:
                raise ModelError(f"rollout.tensor_parallel: set it to 1, or lora.targets to other layers than {last}")
            parts = [last] * module.n_slices if fused else parts
            for number, submodule in enumerate(parts if len(parts) == module.n_slices else []):
                self._find(f"{parent}.{submodule}" if parent else submodule, module, number, slot, before)
                before += module.lora_b_stacked[number].shape[2] if fused else 0
        if missing := sorted(layout.places.keys() - self.matrices.keys()):
            raise ModelError(f"the engine's model has no place for {missing[:5]}, which trainers send")

    def _find(self, name: str, module: Any, number: int, slot: int, before: int) -> None:
        """Note where A and B of a layer are, if the trainers send them. module: the LoRA layer that computes it, maybe
        with others (q, k, v), of which it is the one with this number; or only its rows from `before` on."""
        places = self.layout.places
        if name + A not in places or name + B not in places:
            return
        rank = places[name + A].shape[0]
        a, b = module.lora_a_stacked[number][slot, 0, :rank], module.lora_b_stacked[number][slot, 0, :, :rank]
        column, row = 0, before
        if isinstance(module, RowParallelLinearWithLoRA):
            column = module.tp_rank * a.shape[1]
        elif module.tp_size > 1:  # keys and values may be on several workers
            row = getattr(module, "output_ids", [module.tp_rank])[number] * b.shape[0]
        self.matrices.setdefault(name + A, []).append(Matrix(a, 0, column))
        self.matrices.setdefault(name + B, []).append(Matrix(b, row, 0))

    @torch.no_grad()
    def place(self, name: str, whole: torch.Tensor) -> None:
        """Write one matrix of a version. Only between two engine steps."""
        for matrix in self.matrices[name]:
            matrix.place(whole)

    @torch.no_grad()
    def read(self) -> dict[str, tuple[int, int]]:
        """name -> (checksum, number of values) of what the layers multiply with; safe during generation."""
        dtype, item, places = self.layout.dtype, self.layout.dtype.itemsize, self.layout.places
        return {
            name: (
                sum(checksum_rows(it.memory, it.first_row, dtype, places[name].row_bytes(item)) for it in held)
                % MODULUS,
                sum(it.memory.numel() for it in held),
            )
            for name, held in self.matrices.items()
        }


def slot_rows(slots: torch.Tensor) -> Mapping[int, torch.Tensor | None]:
    """Slot -> which rows of a step belong to it, None for all. slots: [rows], -1 for rows without an adapter."""
    indices: list[int] = torch.unique(slots).tolist()
    if len(indices) == 1:
        return {} if indices[0] < 0 else {indices[0]: None}
    return {slot: (slots == slot).nonzero()[:, 0] for slot in indices if slot >= 0}


def multiply_by_adapter() -> None:
    """Make vLLM on a CPU, in this process and those it forks, multiply all rows of an adapter at once.

    Its own function copies A and B for every row (a gigabyte in a prefill of 4,096 tokens of a small model), and gives
    rows without an adapter the last slot's where a step has both kinds. Experts, which have no adapters here, take the
    kernel of CPUs: with any adapter vLLM takes Triton's, which multiplies with those of experts.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    def add_lora_linear(
        self: Any, y: torch.Tensor, x: torch.Tensor, stacked_a: Any, stacked_b: Any, scale: float, widths: Any, **_: Any
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in slot_rows(self.token_lora_indices).items():
            inputs, start = x if rows is None else x[rows], 0
            for a, b, width in zip(stacked_a, stacked_b, widths, strict=True):
                product = torch.nn.functional.linear(torch.nn.functional.linear(inputs, a[slot, 0]), b[slot, 0])
                out = y[:, start : start + width]
                out.add_(product, alpha=scale) if rows is None else out.index_add_(0, rows, product, alpha=scale)
                start += width

    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    # vLLM sets it where it makes a config: the property ignores that, and says that experts have no adapters
    FusedMoEConfig.is_lora_enabled = property(lambda _: False, lambda *_: None)
