"""The controller rank from start to end: assembly of a run, resume, SFT, loops, evaluation, export, report."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout.client import EngineClient
from rollout.worker import EngineRank
from shared import settings_file
from shared.chat import Chat
from shared.config import Config
from shared.errors import ConfigError, RankLost, RunError
from shared.launch import deaths
from shared.launch.addresses import reachable_address
from shared.launch.ranks import Role
from shared.launch.rpc import Hub
from shared.launch.sockets import refused
from shared.launch.watchdog import PulseKeeper
from shared.model import adapter_folder
from shared.progress import Progress
from shared.types import Problem
from trainer import report
from trainer.assembly import assemble, resumed
from trainer.bottleneck import PHASES
from trainer.check.remarks import objective_lines
from trainer.checkpoint import writer
from trainer.checkpoint.origin import Origin, origin_of, reference_parts
from trainer.checkpoint.reader import VerifiedCheckpoint, compare_weights
from trainer.checkpoint.safetensors_file import REFERENCE
from trainer.client import TrainerClient
from trainer.controller import TrainingLoop
from trainer.data.data_source import PromptFormat
from trainer.data.run_data import RunData, read_files
from trainer.data.sources import Sources
from trainer.evaluation import Evaluator
from trainer.export import export_best, export_last
from trainer.ledger import Interrupted, Ledger
from trainer.objectives.objective import Need, ServedTeacher, moves
from trainer.objectives.registry import needs, objective_of
from trainer.objectives.teachers import Teacher
from trainer.sft import Demonstrations, sft, sft_run
from trainer.soft_values import forget_values, soft_values
from trainer.stages import Stages
from trainer.step.rank import LoadedTrainer, TrainerRank
from trainer.timing import PhaseTimer
from trainer.turns import Turns

NEWS_S = 2.0
"""the death of a rank is known within this time"""
REPEAT_S = 3.0
"""a signal that comes again later than this counts as a second request"""


def later(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Schedule a call in the loop, from another thread; does nothing once the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


class Launch:
    """One launch on rank 0: assembles the run, trains, evaluates, exports and reports."""

    def __init__(
        self, config: Config, sources: Sources, role: Role, progress: Progress, arguments: Sequence[str], given: Config
    ):
        """config: as settled for this machine. arguments: of the command, for the run's list of launches;
        ACCEPT_CHANGES may be among them. given: the settings before they were settled, which the run keeps."""
        self.config, self.sources, self.role, self.progress, self.given = config, sources, role, progress, given
        self.arguments = arguments
        self.keeper = PulseKeeper(role, reachable_address(role.one_node, role.master), config.deadlines.heartbeat_s)
        self.hub = Hub(role)
        first_engine = 1 + config.placement.trainers
        self.trainers = TrainerClient(self.hub, range(1, first_engine), config)
        self.stages = Stages(config)
        in_force, engines = lambda: self.stages.now, range(first_engine, role.world)
        self.engines = EngineClient(self.hub, engines, in_force, progress.warning)
        if config.placement.colocate == "turns":
            Turns(self.trainers, self.engines)
        self.teacher: Teacher | None = None
        """asked over HTTP"""
        self.looping: TrainingLoop | None = None
        self.checkpointer: writer.Checkpointer | None = None
        self.resumed: VerifiedCheckpoint | None = None
        """what this launch goes on from, until its weights are loaded"""
        self.peak_flops = 0.0
        """of a trainer's card, as `LoadedTrainer` says"""
        self.origin: Origin
        """known once the sources are read"""
        self.asked: signal.Signals | None = None
        """the signal that asked this launch to end"""
        self.asked_s = 0.0

    async def run(self) -> None:
        """Run the whole launch. Raises what ended it early: Interrupted after a signal of ENDING, RankLost after the
        death of a rank."""
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(self._work())
        for number in deaths.ENDING:
            loop.add_signal_handler(number, self._interrupt, work, number)
        lost: asyncio.Future[str] = loop.create_future()
        self.keeper.on_death = lambda text: later(loop, lost.set_result, text)
        self.keeper.on_asked = lambda name, asked: later(loop, self._interrupt, work, signal.Signals[asked], name)
        forever = (self.hub.receive(), self.engines.dispatch(), self._turn(), self._mourn(lost))
        background = [asyncio.ensure_future(task) for task in forever]
        self.keeper.start()
        try:
            done, _ = await asyncio.wait([work, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in (work, *background):
                if task in done:
                    if task is work and task.cancelled():
                        raise Interrupted
                    task.result()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed = isinstance(error, (RunError, BaseExceptionGroup))
            if failed:  # perhaps in a rank whose peer has died, which is known a moment later
                await asyncio.wait([lost], timeout=NEWS_S)
            if self.checkpointer is not None and self.asked is None:
                await self.checkpointer.rescue(background)
            await asyncio.to_thread(self.keeper.dismiss)
            raise RankLost(lost.result()) if failed and lost.done() else error  # noqa: B904 - and not what came of it
        finally:
            self.keeper.leaving = True
            for task in (work, *background):
                task.cancel()
            await asyncio.gather(work, *background, return_exceptions=True)
            self.hub.close()

    def _interrupt(self, work: asyncio.Future[None], number: signal.Signals, name: str = "") -> None:
        """Save a checkpoint where there is something to save, and end; at the second signal end at once."""
        if self.keeper.lost:
            return  # there is nothing to save with
        now, first = time.monotonic(), self.asked is None
        if not first and (name or now - self.asked_s < REPEAT_S):
            return  # the same request: a cluster may send it to every process, and their parent passes it on
        self.asked, self.asked_s = number, now
        asked = f"{number.name} came" + (f" to {name}" if name else "") + ("" if first else " again")
        if self.looping is not None and first:
            self.progress.note(f"{asked}: saving a checkpoint first (once more ends at once)")
            self.looping.ledger.interrupt()
        else:
            self.progress.note(f"{asked}: stopping")
            work.cancel()

    async def _mourn(self, lost: asyncio.Future[str]) -> None:
        raise RankLost(await lost)

    async def _turn(self) -> None:
        while True:
            self.keeper.turn()
            if warning := refused.look():
                self.progress.warning(warning)
            for line in deaths.helpers.news():
                self.progress.warning(line)
            if self.looping is not None and self.config.mode == "rl":
                self.looping.logger.live()
            await asyncio.sleep(0.5)

    async def _work(self) -> None:
        config, progress = self.config, self.progress
        progress.keep_phases(config.run_dir / PHASES)
        progress.phase("reading the problems")
        chat, sources = await asyncio.to_thread(Chat.of_run, self.sources.model_dir, config, progress), self.sources
        prompts = PromptFormat(chat, config.data)
        files = await asyncio.to_thread(read_files, config, sources.train, sources.validation)
        ledger, clock = Ledger(self.stages), PhaseTimer()
        newest = await self._resume(prompts, ledger, clock)
        data = RunData(config, self.stages, sources, chat, files, progress)
        self.episodes = data.episodes
        try:
            await data.start()
            if config.mode == "rl":
                progress.note(f"objective: {objective_of(config).describe()}")
                for line in objective_lines(config):
                    progress.warning(line)
            for _, read in data.steps(imitates=newest is None or config.mode == "sft"):
                await read()
            await self._ask_teacher(prompts, data.problems)
            await self._start_ranks(newest)
            run = self._assemble(data, ledger, clock)
            settings_file.write(self.given, config.run_dir / "config.toml")
            try:
                await self._learn(run, data.demonstrations, newest)
                await self._finish(run)
            finally:
                run.logger.end()
        finally:
            await data.close()
            if self.teacher is not None:
                await self.teacher.close()

    async def _ask_teacher(self, prompts: PromptFormat, problems: list[Problem]) -> None:
        """Connect to the teacher behind an address, where the objective has one."""
        teacher = objective_of(self.config).teacher
        if Need.TEACHER not in needs(self.config) or not isinstance(teacher, ServedTeacher):
            return
        self.teacher = Teacher(teacher, self.config.deadlines.start_s)
        probes = [prompts.prompt_of(problem) for problem in problems[:2]]
        decode = prompts.chat.tokenizer.decode
        self.progress.note(await self.teacher.start(probes, decode, self.config.model.max_tokens))

    async def _start_ranks(self, newest: Path | None) -> None:
        self.progress.phase("starting trainers and engines")
        await self.hub.wait_for_ranks(range(1, self.role.world), self.config.deadlines.start_s)
        self.progress.phase("loading the model")
        loaded = await self.trainers.call(
            TrainerRank.load, str(self.sources.model_dir), str(newest) if newest else None
        )
        if self.resumed is not None:
            compare_weights(self.resumed, [trainer.checksums for trainer in loaded])
            self.resumed = None
        self.progress.phase("connecting the engines")
        for trainer in loaded[1:]:
            trainer.transfer.pop("layout")  # the same for all ranks, and tens of kB
        stop_ids = sorted(self.episodes.chat.stop_ids)
        await self.engines.call(EngineRank.attach, [trainer.transfer for trainer in loaded], stop_ids)
        self.peak_flops = min(trainer.peak_flops for trainer in loaded)
        self._describe(loaded)

    def _describe(self, loaded: list[LoadedTrainer]) -> None:
        first = loaded[0]
        details = ", ".join(f"{name} {value}" for name, value in first.description.items())
        if (way := self.config.placement.colocate) != "never":
            details += f", shares GPUs with the engines ({way})"
        self.progress.note(f"{first.parameters / 1e6:.2f} M parameters on {len(loaded)} trainer(s): {details}")
        if any(trainer.slow_dtype for trainer in loaded):
            self.progress.warning('this processor is slow in bfloat16: set optimiser.compute_dtype = "float32"')

    async def _resume(self, prompts: PromptFormat, ledger: Ledger, clock: PhaseTimer) -> Path | None:
        """Restore the state of the newest checkpoint that is whole, if there is one; returns its folder. Raises
        ConfigError for a run that cannot go on like this."""
        self.origin = await asyncio.to_thread(origin_of, self.given, self.sources, prompts)
        self.resumed = await resumed(self.config, self.origin, ledger, clock, self.arguments, self.progress)
        return self.resumed.folder if self.resumed is not None else None

    def _assemble(self, data: RunData, ledger: Ledger, clock: PhaseTimer) -> TrainingLoop:
        evaluator = Evaluator(self.engines, data.scorer, data.source, data.validation, self.episodes)
        run = assemble(
            self.config, ledger, self.engines, self.trainers, data.scorer, self.episodes, data.source, self.progress,
            self.origin, clock=clock, peers=self.keeper.peers, peak_flops=self.peak_flops, teacher=self.teacher,
            evaluator=evaluator if data.validation else None, offline=data.offline,
        )  # fmt: skip
        self.checkpointer = run.checkpointer
        run.checkpointer.saved = ledger.version if ledger.version else -1
        return run

    async def _learn(self, run: TrainingLoop, demonstrations: Demonstrations | None, newest: Path | None) -> None:
        """Run SFT, if any, send the first weights to the engines, evaluate, then train the steps."""
        config, progress = self.config, self.progress
        if demonstrations is not None and config.mode == "rl":
            progress.phase("SFT: imitating demonstrations")
            await sft(run, demonstrations)
        if config.mode == "rl":
            await self._place_models(newest, run.ledger.version)
            if newest is None:
                forget_values(config.run_dir)
        if run.ledger.version == 0:
            await run.checkpointer.save()  # a resume need not start cold again
        progress.phase("first weights to the engines")
        await run.publish(run.ledger.version)
        await self._value_prompts(run)
        if run.ledger.version == 0:
            progress.phase("evaluating before training")
            await self._evaluate(run, 0)
        else:
            await run.evaluate_if_due(run.ledger.version)  # the last launch may have ended before
        run.clock.close_step()
        self.looping = run
        if demonstrations is not None and config.mode == "sft":
            progress.phase("imitating demonstrations")
            await sft_run(run, demonstrations)
        else:
            progress.phase("training")
            await run.run()
        await run.checkpointer.finish()
        self.looping = None

    async def _place_models(self, newest: Path | None, version: int) -> None:
        """Put the models that the objective needs beside the policy on disk and into the trainers."""
        if Need.REFERENCE in needs(self.config):
            folder = await self._reference_folder(newest, version)
            await self.trainers.call(TrainerRank.load_frozen, str(folder), "reference")
            if REFERENCE not in self.origin.contents or version == 0:
                self.origin.contents[REFERENCE] = await asyncio.to_thread(reference_parts, self.config.run_dir)
        if self.sources.teacher_dir is not None:
            await self.trainers.call(TrainerRank.load_frozen, str(self.sources.teacher_dir), "teacher")

    async def _reference_folder(self, newest: Path | None, version: int) -> Path:
        """Folder of the reference: the policy that reinforcement learning starts with, or its adapters, exported then;
        a reference that moves is the one in the checkpoint (one that began to move later moves from the start)."""
        folder, objective = self.config.run_dir / REFERENCE, objective_of(self.config)
        sign, export = "config.json", TrainerRank.export
        if self.config.lora.rank:
            sign, export = adapter_folder.CONFIG, TrainerRank.export_adapter
        if newest is not None and moves(objective) and (newest / REFERENCE / sign).is_file():
            return newest / REFERENCE
        if newest is None or version == 0 and not (folder / sign).is_file():
            await self.trainers.call(export, str(folder))
        elif not (folder / sign).is_file():
            raise ConfigError(
                f"the objective compares with the policy that this run started with, but {folder} was not kept (it "
                "began without objective.kl, and with an objective that needs none): choose such a one again, or start "
                "another run (--name=...)"
            )
        return folder

    async def _value_prompts(self, run: TrainingLoop) -> None:
        """Set the soft values of the prompts where they are needed: sampled before the first step, or as kept."""
        if Need.START_VALUES in needs(self.config):
            begun = run.ledger.version > 0
            values = await soft_values(self.config, self.engines, run.scorer, run.source, self.progress, begun)
            run.learner.values = values
            if run.learner.offline is not None:
                run.learner.offline.keep_valued(values)

    async def _evaluate(self, run: TrainingLoop, version: int) -> None:
        """Evaluate at the sampling temperature and, with evaluate.greedy, greedily; existing results are not remade."""
        for temperature in (self.config.rollout.temperature, *([0.0] if self.config.evaluate.greedy else [])):
            await run.evaluate(version, temperature, alone=True)

    async def _finish(self, run: TrainingLoop) -> None:
        """Evaluate after training, export the last and the best version, stop the ranks, report."""
        config, progress, version = self.config, self.progress, run.ledger.version
        progress.phase("evaluating after training")
        await self._evaluate(run, version)
        progress.phase("exporting the model")
        await run.clock("export", export_last(config, self.trainers, version))
        await asyncio.to_thread(export_best, config, self.sources.model_dir, version, progress)
        progress.phase("stopping trainers and engines")
        self.keeper.ending = True
        await self.trainers.call(
            TrainerRank.stop
        )  # first: they tell the engines' network receivers that nothing comes any more
        await self.engines.call(EngineRank.stop)
        report.show(config, progress)
