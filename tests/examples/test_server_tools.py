"""The example "server_tools": real sandboxes, and a scripted engine behind real HTTP."""

import json
from typing import Any

import httpx
import pytest

from examples.server_tools.chat import chat, main, tools_of
from serve.engine import SamplingParameters
from serve.settings import load
from shared.errors import ConfigError, ModelError
from shared.tool_calls import call_text
from tests.serve.conftest import Serve, Served, model_folder, serve  # noqa: F401 - fixtures

QUESTION = "What is 1 + 2?"
SHORT = {"sandbox": {"test_s": 1.0}}


def program(code: str) -> str:
    return call_text("python", json.dumps({"code": code}))


async def ask(served: Served, options: dict[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=f"{served.url}/v1", timeout=60) as server:
        return await chat(server, tools_of("python", options or {}), QUESTION, **more)


def saying(*turns: str) -> Any:
    """A script of turns, each after some reasoning, which is sampled on its own; the last turn is repeated."""
    left = list(turns)

    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        if sampling.through:
            return "<think>I let a program add.\n</think>"
        return left.pop(0) if len(left) > 1 else left[0]

    return script


async def test_calls_are_run_until_a_turn_has_none(serve):  # noqa: F811
    served = serve(saying(program("x = 1 + 2\nx"), program("x + 1"), "It is 4."))
    _, *messages = await ask(served)
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["3\n", "4\n"]
    assert messages[-1]["content"] == "It is 4." and messages[-1]["reasoning"] == "I let a program add."
    assert '"name": "python"' in served.engine.prompts[0] and "3\n" in served.engine.prompts[2]


@pytest.mark.parametrize(("code", "result"), [
    ("while True: pass", "Error: stopped: took more than 1 s"),
    ("open('/etc/shadow')", "Error: the program raised an exception"),
])  # fmt: skip
async def test_a_hostile_program_gets_a_result_and_no_more(serve, code, result):  # noqa: F811
    messages = await ask(serve(saying(program(code), "Done.")), SHORT)
    assert result in messages[2]["content"] and messages[3]["content"] == "Done."


async def test_turns_have_an_end_and_errors_are_told(serve):  # noqa: F811
    served = serve(saying(program("1")))
    assert len(await ask(served, turns=2)) == 5
    with pytest.raises(ModelError, match="status 404, .*there is no model"):
        await ask(served, model="other")
    with pytest.raises(ConfigError, match="the environment guess has no tools"):
        tools_of("guess", {})


def test_its_command_shows_calls_and_results(serve, capsys):  # noqa: F811
    arguments = ["python", QUESTION, "--turns", "1", "--url"]
    assert main([*arguments, f"{serve(saying(program('1'), 'One.')).url}/v1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == '[call] python {"code": "1"}\n[result] 1\n\n' and "raise --turns" in shown.err
    assert main([*arguments, f"{serve(saying('One.')).url}/v1"]) == 0 and capsys.readouterr().out == "One.\n"
    assert main([*arguments, f"{serve(saying(' ')).url}/v1"]) == 2
    assert "last turn is empty after its reasoning: ask again" in capsys.readouterr().err
    assert main(["pythn", QUESTION]) == 2 and "did you mean python?" in capsys.readouterr().err
    assert main([*arguments, "http://127.0.0.1:1"]) == 2


@pytest.mark.parametrize("name", ["tools", "tool_turns", "tool_result_tokens"])
def test_settings_of_the_servers_own_tools_name_this_example(tmp_path, monkeypatch, name):
    """Given as an option in either form, from a program, by a variable, or in a file."""
    (tmp_path / "serve.toml").write_text(f'{name} = "3"\n')
    option, variable = f"--{name.replace('_', '-')}", (f"MAESTRALE_{name.upper()}", "3")
    file = ("MAESTRALE_CONFIG", str(tmp_path / "serve.toml"))
    for arguments, values, environment in (([option, "3"], {}, ()), ([f"--{name}=3"], {}, ()), ([], {name: "3"}, ()),
                                           ([], {}, (variable,)), ([], {}, (file,))):  # fmt: skip
        with monkeypatch.context() as patch:
            for key, value in environment:
                patch.setenv(key, value)
            repair = f"(?i){name.replace('_', '.')}: the server runs no tools; .*examples/server_tools/README.md"
            with pytest.raises(ConfigError, match=repair):
                load(arguments, **values)
