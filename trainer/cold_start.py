"""Supervised cold start: imitate demonstrations for some steps, before reinforcement learning.

Each step draws its batch as a pure function of the step, so a repeated cold start is the same.
What it does not: harvest or judge demonstrations. Who calls this: session.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from shared.chat import Chat
from shared.config import Config
from shared.errors import DataError
from shared.progress import Progress
from shared.rows import read_rows, text_of
from trainer.advantage import supervised_sequences
from trainer.collate import collate
from trainer.optimiser import warm_and_decay
from trainer.trainers import Trainers

Demonstration = tuple[list[int], list[int]]
"""prompt tokens, completion tokens (end of sequence included)"""

FINAL_SHARE = 0.1
"""the learning rate decays linearly to this share of its peak"""


def load_demonstrations(path: Path, chat: Chat, system_prompt: str, max_tokens: int) -> list[Demonstration]:
    """Read JSONL of {"problem", "completion"}, or of {"problem", "solution", "answer"}, whose solution becomes the
    thoughts. Longer ones than max_tokens are left out.

    Raises DataError naming the line, or cold_start.demonstrations if nothing is left.
    """
    found: list[Demonstration] = []
    for where, _, row in read_rows(path, "cold_start.demonstrations"):
        prompt_ids = chat.render(text_of(row, "problem", where), system_prompt)
        completion_ids = chat.encode(completion_of(row, where))
        if len(prompt_ids) + len(completion_ids) < max_tokens:
            found.append((prompt_ids, [*completion_ids, chat.eos_id]))
    if not found:
        raise DataError(f"cold_start.demonstrations: {path} holds none that fits model.max_tokens = {max_tokens}")
    return found


def completion_of(row: dict[str, Any], where: str) -> str:
    """The completion to imitate: as written, or thoughts and boxed answer from a worked solution."""
    if "completion" not in row and "solution" in row:
        solution, answer = text_of(row, "solution", where), text_of(row, "answer", where)
        return f"<think>\n{solution}\n</think>\nThe answer is \\boxed{{{answer}}}."
    return text_of(row, "completion", where)


def batch_at(demonstrations: list[Demonstration], step: int, size: int, seed: int) -> list[Demonstration]:
    """The batch of a supervised step, [size] demonstrations: a pure function of (seed, step)."""
    return random.Random(f"cold start {seed} {step}").choices(demonstrations, k=size)


async def cold_start(
    trainers: Trainers, demonstrations: list[Demonstration], config: Config, progress: Progress
) -> None:
    """Run all supervised steps, then reset the optimiser's moments."""
    settings = config.cold_start
    tokens, began = 0, time.monotonic()
    for step in range(settings.steps):
        batch = supervised_sequences(batch_at(demonstrations, step, settings.batch, config.seed))
        work = collate(batch, len(trainers.ranks), config.optimiser.micro_batch_tokens)
        found = await trainers.accumulate(work.micro_batches, "supervised")
        await trainers.step(warm_and_decay(step, settings.steps, settings.learning_rate, 20, FINAL_SHARE))
        tokens += found.tokens
        rate = tokens / (time.monotonic() - began)
        progress.supervised(step + 1, settings.steps, found.sums["loss"], rate)
    await trainers.reset_optimiser()
