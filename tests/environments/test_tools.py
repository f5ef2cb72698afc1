"""Tools of environments: schemas from signatures, calls found as serving finds them, errors told and counted; and the
environment "python" in real sandboxes: names are kept, limits hold, episodes repeat."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import pytest

from environments.environment import Action, Environment, Observation, made
from environments.python import Python
from environments.tools import MOST_CALLS, ToolEnvironment, ToolError, cut, tool
from shared.errors import ConfigError
from shared.sandbox_settings import Sandbox
from shared.sections import RewardWeights
from shared.tool_calls import call_text
from shared.types import Problem, Verdict
from shared.user_file import run_file
from tests.tables import read_table
from verify.code import sandbox_pool
from verify.plugins import Failed

PROBLEM = Problem("p", "What is 1 + 2?", "3")
DEEP = {"text": "<tool_call>" + "[" * 100_000 + "</tool_call>", "told": "the call is not JSON"}


async def no_grade(problem: Problem, text: str) -> Any:
    raise AssertionError("nothing is graded here")


def new(kind: type[Environment], of_run: Sandbox | None = None, /, **options: Any) -> Any:
    """of_run: the settings of its sandboxes."""
    return made(kind, "one", options, no_grade, RewardWeights(sandbox=of_run or Sandbox()))


def turn(*calls: tuple[str, dict[str, Any]], before: str = "I see.") -> Action:
    text = "\n".join([before, *(call_text(name, json.dumps(arguments)) for name, arguments in calls)])
    return Action(text, text)


def played(
    kind: type[Environment], *actions: Action, seed: int = 1, of_run: Sandbox | None = None, **options: Any
) -> list[Observation]:
    async def play() -> list[Observation]:
        await environment.reset(PROBLEM, seed)
        return [await environment.step(action) for action in actions]

    environment = new(kind, of_run, **options)
    return asyncio.run(play())


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


def test_tools_are_known_by_their_signatures():
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


def test_calls_are_run_in_order_and_a_turn_without_one_ends_the_episode():
    calls = ("add", {"a": 1, "b": 2}), ("double", {"number": 4}), ("add", {"a": 1})
    first, last = played(Sums, turn(*calls), turn(before="It is 3."))
    assert [(message.role, message.text) for message in first.messages] == [("tool", "3"), ("tool", "8"), ("tool", "2")]
    assert not first.done and first.info == {"tool_calls": 3.0, "failed_calls": 0.0} and Sums.verified
    assert last.done and not last.messages and last.info == {"tool_calls": 0.0, "failed_calls": 0.0}


@pytest.mark.parametrize("row", [*read_table("environments/wrong_calls"), DEEP])
def test_a_call_that_is_wrong_is_told_and_counted(row):
    [answer] = played(Sums, Action(row["text"], row["text"]))
    [message] = answer.messages
    assert message.role == "tool" and message.text.startswith("Error: ") and row["told"] in message.text
    assert not answer.done and answer.info == {"tool_calls": 1.0, "failed_calls": 1.0}


def test_what_fails_for_good_costs_the_episode():
    with pytest.raises(Failed, match="gone"):
        played(Sums, turn(("fail", {"how": "crash"})))


def test_calls_in_the_reasoning_are_none_and_there_are_not_too_many():
    call = call_text("add", '{"a": 1}')
    thought, many = played(Sums, Action(f"<think>{call}</think>3", "3"), turn(*[("add", {"a": 1})] * 40))
    excess = f"Error: a turn has at most {MOST_CALLS} calls"
    assert thought.done and [message.text for message in many.messages] == ["2"] * MOST_CALLS + [excess]


def test_long_results_are_cut_in_their_middle():
    assert cut("a" * 50 + "b" * 50, 100) == "a" * 50 + "b" * 50
    assert cut("a" * 1000 + "b" * 1000, 100) == "a" * 50 + "\n[... 1900 characters left out ...]\n" + "b" * 50
    [answer] = played(Sums, turn(("subtract" * 10_000, {})), result_characters=100)
    assert len(answer.messages[0].text) < 200


@pytest.mark.parametrize(("definition", "told"), [
    ("f(a: int) -> int:\n    return a", "has no docstring"),
    ("f(a) -> int:\n    'x'", "needs a type for its argument a"), ("f(*a: int) -> int:\n    'x'", "takes no \\*"),
    ("f(a: 'Nothing') -> int:\n    'x'", "annotations of the tool f are not understood"),
])  # fmt: skip
def test_a_tool_without_types_or_docstring_is_refused_where_it_stands(tmp_path, definition, told):
    file = tmp_path / "plugin.py"
    file.write_text(f"from environments.tools import ToolEnvironment, tool\n@tool\ndef {definition}\n")
    with pytest.raises(ConfigError, match=told):
        run_file(file, "environment.plugins")


def run(*codes: str, **options: Any) -> list[Observation]:
    return played(Python, *(turn(("python", {"code": code})) for code in codes), **options)


def texts(*codes: str, **options: Any) -> list[str]:
    return [observation.messages[0].text for observation in run(*codes, **options)]


def test_names_files_and_random_numbers_are_there_in_the_next_program():
    drawn = "import random\nx = random.random()\nprint(x)"
    define, write = "def f(n):\n    return n + 1\nf(1)", "open('a', 'w').write('hi')"
    two, number, both, _, hi = texts(define, drawn, "f(3), x", write, "open('a').read()")
    assert (two, both, hi) == ("2\n", f"(4, {number.strip()})\n", "'hi'\n")
    assert texts(drawn) == [number] and texts(drawn, seed=4) != [number]


def test_only_the_output_of_the_last_program_is_shown_and_the_whole_repeats():
    codes = ["print('first')", "import sys\nprint('error', file=sys.stderr)\nsys.stdout.close()", "print('third')", ""]
    printed = texts(*codes)
    assert printed == texts(*codes) and printed[2:] == ["third\n", "(it printed nothing)"]


def test_a_program_that_raises_keeps_what_it_did():
    seen = run("x = 1\nx / 0\nx = 2", "x", "raise SystemExit", "x", "y = (")
    error, value, _, again, syntax = (observation.messages[0].text for observation in seen)
    assert "ZeroDivisionError: division by zero" in error and 'File "cell 1", line 2' in error
    assert "program_process" not in error and value == again == "1\n" and "SyntaxError" in syntax
    assert [observation.info["failed_calls"] for observation in seen] == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(("code", "told"), [
    ("x = 2\nwhile True: pass", "took more than 1.5 s"),
    ("x = 2\nimport time\ntime.sleep(60)", "took more than 1.5 s"),
    ("x = 2\nimport os\nos._exit(0)", "it left the interpreter"),
    ("x = 2\nprint('a' * 10 ** 6)", "it printed more than 65536 bytes"),
    ("x = 2\nimport os\nos.kill(os.getpid(), 11)", "stopped"), ("x = '\0'", "NUL"),
])  # fmt: skip
def test_a_program_that_is_stopped_changes_nothing(code, told):
    _, stopped, after = run("x = 1", code, "x", sandbox={"test_s": 1.5})
    text = stopped.messages[0].text
    assert told in text and "What it changed is undone" in text and len(text) < 2200
    assert stopped.info["failed_calls"] == 1.0 and after.messages[0].text == "1\n"


def test_the_limits_are_those_of_the_run_unless_options_say_others():
    slow, of_run = "import time\ntime.sleep(2)\n1", Sandbox(test_s=1.0)
    assert "took more than 1 s" in texts(slow, of_run=of_run)[0]
    assert texts(slow, of_run=of_run, sandbox={"test_s": 9.0}) == ["1\n"]


def test_the_sandbox_is_one():
    for code in ("import os\nos.listdir('/root')", "import socket\nsocket.socket()", "import os\nos.fork()"):
        assert "PermissionError" in texts(code)[0] or "OSError" in texts(code)[0]
    assert "MemoryError" in texts("[0] * 10 ** 9")[0]


def test_a_host_that_cannot_isolate_is_refused_by_name(monkeypatch):
    refused = Mock(isolation=sandbox_pool.Isolation(refused="not here"))
    monkeypatch.setattr(sandbox_pool, "SandboxHandle", lambda *arguments, **named: refused)
    with pytest.raises(Failed, match=r"sandbox.isolation = \"none\" in reward or the options of python"):
        run("1", sandbox={"test_s": 3.21})
