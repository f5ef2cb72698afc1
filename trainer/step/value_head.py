"""The value head of DRO (arXiv 2405.19107) and A-LoL: V(x) from the policy's last hidden state at the prompt's end.

    V(x) = w . h(x) / sqrt(hidden size) + b         h(x) without gradients: the head never moves the policy

It is small, whole on every rank, float32, with an AdamW of its own; it is neither sent to the engines nor exported.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.atomic_write import cannot_write
from shared.errors import CheckpointError
from shared.record_file import Written
from trainer.checkpoint import safetensors_file

FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """A linear map from hidden states to values, which starts at 0, and its optimiser."""

    def __init__(self, hidden_size: int, learning_rate: float, device: torch.device | str = "cpu", sharers: int = 1):
        """sharers: ranks that have the same batches, and so the same gradients."""
        super().__init__()
        self.sharers = sharers
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))
        self.optimiser = torch.optim.AdamW(self.parameters(), lr=learning_rate, weight_decay=0.0)

    def reset(self) -> None:
        """Drop the moments and the step count (SFT steps without gradients for the head)."""
        self.optimiser.state.clear()

    def forward(self, states: Tensor) -> Tensor:
        """states [prompts, hidden] -> values [prompts] float32."""
        return states.detach().float() @ self.weight / math.sqrt(self.weight.shape[0]) + self.bias

    def step(self) -> None:
        """Take one AdamW step with the gradients of all ranks added up, then drop them. A collective."""
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if dist.is_initialized():
                dist.all_reduce(parameter.grad.div_(self.sharers))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> dict[str, Written]:
        """Write weights and moments into `folder`; returns what was written. Raises CheckpointError."""
        state = self.optimiser.state_dict()["state"]
        tensors = {name: parameter.detach().cpu() for name, parameter in self.named_parameters()}
        for number, moments in state.items():
            tensors |= {f"{name}/{number}": value.detach().cpu().contiguous() for name, value in moments.items()}
        path = folder / FILE
        try:
            return {path.name: safetensors_file.write(path, tensors)}
        except OSError as error:
            raise CheckpointError(cannot_write(path, error)) from error

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises CheckpointError if it is not there or of another model."""
        path = folder / FILE
        try:
            tensors = load_file(path)
            for name, parameter in self.named_parameters():
                if tensors[name].shape != parameter.shape:
                    raise CheckpointError(f"{path} is of another model: {name} has shape {tuple(tensors[name].shape)}")
                parameter.copy_(tensors[name])
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): a value head goes on only from its own checkpoints; start "
                "another run (--name=...)"
            ) from error
        saved = self.optimiser.state_dict()
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, slash, number = name.partition("/")
            if slash:
                moments.setdefault(int(number), {})[kind] = tensor
        self.optimiser.load_state_dict({**saved, "state": moments})
