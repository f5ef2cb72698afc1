"""Every parameter of OpenAI's and vLLM's APIs stands in docs/parameters.md, as accepted or as refused by name.

What the accepted ones do is tested with a real engine, in test_effects.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from serve.completions import CompletionRequest
from serve.parameters import NO_EFFECT, RequestBody
from serve.responses import ResponsesRequest
from serve.schemas import ChatRequest
from tests.serve.conftest import Serve

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"},
}  # fmt: skip
BODIES: dict[str, type[RequestBody]] = {
    CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest,
}  # fmt: skip
PAGE = (Path(__file__).parents[2] / "docs" / "parameters.md").read_text(encoding="utf-8")
ACCEPTED, REFUSED = PAGE.split("\n## Accepted\n")[1].split("\n## Refused\n")
REFUSED_ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in REFUSED.splitlines() if row[:3] == "| `"]
INSIDE_VLLM = set(re.findall(r"`(\w+)`", REFUSED.partition("\nRefused everywhere")[2]))
NO_VALUE = [{"no": "value"}]
"""of no parameter"""
OPENAI: dict[str, set[str]] = {
    CHAT: {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"},
    COMPLETIONS: {*completion_params.CompletionCreateParamsBase.__annotations__, "stream"},
    RESPONSES: {*response_params.ResponseCreateParamsBase.__annotations__, "stream"},
}


def check(serve: Serve, names: dict[str, set[str]]) -> None:
    """All of them stand in the page, and none is dropped without a word."""
    served = serve("x")
    for path, found in names.items():
        assert len(found) > 10
        silent = []
        for name in sorted(found):
            reply = served.client.post(path, json={**NEEDED[path], name: NO_VALUE})
            error = reply.json().get("error") or {}
            refused = reply.status_code == 400 and (error["param"] or "").split(".")[0] == name
            if not refused or (error["code"] == "unknown_parameter") is (name in BODIES[path].model_fields):
                silent.append(name)
        assert not silent, f"{path}: {', '.join(silent)}"
        column = 1 + list(BODIES).index(path)
        refused = {row[0].strip("`") for row in REFUSED_ROWS if row[column] == "no"} | INSIDE_VLLM
        missing = found - set(BODIES[path].model_fields) - refused
        assert not missing, f"{path}: docs/parameters.md lacks {', '.join(sorted(missing))}"


def test_every_parameter_of_openai_is_accepted_or_refused_by_name(serve: Serve) -> None:
    check(serve, OPENAI)


@pytest.mark.slow
def test_every_parameter_of_vllm_is_accepted_or_refused_by_name(serve: Serve) -> None:
    from vllm import SamplingParams
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    sampling = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    check(serve, {
        CHAT: {*ChatCompletionRequest.model_fields, *sampling},
        COMPLETIONS: {*CompletionRequest.model_fields, *sampling},
        RESPONSES: {*ResponsesRequest.model_fields, *sampling},
    })  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"temprature": 0.5}, "unknown_parameter", '"temperature"'),
        ({"temprature": []}, "unknown_parameter", '"temperature"'), ({"zzzz": 1}, "unknown_parameter", "zzzz"),
        ({"use_beam_search": True}, "unknown_parameter", "docs/parameters.md"),
        ({"cache_salt": "s"}, "unknown_parameter", "leave it out. docs/parameters.md"),
        ({"priority": 5}, "unknown_parameter", "priority"),
    ],
)  # fmt: skip
def test_the_error_names_the_parameter(serve: Serve, path: str, body: dict[str, Any], code: str, words: str) -> None:
    served = serve("x")
    reply = served.client.post(path, json={**NEEDED[path], **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == (code, next(iter(body))) and words in error["message"]
    assert served.server.admitted == 0 and not served.engine.prompts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"user": "anna", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "functions": [],
                "logit_bias": {}, "modalities": ["text"], "safety_identifier": "a", "prompt_cache_key": "b"}),
        (CHAT, {"use_beam_search": False, "length_penalty": 1.0, "add_generation_prompt": True, "echo": False,
                "priority": 0, "zzzz": None, "spaces_between_special_tokens": True, "guided_json": None}),
        (COMPLETIONS, {"best_of": 1, "echo": False, "suffix": "", "user": "anna", "logit_bias": None}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "truncation": "disabled", "store": False,
                     "background": False, "service_tier": "auto", "top_logprobs": 0, "user": "a",
                     "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "medium"}}),
    ],
)  # fmt: skip
def test_values_that_ask_for_nothing_are_no_mistakes(serve: Serve, path: str, body: dict[str, Any]) -> None:
    reply = serve("x").client.post(path, json={**NEEDED[path], **body})
    assert reply.is_success, reply.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"store": True}, "store"), (RESPONSES, {"store": True}, "store"),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"), (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"min_tokens": 3, "stop": "x"}, "min_tokens"), (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (CHAT, {"skip_special_tokens": True}, "skip_special_tokens"), (CHAT, {"modalities": ["audio"]}, "modalities"),
        (CHAT, {"service_tier": "flex"}, "service_tier"), (CHAT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (CHAT, {"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        (CHAT, {"logit_bias": {"1000000": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"), (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"), (CHAT, {"bad_words": [""]}, "bad_words"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"truncation": "auto"}, "truncation"), (RESPONSES, {"top_logprobs": 2}, "top_logprobs"),
        (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text"),
        (RESPONSES, {"reasoning": {"efort": "low"}}, "reasoning"),
        (COMPLETIONS, {"best_of": 2}, "best_of"), (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_refused(serve: Serve, path: str, body: dict[str, Any], param: str) -> None:
    served = serve("x")
    reply = served.client.post(path, json={**NEEDED[path], **body})
    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["param"] or "").split(".")[0] == param and not served.engine.prompts


@pytest.mark.parametrize(("above", "status"), [(-1, 200), (0, 400)])
def test_the_last_token_of_the_vocabulary_may_be_named(serve: Serve, above: int, status: int) -> None:
    served = serve("x")
    token = len(served.server.prompts.chat.tokenizer) + above
    assert served.ask(allowed_token_ids=[token]).status_code == status


def accepted() -> Iterator[str]:
    """The rows of the accepted parameters, from the fields of the bodies and their docstrings."""
    for name in sorted({name for body in BODIES.values() for name in body.model_fields}):
        fields = [body.model_fields.get(name) for body in BODIES.values()]
        texts = [" ".join((field.description or "").split()) if field is not None else "" for field in fields]
        first, *others = dict.fromkeys(filter(None, texts))
        kinds = ("chat", "completions", "responses")
        effect = "; ".join([first, *(f"{kinds[texts.index(text)]}: {text}" for text in others)])
        yield f"| `{name}` | {' | '.join('yes' if text else '' for text in texts)} | {effect} |"


def test_the_table_in_the_documentation_is_that_of_the_code() -> None:
    assert [row for row in ACCEPTED.splitlines() if row[:3] == "| `"] == list(accepted())
    names = [row[0].strip("`") for row in REFUSED_ROWS]
    assert names == sorted(set(names)) and len(names) > 50
    for name, *marks, why, _ in REFUSED_ROWS:
        served = [name.strip("`") in body.model_fields for body in BODIES.values()]
        assert why and "no" in marks and not any(served[number] for number in range(3) if marks[number]), name


def test_values_that_ask_for_nothing_are_those_of_the_documentation() -> None:
    for name, *_, written in REFUSED_ROWS:
        nothing = NO_EFFECT.get(name.strip("`"))
        values = "" if nothing is None else ", ".join(sorted({str(value).lower() for value in nothing})) or "empty"
        assert written == values, name


def test_other_endpoints_refuse_what_they_do_not_know(serve: Serve) -> None:
    served = serve("x")
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]}), ("/tokenize", NEEDED[CHAT]),
        (f"{CHAT}/control", {"id": "a", "action": "reasoning_end"}),
    ]  # fmt: skip
    for path, body in bodies:
        reply = served.client.post(path, json={**body, "zzzz": 1})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "zzzz"
