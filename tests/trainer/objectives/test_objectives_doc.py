"""docs/objectives.md says what the settings do: names, sources, needs, numbers, tests, examples."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from shared import settings_file
from shared.config import Config
from shared.errors import ConfigError
from tests.trainer.objectives.named import EXAMPLES, NAMES, PUBLISHED
from trainer.objectives.advantage import GroupFilter, LossAggregation, Scale
from trainer.objectives.importance import BOUNDS, Importance
from trainer.objectives.kl import KlGradient
from trainer.objectives.objective import Advantage, Need, Objective
from trainer.objectives.registry import OBJECTIVES, complaints, read_objective

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
WORDS = {
    Need.REFERENCE: "reference",
    Need.OLD_LOGPROBS: "old log-probs",
    Need.TEACHER: "teacher",
    Need.VALUE: "value head",
    Need.START_VALUES: "soft values",
    Need.GROUPS: "whole groups",
    Need.GROUND_TRUTH: "ground-truth answers",
}
"""of the column `needs`"""
MUST_BE_SET: dict[str, dict[str, Any]] = {"distill": {"teacher": "a folder"}}
"""what a name cannot do without"""
NUMBERS = (
    "clip_low", "clip_high", "importance_low", "importance_high", "beta", "value_samples", "value_learning_rate",
    "answer_weight", "missing_answer_penalty", "desirable_above",
)  # fmt: skip
VALUES: dict[str, tuple[str, ...]] = {
    "importance": get_args(Importance),
    "advantage": get_args(Advantage),
    "scale": get_args(Scale),
    "loss_aggregation": get_args(LossAggregation),
    "filter_groups_by": get_args(GroupFilter),
    "kl_gradient": get_args(KlGradient),
    "reference": get_args(get_args(Objective.model_fields["reference"].annotation)[0]),
}


def table(first: str) -> list[dict[str, str]]:
    """The table whose first column is called so: [rows] of column -> cell."""
    lines = iter(PAGE.splitlines())
    header = next(line for line in lines if line.startswith(f"| {first} |"))
    columns, rows = cells(header), []
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(columns, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def numbers(text: str) -> set[float]:
    return set(map(float, re.findall(r"\d+(?:\.\d+)?", text)))


ROWS = {row[first].strip("`"): row for first in ("name", "example") for row in table(first)}


@cache
def functions(file: str) -> set[str]:
    """Names of the functions of a test file."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_objective_has_a_row() -> None:
    assert sorted(ROWS) == sorted(NAMES) and len(table("name")) == len(OBJECTIVES)
    assert [row["example"].strip("`") for row in table("example")] == EXAMPLES


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_source_and_needs(name: str) -> None:
    published = re.findall(r"\d{4}\.\d{5}", PUBLISHED[name].source)
    assert re.findall(r"\d{4}\.\d{5}", ROWS[name]["source"]) == published
    wanted = {WORDS[need] for need in read_objective(dict(name=NAMES[name], **MUST_BE_SET.get(name, {}))).needs}
    assert set(ROWS[name]["needs"].split(", ")) == (wanted or {"nothing"})


@pytest.mark.parametrize("name", NAMES)
def test_a_formula_has_the_papers_numbers(name: str) -> None:
    full = read_objective(dict(name=NAMES[name], **MUST_BE_SET.get(name, {})))
    assert {value for number in NUMBERS if (value := full.in_force.get(number))} <= numbers(ROWS[name]["formula"])


@pytest.mark.parametrize("name", NAMES)
def test_the_tests_of_a_row_are_there(name: str) -> None:
    named = [one.split("::") for one in re.findall(r"`([^`]+)`", ROWS[name]["test"])]
    assert named and all(function in functions(file) for file, function in named)


@pytest.mark.parametrize("name", NAMES)
def test_no_cell_of_a_row_is_empty(name: str) -> None:
    assert all(ROWS[name].values())


@pytest.mark.parametrize("setting", VALUES)
def test_every_value_of_a_building_block_has_a_row(setting: str) -> None:
    assert sorted(row[f"`{setting}`"].strip("`") for row in table(f"`{setting}`")) == sorted(VALUES[setting])


def test_importance_weights_have_their_bounds() -> None:
    for row in table("`importance`"):
        own = BOUNDS[row["`importance`"].strip("`")]
        written = [float(number) for number in row["bounds unless set"].split(", ") if number]
        assert written == [own[bound] for bound in ("importance_low", "importance_high") if bound in own]


def test_a_loss_reads_what_its_row_says() -> None:
    """The names of a row share a class, and the settings that only its loss reads."""
    rows = {tuple(re.findall(r"`(\w+)`", row["names"])): row for row in table("names")}
    assert sorted(name for names in rows for name in names) == sorted(NAMES)
    general = Objective.model_fields.keys()
    for names, row in rows.items():
        for name in names:
            own = PUBLISHED[name].kind.model_fields.keys() - general - {"importance_low", "importance_high"}
            assert set(re.findall(r"`(\w+)`", row["reads"])) == own | PUBLISHED[name].kind.own - {"importance"}, name


def test_every_need_has_its_price() -> None:
    assert sorted(row["need"] for row in table("need")) == sorted(WORDS.values()) and WORDS.keys() == set(Need)


@pytest.mark.parametrize("example", re.findall(r"```toml example\n(.*?)```", PAGE, re.DOTALL))
def test_an_example_can_be_run(example: str) -> None:
    config = Config.model_validate(tomllib.loads(example))
    assert config.objective and not list(complaints(config))


def test_the_error_on_the_page_is_the_one_that_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_run.toml").write_text('[objective]\nname = "gspo"\nbeta = 0.2\n')
    with pytest.raises(ConfigError) as caught:
        settings_file.load("my_run.toml", complaints=complaints)
    assert f"\nerror: {caught.value}\n" in PAGE
