"""Supervised cold start: imitate demonstrations for some steps, before reinforcement learning.

Each step draws its batch as a pure function of the step, so a repeated cold start is the same.
What it does not: harvest or judge demonstrations. Who calls this: session.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from shared.chat import Chat
from shared.config import Config
from shared.errors import DataError
from shared.progress import Progress
from trainer.advantage import supervised_sequences
from trainer.collate import collate
from trainer.optimiser import warm_and_decay
from trainer.trainers import Trainers

Demonstration = tuple[list[int], list[int]]
"""prompt tokens, completion tokens (end of sequence included)"""

FINAL_SHARE = 0.1
"""the learning rate decays linearly to this share of its peak"""


def load_demonstrations(path: Path, chat: Chat, system_prompt: str, max_tokens: int) -> list[Demonstration]:
    """Read JSONL of {"problem", "completion"}; longer ones than max_tokens are left out.

    Raises DataError naming the line, or cold_start.demonstrations if nothing is left.
    """
    if not path.is_file():
        raise DataError(f"cold_start.demonstrations = '{path}': there is no such file")
    found: list[Demonstration] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            problem, completion = row["problem"], row["completion"]
            prompt_ids, completion_ids = chat.render(problem, system_prompt), chat.encode(completion)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f"cold_start.demonstrations: {path}:{number} needs 'problem' and 'completion' as strings ({error!r})"
            ) from error
        if len(prompt_ids) + len(completion_ids) < max_tokens:
            found.append((prompt_ids, [*completion_ids, chat.eos_id]))
    if not found:
        raise DataError(f"cold_start.demonstrations: {path} holds none that fits model.max_tokens = {max_tokens}")
    return found


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
