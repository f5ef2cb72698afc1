"""Supervised steps: imitate demonstrations, before reinforcement learning (mode "rl") or as the whole run (mode "sft").

Each step draws its batch as a pure function of the step, so a repeated or resumed one is the same. Sequences are packed
end to end into micro-batches (batching.py), each attending to itself only. A share of every batch comes from general
instructions, so that the model keeps its other abilities (Magistral, 2506.10910, section 5.2: 10 %).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.chat import Chat
from shared.config import Config
from shared.errors import DataError
from shared.jsonl import all_faults, read_rows, text_of
from shared.sections import Sft
from shared.types import CONTEXT, IMITATED, Problem
from trainer.client import TrainerClient
from trainer.data.data_source import PromptFormat
from trainer.data.demonstration_rows import completion_of, to_demonstration
from trainer.data.sources import Sources
from trainer.data.written_text import WrittenTexts
from trainer.evaluation import evaluation_due
from trainer.ledger import Interrupted
from trainer.objectives.sequences import Demonstration, sft_sequences
from trainer.schedule import warm_and_decay
from trainer.step.batching import Learned, plan_batch
from trainer.step.rank import TrainerRank
from verify.published import NATIVE, renamed
from verify.verifiers import check_language

if TYPE_CHECKING:
    from trainer.controller import TrainingLoop

WARMUP_STEPS = 20
FINAL_SHARE = 0.1
"""the learning rate decays linearly to this share of its peak"""


@dataclass(frozen=True)
class Demonstrations:
    """The demonstrations that are imitated, as tokens: of reasoning, and of general instructions."""

    reasoning: list[Demonstration]
    general: list[Demonstration]
    general_share: float
    """share of a batch that is drawn from `general`"""
    left_out: tuple[str, ...] = ()
    """a line for each doubt about a file, for one whose rows are of a published shape or too long"""

    def batch_at(self, step: int, size: int, seed: int) -> list[Demonstration]:
        """The batch of an SFT step, [size] demonstrations: a pure function of (seed, step)."""
        rng = random.Random(f"cold start {seed} {step}")
        if not self.general:
            return rng.choices(self.reasoning, k=size)
        expected = size * self.general_share
        count = int(expected) + (rng.random() < expected % 1)
        return rng.choices(self.reasoning, k=size - count) + rng.choices(self.general, k=count)


def demonstrations_of(
    sources: Sources, prompts: PromptFormat, config: Config, warning: Callable[[str], None]
) -> Demonstrations | None:
    """The demonstrations that the settings name; None where none are to be imitated. Raises DataError."""
    if not (config.sft.steps and sources.demonstrations):
        return None
    loaded = load_demonstrations(sources.demonstrations, sources.general, config.sft, prompts, config.model.max_tokens)
    for line in loaded.left_out:
        warning(line)
    return loaded


def load_demonstrations(
    reasoning: Path, general: Path | None, settings: Sft, prompts: PromptFormat, max_tokens: int
) -> Demonstrations:
    """Read both files. Raises DataError naming the lines, or the setting of a file in which nothing fits."""
    left_out: list[str] = []
    plain = prompts.without_system()
    return Demonstrations(
        read_demonstrations(reasoning, "sft.demonstrations", prompts, max_tokens, left_out),
        read_demonstrations(general, "sft.general", plain, max_tokens, left_out) if general else [],
        settings.general_share,
        tuple(left_out),
    )


def read_demonstrations(
    path: Path, setting: str, prompts: PromptFormat, max_tokens: int, left_out: list[str]
) -> list[Demonstration]:
    """Read rows of {"problem", "completion", "domain"?, "system"?, "source"?, "reasoning_language"?} or
    {"problem", "solution", "answer"} (the solution is the reasoning), or of a published shape (`demonstration_rows`).

    "system" follows the system prompt, as tools do. "completion" may be a list of {"role", "content"} messages: several
    turns of the "assistant", with what an environment says ("user" or "tool") between them. Rows longer than max_tokens
    are left out; a line in `left_out` says so. Other lines are about texts that are not as the run's own completions
    are to be (`data.written_text`).

    Raises DataError naming the lines, or `setting` if nothing is left.
    """
    demonstrations: list[Demonstration] = []
    long: list[str] = []
    faults: list[str] = []
    chat, shapes = prompts.chat, Counter[str]()
    texts = WrittenTexts(chat)
    for where, _, fields in read_rows(path, setting, faults):
        try:
            row, shape = to_demonstration(renamed(fields, prompts.settings.columns, where), where)
            shapes[shape] += 1
            problem, domain = text_of(row, "problem", where), text_of(row, "domain", where, "math")
            also, language = text_of(row, "system", where, ""), text_of(row, "reasoning_language", where, "")
            if language:
                check_language(language, "reasoning_language", where)
            if isinstance(row.get("completion"), list):
                completion = encode_turns(chat, row["completion"], where, texts)
            else:
                written = texts.tokens(completion_of(row, where), where)
                completion = Demonstration([], [*written, chat.eos_id])
                if setting != "sft.general" and not row.get("environment"):
                    form: Any = text_of(row, "answer_form", where, "")
                    by = str(row.get("source", ""))
                    one = Problem(where, problem, "", "en", domain, by, answer_form=form, reasoning_language=language)
                    texts.hold(written, one, where)
        except DataError as error:
            faults.append(str(error))
            continue
        if faults:
            continue
        prompt_ids = prompts.render(problem, domain, also, language=language)
        if len(prompt_ids) + len(completion.completion) <= max_tokens:
            demonstrations.append(completion._replace(prompt=prompt_ids))
        else:
            long.append(where)
    if faults:
        raise DataError(all_faults(faults, f"{setting}: {len(faults):,} rows of {path} cannot be used:"))
    if not demonstrations:
        raise DataError(f"{setting}: {path} holds none that fits model.max_tokens = {max_tokens}")
    if {*shapes} - {NATIVE}:
        left_out.append(f"{setting}: read " + ", ".join(f"{count:,} as {name}" for name, count in shapes.most_common()))
    left_out += texts.warnings(setting, len(demonstrations) + len(long))
    if long:
        count = len(demonstrations) + len(long)
        left_out.append(
            f"{setting}: {len(long):,} of {count:,} rows ({len(long) / count:.1%}) are longer than model.max_tokens = "
            f"{max_tokens}: they are left out (first: {long[0].removeprefix(f'{setting}: ')})"
        )
    return demonstrations


def encode_turns(chat: Chat, messages: list[Any], where: str, texts: WrittenTexts | None = None) -> Demonstration:
    """The tokens of a conversation as of an episode, the assistant's imitated. texts: counts. Raises DataError."""
    texts = texts or WrittenTexts(chat)
    ids, mask, between = list[int](), b"", list[tuple[str, str]]()
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("assistant", "user", "tool"):
            raise DataError(f'{where}: message {number} of "completion" needs a "role": "assistant", "user" or "tool"')
        role, text = message["role"], text_of(message, "content", f'{where}: message {number} of "completion"')
        if role != "assistant":
            between.append((role, text))
            continue
        if bool(ids) != bool(between):
            raise DataError(
                f'{where}: "completion" begins with a turn of the assistant, and something must come between two'
            )
        bridge = chat.bridge(between) if between else []
        turn = [*texts.tokens(text, where), chat.eos_id]
        ids, between = [*ids, *bridge, *turn], []
        mask += bytes([CONTEXT]) * len(bridge) + bytes([IMITATED]) * len(turn)
    if not ids or between:
        raise DataError(f'{where}: "completion" must end with a turn of the assistant')
    return Demonstration([], ids, mask)


def sft_rate(step: int, settings: Sft) -> float:
    """Learning rate of SFT step `step` (0-based)."""
    return warm_and_decay(step, settings.steps, settings.learning_rate, WARMUP_STEPS, FINAL_SHARE)


async def imitate(trainers: TrainerClient, demonstrations: Demonstrations, config: Config, step: int) -> Learned:
    """Train one sft step: mean negative log-likelihood over the completion tokens of its batch."""
    batch = sft_sequences(demonstrations.batch_at(step, config.sft.batch, config.seed))
    work = plan_batch(batch, config.shares, config.optimiser.micro_batch_tokens)
    sums = await trainers.forward_backward(work.micro_batches, sft=True)
    return Learned(work, sums, await trainers.step(sft_rate(step, config.sft)))


async def sft(run: TrainingLoop, demonstrations: Demonstrations) -> None:
    """Train all SFT steps before reinforcement learning, then reset the optimiser's moments."""
    settings, tokens, began = run.config.sft, 0, time.monotonic()
    for step in range(settings.steps):
        learned = await imitate(run.learner.trainers, demonstrations, run.config, step)
        tokens += learned.sums.tokens
        _report(run, step, learned, tokens / (time.monotonic() - began))
    await run.learner.trainers.call(TrainerRank.reset_optimiser)


async def sft_run(run: TrainingLoop, demonstrations: Demonstrations) -> None:
    """Train the remaining steps of mode "sft", each a policy version; evaluate and save on the way.

    Raises Interrupted, with everything saved, after Ctrl-C.
    """
    config, ledger, tokens, seconds = run.config, run.ledger, 0, 0.0
    for step in range(ledger.version, config.sft.steps):
        if ledger.interrupted:
            await run.checkpointer.save()
            await run.checkpointer.finish()
            raise Interrupted
        began = time.monotonic()
        learned = await imitate(run.learner.trainers, demonstrations, config, step)
        tokens, seconds = tokens + learned.sums.tokens, seconds + time.monotonic() - began  # without evaluations
        _report(run, step, learned, tokens / seconds)
        ledger.version = step + 1
        await run.checkpointer.save_if_due()
        if evaluation_due(config, ledger.version) and ledger.version < config.last_version:
            await run.publish(ledger.version)
            await run.evaluate(ledger.version, config.rollout.temperature, alone=True)
    await run.publish(ledger.version)


def _report(run: TrainingLoop, step: int, learned: Learned, tokens_per_s: float) -> None:
    settings = run.config.sft
    run.logger.sft(step + 1, settings.steps, learned, sft_rate(step, settings), tokens_per_s)
