"""Training sequences of a prompt and one completion, for tests."""

from collections.abc import Sequence

from shared.types import CONTEXT, IMITATED, SAMPLED, TrainSequence


def make_sequence(
    token_ids: list[int], prompt_tokens: int, logprobs: Sequence[float] | None, advantage: float, weight: float,
    group: int = 0, imitated: int = 0, **columns: Sequence[float],
) -> TrainSequence:  # fmt: skip
    """The last `imitated` tokens were not sampled. logprobs: the engine's, of the sampled tokens; None for a
    demonstration, which is imitated as a whole. columns: further log-probs of the sampled tokens."""
    count = len(token_ids) - prompt_tokens
    if logprobs is None:
        return TrainSequence(token_ids, bytes([CONTEXT] * prompt_tokens + [IMITATED] * count), weight, group=group)
    mask = bytes([CONTEXT] * prompt_tokens + [SAMPLED] * (count - imitated) + [IMITATED] * imitated)
    given = {"behaviour": logprobs, **columns}
    padded = {name: [*values, *[0.0] * imitated] for name, values in given.items()}
    return TrainSequence(token_ids, mask, weight, [advantage], group, padded)
