"""`stop` ends the answer, not the reasoning, over an engine that stops at the first text as vLLM does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve.engine import SamplingParameters
from tests.serve.conftest import Serve, Served

SAID = "<think>\nOne.\n\nTwo END three.\n</think>\n\nFour.\n\nFive END six."
CONSTRAIN = {"reasoning_language": "ru", "reasoning_language_enforcement": "constrain"}
WAYS = pytest.mark.parametrize("stream", [False, True])


def going_on(served: Served, said: str) -> Served:
    """An engine that says a text from where the prompt has come to."""
    chat = served.server.prompts.chat

    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        told = chat.tokenizer.decode(prompt, skip_special_tokens=False)
        return next(said[size:] for size in range(len(said), -1, -1) if told.endswith(said[:size]))

    served.engine.script = script
    return served


def got(served: Served, stream: bool, **body: Any) -> tuple[str, str, Any, Any, int]:
    """Reasoning, answer, reason to finish, stop_reason, tokens."""
    if not stream:
        reply = served.ask(**body).json()
        choice = reply["choices"][0]
        return (choice["message"]["reasoning"] or "", choice["message"]["content"], choice["finish_reason"],
                choice["stop_reason"], reply["usage"]["completion_tokens"])  # fmt: skip
    *events, last = served.events(stream_options={"include_usage": True}, **body)
    deltas = [event["choices"][0]["delta"] for event in events]
    choice = events[-1]["choices"][0]
    return ("".join(delta.get("reasoning", "") for delta in deltas),
            "".join(delta.get("content", "") for delta in deltas), choice["finish_reason"],
            choice["stop_reason"], last["usage"]["completion_tokens"])  # fmt: skip


@WAYS
@pytest.mark.parametrize(
    ("stop", "answer", "reason"),
    [("\n\n", "Four.", "\n\n"), (["END"], "Four.\n\nFive", "END"), (["six", "END"], "Four.\n\nFive", "END"),
     ("nowhere", "Four.\n\nFive END six.", None), ("</think>", "Four.\n\nFive END six.", None),
     ("One", "Four.\n\nFive END six.", None), ("<", "Four.\n\nFive END six.", None)],
)  # fmt: skip
def test_a_stop_in_the_reasoning_does_not_end_it(
    serve: Serve, stream: bool, stop: Any, answer: str, reason: Any
) -> None:
    served = going_on(serve(""), SAID)
    reasoning, text, finish, told, tokens = got(served, stream, stop=stop)
    assert (reasoning, text, finish, told) == ("One.\n\nTwo END three.", answer, "stop", reason)
    end = SAID.index("</think>")
    spoken = SAID if reason is None else SAID[: SAID.index(reason, end + (10 if reason == "\n\n" else 0)) + len(reason)]
    assert tokens == len(served.server.prompts.chat.encode(spoken)), "each token is counted once"
    assert served.engine.running == 0


@WAYS
def test_an_answer_without_reasoning_is_stopped_too(serve: Serve, stream: bool) -> None:
    served = going_on(serve(""), "Four.\n\nFive </think> END six.")
    assert got(served, stream, stop=["END"])[:4] == ("", "Four.\n\nFive </think>", "stop", "END")
    assert got(served, stream, stop=["Five", "END"])[:4] == ("", "Four.", "stop", "Five")


@WAYS
def test_the_stop_can_be_told(serve: Serve, stream: bool) -> None:
    for said in (SAID, "Four.\n\nFive END six."):
        served = going_on(serve(""), said)
        assert got(served, stream, stop="END", include_stop_str_in_output=True)[1] == "Four.\n\nFive END"


@WAYS
def test_tokens_that_stop_end_the_answer_only(serve: Serve, stream: bool) -> None:
    served = going_on(serve(""), SAID)
    (token,) = served.server.prompts.chat.encode("E")
    assert got(served, stream, stop_token_ids=[token])[:4] == ("One.\n\nTwo END three.", "Four.\n\nFive", "stop", token)


def test_reasoning_that_never_ends_is_not_stopped(serve: Serve) -> None:
    served = going_on(serve(""), "<think>\nOne END two END three")
    assert got(served, False, stop="END")[:4] == ("One END two END three", "", "stop", None)
    assert got(served, False, stop="END", max_tokens=20)[2] == "length"


def test_a_budget_and_a_stop(serve: Serve) -> None:
    served = serve(lambda prompt, sampling, call: "<think>\nOne END two END three" if not call else "Four END five.")
    reasoning, answer, *rest = got(served, False, stop="END", thinking_token_budget=12)
    assert answer == "Four" and rest[:2] == ["stop", "END"] and reasoning.startswith("One") and "END t" not in answer


@WAYS
@pytest.mark.parametrize("body", [{"stop": "END"}, {"response_format": {"type": "json_object"}}, CONSTRAIN])
def test_a_budget_loses_no_letter_that_could_begin_a_stop(serve: Serve, stream: bool, body: dict[str, Any]) -> None:
    thoughts = "Одно яблоко, и ещё два яблока."
    served = serve(lambda prompt, sampling, call: "{}" if call else opening(prompt) + thoughts)
    chat = served.server.prompts.chat

    def opening(prompt: list[int]) -> str:
        return "" if chat.tokenizer.decode(prompt).endswith("<think>\n") else "<think>\n"

    for size in (10, 13, 19):
        served.engine.prompts.clear()
        budget = len(chat.encode("<think>\n" + thoughts[:size]))
        reasoning = got(served, stream, thinking_token_budget=budget, **body)[0]
        assert reasoning.startswith(thoughts[:size]), "as many letters as tokens"


BLANKS = ("<think>\n One.\n\nTwo.\n \n</think>\n\n Four.\n\nFive. END\n \n", "Four.\tFive. END ", "<think>\nOne. \n",
          " \n<think> \n </think> \n ", "<think>One.</think>", " \n")  # fmt: skip


BODIES: list[dict[str, Any]] = [
    {}, {"stop": "END"}, {"stop": "END", "include_stop_str_in_output": True}, {"stop": "\n"}, {"n": 2},
    {"max_tokens": 12}, {"max_tokens": 24}, {"reasoning_format": "inline"},
    {"reasoning_format": "inline", "max_tokens": 12},
    {"reasoning_format": "mistral"}, {"reasoning_format": "hidden"},
]  # fmt: skip


@pytest.mark.parametrize("said", BLANKS)
def test_texts_are_the_same_streamed_and_whole(serve: Serve, said: str) -> None:
    served = going_on(serve(""), said)
    for body in BODIES:
        choices = served.ask(**body).json()["choices"]
        streamed = [choice for event in served.events(**body) for choice in event["choices"]]
        for choice in choices:
            deltas = [one["delta"] for one in streamed if one["index"] == choice["index"]]
            for name in ("content", "reasoning"):
                text, whole = flat([delta.get(name) for delta in deltas]), flat(choice["message"].get(name))
                assert text == whole and (text == text.strip() or body.get("reasoning_format") == "inline"), body


def flat(content: Any) -> str:
    """The text of a content, its parts and their reasoning."""
    if isinstance(content, dict):
        return flat(content.get("text") or content.get("thinking"))
    return "".join(map(flat, content)) if isinstance(content, list) else content or ""


@pytest.mark.parametrize("said", BLANKS)
def test_items_are_the_same_streamed_and_whole(serve: Serve, said: str) -> None:
    served = going_on(serve(""), said)
    whole = served.client.post("/v1/responses", json={"input": "x"}).json()["output"]
    lines = served.client.post("/v1/responses", json={"input": "x", "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    items = events[-1]["response"]["output"]
    assert [(item["type"], item["content"]) for item in items] == [(item["type"], item["content"]) for item in whole]
    for number, item in enumerate(items):
        deltas = [event["delta"] for event in events if "delta" in event and event["output_index"] == number]
        assert "".join(deltas) == item["content"][0]["text"]
