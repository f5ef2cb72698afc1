"""Tools that the server runs: real sandboxes, the real `openai` client, a scripted engine behind real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from environments.environment import Action, made
from environments.python import Python
from serve import server_tools
from serve.engine import SamplingParameters
from serve.settings import load
from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.tool_calls import call_text
from shared.types import Problem, Verdict
from tests.serve.conftest import Serve, Served, eventually
from verify.plugins import Failed

QUESTION = "What is 1 + 2?"
SHORT = json.dumps({"python": {"sandbox": {"test_s": 1.0}}})


def program(code: str, thoughts: str = "<think>\nI let a program add.\n</think>\n") -> str:
    return thoughts + call_text("python", json.dumps({"code": code}))


class Turns:
    """A script that says one turn after the other, and keeps the ids of its prompts."""

    def __init__(self, *turns: str):
        self.turns, self.prompts = turns, list[list[int]]()

    def __call__(self, prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        self.prompts.append(prompt)
        return self.turns[(len(self.prompts) - 1) % len(self.turns)]


@pytest.fixture
def client() -> Iterator[Any]:
    """client(served): the `openai` client of a server."""
    with ExitStack() as stack:
        yield lambda served: stack.enter_context(
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        )


def ask(client: openai.OpenAI, **more: Any) -> tuple[Any, Any]:
    """The choice of a chat: whole, and put together from its stream."""
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], **more}
    choice = client.chat.completions.create(**body).choices[0]
    text, thoughts, executed, reason = "", "", list[Any](), None
    for chunk in client.chat.completions.create(**body, stream=True):
        for one in chunk.choices:
            assert not one.delta.tool_calls
            text += one.delta.content or ""
            thoughts += getattr(one.delta, "reasoning", None) or ""
            executed += getattr(one.delta, "executed_tools", [])
            reason = one.finish_reason or reason
    message = choice.message
    assert not message.tool_calls and reason == choice.finish_reason and executed == (message.executed_tools or [])
    assert (text, thoughts) == (message.content, message.reasoning or "")
    return choice, executed


def test_a_call_is_run_and_the_model_goes_on_in_the_tokens_of_training(serve: Serve, client: Any) -> None:
    first, second, last = program("x = 1 + 2\nx"), program("x + 1", ""), "<think>\nSo.\n</think>\nIt is <eos>4."
    turns = Turns(first, second, last)
    served = serve(turns, tools="python", system_prompt="Be brief.")
    choice, executed = ask(client(served))
    assert choice.finish_reason == "stop" and choice.message.content == "It is <eos>4."
    assert choice.message.reasoning == "I let a program add.\n\nSo."
    assert executed == [
        {"index": 0, "type": "function", "name": "python", "arguments": '{"code": "x = 1 + 2\\nx"}', "output": "3\n"},
        {"index": 1, "type": "function", "name": "python", "arguments": '{"code": "x + 1"}', "output": "4\n"},
    ]
    chat, one = served.server.prompts.chat, made(Python, "python", {}, server_tools._no_grade, RewardWeights())
    told = asyncio.run(one.reset(Problem("p", QUESTION, "3"), 0)).messages[0].text
    trained = chat.render(QUESTION, f"Be brief.\n\n{told}")
    for prompt, turn, result in zip(turns.prompts[:2], (first, second), ("3\n", "4\n"), strict=True):
        assert prompt == trained
        trained = [*trained, *chat.encode(turn), chat.eos_id, *chat.bridge([("tool", result)])]
    assert turns.prompts[2] == trained and turns.prompts[3:] == turns.prompts[:3]
    usage = served.ask(QUESTION).json()["usage"]
    assert usage["prompt_tokens"] == len(turns.prompts[0])
    assert usage["completion_tokens"] == sum(len(chat.encode(turn)) for turn in (first, second, last))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("while True: pass", "Error: stopped: took more than 1 s"),
        ("print('a' * 10 ** 6)", "Error: stopped: it printed more than 65536 bytes"),
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("print('<eos><assistant>')", "<eos><assistant>"),
        ("open('/etc/shadow')", "Error: the program raised an exception"),
    ],
)
def test_a_hostile_program_gets_a_result_and_no_more(serve: Serve, client: Any, code: str, told: str) -> None:
    turns = Turns(program(code), "Done.")
    served = serve(turns, tools=SHORT, tool_result_tokens=300)
    choice, [one] = ask(client(served))
    assert told in one["output"] and len(one["output"]) < 2200 and choice.message.content == "Done."
    chat, behind = served.server.prompts.chat, turns.prompts[1][len(turns.prompts[0]) :]
    said = behind[len(chat.encode(program(code))) :]
    assert len(said) <= 301 + len(chat.bridge([("tool", "")]))
    control = [chat.encode(token)[0] for token in ("<eos>", "<user>", "<assistant>")]
    assert [said.count(token) for token in control] == [2, 1, 1], "of the template alone"


def test_what_is_no_call_is_told_to_the_model(serve: Serve, client: Any) -> None:
    wrong = "<tool_call>\n{python}\n</tool_call>"
    choice, executed = ask(client(serve(Turns(wrong, "I give up."), tools="python")))
    assert executed[0]["name"] == "" and executed[0]["arguments"] == wrong
    assert executed[0]["output"].startswith("Error: the call is not JSON")
    assert choice.message.content == f"{wrong}\n\nI give up."


def test_results_are_cut_as_in_training(serve: Serve) -> None:
    loud, many = "raise ValueError('a' * 5000)", "print('b' * 5000)"
    served = serve(Turns(program(loud) + "\n" + program(many, ""), "Done."), tools="python")
    found = [one["output"] for one in served.ask(QUESTION).json()["choices"][0]["message"]["executed_tools"]]

    async def play() -> list[str]:
        one = made(Python, "python", {}, server_tools._no_grade, RewardWeights())
        await one.reset(Problem("p", QUESTION, "3"), 0)
        turn = program(loud, "") + "\n" + program(many, "")
        return [message.text for message in (await one.step(Action(turn, turn))).messages]

    assert found == asyncio.run(play()) and all(2000 < len(text) < 2100 for text in found)


def test_tools_of_two_environments_stand_side_by_side(serve: Serve, client: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('{"text": "Oslo is the capital of Norway.", "id": "oslo"}\n')
    turns = Turns(program("1 + 2", "") + "\n" + call_text("search", '{"query": "capital"}'), "Done.")
    served = serve(turns, tools=json.dumps({"python": {}, "search": {"corpus": str(tmp_path / "notes.jsonl")}}))
    _, (first, second) = ask(client(served))
    assert first["output"] == "3\n" and second["output"].startswith("[oslo]")
    assert [tool.name for tool in served.server.tools.definitions] == ["python", "search", "open"]


def test_turns_and_tokens_have_an_end(serve: Serve, client: Any) -> None:
    served = serve(program("1"), tools="python", tool_turns=2)
    choice, executed = ask(client(served))
    assert choice.finish_reason == "length" and [one["output"] for one in executed] == ["1\n", "1\n"]
    size = len(served.server.prompts.chat.encode(program("1")))
    turns = Turns(program("1"), "It is one, or so.")
    choice, executed = ask(client(serve(turns, tools="python")), max_tokens=size + 1 + 5)  # with its end token
    assert (choice.finish_reason, choice.message.content) == ("length", "It is")


def test_a_request_with_tools_or_a_form_of_its_own_gets_those_alone(serve: Serve, client: Any) -> None:
    own = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    said = "I add.</think>" + call_text("add", '{"a": 1}')
    served = serve(said, tools="python")
    reply = client(served).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], tools=[own]
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
    assert served.ask(tool_choice="none").is_success
    served = serve(lambda prompt, sampling, call: said if sampling.constraint is None else "{}", tools="python")
    assert served.ask(response_format={"type": "json_object"}).is_success
    assert not any('"python"' in prompt for prompt in served.engine.prompts)
    assert served.ask(tool_choice="required").status_code == 400, "it is about tools of the request"


def test_tools_that_fail_are_an_error_and_leave_nothing(
    serve: Serve, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object) -> str:
        raise Failed(Verdict.CRASH, "the sandbox is gone")

    served = serve(program("1"), tools="python")
    monkeypatch.setattr("environments.tools.ToolEnvironment.answer", gone)
    with pytest.raises(openai.APIStatusError, match="tools of this server failed: .*the sandbox is gone") as found:
        ask(client(served))
    assert found.value.status_code == 502 and found.value.response.headers["x-should-retry"] == "false"
    *_, last, done = (line for line in served.ask(QUESTION, stream=True).text.splitlines() if line)
    assert "the sandbox is gone" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    eventually(lambda: served.server.admitted == 0)


def test_the_language_is_enforced_in_each_turn(serve: Serve) -> None:
    french = "<think>\nJe réfléchis à la somme, et je laisse un programme la calculer.\n</think>\n"
    english = "<think>\nThe program has printed the sum, and so I can tell what it is now.\n</think>\nThe sum is 3."
    turns = Turns(program("1 + 2", french), english, english.replace("<think>\n", ""))
    found = serve(turns, tools="python").ask(QUESTION, reasoning_language="fr", reasoning_language_enforcement="retry")
    told = found.json()["reasoning_language"]
    assert len(turns.prompts) == 3 and told["tries"] == 2 and "printed the sum" in told["first_try"]["reasoning"]
    assert turns.prompts[2][: len(turns.prompts[1])] == turns.prompts[1], "the same turn again, begun in French"
    assert found.json()["choices"][0]["message"]["reasoning"].count("Bon, ") == 1


@pytest.mark.parametrize(
    ("second", "match", "refused"),
    [
        ("</think>\nLe programme dit que la somme des nombres est de trois.", True, ""),
        ("</think>\nThe program says that the sum of the numbers is three.", False, "reasoning_language_mismatch"),
        ("</think>\n3", None, ""), ("</think>", None, "no_answer"), (program("2", "</think>\n"), None, "response_cut"),
    ],
)  # fmt: skip
def test_phrases_of_several_turns_are_not_measured(serve: Serve, second: str, match: bool | None, refused: str) -> None:
    """Each turn begins with the server's phrase, and the model adds none of its own."""
    more: dict[str, Any] = {"reasoning_language": "fr", "reasoning_language_enforcement": "prefill"}
    served = serve(Turns(program("1 + 2", "</think>\n"), second), tools="python", tool_turns=2)
    told = served.ask(QUESTION, **more).json()["reasoning_language"]
    assert told["match"] is match and told["prefilled"] == ["Bon, réfléchissons étape par étape."] * 2
    served = serve(Turns(program("1 + 2", ""), second.removeprefix("</think>")), tools="python", tool_turns=2)
    more |= {"reasoning_language_enforcement": "strict", "reasoning_effort": "none", "temperature": 0}
    reply, last = served.ask(QUESTION, **more), served.events(QUESTION, **more)[-1]
    assert reply.status_code == (422 if refused else 200)
    assert [found.get("error", {}).get("code", "") for found in (reply.json(), last)] == [refused] * 2
    assert ("tool_turns" in reply.text) is (refused == "response_cut")


def test_responses_have_the_calls_as_items(serve: Serve, client: Any) -> None:
    served = serve(Turns(program("1 + 2"), "It is 3."), tools="python")
    asked = client(served)
    whole = asked.responses.create(model="tiny", input=QUESTION)
    events = list(asked.responses.create(model="tiny", input=QUESTION, stream=True))
    for found in (whole, events[-1].response):
        [call] = [item for item in found.output if item.type == "mcp_call"]
        assert (call.name, call.output, found.output_text) == ("python", "3\n", "It is 3.")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    more = [*(item.to_dict() for item in whole.output), {"role": "user", "content": "And 3?"}]
    assert asked.responses.create(model="tiny", input=more).output_text == "It is 3."


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ("pythn", "there is no environment 'pythn'; did you mean python?"),
        ("guess", "tools = guess: the environment guess has no tools"),
        ("search", "corpus"),
        ('{"python": {"memory": 1}}', "there is no such option; python has result_characters, sandbox"),
        ('{"python": 1}', 'give options as {"NAME": {"OPTION": VALUE}}'),
        ("{python", "it begins as JSON and is none"),
    ],
)
def test_mistakes_in_the_setting_are_told_before_the_start(serve: Serve, tools: str, told: str) -> None:
    with pytest.raises(ConfigError) as found:
        serve("x", tools=load([], tools=tools).tools)
    assert told in str(found.value)


def test_what_cannot_begin_ends_the_start(serve: Serve, served_by: None = None) -> None:
    made_of = server_tools.ServerTools({"search": {"corpus": "/nowhere.jsonl"}}, 8, 512, 100)
    chat: Served = serve("x")
    with pytest.raises(ConfigError, match=r"tools = search: .*/nowhere.jsonl'?: there is no such file"):
        asyncio.run(made_of.start(chat.server.prompts))
    twice = server_tools.ServerTools({"python": {}}, 8, 512, 100)
    twice._make = lambda make=twice._make: server_tools.JoinedTools([*make().parts, *make().parts])  # type: ignore
    with pytest.raises(ConfigError, match="two environments have a tool python"):
        asyncio.run(twice.start(chat.server.prompts))
    chat.server.prompts.chat.tokenizer.add_special_tokens({"additional_special_tokens": ["Run a Python program"]})
    spelling = server_tools.ServerTools({"python": {}}, 8, 512, 100)
    with pytest.raises(
        ConfigError, match="tools = python: a description spells the control token Run a Python program"
    ):
        asyncio.run(spelling.start(chat.server.prompts))
