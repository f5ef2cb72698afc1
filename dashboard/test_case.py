"""A completion of a run as the source of a test that grades it again and expects the same reward."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import msgspec

from dashboard.group import read_group
from dashboard.growing_file import read_small
from dashboard.run_folder import RunFolder
from shared.config import Config
from shared.types import Group, Problem

MOST_CHARACTERS = 200_000
EMPTY = Problem("", "", "")


class NoTestCase(LookupError):
    """A completion cannot be made into a test; the message says why."""


def write_test(run: RunFolder, step: int, line: int, sample: int) -> str:
    """The source of a test, to be pasted into a file of tests. Raises LookupError, NoTestCase."""
    try:
        group = msgspec.convert(read_group(run, step, line), Group)
        completion, reward, text = group.completions[sample], group.rewards[sample], group.texts[sample]
    except (ValueError, IndexError) as error:
        raise NoTestCase("the record is not whole, or of another version") from error
    problem = group.prompt.problem
    if reward is None or not reward.verdict.graded:
        raise NoTestCase("it has no grade that a test could expect")
    if reward.format is None:
        raise NoTestCase("its environment graded it, and a test of the verifiers cannot repeat that")
    if group.turns and (policy := [turn.text for turn in group.turns[sample] if turn.role == "policy"]):
        text = policy[-1]  # only the last turn is graded
    if len(text) > MOST_CHARACTERS:
        raise NoTestCase(f"its text has more than {MOST_CHARACTERS:,} characters")
    given = {
        field: value for field in Problem.__struct_fields__
        if (value := getattr(problem, field)) != getattr(EMPTY, field) or field in ("id", "text", "answer")
    }  # fmt: skip
    settings = _reward_settings(run)
    name = re.sub(r"\W+", "_", problem.id, flags=re.ASCII).strip("_")[:60] or "a_problem"
    lines = [
        "import pytest",
        "",
        "from shared.config import Config",
        "from shared.types import Problem",
        "from verify.reward import score",
        "",
        "",
        f"def test_{name}_step_{step}_completion_{sample}() -> None:",
        f"    problem = Problem({', '.join(f'{field}={value!r}' for field, value in given.items())})",
        f"    completion = {text!r}",
        f"    settings = Config.model_validate({settings!r})",
        f"    reward = score(problem, completion, settings, tokens={completion.sampled_tokens})",
        f"    assert reward.verdict == {reward.verdict.value!r}, reward.reason",
        f"    assert reward.total == pytest.approx({reward.total!r}, abs=1e-6)",
        "",
    ]
    return "\n".join(lines)


def _reward_settings(run: RunFolder) -> dict[str, Any]:
    """The run's settings that rewards depend on, where they are not the defaults. Raises NoTestCase for settings that
    this version does not understand."""
    try:
        config = Config.model_validate(tomllib.loads(read_small(run.folder / "config.toml").decode()))
    except (ValueError, RecursionError) as error:
        raise NoTestCase("the run's settings are not of this version") from error
    reward = config.reward.model_dump(mode="json", exclude_defaults=True)
    length = config.rollout.model_dump(include={"max_completion_tokens"}, exclude_defaults=True)
    return ({"reward": reward} if reward else {}) | ({"rollout": length} if length else {})
