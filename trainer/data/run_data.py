"""What a run learns from and is evaluated on, read and checked before anything starts.

A launch takes these steps, and so do `check` and `--dry-run` (trainer/check/inspection.py), so that none of them takes
data for good that another refuses: `read_files`, then `RunData.start` and each of `RunData.steps`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from shared.chat import Chat
from shared.config import Config
from shared.jsonl import spread
from shared.progress import Progress
from shared.types import Problem
from trainer.data.copies import tell_copies, tell_shared
from trainer.data.data_source import DataSource, PromptFormat, opened
from trainer.data.environment_rows import start_episodes
from trainer.data.offline import OfflineGroups, load_offline
from trainer.data.problem_file import ProblemFile, check_answers, read_problems, refuse_prose, without_long
from trainer.data.sources import Sources
from trainer.episodes import Episodes
from trainer.objectives.objective import Need
from trainer.objectives.registry import needs
from trainer.sft import Demonstrations, demonstrations_of
from trainer.stages import Stages
from verify.chosen_rewards import choose
from verify.scorer import RewardScorer


def columns_of_rewards(config: Config) -> dict[str, str]:
    """The columns that the rewards of a run ask for (`plugins.ByColumns.columns`). Runs their files, which may define
    the verifiers of rows. Raises ConfigError."""
    chosen = [choose(stage.reward).columns for stage in reversed(config.every_stage)]
    return {name: who for columns in chosen for name, who in columns.items()}


def read_files(config: Config, train: Path | None, validation: Path | None) -> list[ProblemFile]:
    """Read the files of problems: to train on, then to validate on; look for copies in them. Raises DataError."""
    kept = columns_of_rewards(config)
    name, files = config.environment.name, list[ProblemFile]()
    if train is not None:
        files.append(read_problems(train, "data.train", config.data, name, kept))
        if Need.GROUND_TRUTH in needs(config):
            refuse_prose(files[0])
    if validation is not None:
        files.append(read_problems(validation, "data.validation", config.data, name, kept))
    for file in files:
        tell_copies(file)
    if len(files) == 2:
        tell_shared(files[1], files[0])
    return files


class RunData:
    """The data of a run as it is used, with the verifiers and environments that it is read with."""

    def __init__(
        self, config: Config, stages: Stages, sources: Sources, chat: Chat, files: Sequence[ProblemFile],
        progress: Progress,
    ):  # fmt: skip
        """files: of `read_files`. progress: gets warnings and notes."""
        self.config, self.sources, self.files, self.progress = config, sources, files, progress
        by_setting = {file.setting: file.problems for file in files}
        self.problems = opened(by_setting.get("data.train", []), config.data.open_share)
        self.validation = by_setting.get("data.validation", [])
        """problems to validate on; those that are used, once the problems are checked"""
        self.prompts = PromptFormat(chat, config.data)
        self.source = DataSource(self.problems, stages, self.prompts)
        self.scorer = RewardScorer(stages, chat)
        self.episodes = Episodes(config, self.prompts, self.scorer)
        self.offline: OfflineGroups | None = None
        self.demonstrations: Demonstrations | None = None

    async def start(self) -> None:
        """Start the verifiers. Raises SandboxRefused where programs are to be run and the host cannot isolate them."""
        if isolation := await self.scorer.start([*self.problems, *self.validation]):
            self.progress.note(isolation)

    def steps(self, imitates: bool = True) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """(what is read, how), in order; each raises what a launch is refused for. imitates: with demonstrations."""
        steps = [
            ("data.offline", self._read_offline),
            ("environments", self._start_environments),
            ("data", self._check_problems),
        ]
        return [*steps, *([("SFT", self._read_demonstrations)] if imitates else [])]

    async def _read_offline(self) -> None:
        config, progress = self.config, self.progress
        self.offline = await load_offline(self.sources.offline, self.prompts, self.scorer, config, progress)

    async def _start_environments(self) -> None:
        await start_episodes(self.episodes, self.files, [*self.problems, *self.validation])

    async def _check_problems(self) -> None:
        """Check ground truths and lengths of the problems that are used."""
        for file in self.files:
            trained, few = file.setting == "data.train", self.config.evaluate.problems
            left = await self.checked(file, self.source.problems if trained else spread(file.problems, few))
            if not trained:
                self.validation = left

    async def checked(self, file: ProblemFile, problems: list[Problem]) -> list[Problem]:
        """Check ground truths and lengths of problems of a file; returns those that fit. Raises DataError."""
        self.progress.note(file.read_as)
        await check_answers(file, problems, self.scorer.checker, self.config)
        long = await asyncio.to_thread(self.source.measure, problems)
        left = without_long(file, problems, long, self.source.room_in_words)
        for line in file.warnings:
            self.progress.warning(line)
        return left

    async def _read_demonstrations(self) -> None:
        config, warning = self.config, self.progress.warning
        self.demonstrations = await asyncio.to_thread(demonstrations_of, self.sources, self.prompts, config, warning)

    async def close(self) -> None:
        """End environments and verifiers."""
        await self.episodes.close()
        await self.scorer.close()
