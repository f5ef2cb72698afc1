"""Launches of configs/guess.toml whose environment lies in a file of the user's: they repeat, and survive kills."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.config import Config
from tests.system.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(3000)]

FILE = """
import asyncio
from environments.environment import environment
from environments.guess import Guess


@environment("mine")
class Mine(Guess):
    async def step(self, action):
        await asyncio.sleep(0.05)
        return await super().step(action)
"""
SETTINGS: dict[str, Any] = {
    "environment__name": "mine",
    "rollout__prompts_per_step": 4,
    "rollout__group_size": 4,
    "rollout__max_sequences": 16,
    "objective__filter_groups_by": "off",
    "sft__steps": 30,
    "evaluate__problems": 8,
    "evaluate__every": 0,
}


def start(folder: Path, name: str, **settings: Any) -> Launch:
    """A launch in which problems that name no environment have the one of the file."""
    (folder / "mine.py").write_text(FILE)
    (folder / "prepare.py").write_text(
        "from pathlib import Path\n"
        "from examples.guess.prepare import prepare as made\n"
        "def prepare(folder, options, seed):\n"
        "    made(folder, options, seed)\n"
        "    for path in Path(folder).glob('*.jsonl'):\n"
        "        path.write_text(path.read_text().replace('\"guess\"', '\"mine\"'))\n"
    )
    given = {
        **SETTINGS,
        "environment__plugins": [str(folder / "mine.py")],
        "environment__options": "{}",
        "prepare__script": str(folder / "prepare.py"),
        **settings,
    }
    return Launch(folder, name, file="configs/guess.toml", **given)


def environment_pids(launch: Launch) -> list[int]:
    children = psutil.Process(launch.rank_pid(0)).children()
    return [child.pid for child in children if "environments.process" in child.cmdline()]


def test_synchronous_episodes_repeat_bit_for_bit_and_agree_with_the_trainer(tmp_path: Path) -> None:
    """Every token is trained by the weights that sampled it: the two sides differ by their numerics alone."""
    runs = []
    for name in ("first", "second"):
        launch = start(tmp_path, name, rollout__max_async_level=0, steps=3)
        assert launch.wait(500) == 0, launch.output[-6000:]
        runs.append(launch)
    first, second = ([one["completions"] for one in run.groups()] for run in runs)
    tokens = [
        [[(one["token_ids"], one["logprobs"], one["spans"]) for one in group] for group in run]
        for run in (first, second)
    ]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12
    assert runs[0].losses() == runs[1].losses() and len(set(runs[0].losses())) == 3
    assert max(len(one["turns"]) for group in first for one in group) >= 3
    assert all(row["staleness/max"] == 0 and row["logprob_difference/max"] < 1e-3 for row in runs[0].metrics())


def test_twenty_kills_lose_no_episode_and_train_none_twice(tmp_path: Path) -> None:
    """Of engines, of environments and of the launch, in turns, while all are at work."""
    steps, kills, draw = 400, 0, random.Random(os.urandom(4))
    settings: dict[str, Any] = {"steps": steps, "checkpoint__every": 2, "rollout__max_restarts": 20}
    bound = Config.model_validate({"rollout": {"prompts_per_step": 4, "max_async_level": 2}}).max_staleness
    launch = start(tmp_path, "run", **settings)
    for kind in ("environment", "engine", "environment", "environment", "launch") * 4:
        here = len(launch.metrics())
        launch.until_step(here + 2)
        time.sleep(draw.uniform(0.0, 1.0))
        if kind == "launch":
            launch.kill()
            assert launch.survivors() == [], "a process outlived its launch"
            launch = start(tmp_path, "run", **settings)
        else:
            pid = launch.engine_pid(2) if kind == "engine" else draw.choice(environment_pids(launch))
            os.kill(pid, signal.SIGKILL)
        kills += 1
    done = len(launch.metrics())
    launch.until_step(done + 3)
    launch.process.send_signal(signal.SIGINT)
    launch.wait(200)
    trained = launch.trained_prompts()
    assert kills == 20 and len(trained) >= 4 * 40
    assert len(trained) == len(set(trained)), "an episode was trained twice"
    assert trained[: -bound * 8] == list(range(len(trained) - bound * 8)), "an episode was lost"
    completions = [one for group in launch.groups() for one in group["completions"]]
    assert {one["finish_reason"] for one in completions} <= {"stop", "length"}
    assert any(one["restarts"] for one in completions), "no engine was killed at work"
    assert max(row["staleness/max"] for row in launch.metrics()) <= bound
    for one in completions:
        assert sum(span["end"] - span["start"] for span in one["spans"]) == sum(
            t["end"] - t["start"] for t in one["turns"]
        )
