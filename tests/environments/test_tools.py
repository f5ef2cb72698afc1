"""Tools of environments: schemas from signatures, calls found as serving finds them, errors told and counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from environments.environment import Action, Environment, Observation, made
from environments.tools import MOST_CALLS, ToolEnvironment, ToolError, cut, tool
from shared.errors import ConfigError
from shared.sandbox_settings import Sandbox
from shared.sections import RewardWeights
from shared.tool_calls import call_text
from shared.types import Problem, Verdict
from shared.user_file import run_file
from verify.plugins import Failed

PROBLEM = Problem("p", "What is 1 + 2?", "3")


async def no_grade(problem: Problem, text: str) -> Any:
    raise AssertionError("nothing is graded here")


def new(kind: type[Environment], of_run: Sandbox | None = None, /, **options: Any) -> Any:
    """of_run: the settings of its sandboxes."""
    return made(kind, "one", options, no_grade, RewardWeights(sandbox=of_run or Sandbox()))


def turn(*calls: tuple[str, dict[str, Any]], before: str = "I see.") -> Action:
    text = "\n".join([before, *(call_text(name, json.dumps(arguments)) for name, arguments in calls)])
    return Action(text, text)


@tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


class Sums(ToolEnvironment):
    """Two tools as methods, one as a function."""

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two whole numbers,
        or one and 1."""
        return a + b

    @tool
    async def fail(self, how: str) -> str:
        """Fail."""
        raise {"tool": ToolError("it is not there"), "bug": KeyError("x"), "crash": Failed(Verdict.CRASH, "gone")}[how]

    def tools(self) -> Any:
        return [*super().tools(), double]


def test_tools_are_known_by_their_signatures() -> None:
    """tests/environments/test_serving.py compares how they are told."""
    environment = new(Sums)
    asyncio.run(environment.reset(PROBLEM, 1))
    rest, integer = {"additionalProperties": False, "type": "object"}, {"type": "integer"}
    assert [tuple(definition) for definition in environment.definitions] == [
        ("add", "Add two whole numbers,\nor one and 1.",
         {**rest, "properties": {"a": integer, "b": {"default": 1, **integer}}, "required": ["a"]}),
        ("fail", "Fail.", {**rest, "properties": {"how": {"type": "string"}}, "required": ["how"]}),
        ("double", "Double a number.", {**rest, "properties": {"number": integer}, "required": ["number"]}),
    ]  # fmt: skip


def played(*actions: Action, **options: Any) -> list[Observation]:
    async def play() -> list[Observation]:
        await environment.reset(PROBLEM, 1)
        return [await environment.step(action) for action in actions]

    environment = new(Sums, **options)
    return asyncio.run(play())


def test_calls_are_run_in_order_and_a_turn_without_one_ends_the_episode() -> None:
    calls = ("add", {"a": 1, "b": 2}), ("double", {"number": 4}), ("add", {"a": 1})
    first, last = played(turn(*calls), turn(before="It is 3."))
    assert [(message.role, message.text) for message in first.messages] == [("tool", "3"), ("tool", "8"), ("tool", "2")]
    assert not first.done and first.info == {"tool_calls": 3.0, "failed_calls": 0.0} and Sums.verified
    assert last.done and not last.messages and last.info == {"tool_calls": 0.0, "failed_calls": 0.0}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (call_text("subtract", "{}"), "there is no tool 'subtract'; there is add, double, fail"),
        ("<tool_call>\n{add(1, 2)}\n</tool_call>", "the call is not JSON"),
        ('<tool_call>\n{"name": "add"}\n</tool_call>', 'an object with "name" and "arguments"'),
        (call_text("add", "[1, 2]"), "the arguments of a call are an object"),
        (call_text("add", '{"a": "1"}'), "the arguments of add do not fit: a: Input should be a valid integer"),
        (call_text("add", '{"b": 1}'), "a: Field required"),
        (call_text("add", '{"a": 1, "c": 1}'), "c: Extra inputs are not permitted"),
        (call_text("add", '{"a": 1}').removesuffix("</tool_call>"), "the call has no </tool_call>"),
        ("<tool_call></tool_call>", "the call is not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is not JSON"),
        (call_text("fail", '{"how": "tool"}'), "Error: it is not there"),
        (call_text("fail", '{"how": "bug"}'), "Error: KeyError: 'x'"),
    ],
)
def test_a_call_that_is_wrong_is_told_and_counted(text: str, told: str) -> None:
    [answer] = played(Action(text, text))
    [message] = answer.messages
    assert message.role == "tool" and message.text.startswith("Error: ") and told in message.text
    assert not answer.done and answer.info == {"tool_calls": 1.0, "failed_calls": 1.0}


def test_what_fails_for_good_costs_the_episode() -> None:
    with pytest.raises(Failed, match="gone"):
        played(turn(("fail", {"how": "crash"})))


def test_calls_in_the_reasoning_are_none_and_there_are_not_too_many() -> None:
    call = call_text("add", '{"a": 1}')
    thought, many = played(Action(f"<think>{call}</think>3", "3"), turn(*[("add", {"a": 1})] * 40))
    excess = f"Error: a turn has at most {MOST_CALLS} calls"
    assert thought.done and [message.text for message in many.messages] == ["2"] * MOST_CALLS + [excess]


def test_long_results_are_cut_in_their_middle() -> None:
    assert cut("a" * 50 + "b" * 50, 100) == "a" * 50 + "b" * 50
    assert cut("a" * 1000 + "b" * 1000, 100) == "a" * 50 + "\n[... 1900 characters left out ...]\n" + "b" * 50
    [answer] = played(turn(("subtract" * 10_000, {})), result_characters=100)
    assert len(answer.messages[0].text) < 200


@pytest.mark.parametrize(
    ("definition", "told"),
    [
        ("f(a: int) -> int:\n    return a", "has no docstring"),
        ("f(a) -> int:\n    'x'", "needs a type for its argument a"),
        ("f(*a: int) -> int:\n    'x'", "takes no \\*"),
        ("f(a: 'Nothing') -> int:\n    'x'", "annotations of the tool f are not understood"),
    ],
)
def test_a_tool_without_types_or_docstring_is_refused_where_it_stands(
    tmp_path: Path, definition: str, told: str
) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(f"from environments.tools import ToolEnvironment, tool\n@tool\ndef {definition}\n")
    with pytest.raises(ConfigError, match=told):
        run_file(file, "environment.plugins")
