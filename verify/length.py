"""The soft length penalty: zero until shortly before the limit, then linear up to the full penalty.

One formula. Source: Magistral (2506.10910), section 2.2.3; the shape is DAPO's (2503.14476).
"""

from __future__ import annotations

from shared.errors import ConfigError


def length_penalty(tokens: int, length_max: int, overlong_buffer: int, weight: float = 0.1) -> float:
    """Return the penalty of a completion of `tokens` tokens, between 0 and -weight.

    0 up to length_max - overlong_buffer, then -weight * (tokens - length_max + overlong_buffer) / overlong_buffer up to
    length_max, -weight above. All three lengths are in tokens. Raises ConfigError when the limits are impossible.
    """
    if not 0 < overlong_buffer <= length_max:
        raise ConfigError(
            f"reward.overlong_buffer = {overlong_buffer} must lie between 1 and reward.length_max = {length_max} "
            "(0 stands for rollout.max_completion_tokens and must be resolved before): lower overlong_buffer"
        )
    if tokens <= length_max - overlong_buffer:
        return 0.0
    if tokens > length_max:
        return -weight
    return -weight * (tokens - length_max + overlong_buffer) / overlong_buffer
