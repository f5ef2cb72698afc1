"""Names of a module's tensors in model folders, where the two differ.

A mixture's experts: folders store a matrix for each expert, modules hold all of a layer in one tensor.

    module                              Qwen's way                            Mixtral's way
    L.mlp.experts.gate_up_proj          L.mlp.experts.0.gate_proj.weight      L.block_sparse_moe.experts.0.w1.weight
    [experts, 2 inner, hidden]          L.mlp.experts.0.up_proj.weight        L.block_sparse_moe.experts.0.w3.weight
    L.mlp.experts.down_proj             L.mlp.experts.0.down_proj.weight      L.block_sparse_moe.experts.0.w2.weight
    L.mlp.gate.weight                   L.mlp.gate.weight                     L.block_sparse_moe.gate.weight

A folder may also store what the module holds (gpt-oss). The text part of a vision-language model: model.layers.0 is
language_model.model.layers.0 (Mistral 3, Gemma 3), model.language_model.layers.0 (Gemma 4, Qwen3-VL) or itself
(Qwen2.5-VL).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

WAYS = (
    (".mlp.", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
    (".block_sparse_moe.", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
)
"""(the folder's form of ".mlp.", tensor of the module -> its parts of each expert, one below the other)"""


def split_stored(name: str, tensor: Tensor, stored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield what a folder stores of a module's tensor, as (name, part that shares its memory), under those of the names
    `stored` that there are; the tensor itself where it goes under its own name."""
    for stored_name in (name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)):
        if stored_name in stored:
            yield stored_name, tensor
            return
    layer, _, last = name.rpartition(".mlp.")
    for inner, parts in WAYS:
        if f"{layer}{inner}{last}" in stored:
            yield f"{layer}{inner}{last}", tensor
            return
        chunks = parts.get(last.removeprefix("experts."), ()) if tensor.dim() == 3 else ()
        if chunks and f"{layer}{inner}experts.0.{chunks[0]}.weight" in stored:
            for number, expert in enumerate(tensor):
                for projection, rows in zip(chunks, expert.chunk(len(chunks)), strict=True):
                    yield f"{layer}{inner}experts.{number}.{projection}.weight", rows
            return
    yield name, tensor
