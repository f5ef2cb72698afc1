"""Turns completions and demonstrations into sequences to train. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from shared.types import CONTEXT, IMITATED, Completion, Group, TrainSequence


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
        token_ids=prompt + completion.token_ids, mask=mask, weight=0.0,
        advantages=advantages * sum(map(bool, mask.split(b"\0"))) if len(advantages) == 1 else advantages,
        group=group.prompt.index, columns=columns, route_files=completion.routes, offline=bool(group.source),
    )  # fmt: skip


class Demonstration(NamedTuple):
    """What is imitated: tokens after a prompt, of one turn or of several."""

    prompt: list[int]
    """[prompt_tokens]"""
    completion: list[int]
    """[tokens] the end of each turn included"""
    mask: bytes = b""
    """[tokens] IMITATED, or CONTEXT for what is between two turns; b"" where all are imitated"""


def sft_sequences(examples: Sequence[Demonstration]) -> list[TrainSequence]:
    """Demonstrations of one SFT step, each imitated token weighing the same (mean negative log-likelihood over tokens).
    examples: [batch]."""
    masks = [mask or bytes([IMITATED]) * len(completion) for _, completion, mask in examples]
    total = sum(mask.count(IMITATED) for mask in masks)
    return [
        TrainSequence(prompt + completion, bytes([CONTEXT]) * len(prompt) + mask, 1.0 / total)
        for (prompt, completion, _), mask in zip(examples, masks, strict=True)
        if completion
    ]
