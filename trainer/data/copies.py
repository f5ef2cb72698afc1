"""Problems that are in the data more than once: within a file, and in the problems to validate on as well as in those
to train on. By their texts, whatever the case and the blanks; 8 bytes a problem are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.types import Problem, Verdict
from trainer.data.problem_file import ProblemFile
from verify.math.plain import decide

Keys = NDArray[np.uint64]


def tell_copies(file: ProblemFile) -> None:
    """Add warnings to a file: how many of its problems are copies of earlier ones, and how many have another ground
    truth than an earlier one with the same text."""
    keys = keys_of(file.problems, prefixes=True)
    _, first, place_of = np.unique(keys, return_index=True, return_inverse=True)
    earlier = first[place_of.reshape(-1)]
    again = np.flatnonzero((earlier != np.arange(len(keys))) & (keys != 0))
    pairs = [(file.problems[earlier[place]], file.problems[place]) for place in again]
    differing = [pair for pair in pairs if _differ(*pair)]
    others = {id(problem) for _, problem in differing}
    copies = [(before, problem) for before, problem in pairs if id(problem) not in others]
    if differing:
        before, problem = differing[0]
        shown = f"line {file.lines[before.id]} has {_shown(before)}, line {file.lines[problem.id]} {_shown(problem)}"
        what = f"have the text of an earlier one and another ground truth: {shown}. At most one is right: correct them"
        file.warn([problem for _, problem in differing], what)
    if copies:
        before, problem = copies[0]
        shown = f"line {file.lines[problem.id]} repeats line {file.lines[before.id]}"
        what = f"are copies of earlier ones, and are drawn so much more often: {shown}"
        file.warn([problem for _, problem in copies], what)


def tell_shared(validation: ProblemFile, train: ProblemFile) -> None:
    """Add a warning to the file of problems to validate on: how many of them are among those to train on too."""
    keys, trained = keys_of(validation.problems), keys_of(train.problems)
    shared = np.flatnonzero(np.isin(keys, trained) & (keys != 0))
    if len(shared):
        same = train.problems[int(np.flatnonzero(trained == keys[shared[0]])[0])]
        validation.warn(
            [validation.problems[place] for place in shared],
            f"also stand in {train.setting}, where the first is line {train.lines[same.id]}: accuracy on them says "
            "nothing about new problems. `python -m curate duplicates --against` removes them from the problems to "
            "train on",
        )


def keys_of(problems: Sequence[Problem], prefixes: bool = False) -> Keys:
    """[problems] a hash of each text; 0 for those that it cannot distinguish: an environment may have one text for
    all its problems: these are compared with their ground truths. prefixes: texts with another prefix are others."""
    return np.fromiter((_key(problem, prefixes) for problem in problems), np.uint64, len(problems))


def _key(problem: Problem, prefixes: bool) -> int:
    words = " ".join(problem.text.casefold().split())
    if problem.environment:
        truth = _truth(problem)
        if not truth:
            return 0
        words += f"\n{problem.environment}\n{truth}"
    if prefixes and problem.prefix:
        words += f"\n{problem.prefix}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") or 1


def _truth(problem: Problem) -> str:
    if problem.tests is not None:
        return json.dumps(problem.tests, sort_keys=True, default=str)
    return " ".join(problem.answer.casefold().split())


def _differ(problem: Problem, other: Problem) -> bool:
    """Whether two problems with the same text ask for different answers."""
    if not (problem.verified and other.verified) or _truth(problem) == _truth(other):
        return False
    if problem.tests is not None or other.tests is not None:  # other tests may be of the same program
        return False
    return decide(problem.answer, other.answer) is not Verdict.CORRECT


def _shown(problem: Problem) -> str:
    return repr(problem.answer if len(problem.answer) <= 40 else f"{problem.answer[:40]}...")
