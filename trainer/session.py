"""The controller rank from start to end: assemble the run, resume it, start it cold, loop, evaluate, export, report.

What it does not: the loop itself (controller.py). Who calls this: `trainer/__main__.py` on rank 0.
"""

from __future__ import annotations

import asyncio
import fcntl
import signal
from pathlib import Path
from typing import IO

from shared import settings_file
from shared.chat import Chat, system_prompt
from shared.config import Config
from shared.errors import ConfigError
from shared.messages import Loaded
from shared.progress import Progress
from shared.roles import Role
from shared.watch import PulseKeeper
from shared.wire import Hub, reachable_address
from trainer import checkpoint, record, report
from trainer.clock import Clock
from trainer.cold_start import cold_start, load_demonstrations
from trainer.controller import Run
from trainer.data import DataSource, load_problems
from trainer.engines import Engines
from trainer.evaluate import Evaluator
from trainer.judges import Judges
from trainer.ledger import Interrupted, Ledger
from trainer.sources import Sources
from trainer.trainers import Trainers

CANARY_SEQUENCES, CANARY_TOKENS = 2, 24


def lock_folder(run_dir: Path) -> IO[str]:
    """Refuse to let two launches write into one run folder; the lock ends with the process."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"{run_dir} is in use by another launch: stop it, or give this one another name (--name=...)"
        ) from error
    return lock


def choose_canary(source: DataSource) -> list[list[int]]:
    """[sequences][tokens] fixed sequences to score on both sides: the beginnings of the first prompts."""
    found = [source.render(problem, 0).token_ids[:CANARY_TOKENS] for problem in source.problems[:CANARY_SEQUENCES]]
    return [ids for ids in found if len(ids) > 1]


class Session:
    """Everything of one launch on rank 0."""

    def __init__(self, config: Config, sources: Sources, role: Role, progress: Progress):
        self.config, self.sources, self.role, self.progress = config, sources, role, progress
        self.keeper = PulseKeeper(role, reachable_address(role), config.deadlines.heartbeat_s)
        self.hub = Hub(role)
        first_engine = 1 + config.placement.trainers
        self.trainers = Trainers(self.hub, range(1, first_engine), config)
        self.engines = Engines(self.hub, range(first_engine, role.world), config, progress)
        self.looping: Run | None = None

    async def run(self) -> None:
        """The whole launch. Raises what ended it early; Interrupted after Ctrl-C."""
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(self._work())
        loop.add_signal_handler(signal.SIGINT, self._interrupt, work)
        background = [
            asyncio.ensure_future(forever) for forever in (self.hub.receive(), self.engines.dispatch(), self._turn())
        ]
        self.keeper.start()
        try:
            done, _ = await asyncio.wait([work, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in (work, *background):
                if task in done:
                    if task is work and task.cancelled():
                        raise Interrupted
                    task.result()
        except BaseException:
            await asyncio.to_thread(self.keeper.dismiss)
            raise
        finally:
            self.keeper.leaving = True
            for task in (work, *background):
                task.cancel()
            await asyncio.gather(work, *background, return_exceptions=True)
            self.hub.close()

    def _interrupt(self, work: asyncio.Future[None]) -> None:
        self.progress.note("stopping: saving a checkpoint first" if self.looping else "stopping")
        if self.looping is not None:
            self.looping.ledger.interrupt()
        else:
            work.cancel()

    async def _turn(self) -> None:
        while True:
            self.keeper.turn()
            if self.looping is not None:
                self.looping.record.live()
            await asyncio.sleep(0.5)

    async def _work(self) -> None:
        config, progress = self.config, self.progress
        lock = lock_folder(config.run_dir)
        chat = Chat(self.sources.model_dir)
        prompt = system_prompt(config.data.system_prompt)
        source = DataSource(load_problems(self.sources.train, "data.train"), config, chat, prompt)
        judges = Judges(config, chat)
        isolation = await judges.start(source.problems)
        if isolation:
            progress.note(isolation)
        try:
            clock = Clock()
            ledger = Ledger(config)
            newest = self._resume(ledger, clock)
            await self._start_ranks(newest)
            run = self._assemble(source, judges, ledger, clock, chat)
            settings_file.write(config, config.run_dir / "config.toml")
            if newest is None and config.cold_start.steps and self.sources.demonstrations:
                progress.phase("cold start: imitating demonstrations")
                examples = load_demonstrations(
                    self.sources.demonstrations, chat, prompt, config.model.max_tokens
                )
                await cold_start(self.trainers, examples, config, progress)
            await self._train(run)
        finally:
            await judges.close()
            lock.close()

    async def _start_ranks(self, newest: Path | None) -> None:
        self.progress.phase("starting trainers and engines")
        await self.hub.gather_hellos(range(1, self.role.world), self.config.deadlines.start_s)
        self.progress.phase("loading the model")
        loaded = await self.trainers.load(self.sources.model_dir, newest)
        await self.engines.attach([part.transfer for part in loaded])
        self._describe(loaded)

    def _describe(self, loaded: list[Loaded]) -> None:
        first = loaded[0]
        details = ", ".join(f"{name} {value}" for name, value in first.description.items())
        self.progress.note(f"{first.parameters / 1e6:.2f} M parameters on {len(loaded)} trainer(s): {details}")

    def _resume(self, ledger: Ledger, clock: Clock) -> Path | None:
        newest, skipped = checkpoint.newest(self.config.run_dir)
        for line in skipped:
            self.progress.warning(line)
        if newest is not None:
            manifest, state = checkpoint.read(newest)
            ledger.restore(state)
            clock.before_s = manifest.seconds
            record.forget_after(self.config.run_dir, ledger.version)
            self.progress.note(f"resuming {self.config.run_dir} from step {ledger.version} of {self.config.steps}")
        return newest

    def _assemble(self, source: DataSource, judges: Judges, ledger: Ledger, clock: Clock, chat: Chat) -> Run:
        config = self.config
        evaluator = None
        if self.sources.held_out is not None:
            problems = load_problems(self.sources.held_out, "data.held_out")[: config.evaluate.problems]
            evaluator = Evaluator(self.engines, judges, source, problems, config.seed)
        written = record.Record(
            config, clock, self.progress, self.engines, judges, ledger, evaluator, self.keeper.peers
        )
        checkpointer = checkpoint.Checkpointer(config, ledger, self.engines, self.trainers, clock, self.progress)
        checkpointer.saved = ledger.version if ledger.version else -1
        return Run(
            config=config,
            ledger=ledger,
            engines=self.engines,
            judges=judges,
            trainers=self.trainers,
            source=source,
            clock=clock,
            record=written,
            checkpointer=checkpointer,
            canary=choose_canary(source),
        )

    async def _train(self, run: Run) -> None:
        """First weights to the engines, evaluation before, the loop, evaluation after, export, report."""
        config, progress = self.config, self.progress
        temperatures = (config.rollout.temperature, 0.0)
        progress.phase("first weights to the engines")
        await run.publish(run.ledger.version)
        if run.ledger.version == 0:
            await run.checkpointer.save()  # a resume need not start cold again
            progress.phase("evaluating before training")
            for temperature in temperatures:
                if not run.record.has_evaluation(0, temperature):
                    await run.record.evaluate(0, temperature)
        run.clock.close_step()
        self.looping = run
        await run.run()
        self.looping = None
        progress.phase("evaluating after training")
        for temperature in temperatures:
            await run.record.evaluate(config.steps, temperature)
        await self._export(run)
        progress.phase("stopping trainers and engines")
        await self.trainers.stop()  # first: they tell the engines' network receivers that nothing comes any more
        await self.engines.stop()
        report.show(config, progress)

    async def _export(self, run: Run) -> None:
        self.progress.phase("exporting the model")
        folder = self.config.run_dir / "hf" / f"step_{run.ledger.version}"
        await run.clock("export", self.trainers.export(folder))
        checkpoint.link_latest(self.config.run_dir, folder)
