"""Rewards in, advantages and token weights out: what each completion counts in the step's loss.

    loss of the step = - sum_i weight_i sum_t objective_it        (one global denominator, known before the first token)

A completion whose verdict says nothing about the policy (timeout, crash, unverifiable) is masked: it is in no mean, no
deviation and no denominator, and it is not trained.
What this does not: the token objective (loss.py), packing (collate.py). No torch. Who calls this: the controller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from shared.config import Config
from shared.errors import NonFinite
from shared.types import Group, Reward, TrainSequence

Scale = Literal["minibatch", "group", "none"]
Normaliser = Literal["group_tokens", "batch_tokens", "sequence", "constant"]
DiverseBy = Literal["total", "correctness", "off"]


def graded(reward: Reward | None) -> bool:
    """True if the reward says something about the completion: only such completions are trained."""
    return reward is not None and reward.verdict.graded


def diverse(rewards: Sequence[Reward | None], by: DiverseBy) -> bool:
    """True if the group has a learning signal: its graded values of `by` are not all equal (exactly;
    Magistral, arXiv 2506.10910).

    rewards: [group_size]. "off" keeps every group with something graded in it.
    """
    values = [reward.total if by == "total" else reward.correctness for reward in rewards if reward and graded(reward)]
    return bool(values) if by == "off" else len(set(values)) > 1


def centre(rewards: Sequence[float | None]) -> list[float | None]:
    """Group-centred advantage A_i = r_i - mean_j r_j (Magistral, arXiv 2506.10910).

    rewards: [group_size], None where masked, which stays None. Equal rewards give exactly 0, whatever the rounding of
    their mean. Raises NonFinite for a reward that is not a finite number.
    """
    known = [reward for reward in rewards if reward is not None]
    for reward in known:
        if not math.isfinite(reward):
            raise NonFinite(f"a reward is {reward}: it must be a finite number (see the verifier that gave it)")
    if len(set(known)) <= 1:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(known) / len(known)
    return [None if reward is None else reward - mean for reward in rewards]


def deviation(values: Sequence[float]) -> float:
    """Population standard deviation sqrt(mean (x - mean x)^2); 0 exactly when all are equal or there are none."""
    if len(set(values)) <= 1:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def advantages(groups: Sequence[Sequence[float | None]], scale: Scale) -> list[list[float | None]]:
    """Group-centred, then scaled advantages.

        minibatch   A_i / std over all sequences of the step (Magistral, arXiv 2506.10910)
        group       A_i / std over its own group (GRPO, arXiv 2402.03300)
        none        A_i (Dr. GRPO, arXiv 2503.20783)

    groups: [groups, samples] rewards, None where masked; returns the same shape. The deviation is the population's,
    over sequences. Magistral also takes off the minibatch mean of A: it is 0 here, because groups are whole. A
    deviation of 0 leaves advantages of 0.
    """
    centred = [centre(group) for group in groups]
    if scale == "none":
        return centred
    if scale == "group":
        deviations = [deviation([value for value in group if value is not None]) for group in centred]
    else:
        deviations = [deviation([value for group in centred for value in group if value is not None])] * len(centred)
    return [
        [value if value is None or std == 0 else value / std for value in group]
        for group, std in zip(centred, deviations, strict=True)
    ]


def token_weights(
    lengths: Sequence[Sequence[int]], normaliser: Normaliser, max_completion_tokens: int = 0
) -> list[list[float]]:
    """Weight of each token of a completion, so that the step's loss is -sum_i weight_i sum_t objective_it.

        group_tokens   1 / (P * tokens of the group)         mean over tokens of the group, then over P groups
        (Magistral) batch_tokens   1 / tokens of the step                mean over all tokens (DAPO)
        sequence       1 / (P * sequences of the group * its tokens)    mean of means (GRPO)
        constant       1 / (P * group_size * max_completion_tokens)     no length or group in it (Dr. GRPO)

    lengths: [groups, samples] completion tokens, 0 for a masked completion (its weight is 0); P counts the groups that
    have tokens. Over all tokens the weights sum to 1, except for `constant`. Raises ValueError without
    max_completion_tokens where it is needed.
    """
    active = sum(any(group) for group in lengths)
    total = sum(map(sum, lengths))
    if normaliser == "constant" and max_completion_tokens < 1:
        raise ValueError("normaliser = 'constant' needs max_completion_tokens >= 1 (rollout.max_completion_tokens)")

    def weigh(group: Sequence[int], tokens: int) -> float:
        if normaliser == "group_tokens":
            return 1.0 / (active * sum(group))
        if normaliser == "batch_tokens":
            return 1.0 / total
        if normaliser == "sequence":
            return 1.0 / (active * sum(map(bool, group)) * tokens)
        return 1.0 / (active * len(group) * max_completion_tokens)

    return [[weigh(group, tokens) if tokens else 0.0 for tokens in group] for group in lengths]


def train_sequences(groups: Sequence[Group], config: Config) -> list[TrainSequence]:
    """The sequences of one optimiser step, in the order of groups and samples; masked and empty completions left out.

    groups: complete groups of one minibatch, [group_size] completions each.
    """
    totals = [[reward.total if reward and graded(reward) else None for reward in group.rewards] for group in groups]
    lengths = [
        [0 if total is None else len(sample.token_ids) for sample, total in zip(group.completions, row, strict=True)]
        for group, row in zip(groups, totals, strict=True)
    ]
    scaled = advantages(totals, config.objective.advantage)
    weights = token_weights(lengths, config.objective.normaliser, config.rollout.max_completion_tokens)
    return [
        TrainSequence(
            token_ids=group.prompt.token_ids + completion.token_ids,
            prompt_tokens=len(group.prompt.token_ids),
            logprobs=completion.logprobs,
            advantage=advantage,
            weight=weight,
        )
        for group, row, row_weights in zip(groups, scaled, weights, strict=True)
        for completion, advantage, weight in zip(group.completions, row, row_weights, strict=True)
        if advantage is not None and completion.token_ids
    ]


def supervised_sequences(examples: Sequence[tuple[list[int], list[int]]]) -> list[TrainSequence]:
    """Demonstrations of one supervised step, each token weighing the same (mean negative log-likelihood over tokens).

    examples: [batch] pairs of prompt tokens and completion tokens.
    """
    total = sum(len(completion) for _, completion in examples)
    return [
        TrainSequence(prompt + completion, len(prompt), [], advantage=1.0, weight=1.0 / total)
        for prompt, completion in examples
        if completion
    ]
