"""Planted models under every enforcement: what is measured, what strict lets pass, and what streams say of it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serve.reasoning_language import REFUSALS, measure
from shared.chat import Chat
from shared.tool_calls import call_text
from tests.serve.conftest import Serve, Served
from tests.serve.fake_engine import Script
from tests.serve.test_chat import ENGLISH, FRENCH, QUESTION, WRONG
from tests.shared import test_chat as chats

MISMATCH, CUT, EMPTY = REFUSALS
BEGIN, END = "Bon, réfléchissons étape par étape.", "J'ai assez réfléchi, je réponds maintenant."
LONG = f"{FRENCH} {FRENCH}"
FORMULAS = "$3+2=5$; $5-2=3$; $3+2=5$; $5-2=3$; $3+2=5$; $5-2=3$; $3+2=5$"
DONE = "data: [DONE]"


class Planted(NamedTuple):
    """A model: what it writes, and what is to be said of it."""

    reasoning: str | None
    """None: it writes no reasoning, and closes one that is begun for it"""
    answer: str
    match: bool | None
    refused: str = ""
    """by strict, with this code"""
    tries: int = 1
    """under retry and strict"""
    max_tokens: int = 1000
    blocked: bool | None = None
    """match where its reasoning is closed before it begins"""

    def behind(self, chat: Chat) -> Script:
        """The script of an engine that is this model."""
        return lambda prompt, sampling, call: self.script(chat.tokenizer.decode(prompt, skip_special_tokens=False))

    def script(self, prompt: str) -> str:
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


MODELS = {
    "nothing": Planted(None, "", None, EMPTY),
    "an empty reasoning and nothing": Planted("", "", None, EMPTY),
    "an empty reasoning and the right answer": Planted("", FRENCH, True, blocked=True),
    "marks without a word and the right answer": Planted(" ...\n--- ", FRENCH, True, blocked=True),
    "another language": Planted(ENGLISH, ENGLISH, False, MISMATCH, 2, blocked=False),
    "the right language": Planted(FRENCH, FRENCH, True, blocked=True),
    "the right language and no answer": Planted(FRENCH, "", True, EMPTY),
    "the right language and blanks": Planted(FRENCH, " \n", True, EMPTY),
    "an answer in another language": Planted(FRENCH, ENGLISH, False, MISMATCH, blocked=False),
    "another language, then the right one": Planted(ENGLISH, FRENCH, False, MISMATCH, 2, blocked=True),
    "no reasoning and the right answer": Planted(None, FRENCH, True, blocked=True),
    "no reasoning and another language": Planted(None, ENGLISH, False, MISMATCH, 2, blocked=False),
    "cut in the reasoning": Planted(LONG, FRENCH, True, CUT, max_tokens=150, blocked=True),
    "cut in the answer": Planted(FRENCH, LONG, True, CUT, max_tokens=len(FRENCH) + 120, blocked=True),
    "formulas alone": Planted(FORMULAS, "$5$", None),
    "formulas and the right answer": Planted(FORMULAS, FRENCH, None, blocked=True),
    "formulas and another language": Planted(FORMULAS, ENGLISH, False, MISMATCH, blocked=False),
}


def thoughts(response: dict[str, Any]) -> str:
    """The reasoning of a Responses object."""
    items = [item for item in response["output"] if item["type"] == "reasoning"]
    return "".join(part["text"] for item in items for part in item["content"])


def asked(served: Served, api: str, stream: bool, **body: Any) -> tuple[int, str, list[dict[str, Any]], list[str]]:
    """Status, code of an error, objects of all choices' languages, and the texts of their reasoning."""
    if api == "responses":
        body["max_output_tokens"] = body.pop("max_tokens", 1000)
        body = {"input": QUESTION, **({"reasoning": {"effort": "none"}} if body.pop("effort", "") else {}), **body}
    else:
        body = {"messages": [{"role": "user", "content": QUESTION}], **body}
        body |= {"reasoning_effort": body.pop("effort")} if "effort" in body else {}
    reply = served.client.post("/v1/responses" if api == "responses" else "/v1/chat/completions",
                               json={**body, "stream": stream})  # fmt: skip
    if not stream:
        found = reply.json()
        if "error" in found and found["error"]:
            return reply.status_code, found["error"]["code"], [], []
        if api == "responses":
            return 200, "", [found["reasoning_language"]], [thoughts(found)]
        choices = found["choices"]
        languages = [choice["reasoning_language"] for choice in choices]
        return 200, "", languages, [choice["message"]["reasoning"] or "" for choice in choices]
    lines = [line for line in reply.text.splitlines() if line.startswith("data:")]
    if api == "responses":
        last = json.loads(lines[-1].removeprefix("data: "))
        if last["type"] == "response.failed":
            return reply.status_code, last["response"]["error"]["code"], [], []
        assert last["type"] in ("response.completed", "response.incomplete")
        return 200, "", [last["response"]["reasoning_language"]], [thoughts(last["response"])]
    assert lines[-1] == DONE
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    if "error" in events[-1]:
        return reply.status_code, events[-1]["error"]["code"], [], []
    ends = sorted((event for event in events if "reasoning_language" in event), key=lambda e: e["choices"][0]["index"])
    texts = ["" for _ in ends]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("reasoning") or ""
    return 200, "", [event["reasoning_language"] for event in ends], texts


@pytest.mark.parametrize("name", MODELS)
def test_only_the_models_words_count(serve: Serve, name: str) -> None:
    served = serve("")
    served.engine.script = MODELS[name].behind(served.engine.chat)
    for enforcement in ("prompt", "constrain", "prefill", "retry", "strict"):
        check_ways(served, MODELS[name], enforcement)


def check_ways(served: Served, model: Planted, enforcement: str) -> None:
    """Ask in every way, and compare with what is to be said of the model."""
    ways = [("chat", False, 1), ("chat", True, 1), ("chat", False, 2), ("chat", True, 2), ("responses", False, 1),
            ("responses", True, 1)]  # fmt: skip
    ends = [(60, ways[3]), (60, ways[4]), (0, ways[0]), (0, ways[5])]
    for budget, (api, stream, choices) in [*((None, way) for way in ways), *ends]:
        match, refused = (model.blocked, model.refused) if budget == 0 else (model.match, model.refused)
        if budget == 0 and refused != EMPTY and model.max_tokens == 1000:
            refused = MISMATCH if match is False else "" if model.answer.strip() else EMPTY
        if model.max_tokens < 1000 and budget is not None:
            continue  # it would not be cut there
        body: dict[str, Any] = {"reasoning_language": "fr", "reasoning_language_enforcement": enforcement,
                                "max_tokens": model.max_tokens}  # fmt: skip
        body |= {} if budget is None else {"effort": "none"} if budget == 0 else {"thinking_token_budget": budget}
        body |= {"n": choices} if choices > 1 else {}
        status, code, languages, texts = asked(served, api, stream, **body)
        way = (enforcement, budget, api, stream, choices)
        if enforcement == "strict" and refused:
            assert (status, code) == (200 if stream else 422, refused), way
            continue
        assert (status, code, len(languages)) == (200, "", choices), way
        for language, text in zip(languages, texts, strict=True):
            assert language["match"] is match, way
            again = enforcement in ("retry", "strict")
            if budget is None:
                assert language["tries"] == (model.tries if again else 1), way
            server = language.get("prefilled", [])
            begun = budget != 0 and (enforcement == "prefill" or language["tries"] == 2)
            assert (BEGIN in server, END in server) == (begun, END in text), way
            for phrase in server:
                assert phrase in text, way
                text = text.replace(phrase, "", 1)
            assert measure(text, model.answer, "fr").match is match, "whoever measures again finds the same"


@pytest.mark.parametrize("tags", ["control", "opened", "closed"])
def test_tags_do_not_matter(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: str) -> None:
    template = chats.PLAIN
    if tags == "control":
        monkeypatch.setattr(chats, "SPECIAL", [*chats.SPECIAL, "[THINK]", "[/THINK]"])
    blank = "{{ '\n' }}"
    template += {"control": "", "opened": f"<think>{blank}", "closed": f"<think>{blank}</think>{blank}"}[tags]
    folder = chats.make_folder(tmp_path / "m", template, config={"max_position_embeddings": 4096, "eos_token_id": 1})
    served = serve("", model=str(folder))
    served.engine.chat = Chat(folder)
    for model, enforcement in product(MODELS.values(), ("prefill", "strict")):
        served.engine.script = model.behind(served.engine.chat)
        body = {"reasoning_language": "fr", "reasoning_language_enforcement": enforcement}
        match, refused = (model.blocked, "") if tags == "closed" else (model.match, model.refused)
        if tags == "closed" and not model.answer.strip():
            refused = EMPTY
        elif tags == "closed":
            refused = MISMATCH if match is False else CUT if len(model.answer) > model.max_tokens else ""
        status, code, languages, _ = asked(served, "chat", False, max_tokens=model.max_tokens, **body)
        if enforcement == "strict" and refused:
            assert (status, code) == (422, refused), model
        else:
            assert status == 200 and languages[0]["match"] is match, (model, enforcement, code)


@pytest.mark.parametrize(
    "text",
    ["</think>", "<think>", "</think>\n</think>", "<think></think> <think>", "</think>\u200b\n", "<eos>", "[/THINK]",
     "<think></think><answer> </answer>", "</tool_call>", "<|END_THINKING|>", "</think><user>", " <assistant>\n"],
)  # fmt: skip
@pytest.mark.parametrize("enforcement", ["prompt", "strict"])
def test_tags_alone_are_no_answer(serve: Serve, text: str, enforcement: str) -> None:
    served = serve(text, reasoning_language="fr", reasoning_language_enforcement=enforcement)
    for api, stream in product(("chat", "responses"), (False, True)):
        status, code, *_ = asked(served, api, stream)
        strict = enforcement == "strict"
        assert (status, code) == (422 if strict and not stream else 200, EMPTY if strict else ""), (api, stream)


@pytest.mark.parametrize("text", ["5", "\\boxed{5}", "+", "✓", "<b>", "x</think>", "</thinking>", "🙂"])
def test_short_answers_are_answers(serve: Serve, text: str) -> None:
    served = serve(text, reasoning_language="fr", reasoning_language_enforcement="strict")
    assert served.ask(QUESTION).is_success


# ---- second tries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [1, 3])
def test_a_model_that_follows_requests_is_asked_again(serve: Serve, choices: int) -> None:
    served = serve(WRONG, reasoning_language="fr", reasoning_language_enforcement="retry")
    served.server.prompts.trained = True
    served.ask(QUESTION, seed=7, n=choices, temperature=0.5)
    assert len(set(served.engine.prompts)) == 1, "nothing is put into its mouth"
    assert len({sampling.seed for sampling in served.engine.samplings}) == 2 * choices, "each try has a seed of its own"
    served.engine.prompts.clear()
    served.ask(QUESTION, temperature=0)
    assert [BEGIN in prompt for prompt in served.engine.prompts] == [False, True], "the same prompt would say the same"


def test_where_there_is_no_reasoning_the_answer_is_held_back_and_sampled_again(serve: Serve) -> None:
    served = serve(lambda prompt, sampling, call: ENGLISH if call % 2 == 0 else FRENCH, reasoning_language="fr",
                   reasoning_language_enforcement="strict")  # fmt: skip
    found = served.ask(QUESTION, reasoning_effort="none", seed=7).json()
    assert found["choices"][0]["message"]["content"] == FRENCH and found["choices"][0]["message"]["reasoning"] is None
    told = found["reasoning_language"]
    assert (told["match"], told["tries"], told["first_try"]["detected"]) == (True, 2, "en")
    assert len(set(served.engine.prompts)) == 1 and [one.seed for one in served.engine.samplings] == [7, 8]
    events = served.events(QUESTION, reasoning_effort="none")
    assert "three apples" not in json.dumps([event["choices"][0]["delta"] for event in events])
    reply = served.ask(QUESTION, reasoning_effort="none", temperature=0)
    assert reply.status_code == 422 and len(served.engine.prompts) == 5, "a second try would say the same"


def test_a_phrase_that_ends_the_reasoning_hides_no_other_language(serve: Serve) -> None:
    """The held-back reasoning is English, and the French phrase behind it is the server's."""
    served = serve("", reasoning_language="fr", reasoning_language_enforcement="retry")
    short = Planted("We add two.", FRENCH, None)
    served.engine.script = short.behind(served.engine.chat)
    told = served.ask(QUESTION, thinking_token_budget=40).json()["reasoning_language"]
    assert (told["match"], told["tries"], told["detected"]) == (None, 1, None)
    served.engine.script = Planted(ENGLISH, FRENCH, False).behind(served.engine.chat)
    told = served.ask(QUESTION, thinking_token_budget=60).json()["reasoning_language"]
    assert (told["match"], told["tries"], told["detected"]) == (False, 2, "en")
    assert END not in told["first_try"]["reasoning"] and told["first_try"]["detected"] == "en"
    assert told["prefilled"] == [BEGIN, END]


def test_calls_are_no_words_of_an_answer(serve: Serve) -> None:
    arguments = {"place": "the capital of the country"}
    served = serve(call_text("find_the_weather", json.dumps(arguments)), reasoning_language="fr",
                   reasoning_language_enforcement="strict")  # fmt: skip
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "find_the_weather", "parameters": parameters}}
    for effort in ("none", "high"):
        found = served.ask(QUESTION, tools=[tool], reasoning_effort=effort).json()
        assert found["choices"][0]["finish_reason"] == "tool_calls", found
        assert (found["reasoning_language"]["match"], found["reasoning_language"]["tries"]) == (None, 1)


def test_a_tag_that_the_model_has_begun_stays_its_text(serve: Serve) -> None:
    served = serve("", reasoning_language="fr")
    served.engine.script = Planted(f"{FRENCH} </thi no", "Cinq.", True).behind(served.engine.chat)
    budget = len(FRENCH) + 1 + len("</thi") + 1  # tokens are bytes, and the tag is one more
    found = served.ask(QUESTION, thinking_token_budget=budget).json()
    assert found["choices"][0]["message"]["reasoning"] == f"{FRENCH} </thi\n{END}"
    assert found["reasoning_language"]["prefilled"] == [END]


def test_a_refusal_names_the_text_that_was_written_and_what_ended_it(serve: Serve) -> None:
    def refusal(reasoning: str | None, answer: str, **body: Any) -> str:
        served.engine.script = Planted(reasoning, answer, False).behind(served.engine.chat)
        message: str = served.ask(QUESTION, **body).json()["error"]["message"]
        return message

    served = serve("", reasoning_language="fr", reasoning_language_enforcement="strict")
    assert "in any try: answer 100% en; try" in refusal(None, ENGLISH, reasoning_effort="none")
    assert "in any try: answer 100% en; try" in refusal(FRENCH, ENGLISH)
    assert "in any try: reasoning fr with words of other languages; try" in refusal(f"{FRENCH} Потом ещё книги.", "")
    invented = "zorblat quvnix frembulon dwarpish glonk vexuli krandor plimsy ortwag zunfel bixtom gralvo"
    assert "in any try: answer in no language that is known; try" in refusal(FRENCH, invented)
    assert refusal(FRENCH, "").startswith("the model ended without an answer")
    assert refusal(FRENCH, "END of it.", stop="END").startswith("stop 'END' was reached without an answer")
