"""Completions scored without processes of checkers and sandboxes: for tests of rewards."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from shared.config import Config
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from verify.code.tests import ProgramVerdict, Status
from verify.math.plain import decide
from verify.reward import CompletionScorer
from verify.scorer import RewardScorer
from verify.verifiers import read_problem

PROBLEM = Problem("1", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8")
THOUGHT = "<think>Tom starts with 5 apples and buys 3 more, so I add these: 5+3=8.</think>"
GOOD, BAD = f"{THOUGHT}The answer is \\boxed{{8}}.", f"{THOUGHT}The answer is \\boxed{{9}}."


class Grader:
    """Answers without SymPy, programs by comparing them with the right one (in boxes: test_code_reward.py)."""

    def __init__(self, fixed: Verdict | None = None) -> None:
        """fixed: the verdict of every answer."""
        self.fixed, self.asked = fixed, 0

    async def check(self, ground_truth: str, answer: str) -> Verdict:
        self.asked += 1
        return self.fixed or decide(ground_truth, answer) or Verdict.UNVERIFIABLE

    async def run(self, problem: Problem, source: str, language: str, group: int) -> ProgramVerdict:
        if (source, language) == ("print(2 * int(input()))\n", "python"):
            return ProgramVerdict(Verdict.CORRECT, [Status.PASSED] * 4)
        return ProgramVerdict(Verdict.WRONG, [Status.PASSED, *[Status.WRONG] * 3], "printed 3")


def settings(**changes: Any) -> RewardWeights:
    return RewardWeights.model_validate({"length_max": 100, "overlong_buffer": 20, **changes})


def rewards(
    problem: Problem | Mapping[str, Any],
    responses: Sequence[str],
    tokens: int = 50,
    *,
    grader: Grader | None = None,
    opened: bool = False,
    **changes: Any,
) -> list[Reward]:
    """Of responses that are scored at once. A mapping is a row of a data file; `changes` are settings of [reward]."""
    read = problem if isinstance(problem, Problem) else read_problem({"problem": "What is it?", **problem}, "row 1")
    grader = grader or Grader()
    scorer = CompletionScorer(settings(**changes), grader, grader)

    async def work() -> list[Reward]:
        return list(await asyncio.gather(*(scorer.score(read, text, tokens, opened=opened) for text in responses)))

    return asyncio.run(work())


def reward(response: str, problem: Problem | Mapping[str, Any] = PROBLEM, *given: Any, **named: Any) -> Reward:
    return rewards(problem, [response], *given, **named)[0]


class Tokens:
    """What RewardScorer uses of a Chat: a token is the number of a text."""

    def __init__(self, texts: Mapping[int, str] | Sequence[str], think_prefix: str = "", control: bool = False):
        self.texts, self.think_prefix, self.think_ids = texts, think_prefix, (1, 2) if control else None

    def encode(self, text: str) -> list[int]:
        assert text == "[THINK][/THINK]"
        return [1, 2]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[number] for number in ids)


def scorer_of(chat: Tokens, most: int = 100, **table: Any) -> RewardScorer:
    """The scorer of a run with these settings of [reward], whose completions have at most so many tokens."""
    config = Config.model_validate({"rollout": {"max_completion_tokens": most}, "reward": table})
    return RewardScorer(SimpleNamespace(now=config), chat)  # type: ignore[arg-type]
