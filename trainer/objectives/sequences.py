"""Turns complete groups into sequences to train: advantages and weights on the tokens that were sampled.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from shared.chat import Chat
from shared.config import Config
from shared.types import CONTEXT, IMITATED, SAMPLED, Completion, Group, TrainSequence
from trainer.objectives.advantage import token_weights

if TYPE_CHECKING:
    from trainer.objectives.objective import Objective


def train_sequences(
    groups: Sequence[Group],
    objective: Objective,
    config: Config,
    chat: Chat | None = None,
    values: Mapping[str, float] | None = None,
) -> list[TrainSequence]:
    """The sequences of one optimiser step, in the order of groups and samples; masked and empty completions left out.

    groups: complete groups of one minibatch, [group_size] completions each. chat: encodes ground truths, for jepo.
    values: problem id -> soft value of its prompt, for spo. Raises NonFinite for a reward that is not a finite number.
    """
    rows = objective.sequences(groups, config, chat, values)
    if objective.mask_truncated:
        rows = [
            [None if c.finish_reason == "length" else one for c, one in zip(group.completions, row, strict=True)]
            for group, row in zip(groups, rows, strict=True)
        ]
    lengths = [[0 if one is None else one.mask.count(SAMPLED) for one in row] for row in rows]
    weights = token_weights(lengths, objective.loss_aggregation, config.rollout.max_completion_tokens)
    found = []
    for row, counts, own in zip(rows, lengths, weights, strict=True):
        for one, tokens, weight in zip(row, counts, own, strict=True):
            if one is not None and tokens:
                one.weight = weight
                found.append(one)
    return found


def sequence_of(group: Group, completion: Completion, advantages: list[float]) -> TrainSequence:
    """Prompt and completion as sampled; the weight is still 0. advantages: one for each turn, or one for all."""
    prompt, sampled = group.prompt.token_ids, completion.sampled
    columns = {"behaviour": completion.logprobs} if completion.logprobs or not group.source else {}
    if completion.teacher:
        columns["teacher"] = completion.teacher
    if CONTEXT in sampled:
        columns = {name: list(compress(values, sampled)) for name, values in columns.items()}
    mask = bytes([CONTEXT]) * len(prompt) + sampled
    return TrainSequence(
        token_ids=prompt + completion.token_ids,
        mask=mask,
        weight=0.0,
        advantages=advantages * sum(map(bool, mask.split(b"\0"))) if len(advantages) == 1 else advantages,
        group=group.prompt.index,
        columns=columns,
        routes=completion.routes,
        offline=bool(group.source),
    )


class Demonstration(NamedTuple):
    """What is imitated: tokens behind a prompt, of one turn or of several."""

    prompt: list[int]
    """[prompt_tokens]"""
    completion: list[int]
    """[tokens] the end of each turn included"""
    mask: bytes = b""
    """[tokens] IMITATED, or CONTEXT for what stands between two turns; b"" where all are imitated"""


def sft_sequences(examples: Sequence[Demonstration]) -> list[TrainSequence]:
    """Demonstrations of one SFT step, each imitated token weighing the same (mean negative log-likelihood over tokens).

    examples: [batch].
    """
    masks = [mask or bytes([IMITATED]) * len(completion) for _, completion, mask in examples]
    total = sum(mask.count(IMITATED) for mask in masks)
    return [
        TrainSequence(prompt + completion, bytes([CONTEXT]) * len(prompt) + mask, 1.0 / total)
        for (prompt, completion, _), mask in zip(examples, masks, strict=True)
        if completion
    ]
