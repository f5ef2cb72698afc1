"""Kills at random moments, each followed by the same command: nothing lost, nothing trained twice, every death named.

`pytest --soak -n 0 -s tests/system/test_soak.py` prints a table kill -> message -> seconds. SOAK_KILLS and SOAK_SEED
choose how many (50) and which; each mode, asynchronous and synchronous, gets half.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.system.conftest import Start
from tests.system.launch import Launch
from trainer import checkpoint

KILLS = int(os.environ.get("SOAK_KILLS", "50"))
SEED = int(os.environ.get("SOAK_SEED", "25"))
STEPS, PROMPTS, ASYNC_LEVEL = 24, 4, 2
SETTINGS = {
    "steps": STEPS,
    "checkpoint__every": 1,
    "rollout__max_sequences": 4,  # a step takes a while, and completions are in flight at any moment
    "rollout__max_completion_tokens": 100,
    "rollout__max_restarts": 1000,
    "deadlines__sync_s": 120,  # deaths are noticed without it; on a busy machine a start may take half a minute
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
HARMS = {
    "synchronous": [
        Harm("controller", KILL, ("controller (rank 0", NAMED)),
        Harm("trainer", KILL, ("trainer 0 (rank 1", NAMED)),
        TOLD_BY_THE_NEXT,
        Harm("launcher", TERM, ("SIGTERM came",)),
    ],
    "asynchronous": [
        Harm("controller", KILL, ("controller (rank 0", NAMED)),
        Harm("trainer", KILL, ("trainer 0 (rank 1", NAMED)),
        Harm("engine rank", KILL, ("engine 0 (rank 2", NAMED)),
        Harm("engine process", KILL, ("engine 0 (rank 2", NAMED)),
        Harm("engine process", STOP, ("engine 0 (rank 2", "no token and no answer")),
        TOLD_BY_THE_NEXT,
        Harm("launcher", TERM, ("SIGTERM came",)),
        Harm("trainer", TERM, ("SIGTERM came to trainer 0 (rank 1",)),
        Harm("controller", TERM, ("SIGTERM came",)),
    ],
}


def choose(mode: str, kills: int, draw: random.Random) -> Iterator[Harm]:
    """Every kind about equally often, in random order."""
    kinds = HARMS[mode]
    chosen = (kinds * (kills // len(kinds) + 1))[:kills]
    draw.shuffle(chosen)
    return iter(chosen)


def pid_of(launch: Launch, victim: str) -> int:
    ranks = {"controller": 0, "trainer": 1, "engine rank": 2}
    if victim == "launcher":
        return launch.process.pid
    return launch.engine_pid(2) if victim == "engine process" else launch.rank_pid(ranks[victim])


def strike(launch: Launch, harm: Harm, draw: random.Random) -> bool:
    """Wait for a random moment after the next step, then harm. False: the launch ended before."""
    done, moment = len(launch.metrics()), draw.uniform(0, 1.5)
    while len(launch.metrics()) <= done and launch.process.poll() is None:
        time.sleep(0.05)
    time.sleep(moment)
    launch.remember_processes()
    if launch.process.poll() is not None or launch.told("evaluating after training"):
        return False
    os.kill(pid_of(launch, harm.victim), harm.number)
    return True


def outcome(launch: Launch, harm: Harm) -> str:
    """Wait until the harm has had its effect; the line that tells it ("" where the next launch must)."""
    if harm.victim == "engine process":
        seen = launch.output.count("was started again")
        end = time.monotonic() + 200
        while launch.output.count("was started again") == seen and launch.process.poll() is None:
            assert time.monotonic() < end, f"the engine was not started again:\n{launch.output[-3000:]}"
            time.sleep(0.1)
    else:
        code = launch.wait(200)
        assert code != 0 and (harm.number is not TERM or code in (1, 128 + TERM)), (harm, code)
        assert launch.survivors() == [], harm
    if harm is TOLD_BY_THE_NEXT:
        return ""
    lines = [line.strip() for line in launch.output.splitlines() if all(word in line for word in harm.words)]
    assert lines, f"{harm} was not named:\n{launch.output[-3000:]}"
    return lines[-1]


class Soak:
    """One mode's kills over as many runs as they need."""

    def __init__(self, start: Start, folder: Path, mode: str, kills: int):
        self.start, self.folder = start, folder
        self.draw = random.Random(f"{SEED} {mode}")
        self.harms = choose(mode, kills, self.draw)
        self.settings = {**SETTINGS, "rollout__max_async_level": ASYNC_LEVEL if mode == "asynchronous" else 0}
        self.table: list[tuple[str, str, str, float]] = []
        self.harm = next(self.harms, None)

    def run(self, number: int) -> Launch:
        """One run, killed again and again until it is trained; its last launch."""
        untold = False
        while True:
            command = self.draw.choice(["trainer", "torchrun"])
            launch = self.start(self.folder / f"run{number}", command=command, **self.settings)
            while self.harm is not None and strike(launch, self.harm, self.draw):
                began, harm = time.monotonic(), self.harm
                line = outcome(launch, harm)
                if untold:
                    assert launch.told(*TOLD_BY_THE_NEXT.words), launch.output[:3000]
                untold = harm is TOLD_BY_THE_NEXT
                seconds, line = time.monotonic() - began, line or "(told by the next launch)"
                self.table.append((harm.victim, harm.number.name, line, seconds))
                print(f"{command:8} {harm.victim:14} {harm.number.name:8} {seconds:5.1f} s  {line}", flush=True)
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
    newest = checkpoint.folder_of(launch.run_dir, STEPS)
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


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the launches, with a short name, for sockets."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_asynchronous_kills_lose_nothing_and_train_nothing_twice(start: Start, tmp_path: Path, temporary: Path):
    before = leftovers(temporary)
    soak = Soak(start, tmp_path, "asynchronous", KILLS - KILLS // 2)
    number = 0
    while soak.harm is not None:
        check_counts(soak.run(number))
        number += 1
    print(f"{len(soak.table)} kills over {number} runs of {STEPS} steps: 0 groups lost, 0 trained twice")
    assert leftovers(temporary) <= before


def test_synchronous_kills_of_controller_trainers_and_launcher_change_no_bit(
    start: Start, tmp_path: Path, temporary: Path
):
    before = leftovers(temporary)
    straight = start(tmp_path / "straight", **SETTINGS, rollout__max_async_level=0)
    assert straight.wait(400) == 0, straight.output[-6000:]
    expected = weights(straight)
    soak = Soak(start, tmp_path, "synchronous", KILLS // 2)
    number = 0
    while soak.harm is not None:
        launch = soak.run(number)
        check_counts(launch)
        assert launch.losses() == straight.losses()
        found = weights(launch)
        assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
        number += 1
    print(f"{len(soak.table)} kills over {number} runs of {STEPS} steps: losses, weights and moments bitwise equal")
    assert leftovers(temporary) <= before
