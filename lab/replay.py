"""Replay: the trainer alone learns from offline rows, such as the rollouts of an earlier run. One process, no engines.

    .venv/bin/python -m lab.replay SETTINGS.toml --data.offline=runs/recorded --name=again [--SECTION.SETTING=VALUE ...]

The settings are those of a run (`python -m trainer --help`). Each of its `steps` trains rollout.prompts_per_step
offline groups, by the code of the trainer ranks; nothing is sampled, and nothing is evaluated or saved on the way.
runs/NAME gets config.toml, metrics.jsonl and, at the end, the model in latest/. It starts with model.path, without SFT:
to go on where a recorded run began, that is the folder reference/ of a run whose objective has a reference. The same
settings give the same weights, bit for bit on one machine.

spo needs V(x), which a run samples from the reference before the first step. Here it is estimated from the rows, with
the weights ref / mu of whole completions: they must have log-probs, and where the reference sampled them all weigh 1.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist

from rollout.local_engine import LocalRank
from shared import settings_file
from shared.chat import Chat
from shared.config import Config
from shared.errors import ConfigError, MaestraleError, print_error, run_command
from shared.launch.ranks import count_gpus
from shared.metrics import MetricsLog
from shared.model.cpu.processor import given_threads
from shared.progress import Progress
from shared.types import Group
from trainer.checkpoint.safetensors_file import REFERENCE
from trainer.data.data_source import PromptFormat
from trainer.data.offline import OfflineGroups, load_offline
from trainer.data.sources import Sources, gather_sources, missing_settings, prepare
from trainer.export import note_training
from trainer.health import check_alive
from trainer.objectives.objective import Need, train_sequences
from trainer.objectives.registry import complaints, needs, objective_of
from trainer.schedule import learning_rate
from trainer.soft_values import soft_value, spo_of
from trainer.stages import Stages
from trainer.step import fsdp
from trainer.step.batching import BatchPlan, Learned, combine, plan_batch, split
from trainer.step.rank import TrainerRank
from trainer.step_metrics import offline_metrics, training_metrics
from verify.chosen_rewards import choose
from verify.scorer import RewardScorer

LATEST = "latest"


def mistakes(config: Config) -> Iterator[str]:
    """Yield what a replay lacks or cannot do, one line each."""
    yield from chain(missing_settings(config), complaints(config))
    if not config.data.offline:
        yield "data.offline is not set: name a run's folder or a file of rows, e.g. --data.offline=runs/recorded"
    if config.mode != "rl" or config.stages:
        yield 'a replay has one stage of mode = "rl": remove [[stages]]'
    if config.objective.get("entropy_target"):
        yield "objective.entropy_target moves clip_high in a launch only: remove it"


class Replay:
    """A trainer rank of its own, and the rows that it learns from."""

    def __init__(self, config: Config, sources: Sources, chat: Chat, offline: OfflineGroups):
        """Load the model and what the objective compares it with."""
        self.config, self.chat, self.offline = config, chat, offline
        self.objective = objective_of(config)
        device = torch.device("cuda", 0) if count_gpus(config.placement.device) else torch.device("cpu")
        self.rank = TrainerRank(config, LocalRank(device, dist.HashStore()))
        self.rank.load_policy(sources.model_dir)
        if Need.REFERENCE in needs(config):
            self.rank.export(str(config.run_dir / REFERENCE))
            self.rank.load_frozen(str(config.run_dir / REFERENCE), "reference")
        if sources.teacher_dir is not None:
            self.rank.load_frozen(str(sources.teacher_dir), "teacher")
        self.values = self.soft_values() if Need.START_VALUES in needs(config) else None

    def soft_values(self) -> dict[str, float]:
        """Problem id -> beta log (sum_i w_i exp(r_i / beta) / sum_i w_i) over all its completions, w = ref / mu."""
        outcomes: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        beta = spo_of(self.config).beta
        for group in self.offline.groups:
            plan = self.plan([group], valued=False)
            shares = plan.micro_batches[0]
            scored = self.rank.compute_old_logprobs(shares, self.config.rollout.temperature)
            sequences = [sequence for share in shares for sequence in share.sequences]
            for sequence, now in zip(sequences, scored, strict=True):
                weight = sum(now) - sum(sequence.columns["behaviour"])
                outcomes[group.prompt.problem.id].append((sequence.advantages[0], weight))
        return {
            name: soft_value([reward for reward, _ in pairs], beta, [weight for _, weight in pairs])
            for name, pairs in outcomes.items()
        }

    def plan(self, groups: list[Group], valued: bool = True) -> BatchPlan:
        """One optimiser step on these groups."""
        config = self.config
        values = self.values if valued else {group.prompt.problem.id: 0.0 for group in groups}
        sequences = train_sequences(groups, self.objective, config, self.chat, values)
        together = Need.GROUPS in needs(config)
        return plan_batch(sequences, 1, config.optimiser.micro_batch_tokens, together=together)

    def step(self, version: int) -> tuple[Learned, list[Group]]:
        """Train the batch after `version`; returns what came of it, and the batch."""
        config, rank, temperature = self.config, self.rank, self.config.rollout.temperature
        groups = self.offline.batch(version, config.rollout.prompts_per_step, config.seed)
        works = [self.plan(minibatch) for minibatch in split(groups, config.optimiser.minibatches)]
        if len(works) > 1 and Need.OLD_LOGPROBS in needs(config):
            for work in works:
                columns = rank.compute_old_logprobs(work.micro_batches[0], temperature)
                sequences = [sequence for share in work.micro_batches[0] for sequence in share.sequences]
                for sequence, column in zip(sequences, columns, strict=True):
                    sequence.columns["old"] = column
        rate, steps = learning_rate(version, config.steps, config.optimiser), list[Learned]()
        for work in works:
            sums = rank.forward_backward(work.micro_batches[0], temperature)
            steps.append(Learned(work, sums, rank.step(rate)))
        reference = self.objective.compared_with
        if reference is not None and reference.every and (version + 1) % reference.every == 0:
            rank.move_reference(reference.share)
        learned = combine(steps)
        check_alive(learned, config, len(self.chat.tokenizer), version + 1, age=1)
        return learned, groups

    def run(self, progress: Progress) -> None:
        """Train all steps and write the metrics, then the model."""
        log = MetricsLog(self.config.run_dir / "metrics.jsonl")
        for version in range(self.config.steps):
            began = time.monotonic()
            learned, groups = self.step(version)
            row = training_metrics(learned.sums, learned.stepped, learned.plan) | offline_metrics(groups)
            row["lr"] = learning_rate(version, self.config.steps, self.config.optimiser)
            row["time/step_s"] = time.monotonic() - began
            log.write(version + 1, row)
            progress.note(
                f"step {version + 1}/{self.config.steps}: loss {row['loss']:.4f}, gradient {row['grad_norm']:.3f}"
            )
        folder = self.config.run_dir / LATEST
        self.rank.export(str(folder))
        note_training(self.config, folder, self.config.steps)


async def read_rows(config: Config, sources: Sources, chat: Chat, progress: Progress) -> OfflineGroups:
    """The groups of data.offline, scored in verifier processes where they have no rewards. Raises
    ConfigError for rows that the objective cannot learn from."""
    scorer = RewardScorer(Stages(config), chat)
    try:
        await scorer.start([])
        offline = await load_offline(sources.offline, PromptFormat(chat, config.data), scorer, config, progress)
    finally:
        await scorer.close()
    assert offline is not None, "a replay without rows was refused"
    dark = [group.source for group in offline.groups if not all(each.logprobs for each in group.completions)]
    if dark and Need.START_VALUES in needs(config):
        raise ConfigError(
            f'data.offline: objective.name = "spo" estimates soft values from log-probs of who sampled, and {dark[0]} '
            "has none: use agro, dro or one of examples/objectives"
        )
    return offline


def replay(config: Config, progress: Progress) -> None:
    """Run it. Raises what a launch raises for bad settings and data."""
    torch.set_num_threads(given_threads())
    config = config.model_copy(update={"sft": type(config.sft)()})  # none is done, so its files may be absent
    choose(config.reward)
    if (config.run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"{config.run_dir} holds a run already: give this replay another name (--name=...)")
    prepare(config, progress)
    sources = gather_sources(config)
    chat = Chat.of_run(sources.model_dir, config)
    offline = asyncio.run(read_rows(config, sources, chat, progress))
    config.run_dir.mkdir(parents=True, exist_ok=True)
    settings_file.write(config, config.run_dir / "config.toml")
    try:
        Replay(config, sources, chat, offline).run(progress)
    finally:
        fsdp.leave()


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 bad input."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    try:
        config = settings_file.load(arguments[0], arguments[1:], mistakes, os.environ)
        replay(config, Progress())
    except MaestraleError as error:
        return print_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
