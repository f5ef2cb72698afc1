"""The reference policy that an objective compares with: a frozen model, or for a policy with adapters other adapters.

With adapters there is no second model: the frozen weights are the same, and adapters of another time take the place
of the policy's while it scores (at the start of training these are zero: the reference is the frozen model itself).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared.model.language_model import LanguageModel
from trainer.step.fsdp import local, part_of, reshard, trained


@torch.no_grad()
def fill(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy this rank's rows of whole tensors into the model's parameters of these names."""
    parameters = dict(model.named_parameters())
    for name, value in values:
        local(parameters[name]).copy_(part_of(value, parameters[name]))
    reshard(model)


class KeptAdapters:
    """This rank's rows of other adapters of a policy, which change places with its own to score."""

    def __init__(self, policy: nn.Module, settle: Callable[[], None]):
        """Begin as a copy of the policy's adapters. settle: returns when the policy's values may change, which a
        checkpoint that is being written may still read."""
        self.policy, self.settle = policy, settle
        self.kept = {name: local(parameter.detach()).clone() for name, parameter in trained(policy)}

    def parameters(self) -> Iterable[Tensor]:
        """The tensors that take memory."""
        return self.kept.values()

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the contents of the kept tensors and of the policy's."""
        self.settle()
        for name, parameter in trained(self.policy):
            live = local(parameter)
            own = live.clone()
            live.copy_(self.kept[name])
            self.kept[name].copy_(own)
        reshard(self.policy)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """While this lasts the policy is the reference. Not between a forward pass and its backward pass."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def take(self) -> None:
        """Become what the policy is now."""
        for name, parameter in trained(self.policy):
            self.kept[name].copy_(local(parameter))


@torch.no_grad()
def move(reference: LanguageModel | KeptAdapters, policy: LanguageModel, share: float) -> None:
    """reference += share (policy - reference), this rank's float32 rows; 1 makes it the policy exactly, which is all
    that adapters do: the mean of two is not the adapter of the mean."""
    if isinstance(reference, KeptAdapters):
        reference.take()
        return
    for kept, new in zip(reference.parameters(), policy.parameters(), strict=True):
        local(kept).lerp_(local(new), share)
    reshard(reference)
