"""Where the request for a language stands in a prompt: once, and where training puts it."""

import random

import msgspec
import pytest

from serve.messages import ChatMessage
from serve.reasoning import Splitter
from serve.system_prompts import SYSTEM_PROMPTS, PromptRenderer
from shared.chat import Chat
from shared.errors import ModelError
from shared.languages import WITH_REQUEST, request_for, with_request
from shared.model.model_card import CARD, ModelCard
from shared.sections import Data
from shared.types import Problem
from tests.serve.test_keys import make_key
from tests.shared.test_chat import PLAIN, make_folder
from tests.shared.test_chat_families import FAMILIES, write
from trainer.data.data_source import PromptFormat

PIECES = (
    "What is 6 * 7?", "Wie viele Äpfel hat Anna?", "安娜有几个苹果?", " ", "\n", "\n\n", "  \t", "<|im_end|>",
    "</think>", "<think>", "[INST]", "[/SYSTEM_PROMPT]", "<|eot_id|>", "<end_of_turn>", "<tool_response>", "/no_think",
    "{problem}", "{language}", "{{ messages }}", "\ue0000\ue001", "\ue0007\ue001", "MARK0MARK", "\\boxed{5}",
    "é\u0301\u200b", "$x<y$ & z", request_for("de"), request_for("en"), f"\n\n{request_for('fr')}",
)  # fmt: skip
SETTINGS = ("magistral", "", "Be brief.", "Only {answer} in {language}, after </think>: <|im_end|> & no more.\n")
CODES = ("", *WITH_REQUEST, "sw", "vi")
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "apples"}'}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
QUESTION, LATER = "Wie viele Äpfel hat Anna jetzt, wenn sie drei findet?", "And how many pears does she have then?"
ENGLISH = "Think in English."


def said(role, content, **more):
    """A message."""
    return {"role": role, "content": content, **more}


ASKED = said("user", QUESTION)
MARKED = f"{QUESTION}<eos><user>x</think><system>"
CONVERSATIONS = {
    "a question": ([ASKED], QUESTION),
    "parts": ([said("user", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}])], "AB"),
    "an empty question": ([said("user", LATER), said("user", "")], ""),
    "a system message": ([said("system", ENGLISH), ASKED], QUESTION),
    "a developer's": ([said("developer", ENGLISH), ASKED], QUESTION),
    "both, one of them last": ([said("system", "A"), ASKED, said("developer", ENGLISH)], QUESTION),
    "several turns": ([ASKED, said("assistant", "8"), said("user", LATER)], LATER),
    "two in a row": ([ASKED, said("user", LATER)], LATER),
    "the assistant last": ([ASKED, said("assistant", "It is")], QUESTION),
    "results last": (
        [ASKED, said("assistant", None, tool_calls=[CALL]), said("tool", "8", tool_call_id="c1")], QUESTION,
    ),
    "control tokens": ([said("user", MARKED)], MARKED),
}  # fmt: skip
"""what it is -> messages, and the text of the turn that ends with the request"""


def rendered(render, *arguments):
    """The tokens of a prompt, or why there is none."""
    try:
        return list(render(*arguments))
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_and_serving_render_equal_tokens(tmp_path, name):
    """The same text, system prompt, language and template; rows without a request are those of `off`."""
    folder, arguments, chance = write(tmp_path, name), FAMILIES[name].arguments, random.Random(name)
    for setting in SETTINGS:
        trained = PromptFormat(Chat(folder, "", arguments), Data(system_prompt=setting))
        (folder / CARD).write_bytes(msgspec.json.encode(ModelCard("run", 3, setting, template=arguments)))
        served = PromptRenderer.of_model(folder, "trained")
        for number in range(8):
            text = "".join(chance.choices(PIECES, k=chance.randint(0, 5)))
            code = chance.choice(CODES) if number else ""
            ids = rendered(trained.prompt_of, Problem("p", text, "42", reasoning_language=code))
            assert rendered(served.render, [ChatMessage(role="user", content=text)], code) == ids, (text, code)
            assert isinstance(ids, list), (text, ids)


def requests_in(text):
    """The languages for whose reasoning a prompt asks, as often as it does."""
    return [code for code in (*WITH_REQUEST, "sw") for _ in range(text.count(request_for(code)))]


@pytest.mark.parametrize("system", ["policy", "magistral", "", "Be brief."])
def test_the_request_stands_once_at_the_end_of_the_last_user_turn(serve, system):
    served = serve("x", system_prompt=system, reasoning_language="auto")
    for what, (messages, last) in CONVERSATIONS.items():
        more = {"tools": [TOOL]} if what == "results last" else {}
        for code in ("de", "zh", "pt", "sw", ""):
            ask = {"messages": messages, "reasoning_language": code or "off", **more}
            assert served.client.post("/v1/chat/completions", json=ask).is_success
            prompt = served.engine.prompts[-1]
            assert f"<user>{with_request(last, code)}<eos>" in prompt, what
            assert requests_in(prompt) == [code][: bool(code)], what
            assert ENGLISH not in prompt[prompt.index(f"<user>{last}") :]
        assert "another language" not in prompt, "off asks for none"
        assert ("language" in prompt) == (system == "magistral"), "the task's own, as in training without a request"


def test_without_a_user_the_request_is_the_end_of_the_system_prompt(tmp_path):
    chat = Chat(make_folder(tmp_path, PLAIN))
    for system, expected in (("", request_for("de")), ("Be brief.", f"Be brief.\n\n{request_for('de')}")):
        ids = PromptRenderer(chat, system).render([ChatMessage(role="assistant", content="4")], "de")
        assert chat.tokenizer.decode(ids).startswith(f"<system>{expected}<eos>")


def test_who_asks_for_the_language_changes_nothing_else(serve, tmp_path, capsys):
    path = tmp_path / "keys.json"
    named = make_key(path, capsys, "--name", "a", "--reasoning-language", "it")
    plain = make_key(path, capsys, "--name", "b")
    served = serve("x", keys=str(path), reasoning_language="auto", system_prompt="Be brief.")
    header, accept = {"X-Reasoning-Language": "fr-CA"}, {"Accept-Language": "es;q=0.5, ru"}
    for text, key, headers, body, code, source in (
        (QUESTION, plain, {}, {}, "de", "question"),
        (LATER, plain, accept, {}, "en", "question"),
        ("$2+2$?", plain, accept, {}, "ru", "accept-language"),
        ("$2+2$?", plain, {}, {}, "en", "fallback"),
        (QUESTION, named, {}, {}, "it", "key"),
        (QUESTION, named, header, {}, "fr", "header"),
        (QUESTION, named, header, {"reasoning_language": "pt-BR"}, "pt", "body"),
        (QUESTION, named, header, {"reasoning_language": "auto"}, "de", "question"),
        (QUESTION, named, header, {"reasoning_language": "off"}, None, "off"),
        (QUESTION, plain, {"X-Reasoning-Language": "off"}, {}, None, "off"),
    ):
        ask = {"messages": [said("user", text)], **body}
        headers = {"Authorization": f"Bearer {key}", **headers}
        for endpoint, fields in (
            ("/v1/chat/completions", ask), ("/v1/responses", {"input": text, **body}), ("/tokenize", ask),
        ):  # fmt: skip
            reply = served.client.post(endpoint, json=fields, headers=headers)
            assert reply.is_success, reply.text
            if endpoint == "/tokenize":
                prompt = served.server.prompts.chat.tokenizer.decode(reply.json()["tokens"])
            else:
                prompt, told = served.engine.prompts[-1], reply.json()["reasoning_language"]
                assert (told["requested"], told["source"]) == (code, source)
            assert prompt == f"<system>Be brief.<eos><user>{with_request(text, code or '')}<eos><assistant>"


@pytest.mark.parametrize("code", ["", "de", "pt", "sw"])
def test_in_an_episode_it_stands_behind_the_users_first_words_as_in_training(tmp_path, code):
    folder = make_folder(tmp_path)
    (folder / CARD).write_bytes(msgspec.json.encode(ModelCard("run", 3, "Be brief.", history="whole")))
    served = PromptRenderer.of_model(folder, "trained")
    chat, turn = served.chat, "<think>Is it 8?</think>It is 8."
    trained = PromptFormat(chat, Data(system_prompt="Be brief."))
    ids = trained.prompt_of(Problem("p", QUESTION, "8", reasoning_language=code), also="You play.")
    ids += [*chat.encode(turn), chat.eos_id, *chat.bridge([("user", LATER)])]
    messages = [said("system", "You play."), ASKED, said("assistant", "It is 8.", reasoning="Is it 8?"),
                said("user", LATER)]  # fmt: skip
    system, *rest = [ChatMessage.model_validate(message) for message in messages]
    assert served.render([system, *rest], code) == ids
    text = chat.decode(served.render([ChatMessage(role="tool", content="8"), *rest[1:]], code))
    assert requests_in(text) == [code][: bool(code)]
    assert text.startswith(f"<system>{with_request('Be brief.', code)}<eos>")


def test_the_start_says_of_which_models_it_is_not_known_whether_they_follow_requests(serve, tmp_path, caplog):
    for number, (card, template, language, told) in enumerate((
        (None, PLAIN, "auto", True),
        (ModelCard("run", 3, "magistral"), PLAIN, "de", True),
        (ModelCard("run", 3, "magistral"), PLAIN, "off", False),
        (ModelCard("run", 3, "magistral", language_requests=True), PLAIN, "auto", False),
        (ModelCard("run", 3, ""), PLAIN + "<think></think>", "auto", True),
    )):  # fmt: skip
        config = {"max_position_embeddings": 512, "eos_token_id": 1}
        folder = make_folder(tmp_path / f"model-{number}", template, config=config)
        if card is not None:
            (folder / CARD).write_bytes(msgspec.json.encode(card))
        caplog.clear()
        serve("x", model=str(folder), reasoning_language=language)
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(lines) == told, lines
        if told:
            assert lines[0].startswith(f"model-{number}: ") and "reasoning_language" in lines[0]
            assert ("closes the reasoning" in lines[0]) == (template != PLAIN)


@pytest.mark.parametrize(("blanks", "begun", "inside", "empty"), [
    (("\n", "\n", "\n\n"), "<think>\nP", "\nE\n</think>\n\n", "<think>\n\n</think>\n\n"),
    (("", "", ""), "<think>P", " E</think>", "<think></think>"),
])  # fmt: skip
def test_a_server_writes_tags_as_the_training_did(tmp_path, blanks, begun, inside, empty):
    folder = make_folder(tmp_path / "tiny")
    (folder / CARD).write_bytes(msgspec.json.encode(ModelCard("run", 1, "", tag_blanks=blanks)))
    prompts, texts = PromptRenderer.of_model(folder, "trained"), SYSTEM_PROMPTS["de"]
    assert prompts.begin_reasoning([], "de")[0] == prompts.chat.encode(begun.replace("P", texts.first_words))
    for opened, written in ((True, inside), (False, empty)):
        ended, ids = prompts.end_reasoning("de", Splitter(prompts.tags, opened=opened), begun=opened)
        assert ended == written.replace("E", texts.budget_phrase) and ids == prompts.chat.encode(ended)
