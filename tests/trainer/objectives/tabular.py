"""Small problems: completions of one or two tokens whose every probability is a table, so that expectations are sums
over all completions."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.inputs import LossInputs, completions_of


class Table:
    """Completions by their logits: `first` [a] of the first token, of which `ends` numbers end a completion, `second`
    [a, b] of the token behind each; without it a completion is one token: a bandit."""

    def __init__(self, first: Tensor, second: Tensor | None = None, ends: int = 1):
        self.logits = [first] if second is None else [first, second]
        arms, after = len(first), 0 if second is None else second.shape[1]
        self.completions = [(a,) for a in range(ends if after else arms)]
        self.completions += [(a, b) for a in range(ends, arms) for b in range(after)]
        self.counts = [len(each) for each in self.completions]
        self.entries = torch.tensor([
            entry for a, *rest in self.completions for entry in (a, *(arms + a * after + b for b in rest))
        ])  # fmt: skip

    def flat(self) -> Tensor:
        """[tokens of all completions] log-probabilities, one completion after the other."""
        return torch.cat([each.log_softmax(-1).flatten() for each in self.logits])[self.entries]

    def logprobs(self) -> list[Tensor]:
        """[tokens] of every completion."""
        return list(torch.split(self.flat(), self.counts))

    def whole(self) -> Tensor:
        """[completions] log-probabilities."""
        return torch.stack([tokens.sum() for tokens in self.logprobs()])


def draw(seed: int) -> Table:
    """Random logits of three tokens, of which the first ends a completion."""
    generator = torch.Generator().manual_seed(seed)
    return Table(*(torch.randn(*shape, generator=generator) * 0.7 for shape in ((3,), (3, 3))))


@dataclass
class Problem:
    """Everything that an objective can ask for, and the policy that is trained."""

    policy: Table
    behaviour: Table
    reference: Table
    rewards: Tensor
    """[completions]"""
    old: Table | None = None
    value: Tensor | None = None

    def __post_init__(self) -> None:
        for logits in self.policy.logits:
            logits.requires_grad_()

    def inputs(
        self, chosen: Sequence[int], weights: Tensor, groups: Sequence[int] | None = None,
        advantages: Tensor | None = None,
    ) -> LossInputs:  # fmt: skip
        """The completions `chosen` packed; weights [chosen], the same for each of a completion's tokens. advantages
        [completions], the rewards unless given."""
        ends = list(itertools.accumulate(self.policy.counts))
        counts = [self.policy.counts[y] for y in chosen]
        places = torch.tensor([t for y in chosen for t in range(ends[y] - self.policy.counts[y], ends[y])]).long()
        lengths = torch.tensor(counts).long()
        values = self.rewards if advantages is None else advantages
        return LossInputs(
            logprobs=self.policy.flat()[places],
            behaviour=self.behaviour.flat().detach()[places],
            advantages=values[torch.tensor(chosen).long()].repeat_interleave(lengths),
            weights=weights.repeat_interleave(lengths),
            completions=completions_of(counts, groups),
            old=self.old.flat()[places] if self.old else None,
            reference=self.reference.flat()[places],
            values=self.value.expand(len(chosen)) if self.value is not None else None,
        )

    def every(self, advantages: Tensor | None = None) -> LossInputs:
        """All completions, each weighed by its probability under the policy that sampled: an expectation."""
        return self.inputs(range(len(self.rewards)), self.behaviour.whole().detach().exp(), advantages=advantages)

    def groups_of(self, size: int, advantages: Tensor | None = None) -> LossInputs:
        """All groups of `size`, each weighed by its probability under the policy that sampled, 1/size a completion."""
        groups = torch.tensor(list(itertools.product(range(len(self.rewards)), repeat=size)))
        chances = self.behaviour.whole().detach().exp()[groups].prod(-1)
        numbers = torch.arange(len(groups)).repeat_interleave(size).tolist()
        return self.inputs(groups.flatten().tolist(), (chances / size).repeat_interleave(size), numbers, advantages)

    def expect(self, values: Tensor) -> Tensor:
        """The mean of `values` [completions] under the policy."""
        return (self.policy.whole().exp() * values).sum()

    def gradients(self, loss: Tensor) -> Tensor:
        """[all logits] of the policy."""
        parts = torch.autograd.grad(
            loss, self.policy.logits, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([part.flatten() for part in parts])


def optimum(reference: Tensor, rewards: Tensor, beta: float) -> tuple[Tensor, float]:
    """(log pi* [completions] float64, V*) = (log of ref exp(r / beta) / Z, beta log Z), from reference log-probs."""
    tilted = reference.detach().double() + rewards.double() / beta
    return tilted.log_softmax(0), beta * tilted.logsumexp(0).item()
