"""Kills and freezes at random moments, each followed by the same command: nothing lost, nothing trained twice, every
death and freeze named.

`pytest --soak -n 0 -s tests/system/test_soak.py` prints a table victim -> message -> seconds. SOAK_KILLS and SOAK_SEED
choose how many (90) and which; each mode gets a third: an asynchronous one with environments of a plug-in and of an
MCP server that a shell starts, an asynchronous one with adapters, and a synchronous one.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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
    "steps": STEPS, "checkpoint__every": 1, "rollout__max_restarts": 1000, "evaluate__every": 0,
    "rollout__max_sequences": 4,  # a step takes a while, and completions are in flight at any moment
    "rollout__max_completion_tokens": 100,
    "deadlines__sync_s": 120,  # a rank that is silent for half of it is frozen; deaths are noticed without it
}  # fmt: skip
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]


class Harm(NamedTuple):
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
        Harm("launcher", signal.SIGINT, ("SIGINT came",)),
    ],
}


def supervises(words: list[str]) -> bool:
    """Whether a command is that of a supervisor."""
    return any(word.endswith("/supervisor.py") for word in words[:4])


def runs_environment(words: list[str]) -> bool:
    return any("environments.process" in word for word in words)


COMMANDS: dict[str, Callable[[list[str]], bool]] = {
    "checker": lambda words: any("verify.checker_process" in word for word in words),
    "environment": lambda words: not supervises(words) and runs_environment(words),
    "shell of the MCP server": lambda words: words[0] == "bash",
    "MCP server": lambda words: words[1].endswith("mcp_server.py"),
    "supervisor of the environment": lambda words: supervises(words) and runs_environment(words),
    "supervisor of the MCP server": lambda words: supervises(words) and "bash" in words,
}
"""victims that are found by the words of their command"""
NOTICED_S = 20
"""within which the death of a victim that nobody asks anything is noticed"""
GOES_ON = {"engine process", *COMMANDS}
"""victims without which a launch trains on"""


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
                if len(words := child.cmdline()) > 1 and COMMANDS[victim](words):
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
    victim, before = psutil.Process(pid_of(launch, harm.victim, draw)), len(launch.output)
    victim.send_signal(harm.number)
    return victim, before


def outcome(launch: Launch, harm: Harm, victim: psutil.Process, before: int) -> str:
    """Wait until the harm has had its effect; the line that tells it ("" where the next launch must). before: length of
    the output when it came."""
    began = time.monotonic()

    def lines() -> list[str]:
        new = launch.output[before:].splitlines()
        return [line.strip() for line in new if all(word in line for word in harm.words)]

    if harm.victim in GOES_ON:
        done = len(launch.metrics())
        while len(launch.metrics()) < min(done + 2, STEPS) or not lines() or victim.is_running():
            ended = launch.process.poll() is not None
            assert time.monotonic() < began + 600, (harm, lines(), victim.is_running(), launch.output[-3000:])
            assert not ended or launch.process.returncode == 0, f"{harm} ended the launch:\n{launch.output[-3000:]}"
            if ended and lines():
                break
            if ended and time.monotonic() - began < NOTICED_S:
                return "(the launch came to its end first)"
            time.sleep(0.1)
    else:
        code, asked = launch.wait(), harm.number in (TERM, signal.SIGINT)
        assert code != 0 and (not asked or code in (1, 128 + harm.number)), (harm, code)
        assert launch.survivors() == [], harm
    if harm is TOLD_BY_THE_NEXT:
        return ""
    assert lines(), f"{harm} was not named:\n{launch.output[before:][-3000:]}"
    return lines()[-1]


class Soak:
    """One mode's harms over as many runs as they need."""

    def __init__(self, start: Start, folder: Path, mode: str, **settings: Any):
        self.start, self.folder, self.mode, self.settings = start, folder, mode, {**SETTINGS, **settings}
        self.draw, kinds, harms = random.Random(f"{SEED} {mode}"), HARMS[mode], KILLS // 3
        chosen = (kinds * (harms // len(kinds) + 1))[:harms]  # every kind about equally often
        self.draw.shuffle(chosen)
        self.harms, self.struck = iter(chosen), 0
        self.harm = next(self.harms, None)

    def run(self, number: int) -> Launch:
        """One run, harmed again and again until it is trained; its last launch."""
        untold = False
        while True:
            command = self.draw.choice(["trainer", "torchrun"])
            launch = self.start(self.folder / f"run{number}", command=command, **self.settings)
            while self.harm is not None and (struck := strike(launch, self.harm, self.draw)) is not None:
                began, harm = time.monotonic(), self.harm
                line = outcome(launch, harm, *struck) or "(told by the next launch)"
                assert not untold or launch.told(*TOLD_BY_THE_NEXT.words), launch.output[:3000]
                untold, seconds = harm is TOLD_BY_THE_NEXT, time.monotonic() - began
                print(f"{command:8} {harm.victim:24} {harm.number.name:8} {seconds:5.1f} s  {line}", flush=True)
                self.harm, self.struck = next(self.harms, None), self.struck + 1
                if launch.process.poll() is not None:
                    break
            else:
                assert launch.finish().survivors() == []
                assert not untold or launch.told(*TOLD_BY_THE_NEXT.words), launch.output[:3000]
                return launch

    def runs(self) -> Iterator[Launch]:
        """Run until all harms are done; every run trains each prompt and tells each step once, no token is older than
        it may be, and completions that went on in another engine are whole."""
        number, restarted = 0, False
        while self.harm is not None:
            launch = self.run(number)
            assert launch.trained_prompts() == list(range(STEPS * PROMPTS)), "lost, or trained twice"
            rows = launch.metrics()
            assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
            assert max(row["staleness/max"] for row in rows) <= ASYNC_LEVEL + 1
            for one in launch.completions():
                assert one["finish_reason"] in ("stop", "length")
                edges = [0, *(span["end"] for span in one["spans"])]
                assert edges[:-1] == [span["start"] for span in one["spans"]]
                tokens = sum(turn["end"] - turn["start"] for turn in one["turns"]) if one["turns"] else edges[-1]
                assert sum(span["end"] - span["start"] for span in one["spans"]) == tokens
                restarted = restarted or one["restarts"] > 0
            yield launch
            number += 1
        assert restarted or self.mode == "synchronous" or KILLS < 90, "no engine process died at work"
        print(f"{self.struck} harms over {number} runs of {STEPS} steps: 0 groups lost, 0 trained twice")


def weights(launch: Launch) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: weights and moments."""
    files = sorted(writer.folder_of(launch.run_dir, STEPS).glob("trainer-*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(autouse=True)
def nothing_is_left(temporary):
    """Neither files in shared memory that no living process has mapped, nor any in the launches' temporary folder."""

    def leftovers() -> set[str]:
        mapped = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):  # it has ended
                mapped |= {line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
        shared = {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file() and str(path) not in mapped}
        return shared | {str(path) for path in temporary.rglob("*") if "torchelastic_" not in str(path)}

    before = leftovers()
    yield
    assert leftovers() <= before


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
COMMAND = f"bash -c '{sys.executable} {ROOT / 'tests' / 'environments' / 'mcp_server.py'}; exit $?'"


@pytest.fixture
def begin(tmp_path):
    """begin(folder, ...) launches on rows of which half are of a plug-in, and half have the tools of an MCP server,
    which a shell has started."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "prepare.py").write_text(PREPARE)
    options = f'{{ mcp = {{ command = {json.dumps(COMMAND)}, tools = ["add"], shared = true, call_s = 10 }} }}'
    settings: dict[str, Any] = {
        "file": "configs/guess.toml", "environment__plugins": [str(tmp_path / "mine.py")],
        "environment__options": options, "environment__step_s": 20, "prepare__script": str(tmp_path / "prepare.py"),
        "prepare__options": "{ numbers = 8, guesses = 3, max_tokens = 768 }", "model__max_tokens": 768,
        "sft__steps": 20, "rollout__prompts_per_step": PROMPTS, "rollout__group_size": 4, "evaluate__problems": 8,
        "objective__filter_groups_by": "off",
    }  # fmt: skip
    return lambda folder, **more: Launch(folder, **{**settings, **more})


def test_harms_of_environments_lose_nothing(begin, tmp_path):
    assert list(Soak(begin, tmp_path, "environments", rollout__max_async_level=ASYNC_LEVEL).runs())


def test_synchronous_episodes_repeat_bit_for_bit_and_agree_with_the_trainer(begin, tmp_path):
    """Every token is trained by the weights that sampled it: the two sides differ by their numerics alone."""
    sampled = []
    for name in ("first", "second"):
        run = begin(tmp_path / name, rollout__max_async_level=0, steps=3, evaluate__every=0).finish()
        assert len(set(run.losses())) == 3 and max(len(one["turns"]) for one in run.completions()) >= 3
        assert all(row["staleness/max"] == 0 and row["logprob_difference/max"] < 1e-3 for row in run.metrics())
        tokens = [(one["token_ids"], one["logprobs"], one["spans"]) for one in run.completions()]
        sampled.append((tokens, run.losses()))
    assert sampled[0] == sampled[1]


def test_harms_beside_adapters_lose_nothing(start, tmp_path):
    for launch in Soak(start, tmp_path, "adapters", rollout__max_async_level=ASYNC_LEVEL, lora__rank=4).runs():
        assert max(row.get("sync/logprob_diff_mean", 0) for row in launch.metrics()) < 1e-4


def test_synchronous_harms_change_no_bit(start, tmp_path):
    straight = start(tmp_path / "straight", **SETTINGS, rollout__max_async_level=0).finish()
    expected = weights(straight)
    for launch in Soak(start, tmp_path, "synchronous", rollout__max_async_level=0).runs():
        assert launch.losses() == straight.losses()
        found = weights(launch)
        assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
