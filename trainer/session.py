"""A run in this process, for scripts and notebooks (docs/session.md, examples/loop.py).

    async with Session(model="Qwen/Qwen3-0.6B", rows=[{"problem": "1+1?", "answer": "2"}], rewards=[short]) as session:
        await session.train()

or a loop of one's own, here with a settings file:

    async with Session("configs/quickstart.toml", "--steps=20") as session:
        groups = await session.sample(session.draw(16))
        await session.step(groups)
        await session.publish()

One engine, the verifiers and one trainer rank, as those of a launch (`EngineRank`, `TrainerRank`), called by the same
clients; data, SFT, steps, updates, proofs, evaluations, checkpoints and the run's folder are a launch's too. What
only a launch does is refused (`LAUNCH_ONLY`). Not run on a GPU yet.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from rollout.local_engine import LocalConnection, LocalRank
from shared import settings_file
from shared.atomic_write import write_whole
from shared.chat import Chat
from shared.config import Config
from shared.errors import ConfigError, InputError, RunError, first_cause
from shared.launch.ranks import count_gpus
from shared.progress import Progress
from shared.row_files import plain
from shared.section import merged
from shared.settings_file import ACCEPT_CHANGES, literal
from shared.types import Group, Problem, Prompt, Verdict
from trainer.assembly import assemble, resumed
from trainer.bottleneck import PHASES
from trainer.checkpoint.origin import Origin, origin_of
from trainer.checkpoint.reader import VerifiedCheckpoint, compare_weights
from trainer.checkpoint.writer import folder_of
from trainer.client import TrainerClient
from trainer.colocate import settle
from trainer.data import sources
from trainer.data.data_source import PromptFormat
from trainer.data.problem_file import ProblemFile, read_problems
from trainer.data.run_data import RunData, columns_of_rewards, read_files
from trainer.evaluation import Evaluation, Evaluator
from trainer.export import export_last, note_training
from trainer.ledger import Ledger
from trainer.objectives.objective import Need
from trainer.objectives.registry import complaints, needs, objective_of
from trainer.run_lock import RunLock, forget_refused
from trainer.sft import sft
from trainer.solver import Solver
from trainer.stages import Stages
from trainer.step.rank import TrainerRank
from trainer.timing import PhaseTimer
from trainer.trackers import not_installed, start_trackers
from verify.chosen_rewards import choose
from verify.plugins import registered
from verify.verifiers import without_environment

LAUNCH_ONLY = (
    "mode", "stages", "data.offline", "environment", "placement.trainers", "placement.engines", "placement.replicas",
    "rollout.max_restarts",
)  # fmt: skip
"""settings and sections that a session refuses, where they are not the default"""
Rows = str | Iterable[Mapping[str, Any]]
"""a path, "hub:owner/name/config:split", or the rows themselves, in any form that a file of data may have"""


def _refused(config: Config) -> Iterator[str]:
    for setting in LAUNCH_ONLY:
        value, usual = (operator.attrgetter(setting)(each) for each in (config, Config()))
        if value != usual:
            yield f"{setting} = {literal(value)}: a session does not do that: remove it, or use python -m trainer"


class Session:
    """An engine, verifiers and a trainer in this process, one session at a time. Use as
    `async with Session(...) as session`, or `await session.start()` and `await session.close()`."""

    def __init__(
        self, settings: str | Path = "", *options: str, model: str | Path | Mapping[str, Any] = "",
        rows: Rows = "", rewards: Sequence[Callable[..., Any]] = (), **sections: Any,
    ):  # fmt: skip
        """settings: a settings file, "" for none. options: as on the command line, "--section.key=value". model: a
        folder or Hub id, or the section [model]. rows: of data.train. rewards: functions of a `Case`, or with TRL's
        signature, of weight 1 unless reward.extra has another. sections: further settings, which go before the file's,
        e.g. steps=20, rollout={"group_size": 8}. Raises ConfigError that lists all mistakes."""
        self._rewards = {registered(function): _hash_of(function) for function in rewards}
        self._rows: dict[str, bytes] = {}
        """path in the run's folder -> the rows that are written there"""
        given: dict[str, Any] = {"reward": {"extra": dict.fromkeys(self._rewards, 1.0)}} if rewards else {}
        given |= {"data": {"train": self._named(rows)}} if rows else {}
        given |= {"model": {"path": str(model)} if isinstance(model, str | Path) else model} if model else {}
        checks = (sources.missing_settings, complaints, not_installed, _refused)
        self._arguments = [option for option in options if option == ACCEPT_CHANGES]
        self.config = settings_file.load(
            settings, [option for option in options if option != ACCEPT_CHANGES],
            lambda config: chain.from_iterable(check(config) for check in checks), given=merged(given, sections),
        )  # fmt: skip
        choose(self.config.reward)
        self.published = -1
        """version of the weights that the engine has; -1 before the first"""
        if further := needs(self.config) - {Need.OLD_LOGPROBS, Need.GROUPS, Need.GROUND_TRUTH}:
            what = ", ".join(sorted(further))
            raise ConfigError(f"[objective]: a session does not have {what}: choose another, or use python -m trainer")

    def _named(self, rows: Rows) -> str:
        """The path or name of rows; rows that are given will be written into the run's folder."""
        if isinstance(rows, str | Path):
            return str(rows)
        lines = [json.dumps(row, default=plain, ensure_ascii=False).encode() + b"\n" for row in rows]
        name = f"generated/rows-{zlib.crc32(b''.join(lines)):08x}.jsonl"
        self._rows[name] = b"".join(lines)
        return name

    def _write_rows(self) -> list[Path]:
        """Write the rows that were given; returns the files that were not there."""
        contents = {Path(self.config.locate(name)): content for name, content in self._rows.items()}
        new = [path for path in contents if not path.exists()]
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        return new

    async def start(self) -> Session:
        """Start everything, from the newest checkpoint where the run's folder holds one, and prove that the engine has
        the trainer's weights. Raises what a launch raises."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._open = stack.pop_all()
        self._rows.clear()
        return self

    async def close(self) -> None:
        """End engine, verifiers and trainer, once a checkpoint that is being written is whole."""
        await self._open.aclose()

    __aenter__ = start

    async def __aexit__(self, *error: Any) -> None:
        await self._open.__aexit__(*error)

    async def _start(self, stack: AsyncExitStack) -> None:
        self.progress, run_dir = Progress(), self.config.run_dir
        progress = self.progress
        stack.callback(progress.close)
        if not run_dir.exists():
            stack.push(lambda kind, *_: forget_refused(run_dir, PHASES) if _was_refused(kind) else None)
        lock = RunLock(run_dir)
        stack.push(lambda kind, error, _: lock.close(f"exit code {int(kind is not None)}", str(error or "")))
        written = self._write_rows()
        stack.push(lambda kind, *_: _remove(written) if _was_refused(kind) else None)
        progress.keep_phases(run_dir / PHASES)
        start_trackers(self.config, progress.warning)
        sources.prepare(self.config, progress)
        progress.phase("reading the problems")
        files = sources.gather_sources(self.config)
        config = settle(self.config, files.model_dir, min(count_gpus(self.config.placement.device), 1), one_node=True)
        if config.placement.colocate == "turns":
            raise ConfigError("a session keeps trainer and engine on a GPU, and this model does not fit: use a launch")
        # an engine that dies is not started again: forked next to a trainer's process group it would not come to life
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_restarts": 0})})
        chat = Chat.of_run(files.model_dir, config, progress)
        read = [self._alone(file) for file in read_files(config, files.train, files.validation)]
        stages, clock, prompts = Stages(config), PhaseTimer(), PromptFormat(chat, config.data)
        ledger, origin = Ledger(stages), origin_of(self.config, files, prompts)
        origin.contents["rewards"] = self._rewards
        checkpoint = await resumed(config, origin, ledger, clock, self._arguments, progress)
        self.data = data = RunData(config, stages, files, chat, read, progress)
        stack.push_async_callback(data.close)
        progress.phase("starting the engine")
        self.solver = Solver(config, files.model_dir, chat, progress.warning, data.scorer)
        self.solver.engine.keep_routes = True
        stack.push_async_callback(self.solver.engine.close)
        await self.solver.engine.start()
        await data.start()
        for _, step in data.steps(imitates=checkpoint is None):
            await step()
        await self._start_trainer(stack, ledger, clock, origin, checkpoint)

    async def _start_trainer(
        self, stack: AsyncExitStack, ledger: Ledger, clock: PhaseTimer, origin: Origin,
        checkpoint: VerifiedCheckpoint | None,
    ) -> None:  # fmt: skip
        config, engine, data, progress = self.solver.config, self.solver.engine, self.data, self.progress
        progress.phase("loading the model")
        self.trainer = TrainerRank(config, LocalRank(engine.device, engine.store))
        link = LocalConnection("the trainer")
        serving, trainers = asyncio.create_task(link.serve(self.trainer)), TrainerClient(link, range(1), config)
        stack.push_async_callback(_stop, trainers, serving)
        folder = str(checkpoint.folder) if checkpoint else None
        [loaded] = await trainers.call(TrainerRank.load, str(data.sources.model_dir), folder)
        if checkpoint is not None:
            compare_weights(checkpoint, [loaded.checksums])
        await engine.attach([loaded.transfer])
        evaluator = Evaluator(engine.client, data.scorer, data.source, data.validation, data.episodes)
        self.loop = loop = assemble(
            config, ledger, engine.client, trainers, data.scorer, data.episodes, data.source, progress, origin,
            clock=clock, peak_flops=loaded.peak_flops, evaluator=evaluator if data.validation else None,
        )  # fmt: skip
        loop.checkpointer.saved = ledger.version or -1
        stack.callback(loop.logger.end)
        stack.push_async_callback(loop.checkpointer.finish)
        if data.demonstrations is not None:
            progress.phase("SFT: imitating demonstrations")
            await sft(loop, data.demonstrations)
        settings_file.write(self.config, config.run_dir / "config.toml")
        if ledger.version == 0:
            await loop.checkpointer.save()
        progress.phase("first weights to the engine")
        await self.publish()
        loop.clock.close_step()

    @property
    def version(self) -> int:
        """Steps that were taken, those before a resume included."""
        return self.loop.ledger.version

    async def train(self) -> None:
        """Go on until `steps` as a launch does: sampling ahead of training, with updates, checkpoints, and evaluations
        every evaluate.every steps. Raises what a launch raises."""
        await self.publish()
        self.progress.phase("training")
        try:
            await self.solver.engine.guarded(self.loop.run())
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        self.published = self.version
        await self.loop.checkpointer.finish()

    def draw(self, count: int = 0) -> list[Prompt]:
        """The next prompts of data.train, in the order of a launch: `count`, 0 for rollout.prompts_per_step."""
        ledger = self.loop.ledger
        drawn = self.loop.source.draw_many(ledger.next_index, count or self.config.rollout.prompts_per_step)
        ledger.next_index = drawn[-1].index + 1
        return drawn

    def prompt(self, problem: Problem) -> Prompt:
        """A prompt of a problem of your own."""
        self.loop.ledger.next_index += 1
        return self.loop.source.render(problem, self.loop.ledger.next_index - 1)

    async def sample(self, prompts: Sequence[Prompt], samples: int | None = None) -> list[Group]:
        """Sample and score a group for each prompt: `samples` completions, rollout.group_size where it is not given.
        Raises RunError where all that are well formed could not be graded."""
        count = samples or self.config.rollout.group_size
        groups = list(await asyncio.gather(*(self.solver.solve(prompt, count) for prompt in prompts)))
        rewards = [reward for group in groups for reward in group.rewards if reward is not None]
        formed = [reward for reward in rewards if reward.verdict is not Verdict.NO_ANSWER]
        if formed and not any(reward.verdict.graded for reward in formed):
            raise RunError(f"no completion could be graded: {formed[0].reason}")
        return groups

    async def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Take one step of the objective on complete groups, whose rewards you may have replaced. Returns its metrics;
        saves every checkpoint.every steps. Raises what a launch raises; RunError where the last is not published."""
        loop, batch = self.loop, list(groups)
        if not batch or self.published < self.version:
            missing = "publish" if batch else "groups"
            raise RunError(f"a step needs {missing} first: the engine has version {self.published} of {self.version}")
        ledger, count = loop.ledger, len(batch)
        staleness = [ledger.staleness(group) for group in batch]
        learned = await loop.learner.learn(batch, loop.clock.nothing())
        # so that `train` goes on with the slots and the groups that are left
        ledger.started, ledger.busy_slots = ledger.started + count, ledger.busy_slots + count
        ledger.stage.target += count - self.config.rollout.prompts_per_step
        filtered = ledger.trained(batch)
        row = loop.logger.step(batch, staleness, filtered, learned, self.version)
        ledger.stages.move(objective_of(loop.config).after_step(row["entropy"]))
        await loop.logger.keep(batch, self.version)
        await loop.checkpointer.save_if_due()
        return row

    async def publish(self) -> None:
        """Bring the weights of the last step into the running engine, and prove it; completions under way go on. Call
        it after each step; evaluates every evaluate.every steps. Raises SyncMismatch for other weights."""
        if self.published < self.version:
            await self.solver.engine.guarded(self.loop.publish(self.version))
            self.published = self.version
            await self.solver.engine.guarded(self.loop.evaluate_if_due(self.version))

    async def evaluate(self, rows: Rows = "") -> Evaluation:
        """Evaluate the model at rollout.temperature, and with evaluate.greedy greedily too: on data.validation, which
        the run's folder records, or on `rows`. Returns the first. Raises ConfigError where there are no problems."""
        await self.publish()
        loop, evaluator = self.loop, await self._evaluator(rows) if rows else self.loop.evaluator
        if evaluator is None:
            raise ConfigError('there is nothing to evaluate: give rows, or set data={"validation": ...}')
        results = []
        for temperature in (self.config.rollout.temperature, *([0.0] if self.config.evaluate.greedy else [])):
            running = evaluator.run(temperature, self.config.evaluate.samples, self.progress.sampled)
            results.append(await self.solver.engine.guarded(running))
            if not rows:
                loop.logger.evaluation(self.version, results[-1])
        return results[0]

    async def _evaluator(self, rows: Rows) -> Evaluator:
        """An evaluator of other problems than data.validation."""
        name, config, data = self._named(rows), self.solver.config, self.data
        self._write_rows()
        self._rows.clear()
        path = sources.data_file(config, "data.validation", name)
        assert path is not None, "rows were given"
        file = self._alone(read_problems(path, "rows", config.data, kept=columns_of_rewards(config)))
        problems = await data.checked(file, file.problems)
        return Evaluator(self.loop.engines, data.scorer, data.source, problems)

    def _alone(self, file: ProblemFile) -> ProblemFile:
        """The file, none of whose problems has an environment. Raises DataError."""
        for problem in file.problems:
            without_environment(problem, file.where(problem), "a session samples")
        return file

    async def save(self) -> Path:
        """Save a checkpoint of the version as it is now; returns its folder. The same call of `Session` goes on from
        the newest. Raises CheckpointError."""
        await self.loop.checkpointer.save()
        await self.loop.checkpointer.finish()
        return folder_of(self.config.run_dir, self.version)

    async def export(self, folder: str | Path = "") -> Path:
        """Write the model as a Hugging Face folder, to be served; returns it. "": `latest` in the run's folder."""
        if not folder:
            await export_last(self.config, self.loop.learner.trainers, self.version)
            return self.config.run_dir / "latest"
        await self.loop.learner.trainers.call(TrainerRank.export, str(folder))
        note_training(self.config, Path(folder), self.version)
        return Path(folder)


def _was_refused(kind: type[BaseException] | None) -> bool:
    """Whether this is how a session ends that was refused."""
    return kind is not None and issubclass(kind, InputError)


def _remove(files: Iterable[Path]) -> None:
    """Remove files, and their folders where nothing else is in them."""
    with suppress(OSError):
        for path in files:
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def _hash_of(function: Callable[..., Any]) -> str:
    """What a resume compares of a reward."""
    with suppress(OSError, TypeError):
        return f"sha256 {hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]}"
    return "no source"


async def _stop(trainers: TrainerClient, serving: asyncio.Task[None]) -> None:
    """Free the trainer's memory, after the call under way; a call that hangs is left to its thread."""
    with suppress(RunError):
        await trainers.call(TrainerRank.stop)
    serving.cancel()
