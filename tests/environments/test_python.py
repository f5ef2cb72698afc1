"""The environment "python" in real sandboxes: names are kept, limits hold, episodes repeat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from environments.environment import Observation
from environments.python import Python
from shared.sandbox_settings import Sandbox
from tests.environments.test_tools import PROBLEM, new, turn
from verify.plugins import Failed


def run(*codes: str, seed: int = 3, of_run: Sandbox | None = None, **options: Any) -> list[Observation]:
    async def play() -> list[Observation]:
        await environment.reset(PROBLEM, seed)
        return [await environment.step(turn(("python", {"code": code}))) for code in codes]

    environment = new(Python, of_run, **options)
    return asyncio.run(play())


def texts(*codes: str, **more: Any) -> list[str]:
    return [one.messages[0].text for one in run(*codes, **more)]


def test_names_files_and_random_numbers_are_there_in_the_next_program() -> None:
    drawn = "import random\nx = random.random()\nprint(x)"
    define, write = "def f(n):\n    return n + 1\nf(1)", "open('a', 'w').write('hi')"
    two, number, both, _, hi = texts(define, drawn, "f(3), x", write, "open('a').read()")
    assert (two, both, hi) == ("2\n", f"(4, {number.strip()})\n", "'hi'\n")
    assert texts(drawn) == [number] and texts(drawn, seed=4) != [number]


def test_only_the_output_of_the_last_program_is_shown_and_the_whole_repeats() -> None:
    codes = ["print('first')", "import sys\nprint('error', file=sys.stderr)\nsys.stdout.close()", "print('third')", ""]
    printed = texts(*codes)
    assert printed == texts(*codes) and printed[2:] == ["third\n", "(it printed nothing)"]


def test_a_program_that_raises_keeps_what_it_did() -> None:
    seen = run("x = 1\nx / 0\nx = 2", "x", "raise SystemExit", "x", "y = (")
    error, value, _, again, syntax = (observation.messages[0].text for observation in seen)
    assert "ZeroDivisionError: division by zero" in error and 'File "cell 1", line 2' in error
    assert "program_process" not in error and value == again == "1\n" and "SyntaxError" in syntax
    assert [observation.info["failed_calls"] for observation in seen] == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 2\nwhile True: pass", "took more than 3 s"),
        ("x = 2\nimport time\ntime.sleep(60)", "took more than 3 s"),
        ("x = 2\nimport os\nos._exit(0)", "it left the interpreter"),
        ("x = 2\nprint('a' * 10 ** 6)", "it printed more than 65536 bytes"),
        ("x = 2\nimport os\nos.kill(os.getpid(), 11)", "stopped"),
        ("x = '\0'", "NUL"),
    ],
)
def test_a_program_that_is_stopped_changes_nothing(code: str, told: str) -> None:
    _, stopped, after = run("x = 1", code, "x", sandbox={"test_s": 3.0})
    text = stopped.messages[0].text
    assert told in text and "What it changed is undone" in text and len(text) < 2200
    assert stopped.info["failed_calls"] == 1.0 and after.messages[0].text == "1\n"


def test_the_limits_are_those_of_the_run_unless_options_say_others() -> None:
    slow, of_run = "import time\ntime.sleep(2)\n1", Sandbox(test_s=1.0)
    assert "took more than 1 s" in texts(slow, of_run=of_run)[0]
    assert texts(slow, of_run=of_run, sandbox={"test_s": 9.0}) == ["1\n"]


def test_the_sandbox_is_one() -> None:
    for code in ("import os\nos.listdir('/root')", "import socket\nsocket.socket()", "import os\nos.fork()"):
        assert "PermissionError" in texts(code)[0] or "OSError" in texts(code)[0]
    assert "MemoryError" in texts("[0] * 10 ** 9")[0]


def test_a_host_that_cannot_isolate_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from verify.code import sandbox_pool

    class Refused(sandbox_pool.SandboxHandle):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.isolation = sandbox_pool.Isolation(refused="not here")

        def kill(self) -> None:
            pass

    monkeypatch.setattr(sandbox_pool, "SandboxHandle", Refused)
    with pytest.raises(Failed, match=r"sandbox.isolation = \"none\" in reward or the options of python"):
        run("1", sandbox={"test_s": 3.21})
