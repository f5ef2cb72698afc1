"""Puts a run together, or goes on with one: the same parts for a launch and for a session of your own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollout.client import EngineClient
from shared import route_files
from shared.config import Config
from shared.launch.watchdog import Peer
from shared.progress import Progress
from trainer import run_log
from trainer.checkpoint import resume
from trainer.checkpoint.origin import Origin
from trainer.checkpoint.reader import VerifiedCheckpoint
from trainer.checkpoint.writer import Checkpointer
from trainer.client import TrainerClient
from trainer.controller import TrainingLoop
from trainer.data.data_source import DataSource
from trainer.data.offline import OfflineGroups
from trainer.episodes import Episodes
from trainer.evaluation import Evaluator
from trainer.learner import Learner
from trainer.ledger import Ledger
from trainer.objectives.teachers import Teacher
from trainer.run_log import RunLogger
from trainer.timing import PhaseTimer
from verify.scorer import RewardScorer


def assemble(
    config: Config, ledger: Ledger, engines: EngineClient, trainers: TrainerClient, scorer: RewardScorer,
    episodes: Episodes, source: DataSource, progress: Progress, origin: Origin, *, clock: PhaseTimer | None = None,
    peers: Callable[[], list[Peer]] = list, peak_flops: float = 0.0, evaluator: Evaluator | None = None,
    teacher: Teacher | None = None, offline: OfflineGroups | None = None,
) -> TrainingLoop:  # fmt: skip
    """The loop of a run with all that it works with. clock: with the times of the launch so far. peers: the ranks, for
    the metrics of memory. peak_flops: of a trainer's card, 0 where it is not known."""
    clock = clock or PhaseTimer()
    return TrainingLoop(
        ledger=ledger, engines=engines, scorer=scorer, episodes=episodes, source=source,
        learner=Learner(trainers, ledger, source, clock, teacher, offline), clock=clock,
        logger=RunLogger(clock, progress, engines, scorer, ledger, peers, peak_flops, source.prompt_format),
        checkpointer=Checkpointer(config, ledger, engines, trainers, clock, progress, origin), probe=source.probe(),
        evaluator=evaluator,
    )  # fmt: skip


async def resumed(
    config: Config, origin: Origin, ledger: Ledger, clock: PhaseTimer, arguments: Sequence[str], progress: Progress
) -> VerifiedCheckpoint | None:
    """Restore the state of the newest checkpoint that is whole, and return it; None for a run that begins. Raises
    ConfigError for a run that cannot go on like this."""
    checkpoint = await asyncio.to_thread(resume.find, config, origin, arguments, progress)
    folder = checkpoint.folder if checkpoint else None
    await asyncio.to_thread(route_files.restore, config.run_dir, folder)
    if checkpoint is None:
        return None
    for line in run_log.check_folder(config.run_dir):
        progress.warning(line)
    ledger.restore(checkpoint.state)
    clock.before_s = checkpoint.manifest.seconds
    run_log.forget_after(config.run_dir, ledger.version, ledger.stage.number)
    progress.note(f"resuming {config.run_dir} from step {ledger.version} of {config.last_version}")
    return checkpoint
