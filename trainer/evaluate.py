"""Evaluation on held-out problems through the engines' spare slots; training is not drained.

What it does not: benchmarks through the HTTP server (that is serve/). Who calls this: controller.
"""

from __future__ import annotations

import asyncio
import itertools
import math

import msgspec

from shared.types import Problem, Reward, Verdict
from trainer.data import DataSource, completion_seed
from trainer.engines import Engines
from trainer.judges import Judges


class Sampled(msgspec.Struct):
    """One evaluated completion, for people."""

    problem: Problem
    text: str
    reward: Reward
    tokens: int


class Evaluation(msgspec.Struct):
    """Means over held-out problems, one completion each."""

    temperature: float
    problems: int
    accuracy: float
    accuracy_half_width: float
    """half of the 95 % interval over problems (normal approximation)"""
    consistency: float
    """share of completions whose problem, thoughts and answer are in one language"""
    format: float
    reward: float
    tokens: float
    """mean completion length"""
    accuracy_by_language: dict[str, float] = {}
    samples: list[Sampled] = []


class Evaluator:
    """Runs evaluations; several may be under way."""

    def __init__(self, engines: Engines, judges: Judges, source: DataSource, problems: list[Problem], seed: int):
        self.engines, self.judges, self.source, self.seed = engines, judges, source, seed
        self.problems = problems
        self._keys = itertools.count()

    async def run(self, temperature: float) -> Evaluation:
        """Sample one completion a problem (temperature 0 is greedy), verify, average."""
        gate = _SpareSlots(self.engines)
        sampled = await asyncio.gather(*(self._one(i, problem, temperature, gate)
                                         for i, problem in enumerate(self.problems)))
        return summarise(temperature, list(sampled))

    async def _one(self, position: int, problem: Problem, temperature: float, gate: _SpareSlots) -> Sampled:
        await gate.wait()
        prompt = self.source.render(problem, position)
        seed = completion_seed(self.seed, -1 - position, 0)
        completion = await self.engines.sample_once(prompt.token_ids, next(self._keys), seed, temperature)
        reward, text = await self.judges.score(problem, completion)
        return Sampled(problem, text, reward, len(completion.token_ids))


class _SpareSlots:
    """Lets evaluation completions start only where no training completion would have to wait. The caller submits before
    its next await, so the next one in the queue counts it."""

    def __init__(self, engines: Engines):
        self.engines = engines
        self.lock = asyncio.Lock()

    async def wait(self) -> None:
        async with self.lock:
            while self.engines.spare() <= 0:
                await asyncio.sleep(0.02)


def summarise(temperature: float, sampled: list[Sampled]) -> Evaluation:
    """Means of the evaluated completions; accuracy +- 1.96 sqrt(p (1 - p) / n)."""
    count = len(sampled)
    right = [sample.reward.verdict is Verdict.CORRECT for sample in sampled]
    accuracy = sum(right) / count
    languages: dict[str, list[bool]] = {}
    for sample, is_right in zip(sampled, right, strict=True):
        languages.setdefault(sample.problem.language, []).append(is_right)
    return Evaluation(
        temperature=temperature,
        problems=count,
        accuracy=accuracy,
        accuracy_half_width=1.96 * math.sqrt(accuracy * (1 - accuracy) / count),
        consistency=sum(bool(sample.reward.consistent) for sample in sampled) / count,
        format=sum(sample.reward.format > 0 for sample in sampled) / count,
        reward=sum(sample.reward.total for sample in sampled) / count,
        tokens=sum(sample.tokens for sample in sampled) / count,
        accuracy_by_language={code: sum(v) / len(v) for code, v in sorted(languages.items())},
        samples=sampled[:8],
    )
