"""Kills and freezes at random moments, each followed by the same command: nothing lost, nothing trained twice, every
death and freeze named.

`pytest --soak -n 0 -s tests/system/test_soak.py` prints a table victim -> message -> seconds. SOAK_KILLS and SOAK_SEED
choose how many (90) and which; each mode gets a third: an asynchronous one with environments of a plug-in and of an
MCP server that a shell starts, an asynchronous one with adapters, and a synchronous one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.system.conftest import Start
from tests.system.launch import ROOT, Launch
from trainer.checkpoint import writer

KILLS = int(os.environ.get("SOAK_KILLS", "90"))
SEED = int(os.environ.get("SOAK_SEED", "25"))
STEPS, PROMPTS, ASYNC_LEVEL = 24, 4, 2
SETTINGS = {
    "steps": STEPS,
    "checkpoint__every": 1,
    "rollout__max_sequences": 4,  # a step takes a while, and completions are in flight at any moment
    "rollout__max_completion_tokens": 100,
    "rollout__max_restarts": 1000,
    "deadlines__sync_s": 120,  # a rank that is silent for half of it is frozen; deaths are noticed without it
    "evaluate__every": 0,
}
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]


@dataclass(frozen=True)
class Harm:
    """Whom a signal goes to, and the words of the line that must tell it."""

    victim: str
    number: signal.Signals
    words: tuple[str, ...]


KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
NAMED = "killed by signal 9 (SIGKILL)"
TOLD_BY_THE_NEXT = Harm("launcher", KILL, ("ended without a word", "launcher"))
RANKS = {"controller": 0, "trainer": 1, "engine rank": 2}
ENGINE = "engine 0 (rank 2"
EVERYWHERE = [
    Harm("controller", KILL, ("controller (rank 0", NAMED)),
    Harm("trainer", KILL, ("trainer 0 (rank 1", NAMED)),
    Harm("engine rank", KILL, (ENGINE, NAMED)),
    Harm("engine process", KILL, (ENGINE, NAMED)),
    Harm("checker", KILL, ("verifier", NAMED)),
    TOLD_BY_THE_NEXT,
    Harm("launcher", TERM, ("SIGTERM came",)),
    Harm("controller", STOP, ("controller (rank 0)", "silent")),
    Harm("trainer", STOP, ("trainer rank 1", "silent")),
    Harm("engine rank", STOP, ("engine rank 2", "silent")),
    Harm("engine process", STOP, (ENGINE, "no token and no answer")),
]
HARMS = {
    "environments": [
        *EVERYWHERE,
        Harm("environment", KILL, ("environment", NAMED)),
        Harm("environment", STOP, ("environment", "no answer")),
        Harm("MCP server", KILL, ("MCP server",)),
        Harm("shell of the MCP server", KILL, ("MCP server",)),
        Harm("MCP server", STOP, ("MCP server",)),
        Harm("supervisor of the environment", KILL, ("environment", NAMED)),
        Harm("supervisor of the MCP server", KILL, ("MCP server",)),
    ],
    "adapters": EVERYWHERE,
    "synchronous": [  # completions that go on in another engine may differ in the last bit of their log-probs
        *(harm for harm in EVERYWHERE if harm.victim != "engine process"),
        Harm("trainer", TERM, ("SIGTERM came to trainer 0 (rank 1",)),
        Harm("controller", TERM, ("SIGTERM came",)),
    ],
}  # fmt: skip
COMMANDS = {
    "checker": "verify.checker_process", "environment": "environments.process",
    "shell of the MCP server": "bash -c", "MCP server": "mcp_server.py",
    "supervisor of the environment": "environments.process", "supervisor of the MCP server": "mcp_server.py",
}  # fmt: skip
"""victims that are found by a part of their command"""
NOTICED_S = 20
"""within which the death of a victim that nobody asks anything is noticed"""
GOES_ON = {"engine process", *COMMANDS}
"""victims without which a launch trains on"""


def choose(mode: str, harms: int, draw: random.Random) -> Iterator[Harm]:
    """Every kind about equally often, in random order."""
    kinds = HARMS[mode]
    chosen = (kinds * (harms // len(kinds) + 1))[:harms]
    draw.shuffle(chosen)
    return iter(chosen)


def pid_of(launch: Launch, victim: str, draw: random.Random) -> int:
    """One of the processes that a harm may go to."""
    if victim == "launcher":
        return launch.process.pid
    if victim in RANKS:
        return launch.rank_pid(RANKS[victim])
    if victim == "engine process":
        return launch.engine_pid(2)
    pids = []
    while not pids:  # between two episodes there may be none
        for child in psutil.Process(launch.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                line = " ".join(child.cmdline())
                above = victim.startswith("supervisor")
                if (
                    COMMANDS[victim] in line
                    and above == ("supervisor.py" in line)
                    and (above or victim != "MCP server" or "bash -c" not in line)
                ):
                    pids.append(child.pid)
        assert launch.process.poll() is None, launch.output[-3000:]
        time.sleep(0.05)
    return draw.choice(pids)


def strike(launch: Launch, harm: Harm, draw: random.Random) -> tuple[psutil.Process, int] | None:
    """Wait for a random moment after the next step, then harm; returns the victim, and the length of the output when it
    came. None: the launch ended before."""
    done, moment = len(launch.metrics()), draw.uniform(0, 1.5)
    while len(launch.metrics()) <= done and launch.process.poll() is None:
        time.sleep(0.05)
    time.sleep(moment)
    launch.remember_processes()
    if launch.process.poll() is not None or launch.told("evaluating after training"):
        return None
    victim = psutil.Process(pid_of(launch, harm.victim, draw))
    before = len(launch.output)
    victim.send_signal(harm.number)
    return victim, before


def outcome(launch: Launch, harm: Harm, victim: psutil.Process, before: int) -> str:
    """Wait until the harm has had its effect; the line that tells it ("" where the next launch must). before: length of
    the output when it came."""
    began = time.monotonic()
    end = began + 240

    def lines() -> list[str]:
        new = launch.output[before:].splitlines()
        return [line.strip() for line in new if all(word in line for word in harm.words)]

    if harm.victim in GOES_ON:
        done = len(launch.metrics())
        while len(launch.metrics()) < min(done + 2, STEPS) or not lines() or victim.is_running():
            ended = launch.process.poll() is not None
            assert time.monotonic() < end, (harm, lines(), victim.is_running(), launch.output[-3000:])
            assert not ended or launch.process.returncode == 0, f"{harm} ended the launch:\n{launch.output[-3000:]}"
            if ended and lines():
                break
            if ended and time.monotonic() - began < NOTICED_S:
                return "(the launch came to its end first)"
            time.sleep(0.1)
    else:
        code = launch.wait(240)
        assert code != 0 and (harm.number is not TERM or code in (1, 128 + TERM)), (harm, code)
        assert launch.survivors() == [], harm
    if harm is TOLD_BY_THE_NEXT:
        return ""
    assert lines(), f"{harm} was not named:\n{launch.output[before:][-3000:]}"
    return lines()[-1]


class Soak:
    """One mode's harms over as many runs as they need."""

    def __init__(self, start: Start, folder: Path, mode: str, harms: int, **settings: Any):
        self.start, self.folder = start, folder
        self.draw = random.Random(f"{SEED} {mode}")
        self.harms = choose(mode, harms, self.draw)
        self.settings = {**SETTINGS, **settings}
        self.table: list[tuple[str, str, str, float]] = []
        self.harm = next(self.harms, None)

    def run(self, number: int) -> Launch:
        """One run, harmed again and again until it is trained; its last launch."""
        untold = False
        while True:
            command = self.draw.choice(["trainer", "torchrun"])
            launch = self.start(self.folder / f"run{number}", command=command, **self.settings)
            while self.harm is not None and (struck := strike(launch, self.harm, self.draw)) is not None:
                began, harm = time.monotonic(), self.harm
                line = outcome(launch, harm, *struck)
                if untold:
                    assert launch.told(*TOLD_BY_THE_NEXT.words), launch.output[:3000]
                untold = harm is TOLD_BY_THE_NEXT
                seconds, line = time.monotonic() - began, line or "(told by the next launch)"
                self.table.append((harm.victim, harm.number.name, line, seconds))
                print(f"{command:8} {harm.victim:24} {harm.number.name:8} {seconds:5.1f} s  {line}", flush=True)
                self.harm = next(self.harms, None)
                if launch.process.poll() is not None:
                    break
            else:
                assert launch.wait(400) == 0, launch.output[-6000:]
                assert launch.survivors() == []
                assert not untold or launch.told(*TOLD_BY_THE_NEXT.words), launch.output[:3000]
                return launch


def weights(launch: Launch) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: weights and moments."""
    newest = writer.folder_of(launch.run_dir, STEPS)
    files = sorted(newest.glob("trainer-*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def check_counts(launch: Launch) -> None:
    """Every prompt is trained once, every step told once, no token older than it may be."""
    assert launch.trained_prompts() == list(range(STEPS * PROMPTS)), "lost, or trained twice"
    assert [row["step"] for row in launch.metrics()] == list(range(1, STEPS + 1))
    assert max(row["staleness/max"] for row in launch.metrics()) <= ASYNC_LEVEL + 1


def leftovers(folder: Path) -> set[str]:
    """Files in shared memory that no living process has mapped, and what lies in the launches' temporary folder."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= {line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:
            continue  # it has ended
    shared = {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file() and str(path) not in mapped}
    return shared | {str(path) for path in folder.rglob("*") if "torchelastic_" not in str(path)}  # torchrun's own


def harm_all(soak: Soak) -> None:
    """Run until all harms are done; every run trains each prompt once."""
    number = 0
    while soak.harm is not None:
        check_counts(soak.run(number))
        number += 1
    print(f"{len(soak.table)} harms over {number} runs of {STEPS} steps: 0 groups lost, 0 trained twice")


PLUGIN = """
import asyncio
from environments.environment import environment
from environments.guess import Guess


@environment("mine")
class Mine(Guess):
    async def step(self, action):
        await asyncio.sleep(0.05)
        return await super().step(action)
"""
PREPARE = """
import json
from pathlib import Path

from examples.guess.prepare import prepare as prepare_guesses


def prepare(folder, options, seed):
    prepare_guesses(folder, options, seed)
    for path in Path(folder).glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            if "environment" in row:
                row.update({"environment": "mine"} if number % 2 else {"environment": "mcp", "answer": "3"})
        path.write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


def test_harms_of_environments_lose_nothing(tmp_path: Path, temporary: Path) -> None:
    """Half of the rows are of a plug-in, half have the tools of an MCP server, which a shell has started."""
    before = leftovers(temporary)
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "prepare.py").write_text(PREPARE)
    command = f"bash -c '{sys.executable} {ROOT / 'tests' / 'environments' / 'mcp_server.py'}; exit $?'"
    options = f'{{ mcp = {{ command = {json.dumps(command)}, tools = ["add"], shared = true, call_s = 10 }} }}'
    settings = {
        "environment__plugins": [str(tmp_path / "mine.py")], "environment__options": options,
        "environment__step_s": 20, "prepare__script": str(tmp_path / "prepare.py"),
        "prepare__options": "{ numbers = 8, guesses = 3, max_tokens = 768 }", "model__max_tokens": 768,
        "sft__steps": 20, "rollout__prompts_per_step": PROMPTS, "rollout__group_size": 4, "evaluate__problems": 8,
        "objective__filter_groups_by": "off",
    }  # fmt: skip

    def start(folder: Path, **more: Any) -> Launch:
        return Launch(folder, file="configs/guess.toml", **{**settings, **more})

    harm_all(Soak(start, tmp_path, "environments", KILLS // 3, rollout__max_async_level=ASYNC_LEVEL))
    assert leftovers(temporary) <= before


def test_harms_beside_adapters_lose_nothing(start: Start, tmp_path: Path, temporary: Path) -> None:
    before = leftovers(temporary)
    harm_all(Soak(start, tmp_path, "adapters", KILLS // 3, rollout__max_async_level=ASYNC_LEVEL, lora__rank=4))
    assert leftovers(temporary) <= before


def test_synchronous_harms_change_no_bit(start: Start, tmp_path: Path, temporary: Path) -> None:
    before = leftovers(temporary)
    straight = start(tmp_path / "straight", **SETTINGS, rollout__max_async_level=0)
    assert straight.wait(400) == 0, straight.output[-6000:]
    expected = weights(straight)
    soak = Soak(start, tmp_path, "synchronous", KILLS // 3, rollout__max_async_level=0)
    number = 0
    while soak.harm is not None:
        launch = soak.run(number)
        check_counts(launch)
        assert launch.losses() == straight.losses()
        found = weights(launch)
        assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
        number += 1
    print(f"{len(soak.table)} harms over {number} runs of {STEPS} steps: losses, weights and moments bitwise equal")
    assert leftovers(temporary) <= before
