"""The parameters of a vLLM model: which tensors of the trainers each is made of, and what the model computes with now.

What is read back is compared with the trainers' weights after every update (proof.py). It is taken from the model, not
from the memory that the update came through: the values of a plain parameter, and of a linear that keeps a packed copy
(on a CPU) some columns, as its products with unit vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rollout.weights.checksum import checksum_columns, checksum_rows, probed_columns
from rollout.weights.layout import Layout
from shared.errors import ModelError

Linear = Callable[..., torch.Tensor]
"""(x, weight, bias) -> output: the function that vLLM sets on a module as `cpu_linear`"""


@dataclass(frozen=True)
class Target:
    """One parameter of the vLLM model, and the neighbouring tensors of the buffer that it is made of."""

    module: torch.nn.Module
    parameter: str
    sources: list[str]
    bytes: int
    row_bytes: int
    plain: bool
    """the parameter holds its values (embedding, norm, bias, head); a packed linear's plain weight was dropped"""
    packed: bool
    """the module computes with a packed copy"""


def plan_targets(model: torch.nn.Module, layout: Layout) -> list[Target]:
    """Match every parameter of the model with the buffer's tensors (q, k, v -> qkv_proj, gate, up -> gate_up_proj).

    A tied head is packed from the embedding's tensor. Raises ModelError if a parameter has no source or a tensor no
    destination: then part of the model would stay old.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    targets: list[Target] = []
    unused = set(layout.places)
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            prefix = f"{parent}." if parent else ""
            sources = [f"{prefix}{part}.{name}" for part in fused.get(last, [last])]
            tied = False
            if not all(source in layout.places for source in sources):
                sources = [source for source in layout.places if source.endswith("embed_tokens.weight")]
                tied = isinstance(module, ParallelLMHead) and name == "weight" and len(sources) == 1
                if not tied:
                    wanted = f"{prefix}{last}.{name}"
                    raise ModelError(f"the engine's {path}.{name} needs {wanted}, which the trainers do not send")
            unused -= set(sources)
            places = [layout.places[source] for source in sources]
            row_bytes = places[0].row_bytes(layout.dtype.itemsize)
            size = sum(place.rows for place in places) * row_bytes
            packed = name == "weight" and hasattr(module, "cpu_linear")
            targets.append(Target(module, name, sources, size, row_bytes, parameter.numel() > 0 and not tied, packed))
    if unused:
        raise ModelError(f"the engine's model has no place for {sorted(unused)[:5]}, which trainers send")
    return targets


def own_rows(target: Target, layout: Layout, held: int, worker: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (tensor, its first row here, rows, their place in the parameter) of each of the target's tensors.

    held: rows of the parameter. worker: which of the engine's tensor-parallel workers this is.
    """
    module: Any = target.module
    rows = [layout.places[source].rows for source in target.sources]
    whole, start = sum(rows), 0
    for number, (source, count) in enumerate(zip(target.sources, rows, strict=True)):
        first = 0
        if (shard := getattr(module, "shard_indices", None)) is not None:  # rows of a vocabulary, perhaps padded
            first, count = shard.org_vocab_start_index, shard.org_vocab_end_index - shard.org_vocab_start_index
        elif held != whole:
            share, copies = count * held // whole, 1
            if hasattr(module, "num_kv_head_replicas"):  # keys and values may lie on several workers
                copies = module.num_kv_head_replicas if number else 1
                share = (module.num_kv_heads if number else module.num_heads) * module.head_size
            first, count = worker // copies * share, share
        yield source, first, count, start
        start += count


def unit_vectors(columns: slice, dtype: torch.dtype) -> torch.Tensor:
    """[chosen columns, columns]: a linear's product with these is the chosen columns of its weight."""
    chosen = torch.arange(columns.start, columns.stop, columns.step)
    return torch.zeros(len(chosen), columns.stop, dtype=dtype).index_put_(
        (torch.arange(len(chosen)), chosen), torch.ones((), dtype=dtype)
    )


@torch.no_grad()
def read_plain(targets: list[Target], layout: Layout, worker: int = 0) -> dict[str, tuple[int, int]]:
    """tensor -> (checksum, number of values) of the plain parameters of a worker's model; safe beside generation."""
    found: dict[str, tuple[int, int]] = {}
    for target in targets:
        if target.plain:
            held: torch.Tensor = getattr(target.module, target.parameter).data
            held = held if held.ndim else held.reshape(1)
            for source, first, count, start in own_rows(target, layout, held.shape[0], worker):
                rows, of_bytes = held[start : start + count], layout.places[source].row_bytes(layout.dtype.itemsize)
                found[source] = checksum_rows(rows, first, layout.dtype, of_bytes), rows.numel()
    return found


def read_packed(
    targets: list[Target], layout: Layout, dtype: torch.dtype, version: int
) -> Iterator[list[tuple[str, int]]]:
    """Yield (tensor, checksum of the columns that `version` compares) for the tensors of one packed linear after
    another. dtype: of the model. Only between two engine steps: vLLM's products on a CPU share caches and scratch
    memory, and two at a time end the process."""
    vectors: dict[int, torch.Tensor] = {}
    for target in targets:
        if target.packed:
            width = layout.places[target.sources[0]].shape[1]
            if width not in vectors:
                vectors[width] = unit_vectors(probed_columns(version, width), dtype)
            module: Any = target.module
            with torch.no_grad():
                columns = module.cpu_linear(vectors[width], module.weight, None).t().to(layout.dtype)
            yield [
                (source, checksum_columns(columns[start : start + count], first))
                for source, first, count, start in own_rows(target, layout, columns.shape[0], 0)
            ]
