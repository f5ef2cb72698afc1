"""Commands that know single completions only refuse rows with an environment, which they would grade wrongly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from curate.demonstrations import _read_row
from curate.sample import SampleStage
from evaluation.tasks import make_task
from lab.analyse.surface import Survey
from shared.config import Config
from shared.errors import DataError
from shared.jsonl import Row, read_rows
from shared.types import Completion, Group, Problem, Prompt
from verify.records import read_items

ROW = {"id": "p", "problem": "Find it.", "answer": "7", "environment": "guess", "response": "7"}
REFUSED = r"has the environment 'guess', and .* single completions only: leave such rows out"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file whose second line has an environment."""
    path = tmp_path / "rows.jsonl"
    single = {name: value for name, value in ROW.items() if name != "environment"}
    path.write_text("\n".join(map(json.dumps, ({**single, "id": "q"}, ROW))))
    return path


def test_python_m_verify(rows: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2.*" + REFUSED):
        list(read_items(rows))


def test_demonstrations_of_graded_rows_and_of_a_run(rows: Path) -> None:
    with pytest.raises(DataError, match=REFUSED):
        [_read_row(row.number, row, {}) for row in read_rows(rows) if row.number == 2]
    group = Group(Prompt(0, Problem("p", "?", "", environment="guess"), [1]), [Completion(0, 0, 0)], [None], ["text"])
    row = Row("step_1.jsonl:1", 1, json.loads(msgspec.json.encode(group)))
    with pytest.raises(DataError, match=REFUSED):
        _read_row(0, row, {})


@pytest.mark.parametrize("environment", ["", "guess"])
def test_curation_that_samples(rows: Path, environment: str) -> None:
    """A row names one, or the settings do for all rows."""
    config = Config.model_validate({"environment": {"name": environment}})
    stage: Any = SimpleNamespace(run_config=config, name="difficulty", model_dir=rows.parent)
    place = 1 if environment else 2
    with pytest.raises(DataError, match=rf"rows\.jsonl:{place}: .*python -m curate difficulty samples single"):
        asyncio.run(SampleStage.prepare(stage, list(read_rows(rows)), lambda *at: None))  # type: ignore[arg-type]


def test_an_evaluation_of_a_served_model(rows: Path) -> None:
    settings: Any = SimpleNamespace(ask_form=False)
    first, second = read_rows(rows)
    assert make_task("mine", first, settings).problem.id == "q"
    with pytest.raises(DataError, match=REFUSED):
        make_task("mine", second, settings)


def test_a_surface(rows: Path) -> None:
    survey: Any = SimpleNamespace(config=Config(), options=SimpleNamespace(data=rows, problems=9))
    with pytest.raises(DataError, match=r"--data .*rows\.jsonl: p: .*" + REFUSED):
        Survey.prompts(survey, None)  # type: ignore[arg-type]
