"""A loop of one's own with a reward of one's own: an untrained model learns to answer in digits.

    .venv/bin/python -m examples.loop

What `python -m trainer` does in one command is here in the open: draw, sample, score, step, publish. Each update is
proved as in a launch, and the run's folder (runs/loop) can be read by report and dashboard. The same command goes on
from the newest checkpoint. `session.train()` takes such steps by itself: examples/notebook.ipynb.
"""

from __future__ import annotations

import asyncio
import sys

from msgspec.structs import replace

from shared.errors import run_command
from shared.types import Group, Reward
from trainer.session import Session

STEPS = 20
OPTIONS = (
    "--name=loop",
    "--prepare.options.problems=400",
    "--sft.steps=0",
    "--rollout.group_size=8",
    "--rollout.max_completion_tokens=24",
    "--rollout.max_async_level=0",
    "--optimiser.learning_rate=4e-3",
    "--reward.overlong_buffer=8",
)


def digits(text: str) -> float:
    """Share of a text's characters that are digits."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def graded(group: Group) -> Group:
    """The group with our reward in the place of the verifiers'."""
    rewards: list[Reward | None] = [
        None if reward is None else replace(reward, total=digits(text))
        for reward, text in zip(group.rewards, group.texts, strict=True)
    ]
    return replace(group, rewards=rewards)


async def loop(*options: str) -> list[float]:
    """Train; returns the mean reward of each step."""
    means = []
    async with Session("quickstart", *OPTIONS, *options) as session:
        while session.version < STEPS:
            groups = await session.sample(session.draw(16))
            metrics = await session.step([graded(group) for group in groups])
            await session.publish()
            means.append(metrics["reward/mean"])
        await session.export()
    return means


def main() -> int:
    """Print the help, or train."""
    if {"-h", "--help"} & {*sys.argv}:
        sys.stdout.write(str(__doc__))
    elif rewards := asyncio.run(loop(*sys.argv[1:])):  # [] where all steps were taken before
        sys.stdout.write(f"reward of the first step {rewards[0]:.3f}, of the last {rewards[-1]:.3f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
