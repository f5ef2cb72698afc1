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
from shared.section import flat
from tests.trainer.objectives.named import EXAMPLES, NAMES, PUBLISHED
from trainer.__main__ import main
from trainer.objectives.advantage import Advantage, GroupFilter, LossAggregation, Scale
from trainer.objectives.importance import Importance
from trainer.objectives.kl import KlGradient, Reference
from trainer.objectives.objective import Need, Objective
from trainer.objectives.page import describe, describe_all, table
from trainer.objectives.registry import OBJECTIVES, complaints, read_objective
from trainer.objectives.tables import kinds_of, tables_of

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
MUST_BE_SET: dict[str, dict[str, Any]] = {"distill": {"teacher": {"kind": "local", "path": "a folder"}}}
"""what a name cannot do without"""


def kinds(union: Any) -> tuple[str, ...]:
    return tuple(kind for each in tables_of(union) for kind in kinds_of(each))


NUMBERS = (
    "clip_low", "clip_high", "importance.low", "importance.high", "ratio_reference.importance.low",
    "ratio_reference.importance.high", "beta", "value_samples", "value_learning_rate", "answer_weight",
    "missing_answer_penalty", "desirable_above",
)  # fmt: skip
VALUES: dict[str, tuple[str, ...]] = {
    "importance.kind": kinds(Importance),
    "advantage.kind": kinds(Advantage),
    "reference.kind": kinds(Reference),
    "advantage.scale": get_args(Scale),
    "loss_aggregation": get_args(LossAggregation),
    "filter_groups_by": get_args(GroupFilter),
    "kl.gradient": get_args(KlGradient),
}


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
def test_a_row_has_source_needs_numbers_and_tests(name: str) -> None:
    row, full = ROWS[name], read_objective(dict(name=NAMES[name], **MUST_BE_SET.get(name, {})))
    assert all(row.values())
    published = re.findall(r"\d{4}\.\d{5}", PUBLISHED[name].source)
    assert re.findall(r"\d{4}\.\d{5}", row["source"]) == published
    assert set(row["needs"].split(", ")) == ({WORDS[need] for need in full.needs} or {"nothing"})
    written = set(map(float, re.findall(r"\d+(?:\.\d+)?", row["formula"])))
    assert {value for number in NUMBERS if (value := flat(full.in_force).get(number))} <= written
    named = [test.split("::") for test in re.findall(r"`([^`]+)`", row["test"])]
    assert named and all(function in functions(file) for file, function in named)


@pytest.mark.parametrize("setting", VALUES)
def test_every_value_of_a_building_block_has_a_row(setting: str) -> None:
    assert sorted(row[f"`{setting}`"].strip("`") for row in table(f"`{setting}`")) == sorted(VALUES[setting])


def test_importance_weights_have_their_bounds() -> None:
    bounds = {
        kind: [field.default for name, field in table_of_kind.model_fields.items() if name in ("low", "high")]
        for table_of_kind in tables_of(Importance)
        for kind in kinds_of(table_of_kind)
    }
    for row in table("`importance.kind`"):
        written = [float(number) for number in row["bounds unless set"].split(", ") if number]
        assert written == bounds[row["`importance.kind`"].strip("`")]


def test_a_loss_reads_what_its_row_says() -> None:
    """The names of a row share a class, and the settings that only its loss reads."""
    rows = {tuple(re.findall(r"`(\w+)`", row["names"])): row for row in table("names")}
    assert sorted(name for names in rows for name in names) == sorted(NAMES)
    general = Objective.model_fields.keys()
    for names, row in rows.items():
        for name in names:
            assert set(re.findall(r"`(\w+)`", row["reads"])) == PUBLISHED[name].kind.model_fields.keys() - general, name


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


@pytest.mark.parametrize("name", NAMES)
def test_an_objective_is_shown_on_one_screen_with_every_value_and_its_source(name: str) -> None:
    lines = list(describe(NAMES[name]))
    assert len(lines) <= 40 and all(len(line) <= 120 for line in lines)
    formula = " ".join(" ".join(lines).split())
    assert " ".join(ROWS[name]["formula"].replace("`", "").split()) in formula
    source, paper = PUBLISHED[name].source, flat(PUBLISHED[name].values)
    values = {line.split()[0]: line for line in lines[lines.index("") + 1 :]}
    shown = flat(read_objective({"name": NAMES[name]}).in_force).keys() - {"name"}
    assert shown <= values.keys()
    assert all((source in values[setting]) == (setting in paper) for setting in shown)


def test_the_command_lists_shows_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(describe_all())
    assert all(re.search(rf"^{re.escape(full)}\b", text, re.MULTILINE) for full in NAMES.values())
    assert main(["objectives", "grp"]) == 2 and "did you mean grpo?" in capsys.readouterr().err
    assert main(["objectives", "gspo"]) == 0 and "clip_low" in capsys.readouterr().out
