"""Planted models under every enforcement: what is measured, what strict lets pass, and what streams say of it."""

import json
from itertools import product
from typing import NamedTuple

import pytest

from serve.reasoning_language import REFUSALS, measure
from shared.tool_calls import call_text
from tests.serve.test_chat import ENGLISH, FRENCH, QUESTION, WRONG
from tests.shared import test_chat as chats
from tests.tables import read_table

MISMATCH, CUT, EMPTY = REFUSALS
BEGIN, END = "Bon, réfléchissons étape par étape.", "J'ai assez réfléchi, je réponds maintenant."
WAYS = [*product(["chat"], (1, 2), (False, True)), ("responses", 1, False)]
"""interface, choices, whether streamed"""
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


def asked(served, api="chat", stream=False, max_tokens=1000, effort="", **body):
    """Status, code of an error, and the language and the text of each reasoning."""
    if api == "responses":
        body |= {"input": QUESTION, "max_output_tokens": max_tokens, "reasoning": {"effort": effort or None}}
        reply = served.client.post("/v1/responses", json=body)
        whole = reply.json()
        if whole["error"]:
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


def check(served, model, enforcement, way=WAYS[0], budget=None, **body):
    """Ask in a way, and compare with what is to be said of the model. budget: of the reasoning; 0: it is closed."""
    match, refused = (model.blocked, model.refused) if budget == 0 else (model.match, model.refused)
    if budget == 0 and refused != EMPTY and model.max_tokens == 1000:
        refused = MISMATCH if match is False else "" if model.answer.strip() else EMPTY
    if model.max_tokens < 1000 and budget is not None:
        return  # it would not be cut there
    api, choices, stream = way
    body |= {"reasoning_language": "fr", "reasoning_language_enforcement": enforcement}
    body |= {"n": choices} if choices > 1 else {}
    status, code, languages = asked(served, api, stream, model.max_tokens, **body)
    scene = (model, enforcement, way, budget)
    if enforcement == "strict" and refused:
        assert (status, code) == (200 if stream else 422, refused), scene
        return
    assert (status, code, len(languages)) == (200, "", choices), scene
    for language, text in languages:
        assert language["match"] is match, scene
        if budget is None:
            assert language["tries"] == (model.tries if enforcement in ("retry", "strict") else 1), scene
        server = language.get("prefilled", [])
        begun = budget != 0 and (enforcement == "prefill" or language["tries"] == 2)
        assert (BEGIN in server, END in server) == (begun, END in text), scene
        for phrase in server:
            assert phrase in text, scene
            text = text.replace(phrase, "", 1)
        assert measure(text, model.answer, "fr").match is match, "whoever measures again finds the same"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MODELS)
def test_only_the_models_words_count(serve, name):
    served = serve("")
    MODELS[name].plant(served)
    for enforcement in ("prompt", "constrain", "prefill", "retry", "strict"):
        for way in WAYS[:: 1 if enforcement == "strict" else 2]:
            check(served, MODELS[name], enforcement, way)
        for way in WAYS[3:5]:
            check(served, MODELS[name], enforcement, way, 60, thinking_token_budget=60)
        for way in WAYS[:2]:
            check(served, MODELS[name], enforcement, way, 0, effort="none")


@pytest.mark.parametrize("tags", ["control", "opened", "closed"])
def test_tags_do_not_matter(serve, tmp_path, monkeypatch, tags):
    if tags == "control":
        monkeypatch.setattr(chats, "SPECIAL", [*chats.SPECIAL, "[THINK]", "[/THINK]"])
    begun = {"control": "", "opened": "<think>{{ '\n' }}", "closed": "<think>{{ '\n' }}</think>{{ '\n' }}"}[tags]
    config = {"max_position_embeddings": 4096, "eos_token_id": 1}
    folder = chats.make_folder(tmp_path / "m", chats.PLAIN + begun, config=config)
    served = serve("", model=str(folder))
    served.engine.chat = served.server.prompts.chat
    for model, enforcement in product(MODELS.values(), ("prefill", "strict")):
        model.plant(served)
        check(served, model, enforcement, budget=0 if tags == "closed" else None)


def test_tags_alone_are_no_answer_and_short_answers_are(serve):
    served = serve("")
    for text in ("</think>", "<think>", "</think>\n</think>", "<think></think> <think>", "</think>\u200b\n", "<eos>",
                 "[/THINK]", "<think></think><answer> </answer>", "</tool_call>", "<|END_THINKING|>",
                 "</think><user>", " <assistant>\n"):  # fmt: skip
        served.engine.script = lambda *_, text=text: text
        for api, _, stream in WAYS[2:]:
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
    measured = body["reasoning_language"]
    assert (measured["match"], measured["tries"], measured["first_try"]["detected"]) == (True, 2, "en")
    assert len(set(served.engine.prompts)) == 1 and [sampling.seed for sampling in served.engine.samplings] == [7, 8]
    events = served.events(QUESTION, reasoning_effort="none")
    assert "three apples" not in json.dumps([event["choices"][0]["delta"] for event in events])
    reply = served.ask(QUESTION, reasoning_effort="none", temperature=0)
    assert reply.status_code == 422 and len(served.engine.prompts) == 5, "a second try would say the same"


def test_a_phrase_that_ends_the_reasoning_hides_no_other_language(serve):
    """The held-back reasoning is English, and the French phrase behind it is the server's."""
    served = serve("", **RETRY)
    Planted("We add two.", FRENCH).plant(served)
    measured = served.ask(QUESTION, thinking_token_budget=40).json()["reasoning_language"]
    assert (measured["match"], measured["tries"], measured["detected"]) == (None, 1, None)
    Planted(ENGLISH, FRENCH).plant(served)
    measured = served.ask(QUESTION, thinking_token_budget=60).json()["reasoning_language"]
    assert (measured["match"], measured["tries"], measured["detected"]) == (False, 2, "en")
    assert END not in measured["first_try"]["reasoning"] and measured["first_try"]["detected"] == "en"
    assert measured["prefilled"] == [BEGIN, END]


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
