"""A loop of one's own: the parts of a launch in this process, for scripts and notebooks (examples/loop.py).

    async with Session("configs/quickstart.toml", "--steps=20") as session:
        groups = await session.sample(session.draw(16))
        await session.step(groups)
        await session.publish()

One engine, the verifiers and one trainer rank. They are those of a launch (`EngineRank`, `TrainerRank`), called by the
same clients; a step and an update are those of `TrainingLoop`, so that weights are proved in the same way, and metrics
and rollouts are in the run's folder for report and dashboard. What a launch has in addition: several ranks, overlap of
sampling and training, restarts of engines, stages, environments, SFT, evaluations, checkpoints. Not run on a GPU yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from rollout.local_engine import LocalConnection, LocalRank
from shared import settings_file
from shared.chat import Chat
from shared.errors import ConfigError, RunError
from shared.launch.ranks import count_gpus
from shared.progress import Progress
from shared.types import Group, Problem, Prompt
from trainer.assembly import assemble
from trainer.checkpoint.origin import origin_of
from trainer.client import TrainerClient
from trainer.colocate import settle
from trainer.data import sources
from trainer.data.data_source import DataSource, PromptFormat
from trainer.data.problem_file import read_problems
from trainer.episodes import Episodes
from trainer.ledger import Ledger
from trainer.objectives.objective import Need
from trainer.objectives.registry import complaints, needs, objective_of
from trainer.run_lock import RunLock
from trainer.solver import Solver
from trainer.step.rank import TrainerRank
from trainer.trackers import start_trackers
from verify.chosen_rewards import choose
from verify.verifiers import without_environment


class Session:
    """An engine, verifiers and a trainer for a loop of one's own, one session at a time in a process. Use as
    `async with Session(FILE, *OPTIONS) as session`."""

    def __init__(self, settings: str | Path, *options: str):
        """settings: a settings file. options: as on the command line, "--section.key=value". Raises ConfigError."""
        self.config = settings_file.load(
            settings, list(options), lambda config: chain(sources.missing_settings(config), complaints(config))
        )
        choose(self.config.reward)
        self.published = -1
        """version of the weights that the engine has; -1 before the first"""
        further = needs(self.config) - {Need.OLD_LOGPROBS, Need.GROUPS, Need.GROUND_TRUTH}
        if (
            self.config.placement.trainers > 1
            or self.config.placement.engines > 1
            or further
            or self.config.stages
            or self.config.data.offline
        ):
            what = ", ".join(sorted(further)) or "several trainers, engines or stages, or offline rows"
            raise ConfigError(
                f"a session has one trainer and one engine, but the settings ask for {what}: use a launch"
            )

    async def __aenter__(self) -> Session:
        """Start everything, and prove that the engine has the trainer's weights. Raises what a launch raises, and
        ConfigError where the run's folder holds a run already."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        """End engine, verifiers and trainer."""
        await self._open.__aexit__(*error)

    async def _start(self, stack: AsyncExitStack) -> None:
        progress, run_dir = Progress(), self.config.run_dir
        stack.callback(progress.close)
        lock = RunLock(run_dir)
        stack.push(lambda kind, *_: lock.close(f"exit code {int(kind is not None)}"))
        if (run_dir / "metrics.jsonl").exists():
            raise ConfigError(f"{run_dir} holds a run already: give the session a name of its own (--name=...)")
        start_trackers(self.config, progress.warning)
        sources.prepare(self.config, progress)
        files = sources.gather_sources(self.config)
        config = settle(self.config, files.model_dir, min(count_gpus(self.config.placement.device), 1), one_node=True)
        if config.placement.colocate == "turns":
            raise ConfigError("a session keeps trainer and engine on a GPU, and this model does not fit: use a launch")
        # an engine that dies is not started again: forked next to a trainer's process group it would not come to life
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_restarts": 0})})
        chat = Chat.of_run(files.model_dir, config, progress)
        problems = [
            without_environment(one, "data.train", "a session samples")
            for one in read_problems(files.train, "data.train", config.data, config.environment.name).problems
        ]
        self.solver = solver = Solver(config, files.model_dir, chat, progress.warning)
        stack.push_async_callback(solver.close)
        if isolation := await solver.start(problems):
            progress.note(isolation)
        self.trainer = TrainerRank(config, LocalRank(solver.engine.device, solver.engine.store))
        link = LocalConnection("the trainer")
        serving, trainers = asyncio.create_task(link.serve(self.trainer)), TrainerClient(link, range(1), config)
        stack.push_async_callback(_stop, trainers, serving)
        [loaded] = await trainers.call(TrainerRank.load, str(files.model_dir), None)
        await solver.engine.attach([loaded.transfer])
        prompts, ledger = PromptFormat(chat, config.data), Ledger(solver.stages)
        source, origin = DataSource(problems, solver.stages, prompts), origin_of(self.config, files, prompts)
        settings_file.write(self.config, run_dir / "config.toml")
        episodes = Episodes(config, prompts, solver.scorer)
        self.loop = assemble(
            config, ledger, solver.engine.client, trainers, solver.scorer, episodes, source, progress, origin,
            peak_flops=loaded.peak_flops,
        )  # fmt: skip
        stack.callback(self.loop.logger.end)
        await self.publish()
        self.loop.clock.close_step()

    @property
    def version(self) -> int:
        """Steps that were taken."""
        return self.loop.ledger.version

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts of data.train, in the order of a launch."""
        ledger = self.loop.ledger
        drawn = self.loop.source.draw_many(ledger.next_index, count)
        ledger.next_index = drawn[-1].index + 1
        return drawn

    def prompt(self, problem: Problem) -> Prompt:
        """A prompt of a problem of your own."""
        self.loop.ledger.next_index += 1
        return self.loop.source.render(problem, self.loop.ledger.next_index - 1)

    async def sample(self, prompts: Sequence[Prompt], samples: int | None = None) -> list[Group]:
        """Sample and score a group for each prompt: `samples` completions, rollout.group_size where it is not given."""
        count = samples or self.config.rollout.group_size
        return list(await asyncio.gather(*(self.solver.solve(prompt, count) for prompt in prompts)))

    async def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Take one step of the objective on complete groups, whose rewards you may have replaced. Returns its metrics,
        which are in metrics.jsonl too. Raises what a launch raises; RunError where the last step is not published."""
        loop, batch = self.loop, list(groups)
        if not batch or self.published < self.version:
            missing = "publish" if batch else "groups"
            raise RunError(f"a step needs {missing} first: the engine has version {self.published} of {self.version}")
        staleness = [loop.ledger.staleness(group) for group in batch]
        learned = await loop.learner.learn(batch, loop.clock.nothing())
        row = loop.logger.step(batch, staleness, loop.ledger.trained(batch), learned, self.version)
        loop.ledger.stages.move(objective_of(loop.config).after_step(row["entropy"]))
        await loop.logger.keep(batch, self.version)
        return row

    async def publish(self) -> None:
        """Bring the weights of the last step into the running engine, and prove it; completions under way go on. To be
        called after each step. Raises SyncMismatch where the engine does not hold them."""
        if self.published < self.version:
            await self.solver.engine.guarded(self.loop.publish(self.version))
            self.published = self.version

    async def export(self, folder: str | Path) -> None:
        """Write the model as a Hugging Face folder, to be served."""
        await self.loop.learner.trainers.call(TrainerRank.export, str(folder))


async def _stop(trainers: TrainerClient, serving: asyncio.Task[None]) -> None:
    """Free the trainer's memory, after the call under way; a call that hangs is left to its thread."""
    with suppress(RunError):
        await trainers.call(TrainerRank.stop)
    serving.cancel()
