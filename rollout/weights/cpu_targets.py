"""Maps each parameter of a vLLM model on the CPU to the tensors of the transfer buffer that it is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rollout.weights.layout import Layout
from shared.errors import ModelError


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
