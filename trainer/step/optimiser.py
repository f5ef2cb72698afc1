"""AdamW over float32 master weights, and gradient clipping over all shards.

Weights, gradients and moments are float32 whatever the compute type: an update of 1e-4 of a weight at bfloat16 is
lost to rounding (bfloat16 keeps 8 bits). `describe_dtypes` returns the types really in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.errors import NonFinite, RunError
from shared.model.parallel import cut_of
from shared.sections import Optimiser
from trainer.step.fsdp import local, trained


def make_optimiser(model: nn.Module, settings: Optimiser) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) of what is trained; weight decay on matrices only, not on norms and biases.

    The parameters must be float32. Raises ValueError naming the first that is not.
    """
    for name, parameter in trained(model):
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}: master weights must be float32")
    matrices = [parameter for _, parameter in trained(model) if parameter.dim() >= 2]
    vectors = [parameter for _, parameter in trained(model) if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(
        [group for group in groups if group["params"]], settings.learning_rate, settings.betas, settings.epsilon,
        fused=True,
    )  # fmt: skip
    reset(optimiser)
    return optimiser


def reset(optimiser: torch.optim.Optimizer, step: int = 0) -> None:
    """Set the moments to zero and the step count to `step`, as if nothing had been learned.

    The state exists from the start: its memory is taken at once, and a checkpoint before the first step is complete.
    """
    for parameter in parameters_of(optimiser):
        optimiser.state[parameter] = {
            "step": torch.tensor(float(step), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def parameters_of(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters that the optimiser moves."""
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def update(model: nn.Module, optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Take one AdamW step at learning rate `rate`, then drop the gradients.

    Raises RunError if a parameter has no gradient: nothing was accumulated since the last step.
    """
    for name, parameter in trained(model):
        if parameter.grad is None:
            raise RunError(f"{name} has no gradient: an optimiser step needs an accumulate call before it")
    for settings in optimiser.param_groups:
        settings["lr"] = rate
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def step_count(optimiser: torch.optim.Optimizer) -> int:
    """Optimiser steps since the moments were zero."""
    return int(optimiser.state[parameters_of(optimiser)[0]]["step"])


def local_gradients(model: nn.Module, once: bool = False) -> list[Tensor]:
    """This rank's rows of all gradients, those without rows left out; once: also those that a tensor peer counts."""
    gradients = [
        local(parameter.grad)
        for parameter in model.parameters()
        if parameter.grad is not None and not (once and (cut := cut_of(parameter)) is not None and cut.copy)
    ]
    return [gradient for gradient in gradients if gradient.numel()]


def global_norm(model: nn.Module, group: dist.ProcessGroup | None) -> Tensor:
    """Euclidean norm of all gradients over all shards, 0-dimensional float64: sqrt(sum over ranks of sum g^2).

    Squares within a tensor are added in float32, tensors and ranks in float64. One all-reduce.
    """
    norms = torch._foreach_norm(local_gradients(model, once=True))
    device = next(model.parameters()).device
    squares = torch.stack([torch.zeros((), device=device), *norms]).double().square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip(model: nn.Module, max_norm: float, group: dist.ProcessGroup | None) -> float:
    """Scale all gradients by min(1, max_norm / norm) in place; returns the norm before (float32 gradients).

    Raises NonFinite on every rank when the norm is not finite, naming the first parameter to blame.
    """
    norm = float(global_norm(model, group))
    if not math.isfinite(norm):
        name, value = first_non_finite(model, group)
        raise NonFinite(
            f"the gradient norm is {norm}; the first parameter whose gradient is not finite is {name} ({value}). Lower "
            "optimiser.learning_rate, or use optimiser.compute_dtype = 'float32' to find the cause"
        )
    if norm > max_norm:
        torch._foreach_mul_(local_gradients(model), max_norm / norm)
    return norm


def first_non_finite(model: nn.Module, group: dist.ProcessGroup | None) -> tuple[str, str]:
    """Name of the first parameter over all ranks whose gradient is not finite, and a text about its values."""
    names = [name for name, _ in model.named_parameters()]
    bad = [
        0 if parameter.grad is None else int((~torch.isfinite(local(parameter.grad))).sum())
        for parameter in model.parameters()
    ]
    device = next(model.parameters()).device
    counts = torch.tensor(bad, dtype=torch.int64, device=device)
    if group is not None:
        dist.all_reduce(counts, group=group)
    indices = torch.nonzero(counts).flatten().tolist()
    if not indices:
        return "none", "every gradient is finite, but their norm overflows"
    return names[indices[0]], f"{int(counts[indices[0]])} values are NaN or infinite"


def describe_dtypes(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, str]:
    """Names of the types really in use, to print once at start: master weights, moments."""

    def names(tensors: Iterable[Tensor]) -> str:
        return "/".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))

    moments = [state[key] for state in optimiser.state.values() for key in ("exp_avg", "exp_avg_sq")]
    masters = (parameter for _, parameter in trained(model))
    return {"master weights": names(masters), "moments": names(moments)}
