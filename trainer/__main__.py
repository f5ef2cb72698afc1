"""Train a reasoning model: `torchrun --nproc-per-node=3 -m trainer configs/quickstart.toml [--section.key=value ...]`.

Every rank runs this file and takes its role. Rank 0 reads the settings once and hands them to the others.
Without torchrun, `python -m trainer FILE` starts it for you with the right number of ranks on this machine.
Options: --dry-run (show everything that would happen, start nothing), --help (every setting with its meaning).
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
import traceback
from typing import TYPE_CHECKING

from shared import settings_file, watch
from shared.config import Config
from shared.errors import DeadlineExceeded, InputError, MaestraleError

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store

    from shared.launch_folder import LaunchFolder
    from shared.progress import Progress
    from trainer.session import Session

USAGE = """usage: torchrun --nproc-per-node=N -m trainer SETTINGS.toml [--section.key=value ...] [--dry-run]

Train a reasoning model by reinforcement learning. N = 1 controller + placement.trainers + placement.engines.
`python -m trainer SETTINGS.toml` starts torchrun itself, with the right N, on this machine.
An interrupted run goes on from its last checkpoint with the same command.

  --dry-run                 print settings, placement, token and memory budget; start nothing
  --section.key=value       override a setting of the file

settings:
"""


def main(arguments: list[str]) -> int:
    """Parse, pick the role, run; returns the exit code (0 done, 1 failed, 2 bad input, 130 interrupted)."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(USAGE + settings_file.describe())
        return 0
    dry_run = "--dry-run" in arguments
    if dry_run and os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun one rank tells
    path, *overrides = [argument for argument in arguments if argument != "--dry-run"]
    from shared.roles import under_torchrun

    if under_torchrun() and not dry_run:
        return run_rank(path, overrides)
    try:
        config = load(path, overrides)
        if dry_run:
            from trainer.dry_run import plan_text

            print(plan_text(config))
            return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return launch(config, [path, *overrides])


def load(path: str, overrides: list[str]) -> Config:
    """The settings, with every reward they name known: a wrong name is told before anything starts."""
    from verify.plugins import choose

    config = settings_file.load(path, overrides)
    choose(config.reward)
    return config


def launch(config: Config, arguments: list[str]) -> int:
    """Be torchrun with the right number of ranks; returns the exit code of the rank that failed first."""
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from shared import launch_folder
    from shared.processor import spare_allocator

    if not torch.cuda.is_available() and (library := spare_allocator()):
        os.environ.setdefault("LD_PRELOAD", library)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    folder = launch_folder.make(launch_folder.temporary(), launch_folder.name_of(os.getpid()))
    launch_folder.use_for_temporary_files(folder)
    # its agent and ranks meet in a file of the private folder: the store that torchrun would open listens on TCP, and
    # whoever writes to it can make the agent run any code
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    where = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={folder.path / 'rendezvous'}",
             "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]  # fmt: skip
    try:
        ranks = f"--nproc-per-node={config.world_size}"
        torchrun.run(torchrun.parse_args([*where, ranks, "-m", "trainer", *arguments]))
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode or 1
    except SignalException as error:
        return 128 + error.sigval
    finally:
        folder.leave()
    return 0


def run_rank(path: str, overrides: list[str]) -> int:
    """One rank of the launch."""
    from shared.roles import join_meeting, join_node, kind_of, open_store

    watch.die_with_parent()
    rank = int(os.environ["RANK"])
    try:
        node = join_node()
        if rank == 0:
            return run_controller(path, overrides, node)
        meeting = join_meeting(node)
    except MaestraleError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
        return error.exit_code
    store = open_store(meeting) if meeting else None
    settings = store.get("settings").decode() if store else ""
    if store is None or settings == "":
        time.sleep(30)  # rank 0 tells why and exits first, so that torchrun reports it and not us
        return 2
    config = Config.model_validate_json(settings)
    watch.open_stacks(config.run_dir / "stacks", f"rank{rank}")
    # Ctrl-C is the controller's to handle: it saves first. Blocked and not ignored, because vLLM's processes inherit
    # the mask, but set handlers of their own.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    work = run_trainer if kind_of(rank, config.placement.trainers) == "trainer" else run_engine
    code = work(config, store, node.path)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)  # the last reply leaves
    for folder in (node, meeting or node):
        folder.leave()
    os._exit(code)  # at once: destructors of process groups may wait for ranks that have already ended


def run_controller(path: str, overrides: list[str], node: LaunchFolder) -> int:
    """Rank 0."""
    from shared.progress import Progress
    from shared.roles import invite, open_meeting, open_store, read_role
    from trainer.ledger import Interrupted
    from trainer.sources import gather_sources

    progress = Progress()
    session: Session | None = None
    meeting: LaunchFolder | None = None
    told = False
    try:
        config = load(path, overrides)
        meeting = open_meeting(node, config.run_dir)
        store = open_store(meeting)
        role = read_role(config, store, node.path)
        watch.open_stacks(config.run_dir / "stacks", "rank0")
        sources = gather_sources(config, progress)
        ready = config.model_copy(update={"model": config.model.model_copy(update={"path": str(sources.model_dir)})})
        store.set("settings", ready.model_dump_json())  # first: the other ranks import while this one does
        invite(meeting)
        told = True
        from trainer.session import Session

        session = Session(config, sources, role, progress)
        asyncio.run(session.run())
        return 0
    except (Interrupted, KeyboardInterrupt):
        progress.note("stopped; the same command goes on from here")
        return 130
    except BaseExceptionGroup as group:
        return _failed(first_cause(group), progress, session)
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets one clear error and an exit code
        return _failed(error, progress, session)
    finally:
        if not told:
            open_store(node).set("settings", "")
            invite(None)
        progress.close()
        for folder in (meeting or node, node):
            folder.leave()


def first_cause(error: BaseException) -> BaseException:
    """The first error inside (nested) groups that is not a cancellation."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _failed(error: BaseException, progress: Progress, session: Session | None) -> int:
    from trainer.ledger import Interrupted

    if isinstance(error, Interrupted):
        progress.note("stopped; the same command goes on from here")
        return 130
    if isinstance(error, DeadlineExceeded) and session is not None:
        progress.close()
        session.keeper.stop(str(error))
    if not isinstance(error, MaestraleError):
        traceback.print_exception(error)
    progress.error(f"{type(error).__name__}: {error}" if not isinstance(error, InputError) else str(error))
    return error.exit_code if isinstance(error, MaestraleError) else 1


def run_trainer(config: Config, store: Store, folder: Path) -> int:
    """A trainer rank."""
    from shared.roles import read_role
    from shared.wire import Link
    from trainer.worker import serve

    role = read_role(config, store, folder)
    watch.Pulse(role, config.deadlines.heartbeat_s).start()
    link = Link(role)
    try:
        serve(link, config, role)
    except Exception as error:  # noqa: BLE001 - the controller was told by `serve` and tells the user
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
    from shared.roles import read_role
    from shared.wire import AsyncLink

    role = read_role(config, store, folder)
    watch.Pulse(role, config.deadlines.heartbeat_s).start()
    from rollout.worker import serve  # late: importing it takes torchrun's variables out of the environment

    async def work() -> None:
        link = AsyncLink(role)
        await link.hello()
        await serve(link, config, role)
        link.close()

    try:
        asyncio.run(work())
    except Exception as error:  # noqa: BLE001 - the controller was told by `serve` and tells the user
        return _after_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
