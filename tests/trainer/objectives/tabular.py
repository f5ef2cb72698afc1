"""Small tabular problems: completions of one or two tokens whose every probability is a table, so that expectations are
sums over all completions. Who uses this: the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.inputs import LossInputs, completions_of

TOKENS = 3
"""0 ends a completion; 1 and 2 go on to a second token"""
COMPLETIONS: list[tuple[int, ...]] = [(0,)] + [(a, b) for a in (1, 2) for b in range(TOKENS)]
COUNTS = [len(y) for y in COMPLETIONS]
ENTRIES = torch.tensor([
    entry for y in COMPLETIONS for entry in (y[0], *(TOKENS + y[0] * TOKENS + b for b in y[1:]))
])  # fmt: skip
"""where each completion's tokens stand among the first token's table and the second's, one after the other"""


class Table:
    """Completions whose every probability is known. counts: [completions] tokens of each."""

    counts: list[int]

    def flat(self) -> Tensor:
        """[tokens of all completions] log-probabilities, one completion after the other."""
        raise NotImplementedError

    def parameters(self) -> list[Tensor]:
        raise NotImplementedError

    def logprobs(self) -> list[Tensor]:
        """[tokens] of every completion."""
        return list(torch.split(self.flat(), self.counts))

    def whole(self) -> Tensor:
        """[completions] log-probabilities."""
        return torch.stack([tokens.sum() for tokens in self.logprobs()])


class Policy(Table):
    """Logits [TOKENS] of the first token, [TOKENS, TOKENS] of the second after each first."""

    counts = COUNTS

    def __init__(self, first: Tensor, second: Tensor):
        self.first, self.second = first, second

    def flat(self) -> Tensor:
        return torch.cat([self.first.log_softmax(-1), self.second.log_softmax(-1).flatten()])[ENTRIES]

    def parameters(self) -> list[Tensor]:
        return [self.first, self.second]


class Arms(Table):
    """Logits [arms] of completions of one token: a bandit."""

    def __init__(self, logits: Tensor):
        self.logits, self.counts = logits, [1] * logits.shape[0]

    def flat(self) -> Tensor:
        return self.logits.log_softmax(-1)

    def parameters(self) -> list[Tensor]:
        return [self.logits]


def draw_policy(seed: int, spread: float = 0.7, train: bool = False) -> Policy:
    """Random logits, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(TOKENS, generator=generator) * spread
    second = torch.randn(TOKENS, TOKENS, generator=generator) * spread
    return Policy(first.requires_grad_(train), second.requires_grad_(train))


def draw_rewards(seed: int) -> Tensor:
    """[completions] rewards."""
    return torch.randn(len(COMPLETIONS), generator=torch.Generator().manual_seed(1000 + seed))


@dataclass
class Problem:
    """Everything that an objective can ask for, and the policy that is trained."""

    policy: Table
    behaviour: Table
    reference: Table
    old: Table | None
    rewards: Tensor
    """[completions]"""
    value: Tensor | None = None

    def inputs(
        self, chosen: Sequence[int], weights: Tensor, groups: Sequence[int] | None = None,
        advantages: Tensor | None = None,
    ) -> LossInputs:  # fmt: skip
        """The completions `chosen` packed; weights [chosen], the same for each of a completion's tokens."""
        ends = list(itertools.accumulate(self.policy.counts))
        counts = [self.policy.counts[y] for y in chosen]
        places = torch.tensor([t for y in chosen for t in range(ends[y] - self.policy.counts[y], ends[y])]).long()

        def packed(policy: Table) -> Tensor:
            return policy.flat().detach()[places]

        lengths = torch.tensor(counts).long()
        values = self.rewards if advantages is None else advantages
        return LossInputs(
            logprobs=self.policy.flat()[places],
            behaviour=packed(self.behaviour),
            advantages=values[torch.tensor(chosen).long()].repeat_interleave(lengths),
            weights=weights.repeat_interleave(lengths),
            completions=completions_of(counts, groups),
            old=packed(self.old) if self.old else None,
            reference=packed(self.reference),
            values=self.value.expand(len(chosen)) if self.value is not None else None,
        )

    def every(self, advantages: Tensor | None = None) -> LossInputs:
        """All completions, each weighed by its probability under the policy that sampled: an expectation."""
        weights = self.behaviour.whole().detach().exp()
        return self.inputs(range(len(self.rewards)), weights, advantages=advantages)

    def groups_of(self, size: int) -> LossInputs:
        """All groups of `size`, each weighed by its probability under the policy that sampled, 1/size a completion."""
        probabilities = self.behaviour.whole().detach().exp()
        tuples = list(itertools.product(range(len(self.rewards)), repeat=size))
        chosen = [y for one in tuples for y in one]
        weights = (probabilities[torch.tensor(tuples)].prod(-1) / size).repeat_interleave(size)
        return self.inputs(chosen, weights, [number for number, _ in enumerate(tuples) for _ in range(size)])


def gradients(loss: Tensor, problem: Problem) -> Tensor:
    """[all logits] of the policy."""
    found = torch.autograd.grad(
        loss, problem.policy.parameters(), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([one.flatten() for one in found])
