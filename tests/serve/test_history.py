"""Histories of models trained on episodes: what a client sends back is what the model wrote, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from serve.engine import SamplingParameters
from shared.model.model_card import CARD, ModelCard
from tests.serve.conftest import Serve
from tests.shared.test_chat import PLAIN, STRICT, make_folder

DROPPING = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")
OPENING = PLAIN + "<think>{{ '\n' }}"
THOUGHTS = "\nIs it more than 8?  \n"
ANSWER = "\n\n 12,\n\nI say. "


def folder(path: Path, template: str, history: str) -> Path:
    config = {"max_position_embeddings": 4096, "eos_token_id": 1}
    made = Path(make_folder(path / "tiny", template, config=config))
    (made / CARD).write_bytes(msgspec.json.encode(ModelCard("run", 3, "Be brief.", history=history)))
    return made


@pytest.mark.parametrize("format", ["both", "openai", "deepseek", "mistral", "inline"])
@pytest.mark.parametrize("template", [PLAIN, DROPPING, OPENING], ids=["keeping", "dropping", "opening"])
def test_a_message_that_comes_back_is_what_was_sampled(
    serve: Serve, tmp_path: Path, template: str, format: str
) -> None:
    ids: list[list[int]] = []
    opening = "<think>\n" if template == OPENING else "<think>"
    said = f"{opening if template != OPENING else ''}{THOUGHTS}</think>{ANSWER}"

    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        ids.append(prompt)
        return said

    served = serve(script, model=str(folder(tmp_path, template, "whole")), reasoning_format=format)
    served.engine.chat = chat = served.server.prompts.chat
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Find the number."}]
        for _ in range(2):
            message = client.chat.completions.create(model="tiny", messages=messages).choices[0].message
            messages += [message.to_dict(), {"role": "user", "content": "More."}]
        client.chat.completions.create(model="tiny", messages=messages)
        trained = chat.render("Find the number.", "Be brief.")
        for prompt in ids:
            assert prompt == trained
            trained = [*trained, *chat.encode(said), chat.eos_id, *chat.bridge([("user", "More.")])]
        if format != "both":
            return
        ids.clear()
        items: list[Any] = [{"role": "user", "content": "Find the number."}]
        for _ in range(3):
            found = client.responses.create(model="tiny", input=items)
            items += [*(item.to_dict() for item in found.output), {"role": "user", "content": "More."}]
        assert ids[2] == trained[: len(ids[2])] and len(ids[2]) > len(ids[1])


def test_other_models_see_no_reasoning_again(serve: Serve, tmp_path: Path) -> None:
    served = serve("x", model=str(folder(tmp_path, PLAIN, "")))
    messages = [
        {"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "reasoning": "secret"},
        {"role": "user", "content": "C"},
    ]  # fmt: skip
    assert served.client.post("/v1/chat/completions", json={"messages": messages}).is_success
    assert served.engine.prompts == ["<system>Be brief.<eos><user>A<eos><assistant>B<eos><user>C<eos><assistant>"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "B"}],
        [{"role": "system", "content": "A"}],
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "reasoning": {"text": 1}}],
        [{"role": "user", "content": "A"}] + [{"role": "tool", "content": "<eos>"}] * 300,
    ],
)
def test_strange_histories_are_answered_or_refused(
    serve: Serve, tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    served = serve("x", model=str(folder(tmp_path, DROPPING, "whole")))
    reply = served.client.post("/v1/chat/completions", json={"messages": messages})
    assert reply.status_code == (200 if messages[0]["role"] == "user" else 400)


THINKING = PLAIN + "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"


def test_requests_and_the_server_choose_the_arguments_of_the_template(serve: Serve, tmp_path: Path) -> None:
    made = folder(tmp_path, THINKING, "")
    script = "Thoughts</think>5"
    for settings, usual in (({}, False), ({"template": {"enable_thinking": True}}, True)):
        served = serve(script, model=str(made), **settings)
        for given in (None, True, False):
            arguments = {} if given is None else {"chat_template_kwargs": {"enable_thinking": given}}
            opened = usual if given is None else given
            message = served.ask(**arguments).json()["choices"][0]["message"]
            wanted = ("Thoughts", "5") if opened else (None, script)
            assert (message["reasoning"], message["content"]) == wanted
            assert served.engine.prompts[-1].endswith("<think>" if opened else "</think>")
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in served.events(**arguments))
            assert text == wanted[1]
            tokens = served.client.post(
                "/tokenize", json={"messages": [{"role": "user", "content": "x"}], **arguments}
            ).json()["tokens"]
            assert served.server.prompts.chat.decode(tokens).endswith("<think>" if opened else "</think>")
            out = served.client.post("/v1/responses", json={"input": "x", **arguments}).json()["output"]
            assert [item["type"] for item in out] == ["reasoning", "message"][not opened :]
        for wrong in ({"enable_thinkng": True}, {"messages": "x"}, {"enable_thinking": "<eos>"}, {"eos_token": "x"}):
            error = served.ask(chat_template_kwargs=wrong)
            assert error.status_code == 400 and error.json()["error"]["param"] == "chat_template_kwargs"
            assert str(served.server.prompts.chat.folder) not in error.text, "a path of the server's machine"
        assert served.ask(chat_template_kwargs={"enable_thinking": [1]}).status_code == 400


def test_an_export_says_with_which_template_and_arguments_it_was_trained(serve: Serve, tmp_path: Path) -> None:
    made = folder(tmp_path, PLAIN, "")
    card = ModelCard("run", 3, "Be brief.", chat_template=THINKING, template={"enable_thinking": True})
    (made / CARD).write_bytes(msgspec.json.encode(card))
    served = serve("Thoughts</think>5", model=str(made))
    assert served.ask("2+3?").json()["choices"][0]["message"]["reasoning"] == "Thoughts"
    assert served.engine.prompts[-1].endswith("<user>2+3?<eos><assistant><think>")


def test_conversations_of_agents_are_answered_where_the_template_wants_roles_in_turn(
    serve: Serve, tmp_path: Path
) -> None:
    served = serve("Yes.", model=str(folder(tmp_path, STRICT, "")))
    for roles in ("user user", "user assistant tool user", "user assistant assistant user", "user system user", "user"):
        messages = [{"role": role, "content": f"Turn {place}."} for place, role in enumerate(roles.split())]
        said = served.client.post("/v1/chat/completions", json={"messages": messages})
        assert said.status_code == 200, said.text
        assert all(message["content"] in served.engine.prompts[-1] for message in messages)
    messages = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi."}]
    assert served.client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert served.engine.prompts[-1] == "<user>Be brief.<eos><assistant>Hello.<eos><user>Hi.<eos><assistant>"
    served = serve("Yes.", model=str(folder(tmp_path, STRICT, "")), system_prompt="")
    error = served.client.post("/v1/chat/completions", json={"messages": messages})
    assert error.status_code == 400 and "wants the user's first" in error.json()["error"]["message"]
    assert str(served.server.prompts.chat.folder) not in error.text, "a path of the server's machine"
