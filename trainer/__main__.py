"""Train a reasoning model: `torchrun --nproc-per-node=3 -m trainer configs/quickstart.toml [--section.key=value ...]`.

This process is the parent of its node's ranks (shared/launch/node.py), which run rank_process.py.
`python -m trainer FILE` does the same without torchrun, with the right number of ranks.
Options: --dry-run (show everything that would happen, start nothing), --help (every setting with its meaning).
`python -m trainer check [FILE]` looks at the machine and the settings instead (check/),
`python -m trainer objectives` shows the objectives (objectives/page.py).
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# rounds in which a thread that waits for another of its process looks again before it sleeps (OpenMP reads it once):
# few, because trainers and engines may share cores. Alone, two threads train as fast as with the 300,000 of OpenMP
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import argparse
import signal
import sys
from typing import NoReturn

from shared import settings_file
from shared.clean_text import clean, clean_logs
from shared.command_line import CommandParser
from shared.config import Config
from shared.errors import ConfigError, InputError, command_of, print_error, run_command
from shared.launch import deaths, watchdog
from shared.launch.ranks import Nodes, ranks_here, under_torchrun
from trainer.run_lock import forget_refused
from trainer.settings import load

RANK = (sys.executable, "-m", "trainer.rank_process")
"""command of a rank, before the settings file and the options"""
USAGE = """usage: python -m trainer SETTINGS.toml [--section.key=value ...] [--dry-run]
       torchrun --nproc-per-node=N -m trainer SETTINGS.toml [--section.key=value ...]

Train a reasoning model by reinforcement learning, on 1 controller + placement.trainers + placement.engines ranks.
`python -m trainer` starts all of them; with torchrun N is their number on each machine.
`python -m trainer check [SETTINGS.toml]` looks at the machine and the settings, and says what to repair.
`python -m trainer objectives [NAME]` lists the objectives, or shows formula, source and every value of one.
An interrupted run goes on from its last checkpoint with the same command. Ctrl-C, SIGTERM and SIGHUP save one first.

  --dry-run                 print settings, placement, token and memory budget; start nothing
  --dashboard               show the runs in a browser while this one goes on (python -m dashboard runs/ does later)
  --accept-changes          go on although settings, data or model are not what the run was made from
  --section.key=value       override a setting of the file

On several machines, start the same command on each, with the settings file on all of them:
  --nnodes=N                number of machines; the GPUs that the ranks need are spread evenly over them
  --node-rank=K             number of this machine, from 0; the controller runs on machine 0
  --master-addr=ADDRESS     address of machine 0, by which the others reach it
  --master-port=PORT        port there at which the machines find each other (default 29500)

MAESTRALE_TRAIN_SECTION__KEY=value in the environment overrides a setting of the file too, e.g.
MAESTRALE_TRAIN_ROLLOUT__GROUP_SIZE=8; an option overrides both. On a CPU a trainer has OMP_NUM_THREADS threads, an
engine half as many.

settings:
"""


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
    if under_torchrun() and not dry_run:
        return launch_by_torchrun(arguments)
    if os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun the first process shows it
    for number in deaths.ENDING:
        signal.signal(number, end_at_once)
    try:
        nodes, (path, *overrides) = take_nodes([argument for argument in arguments if argument != "--dry-run"])
        config = load(path, overrides)
        if dry_run:
            from trainer.check.plan import plan_text

            print(clean(plan_text(config)))
            return 0
        from trainer import report

        if nodes.count == 1 and settings_file.ACCEPT_CHANGES not in overrides and (done := report.finished(config)):
            print(clean(done))
            return 0
        return launch(config, [path, *overrides], nodes)
    except InputError as error:
        return print_error(error)


def take_nodes(arguments: list[str]) -> tuple[Nodes, list[str]]:
    """Split off the options that say which machine of how many this is. Raises ConfigError for impossible ones."""
    parser = CommandParser("python -m trainer", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    for name, kind, default in (
        ("nnodes", int, 1), ("node-rank", int, 0), ("master-addr", str, ""), ("master-port", int, 29500),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=kind, default=default)
    given, rest = parser.parse_known_args(arguments)
    if not rest:
        raise ConfigError(f"a settings file is missing, e.g. {command_of('trainer')} configs/quickstart.toml")
    if not 0 <= given.node_rank < given.nnodes:
        raise ConfigError(f"--node-rank={given.node_rank}: expected 0 to --nnodes - 1, which is {given.nnodes - 1}")
    if not 0 < given.master_port < 65536:
        raise ConfigError(f"--master-port={given.master_port}: expected 1 to 65535")
    if given.nnodes > 1 and not given.master_addr:
        raise ConfigError("--master-addr is missing: give the address of machine 0, by which the others reach it")
    return Nodes(given.nnodes, given.node_rank, given.master_addr or "127.0.0.1", given.master_port), rest


def launch(config: Config, arguments: list[str], nodes: Nodes) -> int:
    """Start this node's ranks of a launch and wait for them; returns the exit code. Raises ConfigError."""
    from shared.launch.node import run_ranks
    from shared.launch.sockets import raise_open_files
    from trainer.data.sources import check_sources

    if not nodes.number:
        check_sources(config)
    ranks = nodes.ranks(config)
    environment = {**os.environ, **nodes.variables(config)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if not torch.cuda.is_available():
        from shared.model.cpu.processor import spare_allocator

        if library := spare_allocator():
            environment.setdefault("LD_PRELOAD", library)
    from verify.plugin_host import close_hosts

    close_hosts()  # rank 0 has its own
    raise_open_files()
    if nodes.number:
        print(f"node {nodes.number}: waiting for node 0 at {nodes.address}:{nodes.port}", flush=True)
    new = not (nodes.number or config.run_dir.exists())
    code = run_ranks(ranks, [*RANK, *arguments], environment)
    if new and code == ConfigError.exit_code:
        forget_refused(config.run_dir)
    return code


def launch_by_torchrun(arguments: list[str]) -> int:
    """Be the parent of this node's ranks, in the first of the processes that torchrun has started here."""
    from shared.launch.node import run_ranks

    if os.environ["LOCAL_RANK"] != "0":
        return 0  # the first process is the parent of all ranks here
    watchdog.die_with_parent()
    return run_ranks(ranks_here(), [*RANK, *arguments], os.environ)


def end_at_once(number: int, frame: object) -> NoReturn:
    """End before there are ranks. An exception may be lost in a library that is being imported."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
