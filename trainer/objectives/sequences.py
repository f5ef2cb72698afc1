"""Turns complete groups into sequences to train: advantages and weights on the tokens that were sampled.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.chat import Chat
from shared.config import Config
from shared.types import Completion, Group, TrainSequence
from trainer.objectives.advantage import advantages, graded, token_weights
from trainer.truth import bounded_groups, put_answer


def train_sequences(
    groups: Sequence[Group], config: Config, chat: Chat | None = None, values: Mapping[str, float] | None = None
) -> list[TrainSequence]:
    """The sequences of one optimiser step, in the order of groups and samples; masked and empty completions left out.

    groups: complete groups of one minibatch, [group_size] completions each. chat: for jepo, to put true answers after
    thoughts; a group in which one would be longer than model.max_tokens with it is trained by its rewards, since a cut
    answer has another likelihood. values: problem id -> soft value of its prompt, for spo, whose advantage is what the
    reward exceeds it by. Raises NonFinite for a reward that is not a finite number.
    """
    settings = config.objective.resolved()
    scored = advantages([group.rewards for group in groups], settings, config.reward)
    bounded = bounded_groups(groups, settings.bound_for) if settings.bound_for else [False] * len(groups)
    rows = []
    for number, group in enumerate(groups):
        row = row_of(group, chat if bounded[number] else None)
        if bounded[number] and any(one is not None and len(one.token_ids) > config.model.max_tokens for one in row):
            row, bounded[number] = row_of(group, None), False
        rows.append(row)
    lengths = [[0 if one is None else len(one.logprobs) for one in row] for row in rows]
    weights = token_weights(lengths, settings.loss_aggregation or "group_tokens", config.rollout.max_completion_tokens)
    found = []
    for group, bound, row, row_advantages, row_weights in zip(groups, bounded, rows, scored, weights, strict=True):
        value = values[group.prompt.problem.id] if values is not None else 0.0
        for one, advantage, weight in zip(row, row_advantages, row_weights, strict=True):
            if one is not None and advantage is not None and one.logprobs:
                one.advantage, one.weight, one.bounded = advantage - value, weight, bound
                found.append(one)
    return found


def row_of(group: Group, chat: Chat | None) -> list[TrainSequence | None]:
    """[group_size] `sequence_of` each completion, None for a masked one."""
    return [
        sequence_of(group, completion, chat) if graded(reward) else None
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def sequence_of(group: Group, completion: Completion, chat: Chat | None) -> TrainSequence:
    """Prompt and completion as sampled; with a chat format the true answer in place of the completion's own."""
    prompt, kept, truth = group.prompt, completion.token_ids, []
    if chat is not None and (forced := put_answer(chat, completion.token_ids, prompt.problem.answer)) is not None:
        kept, truth = completion.token_ids[: forced.thoughts], forced.truth
    return TrainSequence(
        token_ids=prompt.token_ids + kept + truth,
        prompt_tokens=len(prompt.token_ids),
        logprobs=completion.logprobs[: len(kept)],
        advantage=0.0,
        weight=0.0,
        group=prompt.index,
        teacher=completion.teacher[: len(kept)],
        truth_tokens=len(truth),
    )


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
