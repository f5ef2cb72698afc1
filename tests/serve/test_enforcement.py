"""Planted models under every enforcement: what is measured, what strict lets pass, and what streams say of it."""

import json
from itertools import product
from typing import NamedTuple

import pytest

from serve.reasoning_language import REFUSALS, measure
from shared.chat import Chat
from shared.tool_calls import call_text
from tests.serve.test_chat import ENGLISH, FRENCH, QUESTION, WRONG
from tests.shared import test_chat as chats
from tests.tables import read_table

MISMATCH, CUT, EMPTY = REFUSALS
BEGIN, END = "Bon, réfléchissons étape par étape.", "J'ai assez réfléchi, je réponds maintenant."
WAYS = [(api, stream, choices) for api, stream, choices in product(("chat", "responses"), (False, True), (1, 2))
        if api == "chat" or choices == 1]  # fmt: skip
RETRY, STRICT = ({"reasoning_language": "fr", "reasoning_language_enforcement": name} for name in ("retry", "strict"))


class Planted(NamedTuple):
    """A model: what it writes, and what is to be said of it."""

    reasoning: str | None
    """None: it writes no reasoning, and closes one that is begun for it"""
    answer: str
    match: bool | None = False
    refused: str = ""
    """by strict, with this code"""
    tries: int = 1
    """under retry and strict"""
    max_tokens: int = 1000
    blocked: bool | None = None
    """match where its reasoning is closed before it begins"""

    def plant(self, served):
        """Let the engine of a server be this model."""
        decode = served.engine.chat.tokenizer.decode
        served.engine.script = lambda ids, sampling, call: self.script(decode(ids, skip_special_tokens=False))

    def script(self, prompt):
        """What it writes behind a prompt."""
        opened, closed = prompt.rfind("THINK]"), prompt.rfind("/THINK]")
        if opened < 0:
            opened, closed = prompt.rfind("think>"), prompt.rfind("/think>")
        begun, ended = prompt.rfind("<assistant>") < opened, prompt.rfind("<assistant>") < closed
        open_tag, close_tag = ("[THINK]", "[/THINK]") if "[THINK]" in prompt else ("<think>", "</think>")
        if ended:
            return self.answer
        if self.reasoning is None:
            return f"{close_tag}{self.answer}" if begun else self.answer
        return f"{'' if begun else open_tag}{self.reasoning}{close_tag}{self.answer}"


MODELS = {row.pop("name"): Planted(**row) for row in read_table("serve/enforcement")}


def asked(served, api, stream, max_tokens=1000, effort="", **body):
    """Status, code of an error, and the language and the text of each reasoning."""
    if api == "responses":
        body |= {"input": QUESTION, "max_output_tokens": max_tokens, "stream": stream}
        reply = served.client.post("/v1/responses", json=body | ({"reasoning": {"effort": effort}} if effort else {}))
        whole = reply.json() if not stream else json.loads(reply.text.splitlines()[-2].removeprefix("data: "))
        assert not stream or whole["type"] in ("response.completed", "response.incomplete", "response.failed")
        whole = whole["response"] if stream else whole
        if whole.get("error"):
            return reply.status_code, whole["error"]["code"], []
        parts = [part["text"] for item in whole["output"] if item["type"] == "reasoning" for part in item["content"]]
        return 200, "", [(whole["reasoning_language"], "".join(parts))]
    body |= {"max_tokens": max_tokens, **({"reasoning_effort": effort} if effort else {})}
    if not stream:
        reply = served.ask(QUESTION, **body)
        if not reply.is_success:
            return reply.status_code, reply.json()["error"]["code"], []
        choices = reply.json()["choices"]
        return 200, "", [(choice["reasoning_language"], choice["message"]["reasoning"] or "") for choice in choices]
    events = served.events(QUESTION, **body)
    if "error" in events[-1]:
        return 200, events[-1]["error"]["code"], []
    languages = {event["choices"][0]["index"]: event.get("reasoning_language") for event in events}
    texts = dict.fromkeys(sorted(languages), "")
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["delta"].get("reasoning") or ""
    return 200, "", [(languages[index], text) for index, text in texts.items()]


@pytest.mark.parametrize("name", MODELS)
def test_only_the_models_words_count(serve, name):
    served = serve("")
    MODELS[name].plant(served)
    for enforcement in ("prompt", "constrain", "prefill", "retry", "strict"):
        check_ways(served, MODELS[name], enforcement)


def check_ways(served, model, enforcement):
    """Ask in several ways, under strict in every one, and compare with what is to be said of the model."""
    ways = [(None, way) for way in WAYS[:: 1 if enforcement == "strict" else 2]]
    ends = [(60, WAYS[3]), (60, WAYS[4]), (0, WAYS[0]), (0, WAYS[5])]
    for budget, (api, stream, choices) in ways + ends:
        match, refused = (model.blocked, model.refused) if budget == 0 else (model.match, model.refused)
        if budget == 0 and refused != EMPTY and model.max_tokens == 1000:
            refused = MISMATCH if match is False else "" if model.answer.strip() else EMPTY
        if model.max_tokens < 1000 and budget is not None:
            continue  # it would not be cut there
        body = {"reasoning_language": "fr", "reasoning_language_enforcement": enforcement}
        body |= {} if budget is None else {"effort": "none"} if budget == 0 else {"thinking_token_budget": budget}
        body |= {"n": choices} if choices > 1 else {}
        status, code, told = asked(served, api, stream, model.max_tokens, **body)
        way = (enforcement, budget, api, stream, choices)
        if enforcement == "strict" and refused:
            assert (status, code) == (200 if stream else 422, refused), way
            continue
        assert (status, code, len(told)) == (200, "", choices), way
        for language, text in told:
            assert language["match"] is match, way
            if budget is None:
                assert language["tries"] == (model.tries if enforcement in ("retry", "strict") else 1), way
            server = language.get("prefilled", [])
            begun = budget != 0 and (enforcement == "prefill" or language["tries"] == 2)
            assert (BEGIN in server, END in server) == (begun, END in text), way
            for phrase in server:
                assert phrase in text, way
                text = text.replace(phrase, "", 1)
            assert measure(text, model.answer, "fr").match is match, "whoever measures again finds the same"


@pytest.mark.parametrize("tags", ["control", "opened", "closed"])
def test_tags_do_not_matter(serve, tmp_path, monkeypatch, tags):
    template = chats.PLAIN
    if tags == "control":
        monkeypatch.setattr(chats, "SPECIAL", [*chats.SPECIAL, "[THINK]", "[/THINK]"])
    blank = "{{ '\n' }}"
    template += {"control": "", "opened": f"<think>{blank}", "closed": f"<think>{blank}</think>{blank}"}[tags]
    folder = chats.make_folder(tmp_path / "m", template, config={"max_position_embeddings": 4096, "eos_token_id": 1})
    served = serve("", model=str(folder), reasoning_language="fr")
    served.engine.chat = Chat(folder)
    for model, enforcement in product(MODELS.values(), ("prefill", "strict")):
        model.plant(served)
        match, refused = (model.blocked, "") if tags == "closed" else (model.match, model.refused)
        if tags == "closed" and not model.answer.strip():
            refused = EMPTY
        elif tags == "closed":
            refused = MISMATCH if match is False else CUT if len(model.answer) > model.max_tokens else ""
        status, code, told = asked(served, "chat", False, model.max_tokens, reasoning_language_enforcement=enforcement)
        if enforcement == "strict" and refused:
            assert (status, code) == (422, refused), model
        else:
            assert status == 200 and told[0][0]["match"] is match, (model, enforcement, code)


def test_tags_alone_are_no_answer_and_short_answers_are(serve):
    served = serve("")
    for text in ("</think>", "<think>", "</think>\n</think>", "<think></think> <think>", "</think>\u200b\n", "<eos>",
                 "[/THINK]", "<think></think><answer> </answer>", "</tool_call>", "<|END_THINKING|>",
                 "</think><user>", " <assistant>\n"):  # fmt: skip
        served.engine.script = lambda *_, text=text: text
        for api, stream in product(("chat", "responses"), (False, True)):
            assert asked(served, api, stream, **STRICT)[:2] == (200 if stream else 422, EMPTY), (text, api, stream)
            assert asked(served, api, stream, reasoning_language="fr")[:2] == (200, ""), (text, api, stream)
    for text in ("5", "\\boxed{5}", "+", "✓", "<b>", "x</think>", "</thinking>", "🙂"):
        served.engine.script = lambda *_, text=text: text
        assert served.ask(QUESTION, **STRICT).is_success, text


@pytest.mark.parametrize("choices", [1, 3])
def test_a_model_that_follows_requests_is_asked_again(serve, choices):
    served = serve(WRONG, **RETRY)
    served.server.prompts.trained = True
    served.ask(QUESTION, seed=7, n=choices, temperature=0.5)
    assert len(set(served.engine.prompts)) == 1, "nothing is put into its mouth"
    assert len({sampling.seed for sampling in served.engine.samplings}) == 2 * choices, "each try has a seed of its own"
    served.engine.prompts.clear()
    served.ask(QUESTION, temperature=0)
    assert [BEGIN in prompt for prompt in served.engine.prompts] == [False, True], "the same prompt would say the same"


def test_where_there_is_no_reasoning_the_answer_is_held_back_and_sampled_again(serve):
    served = serve(lambda prompt, sampling, call: ENGLISH if call % 2 == 0 else FRENCH, **STRICT)
    body = served.ask(QUESTION, reasoning_effort="none", seed=7).json()
    assert body["choices"][0]["message"]["content"] == FRENCH and body["choices"][0]["message"]["reasoning"] is None
    told = body["reasoning_language"]
    assert (told["match"], told["tries"], told["first_try"]["detected"]) == (True, 2, "en")
    assert len(set(served.engine.prompts)) == 1 and [sampling.seed for sampling in served.engine.samplings] == [7, 8]
    events = served.events(QUESTION, reasoning_effort="none")
    assert "three apples" not in json.dumps([event["choices"][0]["delta"] for event in events])
    reply = served.ask(QUESTION, reasoning_effort="none", temperature=0)
    assert reply.status_code == 422 and len(served.engine.prompts) == 5, "a second try would say the same"


def test_a_phrase_that_ends_the_reasoning_hides_no_other_language(serve):
    """The held-back reasoning is English, and the French phrase behind it is the server's."""
    served = serve("", **RETRY)
    Planted("We add two.", FRENCH).plant(served)
    told = served.ask(QUESTION, thinking_token_budget=40).json()["reasoning_language"]
    assert (told["match"], told["tries"], told["detected"]) == (None, 1, None)
    Planted(ENGLISH, FRENCH).plant(served)
    told = served.ask(QUESTION, thinking_token_budget=60).json()["reasoning_language"]
    assert (told["match"], told["tries"], told["detected"]) == (False, 2, "en")
    assert END not in told["first_try"]["reasoning"] and told["first_try"]["detected"] == "en"
    assert told["prefilled"] == [BEGIN, END]


def test_calls_are_no_words_of_an_answer(serve):
    served = serve(call_text("find_the_weather", '{"place": "the capital of the country"}'), **STRICT)
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "find_the_weather", "parameters": parameters}}
    for effort in ("none", "high"):
        body = served.ask(QUESTION, tools=[tool], reasoning_effort=effort).json()
        assert body["choices"][0]["finish_reason"] == "tool_calls", body
        assert (body["reasoning_language"]["match"], body["reasoning_language"]["tries"]) == (None, 1)


def test_a_tag_that_the_model_has_begun_stays_its_text(serve):
    served = serve("", reasoning_language="fr")
    Planted(f"{FRENCH} </thi no", "Cinq.").plant(served)
    budget = len(FRENCH) + 1 + len("</thi") + 1  # tokens are bytes, and the tag is one more
    body = served.ask(QUESTION, thinking_token_budget=budget).json()
    assert body["choices"][0]["message"]["reasoning"] == f"{FRENCH} </thi\n{END}"
    assert body["reasoning_language"]["prefilled"] == [END]


def test_a_refusal_names_the_text_that_was_written_and_what_ended_it(serve):
    served = serve("", **STRICT)
    invented = "zorblat quvnix frembulon dwarpish glonk vexuli krandor plimsy ortwag zunfel bixtom gralvo"
    for reasoning, answer, body, words in (
        (None, ENGLISH, {"reasoning_effort": "none"}, "answer 100% en"), (FRENCH, ENGLISH, {}, "answer 100% en"),
        (f"{FRENCH} Потом ещё книги.", "", {}, "reasoning fr with words of other languages"),
        (FRENCH, invented, {}, "answer in no language that is known"),
        (FRENCH, "", {}, "the model ended without an answer"),
        (FRENCH, "END of it.", {"stop": "END"}, "stop 'END' was reached without an answer"),
    ):  # fmt: skip
        Planted(reasoning, answer).plant(served)
        message = served.ask(QUESTION, **body).json()["error"]["message"]
        assert message.startswith(words) if "without" in words else f"in any try: {words}; try" in message
