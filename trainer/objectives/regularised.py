"""Losses whose reward is regularised by a reference: regressions that need no importance weights.

    R(x, y) = r(x, y) - beta log(pi(y|x) / ref(y|x)) is the same for all y exactly when pi is the optimum
    pi* = ref exp((r - V*) / beta),     V*(x) = beta log E_ref[exp(r / beta)]

    name    loss of a prompt                            what is used for V*
    agro    1/2 Var_y R, by its n samples               the mean of R over the group (arXiv 2503.19612)
    spo     1/2 E (R - V)^2                             V from samples of the reference (arXiv 2503.05453)
    dro     1/2 E (R - V(x))^2, also minimised in V     a value head (arXiv 2405.19107)

All have pi* as their optimum whatever policies sampled, as long as everything is sampled (SPO without its V has another
optimum). The policy's gradient is that of the loss over beta, as in DRO
(equation 8): of the size of a policy gradient. log pi / ref is of whole completions, so that nothing of the gradient of
their KL is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from shared.config import Config
from shared.lazy_module import LazyModule
from trainer.objectives.inputs import LossInputs, LossTerm, unbounded
from trainer.objectives.objective import FIXED, Compared, Need
from trainer.objectives.registry import publish

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


class Regularised(Compared):
    """Settings of a regularised reward, which is compared itself with what the policy says."""

    compares_rewards = False
    reads_plain_rewards = True
    least_completions = 1

    beta: float = Field(0.1, gt=0)
    """strength of the regularisation, in units of reward"""

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """Any completions: who sampled them plays no role."""
        return "rows"

    def log_ratios(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """(log pi / ref with gradients, weight in the step's loss), each [completions].

        Raises ValueError without the log-probs of a reference."""
        if inputs.reference is None:
            raise ValueError(f'objective.name = "{self.name}" needs the log-probs of a reference')
        completions = inputs.completions
        return completions.sums(inputs.logprobs - inputs.reference), inputs.weights[completions.first]

    def regularised_rewards(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """(R_i with gradients, weight in the step's loss), each [completions]; the advantages are the rewards.

        Raises ValueError without the log-probs of a reference."""
        log_ratios, weights = self.log_ratios(inputs)
        return inputs.advantages[inputs.completions.first] - self.beta * log_ratios, weights

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield what does not go with a regularised reward, and the contradictions of every objective."""
        if self.kl:
            yield (
                f'objective.kl: objective.name = "{self.name}" keeps the policy near its reference by objective.beta '
                "already; remove kl"
            )
        if self.advantage.kind != "reward":
            yield (
                f'objective.advantage.kind = "{self.advantage.kind}" with objective.name = "{self.name}": it compares '
                'the reward itself with what the policy says, use "reward"'
            )
        yield from super().contradictions(config)


class Agro(Regularised):
    """The variance of R over a group."""

    least_completions = 2

    @property
    def needs(self) -> set[Need]:
        """Whole groups: their means are compared with."""
        return super().needs | {Need.GROUPS}

    def loss(self, inputs: LossInputs) -> LossTerm:
        """sum_i weight_i n/(n - 1) 1/2 (R_i - mean_j R_j)^2 / beta over each group of n; 0 for n = 1.

        Its expected gradient is that of 1/2 Var R / beta: the other samples take the place of the mean.
        """
        group, groups = inputs.completions.group, inputs.completions.groups
        rewards, weights = self.regularised_rewards(inputs)
        counts = torch.zeros(groups, device=rewards.device).index_add(0, group, torch.ones_like(weights))
        means = torch.zeros(groups, device=rewards.device).index_add(0, group, rewards) / counts
        unbiased = counts / (counts - 1).clamp(min=1)
        residual = rewards - means[group]
        return unbounded((weights * unbiased[group] * residual.square()).sum() / (2 * self.beta), inputs)


class Spo(Regularised):
    """The distance of R from a soft value that is estimated before training (trainer/soft_values.py)."""

    several_turns = "samples its soft values before training, in one turn and without the environment"

    value_samples: int = Field(8, ge=1, json_schema_extra=FIXED)
    """completions of each prompt, sampled before training, from which its soft value is estimated"""

    @property
    def needs(self) -> set[Need]:
        """Soft values of the prompts, which are taken off the advantages."""
        return super().needs | {Need.START_VALUES}

    def loss(self, inputs: LossInputs) -> LossTerm:
        """sum_i weight_i 1/2 (r_i - V(x_i) - beta log pi/ref)^2 / beta; the advantages are r - V(x)."""
        residual, weights = self.regularised_rewards(inputs)
        return unbounded((weights * residual.square()).sum() / (2 * self.beta), inputs)

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield what the soft values do not allow, and the contradictions of every regularised reward."""
        yield from super().contradictions(config)
        if self.reference.kind != "start":
            yield (
                f'objective.reference.kind = "{self.reference.kind}": the soft values of objective.name = '
                f'"{self.name}" are those of the policy at the start, use "start"'
            )
        for stage in config.stages:
            if stage.reward or stage.objective or "max_completion_tokens" in stage.rollout:
                yield (
                    f"stages.{stage.name} changes rewards or objective, but the soft values of objective.name = "
                    f'"{self.name}" are sampled once, before the first step: set [reward], [objective] and '
                    "rollout.max_completion_tokens for the whole run"
                )


class Dro(Regularised):
    """The distance of R from the value that a head predicts."""

    value_learning_rate: float = Field(1e-2, gt=0, json_schema_extra=FIXED)
    """learning rate of the value head"""

    @property
    def needs(self) -> set[Need]:
        """The value head."""
        return super().needs | {Need.VALUE}

    def loss(self, inputs: LossInputs) -> LossTerm:
        """The loss of `Spo` with the head's V(x); the head's gradient is that of 1/2 (r - V(x) - beta log pi/ref)^2.

        Raises ValueError without a value head."""
        if inputs.values is None:
            raise ValueError('objective.name = "dro" needs a value head')
        rewards, weights = self.regularised_rewards(inputs)
        policy = (rewards - inputs.values.detach()).square() / (2 * self.beta)
        value = (rewards.detach() - inputs.values).square() / 2
        return unbounded((weights * (policy + value)).sum(), inputs)


for name, kind, source in (
    ("agro", Agro, "arXiv 2503.19612"),
    ("spo", Spo, "arXiv 2503.05453"),
    ("dro", Dro, "arXiv 2405.19107, equation 8"),
):
    # groups of equal rewards have a signal too
    publish(name, kind, source, advantage={"kind": "reward"}, loss_aggregation="completions", filter_groups_by="off")
