"""Where the request for a language stands in a prompt: once, and where training puts it. Nothing that users, documents,
tools and models write switches it off, or fakes its measurement: jailbreaks.jsonl has ways to try."""

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from serve.messages import ChatMessage
from serve.reasoning import Splitter
from serve.system_prompts import SYSTEM_PROMPTS, PromptRenderer
from shared.chat import Chat
from shared.languages import WITH_REQUEST, request_for, with_request
from shared.model.model_card import CARD, ModelCard
from shared.sections import Data
from shared.types import Problem
from tests.serve.test_keys import new_key
from tests.shared.test_chat import PLAIN, make_folder
from tests.shared.test_chat_families import FAMILIES, write
from tests.tables import read_table
from trainer.data.data_source import PromptFormat

PIECES = (
    "Wie viele Äpfel hat Anna?", "安娜有几个苹果?", " ", "\n", "\n\n", "  \t", "<|im_end|>", "</think>",
    "/no_think", "{problem}", "{language}", "{{ messages }}", "\ue0000\ue001", "\ue0007\ue001", "MARK0MARK",
    "\\boxed{5}", "é\u0301\u200b", "$x<y$ & z", request_for("de"), request_for("en"), f"\n\n{request_for('fr')}",
)  # fmt: skip
SETTINGS = ("magistral", "", "Be brief.", "Only {answer} in {language}, after </think>: <|im_end|> & no more.\n")
CODES = ("", *WITH_REQUEST, "sw", "vi")
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
QUESTION, LATER = "Wie viele Äpfel hat Anna jetzt, wenn sie drei findet?", "And how many pears does she have then?"
PEARS = "Ein Korb hat neun Birnen, und zwei davon sind faul. Wie viele gute Birnen liegen noch im Korb?"
IN_ENGLISH = "<think>There are nine pears in the basket and two of them are bad, so we take two away.</think>Seven."
CONTROL = ("<eos>", "<user>", "<assistant>", "<system>", "<think>", "</think>", "<turn>")
REPORT = "The council of the valley met in spring and wrote down how pears are picked, stored and sold. " * 20
LONG = [f"{REPORT}\n\n{PEARS}", PEARS + f"\n\n{request_for('en')}" * 50]


def turn_of(role, content, **more):
    """A message."""
    return {"role": role, "content": content, **more}


@pytest.mark.sampled(8)
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
            ids = trained.prompt_of(Problem("p", text, "42", reasoning_language=code))
            assert served.render([ChatMessage(role="user", content=text)], code) == list(ids), (text, code)


def requests_in(text):
    """The languages for whose reasoning a prompt asks, as often as it does."""
    return [code for code in (*WITH_REQUEST, "sw") for _ in range(text.count(request_for(code)))]


@pytest.mark.parametrize("system", ["policy", "magistral", "", "Be brief."])
def test_the_request_stands_once_at_the_end_of_the_last_user_turn(serve, system):
    served = serve("x", system_prompt=system, reasoning_language="auto")
    for row in read_table("serve/jailbreaks", kind="talks"):
        messages, last = row["messages"], row["last"]
        more = {"tools": [TOOL]} if messages[-1]["role"] == "tool" else {}
        for code in ("de", "zh", "pt", "sw", ""):
            ask = {"messages": messages, "reasoning_language": code or "off", **more}
            assert served.client.post("/v1/chat/completions", json=ask).is_success
            prompt = served.engine.prompts[-1]
            assert f"<user>{with_request(last, code)}<eos>" in prompt, row
            assert requests_in(prompt) == [code][: bool(code)], row
            assert "Think in English." not in prompt[prompt.index(f"<user>{last}") :]
        assert "another language" not in prompt, "off asks for none"
        assert ("language" in prompt) == (system == "magistral"), "the task's own, as in training without a request"


def test_nothing_that_a_request_holds_switches_the_policy_off(serve):
    prompts = []
    served = serve(lambda ids, *_: prompts.append(ids) or IN_ENGLISH, reasoning_language="auto", max_tokens=60_000)
    chat = served.server.prompts.chat
    control = {chat.encode(token)[0] for token in CONTROL}
    long = [{"messages": [{"role": "user", "content": text}], "fields": {}} for text in LONG]
    for row in [*read_table("serve/jailbreaks", kind="asks"), *long]:
        prompts.clear()
        messages, fields = row["messages"], row["fields"]
        body = {"messages": messages, "reasoning_language": "de", **fields}
        reply = served.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, (row, reply.text)
        measured = reply.json()["reasoning_language"]
        assert (measured["requested"], measured["match"]) == ("de", False), row
        text, system = chat.tokenizer.decode(prompts[0]), served.server.prompts.system_prompt("de")
        last = [message["content"] for message in messages if message["role"] == "user"][-1]
        last = last if isinstance(last, str) else "".join(part["text"] for part in last)
        assert text.count(f"<user>{last}\n\n{request_for('de')}<eos>") == 1, row
        assert text.startswith(f"<system>{system}"), "the client's own stand behind it"
        turns = 1 + sum(message["role"] not in ("system", "developer") for message in messages)
        tags = sum(token in control for token in chat.encode(system))
        assert sum(token in control for token in prompts[0]) == 2 * turns + 1 + tags, (row, "the template's only")


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_model_writes_is_measured_and_cannot_be_faked(serve, stream):
    text = ""
    served = serve(lambda *_: text)
    for row in (*read_table("serve/jailbreaks", kind="writes"), *read_table("serve/jailbreaks", kind="hides")):
        text = row["text"]
        if stream:
            events = served.events(PEARS, reasoning_language="de")
            [language] = [event["reasoning_language"] for event in events if "reasoning_language" in event]
        else:
            language = served.ask(PEARS, reasoning_language="de").json()["reasoning_language"]
        assert language["match"] is row["match"] if row["kind"] == "writes" else language["match"] is not True, row


@pytest.mark.parametrize(("system", "requests", "default", "asked"), [
    ("", False, "auto", ""), ("", True, "auto", "de"), ("Be brief.", False, "auto", "de"), ("", False, "de", "de"),
])  # fmt: skip
def test_a_model_that_never_saw_a_request_gets_one_where_somebody_asks(
    serve, model_folder, tmp_path, system, requests, default, asked
):
    """A run without a system prompt: what it was trained on is the question alone, and tools where it had some."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    (folder / CARD).write_bytes(msgspec.json.encode(ModelCard("run", 3, system, language_requests=requests)))
    served = serve("x", reasoning_language=default, system_prompt="trained", model=str(folder))
    reply = served.ask(PEARS).json()["reasoning_language"]
    assert requests_in(served.engine.prompts[-1]) == [asked][: bool(asked)]
    assert (reply["requested"] or "", reply["source"] == "off") == (asked, not asked)
    for body, code in (({"reasoning_language": "fr"}, "fr"), ({"reasoning_language": "auto"}, "de")):
        assert served.ask(PEARS, **body).json()["reasoning_language"]["requested"] == code
        assert requests_in(served.engine.prompts[-1]) == [code]


def test_without_a_user_the_request_is_the_end_of_the_system_prompt(tmp_path):
    chat = Chat(make_folder(tmp_path, PLAIN))
    for system, expected in (("", request_for("de")), ("Be brief.", f"Be brief.\n\n{request_for('de')}")):
        ids = PromptRenderer(chat, system).render([ChatMessage(role="assistant", content="4")], "de")
        assert chat.tokenizer.decode(ids).startswith(f"<system>{expected}<eos>")


def test_who_asks_for_the_language_changes_nothing_else(serve, tmp_path, capsys):
    path = tmp_path / "keys.json"
    named = new_key(path, capsys, "--name", "a", "--reasoning-language", "it")
    plain = new_key(path, capsys, "--name", "b")
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
        ask = {"messages": [turn_of("user", text)], **body}
        headers = {"Authorization": f"Bearer {key}", **headers}
        for endpoint, fields in (
            ("/v1/chat/completions", ask), ("/v1/responses", {"input": text, **body}), ("/tokenize", ask),
        ):  # fmt: skip
            reply = served.client.post(endpoint, json=fields, headers=headers)
            assert reply.is_success, reply.text
            if endpoint == "/tokenize":
                prompt = served.server.prompts.chat.tokenizer.decode(reply.json()["tokens"])
            else:
                prompt, sampled_prompt = served.engine.prompts[-1], reply.json()["reasoning_language"]
                assert (sampled_prompt["requested"], sampled_prompt["source"]) == (code, source)
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
    thoughts = turn_of("assistant", "It is 8.", reasoning="Is it 8?")
    messages = [turn_of("system", "You play."), turn_of("user", QUESTION), thoughts, turn_of("user", LATER)]
    system, *rest = map(ChatMessage.model_validate, messages)
    assert served.render([system, *rest], code) == ids
    text = chat.decode(served.render([ChatMessage(role="tool", content="8"), *rest[1:]], code))
    assert requests_in(text) == [code][: bool(code)]
    assert text.startswith(f"<system>{with_request('Be brief.', code)}<eos>")


def test_the_start_says_of_which_models_it_is_not_known_whether_they_follow_requests(serve, tmp_path, caplog):
    for number, (card, template, language, warned) in enumerate((
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
        assert len(lines) == warned, lines
        if warned:
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
