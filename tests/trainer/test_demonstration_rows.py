"""Demonstrations as they are published become the rows that are imitated, or are refused with the place; and commands
that know single completions only refuse rows with an environment, which they would grade wrongly."""

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
from tests.published import SETS
from tests.tables import read_table
from trainer.data.demonstration_rows import to_demonstration
from verify.published import NATIVE
from verify.records import read_items

SYSTEM, ASKED, REPLY = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
TABLE = read_table("trainer/demonstrations")
"""a published row, and the row that is `made` of it or why it is `refused`"""
ROW = {"id": "p", "problem": "Find it.", "answer": "7", "environment": "guess", "response": "7"}


@pytest.mark.parametrize("case", [case for case in TABLE if "made" in case])
def test_each_published_form(case):
    row, name = to_demonstration(case["row"], "rows.jsonl:1")
    assert row == case["made"] and name != NATIVE
    assert to_demonstration(row, "rows.jsonl:1") == (row, NATIVE)


@pytest.mark.parametrize("case", [case for case in TABLE if "refused" in case])
def test_what_is_no_demonstration_is_refused_with_its_place_once(case):
    with pytest.raises(DataError, match=case["refused"]) as error:
        to_demonstration(case["row"], "rows.jsonl:1")
    assert str(error.value).startswith("rows.jsonl:1: ") and str(error.value).count("rows.jsonl:1") == 1


def test_tools_their_calls_and_their_results_are_told_as_in_episodes():
    arguments, result = '{"a": 1}', {"role": "tool", "content": "2"}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
    row, _ = to_demonstration({"messages": [ASKED, calling, result, REPLY], "tools": tools}, "")
    called = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    assert row["completion"] == [{"role": "assistant", "content": called}, result, REPLY]
    assert '{"name": "add", "description": "adds", "parameters": {}}' in row["system"]
    turns = {
        "human": "u",
        "function_call": f'{{"name": "add", "arguments": {arguments}}}',
        "observation": "2",
        "gpt": "a",
    }
    chat = [{"from": role, "value": text} for role, text in turns.items()]
    assert to_demonstration({"conversations": chat}, "")[0]["completion"] == row["completion"]


def test_our_own_form_wins_and_a_conversation_before_a_worked_solution():
    ours = {"problem": "p", "solution": "s", "answer": "2", "messages": [ASKED, REPLY]}
    assert to_demonstration(ours, "") == (ours, NATIVE)
    assert to_demonstration(SETS["numina_cot"][0].row, "")[1] == "a conversation in 'messages'"
    row, _ = to_demonstration(SETS["gsm8k"][0].row, "")
    assert row["answer"] == "13" and row["solution"] == "She has 10 + 3 = 13."


@pytest.mark.parametrize("row", [
    {"messages": [SYSTEM, ASKED, REPLY], "tools": [], "system": "s", "history": [], "prompt": "u"},
    {"instruction": "u", "input": "x", "output": "a", "history": []}, {"prompt": "u", "completion": "a"},
], ids=["messages", "instruction", "prompt"])  # fmt: skip
def test_a_cell_of_any_type_is_read_or_refused_with_the_place(row):
    odd: list[Any] = [None, 1, "", "x", "[", "{}", [], {}, [None], [[]], {"a": 1}, [{"role": 1}], [{"from": None}]]
    for column in row:
        for cell in odd:
            try:
                to_demonstration(row | {column: cell}, "rows.jsonl:1")
            except DataError as error:
                assert str(error).startswith("rows.jsonl:1: "), error


def rows(folder: Path) -> Path:
    """A file whose second line has an environment."""
    single = {name: value for name, value in ROW.items() if name != "environment"}
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ({**single, "id": "q"}, ROW))))
    return folder / "rows.jsonl"


def demonstration_of_a_run(path: Path) -> None:
    group = Group(Prompt(0, Problem("p", "?", "", environment="guess"), [1]), [Completion(0, 0, 0)], [None], ["text"])
    _read_row(0, Row("step_1.jsonl:1", 1, json.loads(msgspec.json.encode(group))), {})


def surface(path: Path) -> None:
    survey: Any = SimpleNamespace(config=Config(), options=SimpleNamespace(data=path, problems=9))
    Survey.prompts(survey, None)


def evaluation_of_a_served_model(path: Path) -> None:
    settings: Any = SimpleNamespace(ask_form=False)
    first, second = read_rows(path)
    assert make_task("mine", first, settings).problem.id == "q"
    make_task("mine", second, settings)


@pytest.mark.parametrize("command", [
    lambda path: list(read_items(path)), lambda path: _read_row(2, list(read_rows(path))[1], {}),
    demonstration_of_a_run, evaluation_of_a_served_model, surface,
], ids=["verify", "graded rows", "a run", "evaluation", "surface"])  # fmt: skip
def test_commands_for_single_completions_refuse_environments(tmp_path, command):
    path, message = rows(tmp_path), "has the environment 'guess', and .* single completions only: leave such rows out"
    with pytest.raises(DataError, match=message):
        command(path)


@pytest.mark.parametrize(("environment", "line"), [("", 2), ("guess", 1)])
def test_curation_that_samples_refuses_environments_also_of_settings(tmp_path, environment, line):
    config = Config.model_validate({"environment": {"name": environment}})
    stage: Any = SimpleNamespace(run_config=config, name="difficulty", model_dir=tmp_path)
    with pytest.raises(DataError, match=rf"rows\.jsonl:{line}: .*python -m curate difficulty samples single"):
        asyncio.run(SampleStage.prepare(stage, list(read_rows(rows(tmp_path))), lambda *at: None))
