"""Train a reasoning model: `torchrun --nproc-per-node=3 -m trainer configs/quickstart.toml [--section.key=value ...]`.

Every rank runs this file and takes its role. Rank 0 reads the settings once and hands them to the others.
Without torchrun, `python -m trainer FILE` starts it for you with the right number of ranks on this machine.
Options: --dry-run (show everything that would happen, start nothing), --help (every setting with its meaning).
`python -m trainer check [FILE]` looks at the machine and the settings instead (check.py),
`python -m trainer objectives` shows the objectives (objectives/page.py).
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once, when it is imported
# rounds in which a thread that waits for another of its process looks again before it sleeps (OpenMP reads it once):
# few, because trainers and engines may share cores. Alone, two threads train as fast as with the 300,000 of OpenMP
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import asyncio
import logging
import signal
import sys
import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NoReturn

from shared import settings_file
from shared.clean_text import clean, clean_logs, print_traceback
from shared.config import Config
from shared.errors import DeadlineExceeded, InputError, MaestraleError, print_error
from shared.launch import deaths, watchdog

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from shared.launch.launch_folder import LaunchFolder
    from shared.progress import Progress
    from trainer.launch import Launch

SAVING_S = 600
"""that torchrun gives the ranks to save and end after a signal; its own default is 30"""
USAGE = """usage: torchrun --nproc-per-node=N -m trainer SETTINGS.toml [--section.key=value ...] [--dry-run]

Train a reasoning model by reinforcement learning. N = 1 controller + placement.trainers + placement.engines.
`python -m trainer SETTINGS.toml` starts torchrun itself, with the right N, on this machine.
`python -m trainer check [SETTINGS.toml]` looks at the machine and the settings, and says what to repair.
`python -m trainer objectives [NAME]` lists the objectives, or shows formula, source and every value of one.
An interrupted run goes on from its last checkpoint with the same command. Ctrl-C, SIGTERM and SIGHUP save one first.

  --dry-run                 print settings, placement, token and memory budget; start nothing
  --dashboard               show the runs in a browser while this one goes on (python -m dashboard runs/ does later)
  --accept-changes          go on although settings, data or model are not what the run was made from
  --section.key=value       override a setting of the file

MAESTRALE_TRAIN_SECTION__KEY=value in the environment overrides a setting of the file too, e.g.
MAESTRALE_TRAIN_ROLLOUT__GROUP_SIZE=8; an option overrides both. On a CPU a trainer has OMP_NUM_THREADS threads, an
engine half as many.

settings:
"""


class Asked(KeyboardInterrupt):
    """A signal asks for the end before there is anything to save."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def main(arguments: list[str]) -> int:
    """Parse, pick the role, run; returns the exit code: 0 done, 1 failed, 2 bad input, and 128 + the signal that asked
    for the end (130 after Ctrl-C, 143 after SIGTERM) or that killed a rank (137 after kill -9)."""
    clean_logs()
    if not arguments or (arguments[0] != "check" and ("--help" in arguments or "-h" in arguments)):
        from trainer.objectives.page import describe_settings

        print(f"{USAGE}{settings_file.describe()}\n[objective]\n{describe_settings()}")
        return 0
    if arguments[0] == "check":
        from trainer.check import command

        return command.main(arguments[1:], load, lambda text: print(clean(text)))
    if arguments[0] == "objectives":
        from trainer.objectives import page

        try:
            return page.main(arguments[1:], lambda text: print(clean(text)))
        except InputError as error:
            return print_error(error)
    dry_run = "--dry-run" in arguments
    if dry_run and os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun one rank tells
    path, *overrides = [argument for argument in arguments if argument != "--dry-run"]
    from shared.launch.ranks import under_torchrun
    from shared.launch.sockets import raise_open_files

    if under_torchrun() and not dry_run:
        return run_rank(path, overrides)
    try:
        config = load(path, overrides)
        if dry_run:
            from trainer.check.plan import plan_text

            print(clean(plan_text(config)))
            return 0
        raise_open_files()
    except InputError as error:
        return print_error(error)
    return launch(config, [path, *overrides])


def load(path: str, overrides: list[str]) -> Config:
    """The settings, with every reward they name known: a wrong name is told before anything starts."""
    from trainer.data.sources import missing_settings
    from trainer.objectives.registry import complaints
    from trainer.trackers import not_installed
    from verify.chosen_rewards import choose

    wanted = [given for given in overrides if given not in (settings_file.ACCEPT_CHANGES, settings_file.DASHBOARD)]
    checks = (missing_settings, complaints, not_installed)
    config = settings_file.load(path, wanted, lambda config: chain.from_iterable(c(config) for c in checks), os.environ)
    for stage in config.every_stage:
        choose(stage.reward)
    return config


def launch(config: Config, arguments: list[str]) -> int:
    """Be torchrun with the right number of ranks; returns the exit code of the rank that failed first, 128 + the signal
    if one killed it."""
    folders: list[LaunchFolder] = []

    def leave(number: int, frame: object) -> NoReturn:
        """End before there are ranks. An exception may be lost in a library that is being imported."""
        for folder in folders:
            folder.leave()
        os.write(2, b"stopped\n")
        os._exit(128 + number)

    handlers = {number: signal.signal(number, leave) for number in deaths.ENDING}  # until torchrun sets its own
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from shared.launch import launch_folder
    from shared.model.cpu.processor import spare_allocator
    from verify.plugin_host import close_hosts

    close_hosts()  # rank 0 has its own
    if not torch.cuda.is_available() and (library := spare_allocator()):
        os.environ.setdefault("LD_PRELOAD", library)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    silence_torchrun()
    folder = launch_folder.make(launch_folder.temporary(), launch_folder.name_of(os.getpid()))
    launch_folder.use_for_temporary_files(folder)
    folders.append(folder)
    # its agent and ranks meet in a file of the private folder: the store that torchrun would open listens on TCP, and
    # whoever writes to it can make the agent run any code
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = ["--nnodes=1", f"--nproc-per-node={config.world_size}", "--rdzv-backend=c10d",
               f"--rdzv-endpoint={folder.path / 'rendezvous'}", "--rdzv-conf=store_type=file",
               "--local-addr=127.0.0.1", f"--shutdown-timeout={SAVING_S}", f"--log-dir={os.devnull}"]  # fmt: skip
    kills_before = deaths.memory_kills()
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "trainer", *arguments]))
    except ChildFailedError as error:
        return _tell_silent_death({rank: part.exitcode for rank, part in ordered(error)}, config, kills_before)
    except SignalException as error:
        return 128 + error.sigval
    finally:
        folder.leave()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def silence_torchrun() -> None:
    """Leave out what torchrun itself logs: ours says what happens. Each of its loggers has a level of its own."""
    for name in [*logging.Logger.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def ordered(error: ChildFailedError) -> list[tuple[int, ProcessFailure]]:
    """(rank, failure), the first first; within one second the killed, because of whom others may have ended; last those
    that ended by SIGTERM, which torchrun sends to all once one has failed."""

    def place(pair: tuple[int, ProcessFailure]) -> tuple[bool, int, bool]:
        failure = pair[1]
        return failure.exitcode == -signal.SIGTERM, failure.timestamp, failure.exitcode >= 0

    return sorted(error.failures.items(), key=place)


def _tell_silent_death(exit_codes: dict[int, int], config: Config, kills_before: int) -> int:
    """Exit code for the ranks' codes, the first failure first. A death is told here only if no rank is left to tell it
    (one that is ends with code 1 or 2)."""
    from shared.launch.ranks import kind_of, rank_name

    rank, code = next(iter(exit_codes.items()))
    if code >= 0:
        return code or 1
    if not {1, 2} & set(exit_codes.values()):
        kind = kind_of(rank, config.placement.trainers)
        advice = deaths.advice(code, kind, 0, kills_before)
        name = rank_name(rank, config.placement.trainers)
        print(f"error: {name} {deaths.how(code)}{advice}. {deaths.again(config.run_dir)}", file=sys.stderr)
    return 128 - code


def run_rank(path: str, overrides: list[str]) -> int:
    """One rank of the launch."""
    from shared.launch.ranks import join_meeting, join_node, kind_of, open_store
    from shared.launch.sockets import raise_open_files

    watchdog.die_with_parent()
    rank = int(os.environ["RANK"])
    try:
        node = join_node()
        if rank == 0:
            raise_open_files()
            return run_controller(path, overrides, node)
        meeting = join_meeting(node)
    except MaestraleError as error:
        print(f"error: rank {rank}: {clean(str(error))}", file=sys.stderr)
        return error.exit_code
    store = open_store(meeting) if meeting else None
    settings = store.get("settings").decode() if store else ""
    if store is None or settings == "":
        time.sleep(30)  # rank 0 tells why and exits first, so that torchrun reports it and not us
        return 2
    config = Config.model_validate_json(settings)
    watchdog.open_stacks(config.run_dir / "stacks", f"rank{rank}")
    deaths.only_note_requests()  # they are the controller's to handle: it saves first
    work = run_trainer if kind_of(rank, config.placement.trainers) == "trainer" else run_engine
    try:
        code = work(config, store, node.path)
    except InputError as error:  # of its role: the controller is told by its end
        print(f"error: rank {rank}: {clean(str(error))}", file=sys.stderr)
        code = error.exit_code
    watchdog.phase(watchdog.DONE)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)  # the last reply leaves
    for folder in (node, meeting or node):
        folder.leave()
    os._exit(code)  # at once: destructors of process groups may wait for ranks that have already ended


def run_controller(path: str, overrides: list[str], node: LaunchFolder) -> int:
    """Rank 0."""
    from rollout.start import with_time_to_start
    from shared.launch.ranks import count_gpus, invite, open_meeting, open_store, ranks_here, read_role
    from shared.progress import Progress
    from trainer.colocate import settle
    from trainer.data.sources import gather_sources, prepare
    from trainer.run_lock import RunLock

    progress = Progress()
    session: Launch | None = None
    lock: RunLock | None = None
    meeting: LaunchFolder | None = None
    told, code = False, 1
    for number in deaths.ENDING:  # until the session, which saves first, takes them
        signal.signal(number, _stop)
    try:
        config = load(path, overrides)
        lock = RunLock(config.run_dir)  # first: a launch that is refused touches nothing of the one that runs
        meeting = open_meeting(node, config.run_dir)
        store = open_store(meeting)
        role = read_role(config, store, node.path)
        watchdog.open_stacks(config.run_dir / "stacks", "rank0")
        if lock.silent:
            progress.warning(f"{lock.silent}. {deaths.again(config.run_dir)}")
        start_followers(config, overrides, progress)
        prepare(config, progress)
        sources = gather_sources(config)
        config = config.with_template()
        gpus = count_gpus(config.placement.device)
        settled = settle(config, sources.model_dir, gpus, role.one_node, len(ranks_here()) - 1)
        settled = with_time_to_start(settled, sources.model_dir, bool(gpus))
        ready = settled.model_copy(update={"model": config.model.model_copy(update={"path": str(sources.model_dir)})})
        store.set("settings", ready.model_dump_json())  # first: the other ranks import while this one does
        invite(meeting)
        told = True
        from trainer.launch import Launch

        session = Launch(settled, sources, role, progress, [path, *overrides], config)
        if _asked:  # of an exception that was raised inside of an import nothing may be left
            raise Asked(_asked[0])
        session.keeper.on_stop = partial(lock.close, "stopped because something hung")
        asyncio.run(session.run())
        code = 0
    except BaseExceptionGroup as group:
        code = _failed(first_cause(group), progress, session)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it is: one clear error, an exit code
        code = _failed(error, progress, session)
    finally:
        if not told:
            open_store(node).set("settings", "")
            invite(None)
        if lock is not None:
            lock.close(f"exit code {code}")
        progress.close()
        for folder in (meeting or node, node):
            folder.leave()
    return code


def start_followers(config: Config, overrides: list[str], progress: Progress) -> None:
    """Start what follows the run's folder in processes of its own: the trackers, and the dashboard if it is asked."""
    from trainer import dashboard
    from trainer.trackers import start_trackers

    start_trackers(config, progress.warning)
    if settings_file.DASHBOARD in overrides:
        dashboard.open_beside(config.run_dir.parent, progress)


_asked: list[int] = []
"""signals that came before the session"""


def _stop(number: int, frame: object) -> None:
    _asked.append(number)
    raise Asked(number)


def first_cause(error: BaseException) -> BaseException:
    """The first error inside (nested) groups that is not a cancellation."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _failed(error: BaseException, progress: Progress, session: Launch | None) -> int:
    from trainer.ledger import Interrupted

    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        progress.note("stopped; the same command goes on from here")
        asked = error.number if isinstance(error, Asked) else session and session.asked
        return 128 + (asked or signal.SIGINT)
    if isinstance(error, DeadlineExceeded) and session is not None:
        progress.close()
        session.keeper.stop(str(error))
    message = f"{type(error).__name__}: {error}" if not isinstance(error, InputError) else str(error)
    repair = deaths.lacking(message)
    if not isinstance(error, MaestraleError) and not repair:
        print_traceback(error)
    progress.error(message + repair)
    return error.exit_code if isinstance(error, MaestraleError) else 1


def run_trainer(config: Config, store: Store, folder: Path) -> int:
    """A trainer rank."""
    from shared.launch.ranks import read_role
    from shared.launch.rpc import TrainerLink, failure

    role = read_role(config, store, folder)
    watchdog.Pulse(role, config.deadlines.heartbeat_s).start()
    link = TrainerLink(role)
    try:
        from trainer.step.rank import serve

        serve(link, config, role)
    except Exception as error:  # noqa: BLE001 - the controller tells the user
        link.send(0, failure(error))  # also what no call asked for
        return _after_failure(error)
    finally:
        link.close()
    return 0


def _after_failure(error: Exception) -> int:
    """The controller was told and tells the user; it should end first, so that torchrun does not cut it short."""
    time.sleep(20)
    return error.exit_code if isinstance(error, MaestraleError) else 1


def run_engine(config: Config, store: Store, folder: Path) -> int:
    """A rollout rank."""
    from shared.launch.ranks import read_role
    from shared.launch.rpc import EngineLink, failure

    role = read_role(config, store, folder)
    watchdog.Pulse(role, config.deadlines.heartbeat_s).start()

    async def work() -> None:
        link = EngineLink(role)
        await link.register()
        try:
            from rollout.worker import serve  # late: vLLM takes torchrun's variables out of the environment

            await serve(link, config, role)
        except Exception as error:
            await link.send(0, failure(error))  # also what no call asked for, such as settings that vLLM refuses
            raise
        finally:
            link.close()

    try:
        asyncio.run(work())
    except Exception as error:  # noqa: BLE001 - the controller was told and tells the user
        return _after_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
