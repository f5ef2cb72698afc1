"""Computes advantages and token weights from rewards: what each completion counts in the step's loss.

    loss of the step = - sum_i weight_i sum_t objective_it        (one global denominator, known before the first token)

A completion whose verdict says nothing about the policy (timeout, crash, unverifiable) is masked: it is in no mean, no
deviation and no denominator, and it is not trained.
Advantages of a single group: baselines.py. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from shared.errors import NonFinite
from shared.section import Section
from shared.sections import RewardWeights
from shared.types import Completion, Group, Reward, Verdict
from trainer.objectives import baselines

Scale = Literal["minibatch", "group", "none"]
LossAggregation = Literal["group_tokens", "batch_tokens", "sequence", "completions", "constant"]
GroupFilter = Literal["total", "correctness", "off"]
LEAST_DEVIATION = 1e-8
"""least deviation that counts: far above the rounding of rewards about 1 (1e-16), far below any real difference"""


class Mean(Section):
    """A reward less the mean of its group, or each of its components by itself."""

    kind: Literal["mean", "each_reward"] = "mean"
    """how rewards become advantages: less the mean of the group, of the others, of each reward by itself; how much a
    completion adds to the best or the majority of k; "reward" (nothing is taken off), "none" (rewards do not count)"""
    scale: Scale = "minibatch"
    """advantages are divided by the standard deviation over the minibatch, the group, or not"""


class LeaveOneOut(Section):
    """A reward less the mean of the others."""

    kind: Literal["leave_one_out"] = "leave_one_out"
    scale: Scale = "none"


class AmongSeveral(Section):
    """How much a completion adds to the best, or to the majority, of k."""

    kind: Literal["pass_at_k", "majority"]
    k: int = Field(0, ge=0)
    """completions of which the best or the majority counts; 0 for the whole group"""
    centred: bool = False
    """take the mean over the group off what completions add"""
    scale: Scale = "none"


class Unscaled(Section):
    """An advantage without settings."""

    scale: ClassVar[Scale] = "none"

    kind: Literal["maxrl", "reward", "none"]


Advantage = Annotated[Mean | LeaveOneOut | AmongSeveral | Unscaled, Field(discriminator="kind")]


def graded(reward: Reward | None) -> bool:
    """True if the reward says something about the completion: only such completions are trained."""
    return reward is not None and reward.verdict.graded


def diverse(rewards: Sequence[Reward | None], by: GroupFilter) -> bool:
    """True if the group has a learning signal: its graded values of `by` are not all equal (exactly;
    Magistral, arXiv 2506.10910).

    rewards: [group_size]. "off" keeps every group with something graded in it.
    """
    values = [reward.total if by == "total" else reward.correctness for reward in rewards if reward and graded(reward)]
    return bool(values) if by == "off" else len(set(values)) > 1


def turns_differ(group: Group, discount: float) -> bool:
    """True if the group has a learning signal where each turn has an advantage of its own (environment.credit =
    "turn"): of some turn, the returns of the graded completions that have it are not all equal (exactly)."""
    known = [returns for returns in group_returns(group, discount) if returns is not None]
    longest = max(map(len, known), default=0)
    return any(len({returns[turn] for returns in known if len(returns) > turn}) > 1 for turn in range(longest))


def deviation(values: Sequence[float]) -> float:
    """Population standard deviation sqrt(mean (x - mean x)^2); 0 exactly when all are equal or there are none."""
    if len(set(values)) <= 1:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def divisor(values: Sequence[float]) -> float:
    """What advantages are divided by: their deviation, or 1 below LEAST_DEVIATION, which is rounding."""
    spread = deviation(values)
    return spread if spread >= LEAST_DEVIATION else 1.0


def check_finite(rewards: Sequence[Reward]) -> None:
    """Raise NonFinite for a reward that is not a finite number."""
    for reward in rewards:
        if not math.isfinite(reward.total) or not math.isfinite(reward.correctness):
            raise NonFinite(f"a reward is {reward.total}: it must be a finite number (see the verifier that gave it)")


def group_advantages(rewards: Sequence[Reward], settings: Advantage, weights: RewardWeights) -> list[float]:
    """Advantages of one group before scaling, chosen by settings.kind. rewards: [samples], all graded.

    pass_at_k, majority and maxrl are about right answers: they replace the correctness alone, and what is left of the
    reward (format, language, length) is compared with that of the others as in leave_one_out.
    """
    check_finite(rewards)
    name, totals = settings.kind, [reward.total for reward in rewards]
    if name == "reward":
        return totals
    if name == "none" or not totals:
        return [0.0] * len(totals)
    if name == "mean":
        return baselines.mean_baseline(totals)
    if name == "leave_one_out":
        return baselines.leave_one_out(totals)
    if name == "each_reward":
        names = sorted({extra for reward in rewards for extra in reward.extra})
        kinds = ("format", "correctness", "length", "language")
        components = [[getattr(reward, kind) or 0.0 for reward in rewards] for kind in kinds]
        components += [[reward.extra.get(extra, 0.0) for reward in rewards] for extra in names]
        shares = [getattr(weights, kind) for kind in kinds] + [weights.extra.get(extra, 0.0) for extra in names]
        return baselines.each_reward(components, shares)
    rights = [reward.correctness for reward in rewards]
    # summed anew: total - correctness would differ by roundings, which a scale makes large
    rest = baselines.leave_one_out(
        [math.fsum((r.format or 0.0, r.length, r.language, *r.extra.values())) for r in rewards]
    )
    if isinstance(settings, AmongSeveral):
        values = among_several(rewards, settings, weights)
    else:
        values = [weights.correctness * value for value in baselines.maxrl(rights)]
    return [value + other for value, other in zip(values, rest, strict=True)]


def among_several(rewards: Sequence[Reward], settings: AmongSeveral, weights: RewardWeights) -> list[float]:
    """How much the correctness of each completion adds to the best, or to the majority, of k. rewards: [samples]."""
    rights = [reward.correctness for reward in rewards]
    k = min(settings.k or len(rewards), len(rewards))
    if k < 2:
        values = baselines.leave_one_out(rights)
    elif settings.kind == "pass_at_k":
        values = baselines.best_of(rights, k)
    else:
        voted = baselines.majority_of(
            [reward.verdict is Verdict.CORRECT for reward in rewards], [vote_of(reward) for reward in rewards], k
        )
        values = [weights.correctness * value for value in voted]
    return baselines.mean_baseline(values) if settings.centred else values


def vote_of(reward: Reward) -> str | None:
    """The answer in the form in which votes are compared: without blanks and case; None where there is none."""
    return None if reward.answer is None else "".join(reward.answer.split()).casefold()


def advantages(
    groups: Sequence[Sequence[Reward | None]], settings: Advantage, weights: RewardWeights
) -> list[list[float | None]]:
    """Advantages of a minibatch, scaled.

        minibatch   A_i / std over all sequences of the step (Magistral, arXiv 2506.10910)
        group       A_i / std over its own group (GRPO, arXiv 2402.03300)
        none        A_i (Dr. GRPO, arXiv 2503.20783)

    groups: [groups, samples] rewards; what is not graded is masked: None, in no mean and no deviation. Returns the same
    shape. The deviation is the population's, over sequences. Magistral's minibatch mean of A is 0 here: groups are
    whole. Advantages with a deviation below LEAST_DEVIATION stay: 0, but for rounding. Raises NonFinite.
    """
    known = [
        group_advantages([reward for reward in group if reward and graded(reward)], settings, weights)
        for group in groups
    ]
    if settings.scale == "group":
        known = [[value / divisor(group) for value in group] for group in known]
    elif settings.scale == "minibatch":
        whole = divisor([value for group in known for value in group])
        known = [[value / whole for value in group] for group in known]
    rows = []
    for group, values in zip(groups, known, strict=True):
        waiting = iter(values)
        rows.append([next(waiting) if graded(reward) else None for reward in group])
    return rows


def turn_returns(completion: Completion, reward: Reward, discount: float) -> list[float]:
    """[turns] sum_k discount^k r_(t+k) of the rewards from each turn t on. Where a verifier grades, its total is
    the last turn's reward; a completion without an environment is one turn."""
    given = [turn.reward or 0.0 for turn in completion.turns[:-1]]
    last = completion.turns[-1].reward if completion.turns else None
    rewards = [*given, reward.total if last is None else last]
    return [
        math.fsum(discount**later * value for later, value in enumerate(rewards[turn:])) for turn in range(len(rewards))
    ]


def group_returns(group: Group, discount: float) -> list[list[float] | None]:
    """[samples][turns] `turn_returns` of a group; None for a completion that is not graded."""
    pairs = zip(group.completions, group.rewards, strict=True)
    return [turn_returns(c, reward, discount) if reward and graded(reward) else None for c, reward in pairs]


def turn_advantages(
    groups: Sequence[Group], settings: Advantage, discount: float = 1.0
) -> list[list[list[float] | None]]:
    """[groups][samples][turns] advantages of the turns, scaled; None for a completion that is not graded.

    That of turn t is the discounted sum of the completion's rewards from t on, less the mean of the same over the
    group's completions that have a turn t (of the others', with "leave_one_out"). Scale "group" divides by the
    deviation of these values of one turn; "minibatch" by that over all turns of the step. Raises NonFinite.
    """
    rows: list[list[list[float] | None]] = []
    for group in groups:
        known = group_returns(group, discount)
        check_finite([reward for reward in group.rewards if reward and graded(reward)])
        for turn in range(max((len(returns) for returns in known if returns is not None), default=0)):
            reaching = [returns for returns in known if returns is not None and len(returns) > turn]
            values = [returns[turn] for returns in reaching]
            leave_out = settings.kind == "leave_one_out"
            values = baselines.leave_one_out(values) if leave_out else baselines.mean_baseline(values)
            whole = divisor(values) if settings.scale == "group" else 1.0
            for returns, value in zip(reaching, values, strict=True):
                returns[turn] = value / whole
        rows.append(list(known))
    if settings.scale == "minibatch":
        whole = divisor([value for row in rows for one in row if one is not None for value in one])
        rows = [[None if one is None else [value / whole for value in one] for one in row] for row in rows]
    return rows


def token_weights(
    lengths: Sequence[Sequence[int]], loss_aggregation: LossAggregation, max_completion_tokens: int = 0
) -> list[list[float]]:
    """Weight of each token of a completion, so that the step's loss is -sum_i weight_i sum_t objective_it.

        group_tokens   1 / (P * tokens of the group)    mean over tokens of the group, then over P groups (Magistral)
        batch_tokens   1 / tokens of the step           mean over all tokens (DAPO)
        sequence       1 / (P * sequences of the group * its tokens)    mean of means (GRPO)
        completions    1 / (P * sequences of the group)                 sum over tokens, mean over completions (RLOO)
        constant       the same / max_completion_tokens                 no length in it (Dr. GRPO)

    lengths: [groups, samples] completion tokens, 0 for a masked completion (its weight is 0); P counts the groups, and
    sequences those of a group, that have tokens. Over all tokens the weights sum to 1, except for `completions` and
    `constant`. Raises ValueError without max_completion_tokens where it is needed.
    """
    active = sum(any(group) for group in lengths)
    total = sum(map(sum, lengths))
    if loss_aggregation == "constant" and max_completion_tokens < 1:
        raise ValueError(
            "loss_aggregation = 'constant' needs max_completion_tokens >= 1 (rollout.max_completion_tokens)"
        )

    def weigh(group: Sequence[int], tokens: int) -> float:
        if loss_aggregation == "group_tokens":
            return 1.0 / (active * sum(group))
        if loss_aggregation == "batch_tokens":
            return 1.0 / total
        if loss_aggregation == "sequence":
            return 1.0 / (active * sum(map(bool, group)) * tokens)
        if loss_aggregation == "completions":
            return 1.0 / (active * sum(map(bool, group)))
        return 1.0 / (active * sum(map(bool, group)) * max_completion_tokens)

    return [[weigh(group, tokens) if tokens else 0.0 for tokens in group] for group in lengths]
