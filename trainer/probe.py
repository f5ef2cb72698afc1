"""The sequences that trainers and engines score after every weight update, to prove that both hold the same model."""

from __future__ import annotations

import itertools

from trainer.data import DataSource

PROBE_TOKENS = 8, 64, 256
"""of each probe sequence, where model.max_tokens has room for them"""


def choose_probe(source: DataSource) -> list[list[int]]:
    """[sequences][tokens] fixed sequences to score on both sides: ends of problems with their answers, the longest of
    several, each of another length and from another problem on."""
    found: list[list[int]] = []
    longest = min(PROBE_TOKENS[-1], source.stages.now.model.max_tokens - 1)
    problems = itertools.cycle(source.all)
    for count in sorted({max(2, tokens * longest // PROBE_TOKENS[-1]) for tokens in PROBE_TOKENS}):
        ids: list[int] = []
        while len(ids) < count:
            problem = next(problems)
            answer = source.prompt_format.chat.encode_plain(problem.answer or problem.text)
            ids += source.render(problem, 0).token_ids + answer
        found.append(ids[-count:])
    return found
