"""`stop` ends the answer, not the reasoning, over an engine that stops at the first text as vLLM does."""

import json

import pytest

SAID = "<think>\nOne.\n\nTwo END three.\n</think>\n\nFour.\n\nFive END six."
BARE = "Four.\n\nFive END six."
CONSTRAIN = {"reasoning_language": "ru", "reasoning_language_enforcement": "constrain"}


def going_on(served, text):
    """An engine that says a text from where the prompt has come to."""
    decode = served.server.prompts.chat.tokenizer.decode

    def script(prompt, sampling, call):
        prompted = decode(prompt, skip_special_tokens=False)
        return next(text[size:] for size in range(len(text), -1, -1) if prompted.endswith(text[:size]))

    served.engine.script = script
    return served


def ended(choice, usage):
    """With what a choice ended, and after how many tokens."""
    return choice["finish_reason"], choice["stop_reason"], usage["completion_tokens"]


def got(served, **body):
    """Reasoning, answer, reason to finish, stop_reason, tokens."""
    reply = served.ask(**body).json()
    message = reply["choices"][0]["message"]
    return message["reasoning"] or "", message["content"], *ended(reply["choices"][0], reply["usage"])


def test_a_stop_in_the_reasoning_does_not_end_it(serve):
    served = going_on(serve(""), SAID)
    for stop, answer, reason in (
        ("\n\n", "Four.", "\n\n"), (["END"], "Four.\n\nFive", "END"), (["six", "END"], "Four.\n\nFive", "END"),
        *((stop, BARE, None) for stop in ("nowhere", "</think>", "One", "<")),
    ):  # fmt: skip
        *response, tokens = got(served, stop=stop)
        assert response == ["One.\n\nTwo END three.", answer, "stop", reason]
        spoken = SAID if reason is None else SAID[: SAID.rindex(reason) + len(reason)]
        if reason == "\n\n":
            spoken = SAID[: SAID.index("Four.") + len("Four.\n\n")]
        assert tokens == len(served.server.prompts.chat.encode(spoken)), "each token is counted once"
        assert served.engine.running == 0
    (token,) = served.server.prompts.chat.encode("E")
    assert got(served, stop_token_ids=[token])[:4] == ("One.\n\nTwo END three.", "Four.\n\nFive", "stop", token)


def test_an_answer_without_reasoning_is_stopped_too_and_the_stop_can_be_told(serve):
    served = going_on(serve(""), "Four.\n\nFive </think> END six.")
    assert got(served, stop=["END"])[:4] == ("", "Four.\n\nFive </think>", "stop", "END")
    assert got(served, stop=["Five", "END"])[:4] == ("", "Four.", "stop", "Five")
    for text in (SAID, BARE):
        going_on(served, text)
        assert got(served, stop="END", include_stop_str_in_output=True)[1] == "Four.\n\nFive END"


def test_reasoning_that_never_ends_is_not_stopped(serve):
    served = going_on(serve(""), "<think>\nOne END two END three")
    assert got(served, stop="END")[:4] == ("One END two END three", "", "stop", None)
    assert got(served, stop="END", max_tokens=20)[2] == "length"
    served.engine.prompts.clear()
    served.engine.script = lambda prompt, sampling, call: "Four END five." if call else "<think>\nOne END two END three"
    reasoning, *rest = got(served, stop="END", thinking_token_budget=12)
    assert rest[:3] == ["Four", "stop", "END"] and reasoning.startswith("One")


@pytest.mark.parametrize("body", [{"stop": "END"}, {"response_format": {"type": "json_object"}}, CONSTRAIN])
def test_a_budget_loses_no_letter_that_could_begin_a_stop(serve, body):
    thoughts = "Одно яблоко, и ещё два яблока."
    served = serve(lambda prompt, sampling, call: "{}" if call else opening(prompt) + thoughts)
    chat = served.server.prompts.chat

    def opening(prompt):
        return "" if chat.tokenizer.decode(prompt).endswith("<think>\n") else "<think>\n"

    for size in (10, 13, 19):
        served.engine.prompts.clear()
        budget = len(chat.encode("<think>\n" + thoughts[:size]))
        reasoning = got(served, thinking_token_budget=budget, **body)[0]
        assert reasoning.startswith(thoughts[:size]), "as many letters as tokens"


def flat(content):
    """The text of a content, its parts and their reasoning."""
    if isinstance(content, dict):
        return flat(content.get("text") or content.get("thinking"))
    return "".join(map(flat, content)) if isinstance(content, list) else content or ""


@pytest.mark.parametrize(
    "text", ["<think>\n One.\n\nTwo.\n \n</think>\n\n Four.\n\nFive. END\n \n", "Four.\tFive. END ", "<think>\nOne. \n",
             " \n<think> \n </think> \n ", "<think>One.</think>", " \n"],
)  # fmt: skip
def test_texts_and_items_are_the_same_streamed_and_whole(serve, text):
    served = going_on(serve(""), text)
    for body in (
        {}, {"stop": "END"}, {"stop": "END", "include_stop_str_in_output": True}, {"stop": "\n"}, {"n": 2},
        {"max_tokens": 12}, {"max_tokens": 24}, {"reasoning_format": "inline"}, {"reasoning_format": "mistral"},
        {"reasoning_format": "inline", "max_tokens": 12}, {"reasoning_format": "hidden"},
        {"stop": "END", "thinking_token_budget": 12}, {"stop_token_ids": [served.server.prompts.chat.encode("E")[0]]},
    ):  # fmt: skip
        *events, last = served.events(stream_options={"include_usage": True}, **body)
        whole = served.ask(**body).json()
        for choice in whole["choices"]:
            parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
            assert ended(parts[-1], last["usage"]) == ended(choice, whole["usage"]), body
            deltas = [part["delta"] for part in parts]
            for name in ("content", "reasoning"):
                text = flat([delta.get(name) for delta in deltas])
                assert text == flat(choice["message"].get(name)), body
                assert text == text.strip() or body.get("reasoning_format") == "inline", body
    whole = served.client.post("/v1/responses", json={"input": "x"}).json()["output"]
    lines = served.client.post("/v1/responses", json={"input": "x", "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    items = events[-1]["response"]["output"]
    assert [(item["type"], item["content"]) for item in items] == [(item["type"], item["content"]) for item in whole]
    for number, item in enumerate(items):
        deltas = [event["delta"] for event in events if "delta" in event and event["output_index"] == number]
        assert "".join(deltas) == item["content"][0]["text"]
