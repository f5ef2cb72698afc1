"""Tokens a second of episodes whose environment answers in 0.2 s, beside the same episodes without that wait.

Rank 0's own admission, collection, episodes and ledger, a real rollout rank, an environment in a process of its own;
batches are taken as soon as they are complete, and are not trained (as in rollout.py). Episodes have 4 turns of some 32
tokens (lognormal; a random model ends none itself, so a turn of its length counts as ended) and short observations; the
engine decodes 48 sequences at a time. With and without the wait take turns, for 1, 2, 3 and 6 episodes under way for
every seat of the engine. 6 is what the default settings give one engine: 3 batches of 32 groups of 16 episodes, 256
seats. First and last batches, in which the episodes under way grow and shrink, are not counted.

An episode needs its seat for t seconds a turn and leaves it for 0.2 s: (t + 0.2) / t episodes a seat fill the engine.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from benchmarks.rollout import LONGEST, Load, Ours, launched, make_model  # first: it prepares the environment for vLLM

# isort: split
from benchmarks.figures import Figure, benchmark
from shared.config import Config
from shared.errors import RunError
from shared.types import Completion
from trainer.controller import TrainingLoop
from trainer.data.data_source import DataSource
from trainer.episodes import Episodes
from trainer.learner import Learner
from trainer.ledger import Ledger
from trainer.stages import Stages
from verify.scorer import RewardScorer

WAIT_S, TURNS, TURN_TOKENS, SEATS, GROUP_SIZE = 0.2, 4, 32, 48, 8
FACTORS, DEFAULT_FACTOR, TARGET = (1, 2, 3, 6), 6, 0.9
"""episodes under way for every seat"""
REST = 2
"""batches at the beginning and at the end that are not counted"""
KINDS = {"waits": WAIT_S, "answers": 0.0}
"""environment -> seconds that it takes for an answer"""
FILE = f"""
import asyncio
from environments.environment import Environment, Observation, environment, user


@environment("answers")
class Answers(Environment):
    async def reset(self, problem, seed):
        self.turns = 0
        return Observation()

    async def step(self, action):
        self.turns += 1
        return Observation([user(f"That was turn {{self.turns}}.")], reward=1.0, done=self.turns == {TURNS})


@environment("waits")
class Waits(Answers):
    async def step(self, action):
        await asyncio.sleep({WAIT_S})
        return await super().step(action)
"""


class EpisodeLoad(Load):
    """Turns in place of completions."""

    def config(self, factor: int = 1, batches: int = 1, plugins: tuple[str, ...] = ()) -> Config:
        """Return the settings with so many episodes under way for every seat."""
        given = super().config().model_dump(exclude_unset=True)
        most = TURNS * (1 + int(LONGEST * self.mean_tokens))
        prompts = factor * self.seats // (self.group_size * (given["rollout"]["max_async_level"] + 1))
        given["rollout"] |= {"prompts_per_step": prompts, "max_completion_tokens": most}
        given["model"]["max_tokens"] = most + 512
        more = {"plugins": list(plugins), "max_turns": TURNS}
        return Config.model_validate(
            {**given, "steps": batches, "environment": more, "objective": {"filter_groups_by": "off"}}
        )


LOAD = EpisodeLoad("quickstart's model", None, "float32", SEATS, 2, GROUP_SIZE, TURN_TOKENS, steps=1, target=None)


class Cut(Episodes):
    """A turn that has its length counts as ended by the policy."""

    def end_turn(self, completion: Completion) -> Completion:
        """The completion, which waits for its environment."""
        return super().end_turn(replace(completion, finish_reason="stop"))


async def play(ours: Ours, kind: str, config: Config) -> float:
    """Return tokens a second in batches of episodes with one kind of environment. Raises RunError where an episode ends
    early."""
    stages, chat, unused = Stages(config), ours.scorer.chat, None
    ours.config, scorer, ledger = config, RewardScorer(stages, chat), Ledger(stages)
    logger = SimpleNamespace(note_waiting=lambda: None)
    source = DataSource([replace(one, environment=kind) for one in ours.source.all], stages, ours.source.prompt_format)
    episodes, marks = Cut(config, source.prompt_format, scorer), list[tuple[float, int]]()

    async def take_all() -> None:
        while not ledger.exhausted:
            groups = await ledger.take()
            marks.append((time.perf_counter(), ours.engines.generated_tokens))
            if any(len(one.turns) != TURNS for group in groups for one in group.completions):
                raise RunError("an episode ended early: its figures say nothing")
            ledger.trained(groups)
            ledger.release(ledger.version)
        ours.engines.close()

    learner = Learner(unused, ledger, source, unused)
    given: Any = (ledger, ours.engines, scorer, episodes, source, learner, unused, logger, unused, [])
    path = TrainingLoop(*given)
    await episodes.start(source.all)
    try:
        async with asyncio.TaskGroup() as loops:
            for loop in (path.admit(), path.collect(), take_all()):
                loops.create_task(loop)
    finally:
        await episodes.close()
    (began, before), (ended, after) = marks[REST], marks[-1 - REST]
    return (after - before) / (ended - began)


async def compare(repeats: int, batches: int, folder: Path) -> dict[int, dict[str, list[float]]]:
    """Measure episodes under way for every seat -> environment -> [repeats] tokens a second."""
    (plugin := folder / "answering.py").write_text(FILE)
    found: dict[int, dict[str, list[float]]] = {factor: {kind: [] for kind in KINDS} for factor in FACTORS}
    async with launched(LOAD, make_model(LOAD, folder / "model")) as (ours, _):
        await ours.guarded(play(ours, "answers", LOAD.config(2, 2 * REST + 2, (str(plugin),))))
        for _ in range(repeats):
            for factor, kinds in found.items():
                config = LOAD.config(factor, 2 * REST + 1 + -(-batches // factor), (str(plugin),))
                for kind, values in kinds.items():
                    values.append(await ours.guarded(play(ours, kind, config)))
        if ours.engines.restarts:
            raise RunError("the engine died and was started again: its figures say nothing")
    return found


@benchmark()
def waiting(quick: bool) -> Iterator[Figure]:
    """Measure with and without the wait, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(compare(*((1, 12) if quick else (3, 48)), Path(folder)))
    turn_s = [SEATS * TURN_TOKENS / rate for rate in found[DEFAULT_FACTOR]["answers"]]
    yield Figure("a turn, with every seat taken", turn_s, "s")
    yield Figure("episodes a seat that fill the engine", [(each + WAIT_S) / each for each in turn_s], "")
    for factor, kinds in found.items():
        name = f"{factor} episodes under way a seat" + (" (default)" if factor == DEFAULT_FACTOR else "")
        yield Figure(f"{name}: without a wait", kinds["answers"], "tokens/s", better="higher")
        yield Figure(f"{name}: {WAIT_S} s an answer", kinds["waits"], "tokens/s", better="higher")
        busy = [one / other for one, other in zip(kinds["waits"], kinds["answers"], strict=True)]
        target = TARGET if factor == DEFAULT_FACTOR else None
        yield Figure(f"{name}: engines busy", busy, "", "those without a wait", "higher", target)
