"""What each rank of a launch runs: `python -m trainer.rank_process SETTINGS.toml [options]`, started by its parent.

The parent (shared/launch/node.py) says by variables which rank it is. Rank 0 reads the settings for all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from shared import settings_file
from shared.clean_text import clean, clean_logs, print_traceback
from shared.config import Config
from shared.errors import ConfigError, DeadlineExceeded, InputError, MaestraleError, first_cause
from shared.launch import deaths, watchdog
from shared.launch.deaths import RankFile
from shared.launch.launch_folder import LaunchFolder
from shared.launch.messages import failure
from shared.launch.ranks import (
    count_gpus,
    invite,
    join_meeting,
    join_node,
    kind_of,
    one_node,
    open_meeting,
    open_store,
    rank_name,
    ranks_here,
    read_role,
)
from shared.launch.sockets import raise_open_files
from shared.progress import Progress
from trainer.settings import load

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store

    from trainer.launch import Launch


class Asked(KeyboardInterrupt):
    """A signal asks for the end before there is anything to save."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def main(path: str, *overrides: str) -> int:
    """Take the role of this rank, and do its work; returns the exit code."""
    clean_logs()
    watchdog.die_with_parent()
    rank = int(os.environ["RANK"])
    try:
        node = join_node()
        file = RankFile(node.path / f"rank{rank}")
        watchdog.keep_phases(file)
        raise_open_files()
        if rank == 0:
            return run_controller(path, list(overrides), node, file)
        meeting = join_meeting(node)
    except MaestraleError as error:
        sys.stderr.write(f"error: rank {rank}: {clean(str(error))}\n")
        return error.exit_code
    store = open_store(meeting) if meeting else None
    settings = store.get("settings").decode() if store else ""
    if meeting is None or store is None or settings == "":  # rank 0 says why
        file.explain()
        return 2 if ranks_here().start else 0
    config = Config.model_validate_json(settings)
    file.about = rank_name(rank, config.placement.trainers), str(config.run_dir)
    watchdog.open_stacks(config.run_dir / "stacks", f"rank{rank}")
    deaths.only_note_requests()  # they are the controller's to handle: it saves first
    work = run_trainer if kind_of(rank, config.placement.trainers) == "trainer" else run_engine
    try:
        code = work(config, store, meeting.path)
    except InputError as error:  # of its role; the controller hears of the end
        sys.stderr.write(f"error: rank {rank}: {clean(str(error))}\n")
        code = error.exit_code
    watchdog.phase(watchdog.DONE)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)  # the last reply leaves
    for folder in (node, meeting):
        folder.leave()
    os._exit(code)  # at once: destructors of process groups may wait for ranks that have already ended


def run_controller(path: str, overrides: list[str], node: LaunchFolder, file: RankFile) -> int:
    """Rank 0."""
    from rollout.start import with_time_to_start
    from shared.progress import Progress
    from trainer.colocate import settle
    from trainer.data.sources import gather_sources, prepare
    from trainer.run_lock import RunLock

    progress = Progress()
    launch: Launch | None = None
    lock: RunLock | None = None
    meeting: LaunchFolder | None = None
    invited, code = False, 1
    for number in deaths.ENDING:  # until the launch, which saves first, takes them
        signal.signal(number, _stop)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, deaths.ENDING)  # the parent has blocked them
        config = load(path, overrides)
        file.about = rank_name(0, config.placement.trainers), str(config.run_dir)
        lock = RunLock(config.run_dir)  # first: a launch that is refused touches nothing of the one that runs
        meeting = open_meeting(node, config.run_dir)
        store = open_store(meeting)
        role = read_role(config, store, meeting.path)
        watchdog.open_stacks(config.run_dir / "stacks", "rank0")
        lock.warn(progress.warning)
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
        invited = True
        from trainer.launch import Launch

        launch = Launch(settled, sources, role, progress, [path, *overrides], config)
        if _asked:  # of an exception that was raised inside of an import nothing may be left
            raise Asked(_asked[0])
        launch.keeper.on_stop = partial(lock.close, "stopped because something hung")
        asyncio.run(launch.run())
        code = 0
    except BaseExceptionGroup as group:
        code = _failed(first_cause(group), progress, launch)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it is: one clear error, an exit code
        code = _failed(error, progress, launch)
    finally:
        if not invited:
            if one_node():
                open_store(node).set("settings", "")
            with suppress(ConfigError):  # it may be the reason
                invite(None)
        if lock is not None:
            lock.close(f"exit code {code}", progress.last_error)
        progress.close()
        for folder in (meeting or node, node):
            folder.leave()
    return code


def start_followers(config: Config, overrides: list[str], progress: Progress) -> None:
    """Start the processes that follow the run's folder: the trackers, and the dashboard if it is asked for."""
    from trainer import dashboard
    from trainer.trackers import start_trackers

    start_trackers(config, progress.warning)
    if settings_file.DASHBOARD in overrides:
        dashboard.open_beside(config.run_dir.parent, progress)


_asked: list[int] = []
"""signals that came before the launch"""


def _stop(number: int, frame: object) -> None:
    _asked.append(number)
    raise Asked(number)


def _stopped(launch: Launch | None) -> str:
    """From where a run that was stopped goes on."""
    folders = launch.config.run_dir.glob("checkpoints/step_*") if launch else ()
    steps = [int(step) for folder in folders if (step := folder.name.removeprefix("step_")).isdigit()]
    if launch and max(steps, default=-1) >= launch.config.last_version:
        return "stopped; its steps are done: the same command only evaluates and exports what is missing"
    goes_on = f"; the same command goes on from step {max(steps, default=0)}"
    return "stopped" + (goes_on if steps else " before the first checkpoint: the same command begins anew")


def _failed(error: BaseException, progress: Progress, launch: Launch | None) -> int:
    from trainer.ledger import Interrupted

    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        progress.note(_stopped(launch))
        asked = error.number if isinstance(error, Asked) else launch and launch.asked
        return 128 + (asked or signal.SIGINT)
    if isinstance(error, DeadlineExceeded) and launch is not None:
        progress.close()
        launch.keeper.stop(str(error))
    message = f"{type(error).__name__}: {error}" if not isinstance(error, InputError) else str(error)
    repair = deaths.lacking(message)
    if not isinstance(error, MaestraleError) and not repair:
        print_traceback(error)
    progress.error(message + repair)
    return error.exit_code if isinstance(error, MaestraleError) else 1


def run_trainer(config: Config, store: Store, folder: Path) -> int:
    """A trainer rank."""
    from shared.launch.rpc import TrainerLink

    role = read_role(config, store, folder)
    watchdog.Pulse(role, config.deadlines.heartbeat_s).start()
    link = TrainerLink(role)
    try:
        from trainer.step.rank import serve

        serve(link, config, role)
    except Exception as error:  # noqa: BLE001 - the controller shows it to the user
        link.send(0, failure(error))  # also what no call asked for
        return _after_failure(error)
    finally:
        link.close()
    return 0


def _after_failure(error: Exception) -> int:
    """The controller shows the error to the user, and ends this process with the launch."""
    time.sleep(20)
    return error.exit_code if isinstance(error, MaestraleError) else 1


def run_engine(config: Config, store: Store, folder: Path) -> int:
    """A rollout rank."""
    from shared.launch.rpc import EngineLink

    role = read_role(config, store, folder)
    watchdog.Pulse(role, config.deadlines.heartbeat_s).start()

    async def work() -> None:
        link = EngineLink(role)
        await link.register()
        try:
            from rollout.worker import serve  # late: vLLM takes the variables of the launch out of the environment

            await serve(link, config, role)
        except Exception as error:
            await link.send(0, failure(error))  # also what no call asked for, such as settings that vLLM refuses
            raise
        finally:
            link.close()

    try:
        asyncio.run(work())
    except Exception as error:  # noqa: BLE001 - the controller has it, and shows it to the user
        return _after_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
