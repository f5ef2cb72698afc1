"""New weights into a vLLM model on the CPU, in one pass straight out of the shared buffer.

vLLM on the CPU keeps private packed (oneDNN) copies of linear weights and of the language-model head and drops the
plain ones, so writing into its parameters does nothing: each linear is packed anew. A tied head has a packed copy too.
What it does not: GPUs, where vLLM's own load_weights copies in place. Who calls this: vllm_backend.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rollout.transfer.layout import Layout
from shared.errors import ModelError

Read = Callable[[list[str]], torch.Tensor]
"""names of neighbouring tensors -> their rows, concatenated"""


@dataclass(frozen=True)
class Target:
    """One parameter of the vLLM model, and which tensors of the buffer it is made of (none: a tied head)."""

    module: torch.nn.Module
    parameter: str
    sources: list[str]


def plan_targets(model: torch.nn.Module, layout: Layout) -> list[Target]:
    """Match every parameter of the model with the buffer's tensors (q, k, v -> qkv_proj, gate, up -> gate_up_proj).

    Raises ModelError if a parameter has no source or a tensor no destination: then part of the model would stay old.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    targets: list[Target] = []
    unused = set(layout.places)
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        for parameter, _ in module.named_parameters(recurse=False):
            prefix = f"{parent}." if parent else ""
            sources = [f"{prefix}{part}.{parameter}" for part in fused.get(last, [last])]
            if all(source in layout.places for source in sources):
                targets.append(Target(module, parameter, sources))
                unused -= set(sources)
            elif isinstance(module, ParallelLMHead) and parameter == "weight":
                targets.append(Target(module, parameter, []))
            else:
                raise ModelError(f"the engine's {path}.{parameter} needs {sources}, which the trainers do not send")
    if unused:
        raise ModelError(f"the engine's model has no place for {sorted(unused)[:5]}, which trainers send")
    return targets


@torch.no_grad()
def apply_targets(targets: list[Target], read: Read, dtype: torch.dtype) -> None:
    """Put the buffer's weights into the model; between two engine steps, never during one.

    A target with sources must come before a tied head, which packs what the embedding then holds (model order does).
    """
    for target in targets:
        module = target.module
        if not target.sources:
            _repack(module, keep_plain=True)
            continue
        rows = read(target.sources)
        parameter = getattr(module, target.parameter)
        if parameter.numel() == 0:  # a packed linear: its plain weight was dropped
            module.weight = torch.nn.Parameter(rows.to(dtype), requires_grad=False)
            _repack(module, keep_plain=False)
            continue
        parameter.data[: rows.shape[0]].copy_(rows)  # an embedding may have padding rows behind the vocabulary
        if target.parameter == "weight" and isinstance(module, ParallelLMHead):
            _repack(module, keep_plain=True)


def _repack(module: torch.nn.Module, keep_plain: bool) -> None:
    """Pack the plain weight again. The old packed copy goes first, so that its memory is used again."""
    if hasattr(module, "cpu_linear"):
        module.cpu_linear = None  # type: ignore[assignment]  # a function that vLLM hangs on the module
        dispatch_cpu_unquantized_gemm(module, remove_weight=not keep_plain)
