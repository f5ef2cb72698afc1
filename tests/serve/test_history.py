"""Histories of models trained on episodes: what a client sends back is what the model wrote, token for token."""

import msgspec
import openai
import pytest

from shared.model.model_card import CARD, ModelCard
from tests.shared.test_chat import PLAIN, STRICT, make_folder

DROPPING = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")
OPENING = PLAIN + "<think>{{ '\n' }}"
THINKING = PLAIN + "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
THOUGHTS = "\nIs it more than 8?  \n"
ANSWER = "\n\n 12,\n\nI say. "


def folder(path, template, /, **card):
    """A model's folder, as a run that trained it has written it."""
    config = {"max_position_embeddings": 4096, "eos_token_id": 1}
    made = make_folder(path / "tiny", template, config=config)
    (made / CARD).write_bytes(msgspec.json.encode(ModelCard("run", 3, "Be brief.", **card)))
    return str(made)


def post(served, messages):
    return served.client.post("/v1/chat/completions", json={"messages": messages})


@pytest.mark.parametrize("format", ["both", "openai", "deepseek", "mistral", "inline"])
@pytest.mark.parametrize("template", [PLAIN, DROPPING, OPENING], ids=["keeping", "dropping", "opening"])
def test_a_message_that_comes_back_is_what_was_sampled(serve, tmp_path, template, format):
    ids = []
    turn = f"{'' if template == OPENING else '<think>'}{THOUGHTS}</think>{ANSWER}"
    model = folder(tmp_path, template, history="whole")
    served = serve(lambda prompt, *_: ids.append(prompt) or turn, model=model, reasoning_format=format)
    served.engine.chat = chat = served.server.prompts.chat
    question, more = ({"role": "user", "content": text} for text in ("Find the number.", "More."))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        messages = [question]
        for _ in range(3):
            message = client.chat.completions.create(model="tiny", messages=messages).choices[0].message
            messages += [message.to_dict(), more]
        items = [question]
        for _ in range(3 if format == "both" else 0):
            items += [*(item.to_dict() for item in client.responses.create(model="tiny", input=items).output), more]
    trained = [chat.render("Find the number.", "Be brief.")]
    for _ in range(2):
        trained += [[*trained[-1], *chat.encode(turn), chat.eos_id, *chat.bridge([("user", "More.")])]]
    assert ids == trained * (len(ids) // 3) and len(ids) == (6 if format == "both" else 3)


@pytest.mark.parametrize(
    ("template", "history", "reasoning", "answered", "begin"),
    [(PLAIN, "", "secret", "B", ""), (OPENING, "whole", "", "<think>\n</think>B", "<think>\n")],
)
def test_a_turn_has_no_reasoning_where_none_is_read_or_sent(
    serve, tmp_path, template, history, reasoning, answered, begin
):
    """Other models see none again; where the template opens it, it is closed at once."""
    served = serve("x", model=folder(tmp_path, template, history=history))
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "reasoning": reasoning},
                {"role": "user", "content": "C"}]  # fmt: skip
    assert post(served, messages).is_success
    turns = f"<user>A<eos><assistant>{answered}<eos><user>C<eos><assistant>{begin}"
    assert served.engine.prompts == [f"<system>Be brief.<eos>{turns}"]


def test_strange_histories_are_answered_or_refused(serve, tmp_path):
    served = serve("x", model=folder(tmp_path, DROPPING, history="whole"))
    question = {"role": "user", "content": "A"}
    for messages, status in (
        ([{"role": "assistant", "content": "B"}], 400), ([{"role": "system", "content": "A"}], 400),
        ([question, {"role": "assistant", "content": "B", "reasoning": {"text": 1}}], 200),
        ([question] + [{"role": "tool", "content": "<eos>"}] * 300, 200),
    ):  # fmt: skip
        assert post(served, messages).status_code == status, messages[:2]


def test_requests_and_the_server_choose_the_arguments_of_the_template(serve, tmp_path):
    model = folder(tmp_path, THINKING)
    script = "Thoughts</think>5"
    for settings, usual in (({}, False), ({"template": {"enable_thinking": True}}, True)):
        served = serve(script, model=model, **settings)
        for given in (None, True, False):
            arguments = {} if given is None else {"chat_template_kwargs": {"enable_thinking": given}}
            opened = usual if given is None else given
            expected, end = (("Thoughts", "5"), "<think>") if opened else ((None, script), "</think>")
            message = served.ask(**arguments).json()["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == expected and served.engine.prompts[-1].endswith(end)
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in served.events(**arguments))
            assert text == expected[1]
            asked = {"messages": [{"role": "user", "content": "x"}], **arguments}
            tokens = served.client.post("/tokenize", json=asked).json()["tokens"]
            assert served.server.prompts.chat.decode(tokens).endswith(end)
            output = served.client.post("/v1/responses", json={"input": "x", **arguments}).json()["output"]
            assert [item["type"] for item in output] == ["reasoning", "message"][not opened :]
    for wrong in ({"enable_thinkng": True}, {"messages": "x"}, {"enable_thinking": "<eos>"}, {"eos_token": "x"}):
        error = served.ask(chat_template_kwargs=wrong)
        assert error.status_code == 400 and error.json()["error"]["param"] == "chat_template_kwargs"
        assert model not in error.text, "a path of the server's machine"
    assert served.ask(chat_template_kwargs={"enable_thinking": [1]}).status_code == 400


def test_an_export_says_with_which_template_and_arguments_it_was_trained(serve, tmp_path):
    model = folder(tmp_path, PLAIN, chat_template=THINKING, template={"enable_thinking": True})
    served = serve("Thoughts</think>5", model=model)
    assert served.ask("2+3?").json()["choices"][0]["message"]["reasoning"] == "Thoughts"
    assert served.engine.prompts[-1].endswith("<user>2+3?<eos><assistant><think>")


def test_an_assistant_may_speak_first_where_a_system_prompt_stands_before(serve, tmp_path):
    model = folder(tmp_path, STRICT)
    served = serve("Yes.", model=model)
    messages = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi."}]
    assert post(served, messages).status_code == 200
    assert served.engine.prompts[-1] == "<user>Be brief.<eos><assistant>Hello.<eos><user>Hi.<eos><assistant>"
    error = post(serve("Yes.", model=model, system_prompt=""), messages)
    assert error.status_code == 400 and "wants the user's first" in error.json()["error"]["message"]
    assert model not in error.text, "a path of the server's machine"
