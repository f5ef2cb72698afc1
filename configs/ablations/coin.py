"""The reward "coin": a fair coin, tossed by the text itself, that no policy can learn. Used by clip.toml."""

import hashlib

from verify.plugins import Case, reward


@reward("coin")
def coin(case: Case) -> float:
    """0 or 1, each for half of all texts; always the same for one text."""
    text = f"{case.problem.id} {case.thoughts} {case.solution}"
    return float(hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 2)
