"""What another try may help, when, and what a server said."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from evaluation.client import (
    ChatCompletion,
    EvaluationClient,
    NoResponse,
    RequestRefused,
    parse_message,
    retry_after_s,
    split,
    weights_of,
)
from evaluation.settings import EvaluationSettings
from evaluation.tables import compare, read_run
from oversight.players import ModelPlayer, read_replies
from oversight.prompts import Ask, PlayerReply
from shared.chat_endpoint import ChatEndpoint, HttpStatus, explain_error, read_count, refused_parameter
from tests.evaluation.conftest import Plain, evaluate, records, write_rows
from tests.serve.conftest import running

BODY = {"messages": [{"role": "user", "content": "x"}]}


def ask(url: str, **settings: float) -> tuple[str, int]:
    """One question: the content and the number of tries."""

    async def run() -> tuple[str, int]:
        client = EvaluationClient(EvaluationSettings(url=url, **settings))  # type: ignore[arg-type]
        try:
            got = await client.ask(BODY)
        finally:
            await client.close()
        return str(got.reply.choices[0].message.content), got.tries

    return asyncio.run(run())


def test_retry_after_is_honoured(plain: Plain) -> None:
    server = plain(lambda _, call: "yes" if call else JSONResponse({}, 429, {"Retry-After": "2"}))
    began = time.monotonic()
    assert ask(server.url) == ("yes", 2)
    assert time.monotonic() - began >= 2


def test_retry_after_as_number_and_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after_s(httpx.Headers({"Retry-After": "7"})) == 7
    assert 27 < (retry_after_s(httpx.Headers({"Retry-After": soon})) or 0) <= 30
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    assert retry_after_s(httpx.Headers({"Retry-After": past})) == 0
    for value in ("", "soon", "-1"):
        assert retry_after_s(httpx.Headers({"Retry-After": value})) is None


def test_tries_have_an_end(plain: Plain) -> None:
    server = plain(lambda *_: JSONResponse({"detail": "busy"}, 503, {"Retry-After": "0"}))
    with pytest.raises(NoResponse, match="status 503: busy") as failed:
        ask(server.url, tries=3)
    assert failed.value.tries == len(server.requests) == 3


def test_a_slow_server_has_a_deadline(plain: Plain) -> None:
    def slow(*_: object) -> str:
        time.sleep(0.6)
        return "late"

    with pytest.raises(NoResponse, match=r"no response in 0.2 s|Timeout"):
        ask(plain(slow).url, tries=1, deadline_s=0.2)


def test_refusals_are_not_repeated(plain: Plain) -> None:
    server = plain(lambda *_: JSONResponse({"error": {"message": "bad", "code": "nope"}}, 400))
    with pytest.raises(RequestRefused, match="status 400: bad") as refused:
        ask(server.url)
    assert refused.value.code == "nope" and len(server.requests) == 1


@pytest.mark.parametrize("message", [{"content": 3}, {"content": "x", "tool_calls": "f"}, {"content": [3]}])
def test_what_is_no_chat_completion(plain: Plain, message: dict[str, object]) -> None:
    with pytest.raises(NoResponse, match="no chat completion"):
        ask(plain(lambda *_: message).url, tries=1)


def test_the_text_of_a_reply_that_is_no_json_is_told(plain: Plain) -> None:
    with pytest.raises(NoResponse, match="no chat completion: upstream connect error"):
        ask(plain(lambda *_: Response("upstream connect error", 200)).url, tries=1)


def openai(name: str, words: str = "is not supported with this model.", code: str = "unsupported_parameter") -> Any:
    """The body that refuses a parameter, as OpenAI words it."""
    return {"error": {"message": f"Unsupported parameter: '{name}' {words}", "param": name, "code": code}}


REFUSALS = {
    "max_tokens": [
        openai("max_tokens", "is not supported with this model. Use 'max_completion_tokens' instead."),
        {"error": {"message": "max_tokens is deprecated, use max_completion_tokens"}},
    ],
    "temperature": [
        openai("temperature", "does not support 0.7 with this model. Only the default (1) value is supported."),
        {"error": {"message": "`temperature` is not supported for this model"}},
        {"detail": "Unknown field temperature. Fields: top_p, seed"},
        {"error": {"message": "invalid temperature: only 1 is allowed for this model"}},
        {"error": {"message": "This model doesn't support temperature"}},
        {"error": {"message": "temperature should not be set for models that reason"}},
        {"error": {"message": "temperature is not configurable here"}},
    ],
    "top_p": [
        openai("top_p"),
        {"error": {"message": "litellm.UnsupportedParamsError: openai does not support parameters: ['top_p'], for o1"}},
        {"error": {"message": "`temperature` and `top_p` cannot both be specified for this model"}},
    ],
    "seed": [
        {"error": {"message": "Unrecognized request argument supplied: seed", "param": None}},
        {"error": {"message": 'Invalid JSON payload received. Unknown name "seed": Cannot find field.'}},
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]},
        {"message": "property 'seed' is unsupported"}, {"error": "seed is not yet implemented"},
        {"error": {"message": "The parameter seed isn't accepted by this provider"}},
    ],
    "": [
        {"error": {"message": "max_tokens is too large: 40960. This model supports at most 16384 completion tokens."}},
        {"error": {"message": "maximum context length is 4096 tokens, your max_tokens is not allowed"}},
        {"error": {"message": "temperature must be less than or equal to 1"}},
        {"error": {"message": "Unsupported parameter: 'tools' is not supported beside 'seed'", "param": "tools"}},
        {"error": {"message": "image input is not supported"}}, {"error": "unknown"}, {"detail": "seed is wrong"},
    ],
}  # fmt: skip
SENT = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.95, "seed": 1}


@pytest.mark.parametrize(("name", "body"), [(name, body) for name, bodies in REFUSALS.items() for body in bodies])
@pytest.mark.parametrize("status", [400, 422, 403])
def test_which_parameter_a_refusal_names(name: str, body: Any, status: int) -> None:
    refusal = httpx.Response(status, json=body)
    assert refused_parameter(HttpStatus(refusal, refusal.content), SENT) == (name if status != 403 else "")


def particular(body: dict[str, Any], _: int) -> str | JSONResponse:
    """A model that reasons: it refuses all parameters of sampling, one at a time."""
    for name in SENT:
        if name in body:
            return JSONResponse(REFUSALS[name][0], 400)
    return r"\boxed{3}" if body["max_completion_tokens"] else "no limit"


def test_refused_parameters_are_left_out_told_once_and_recorded(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, file = plain(particular), write_rows(tmp_path / "s.jsonl", {"problem": "1 + 2", "answer": "3"})
    found = evaluate(server.url, tmp_path / "a", file, "--samples", "4", "--concurrency", "2")["benchmarks"]["s"]
    told = capsys.readouterr().err
    assert found["pass_at"]["1"] == 1 and found["errors"] == 0
    assert found["left_out"] == dict.fromkeys(sorted(SENT), 1.0)
    assert any("100.0% of the responses are to requests without seed" in line for line in found["warnings"])
    assert {tuple(sorted(one["left_out"])) for one in records(tmp_path / "a")} == {tuple(sorted(SENT))}
    for name in SENT:
        assert told.count(f"refuses {name}, which is left out from now on: Unsupported") <= 1
        assert told.count(f"refuses {name}, ") == 1
    assert server.requests[-1].keys() == {"model", "messages", "max_completion_tokens"}
    assert server.requests[-1]["max_completion_tokens"] == 40960
    assert "| s | the server's | the server's | 40960 | 4 |" in (tmp_path / "a" / "summary.md").read_text()

    before = len(server.requests)
    omit = ["--omit", "temperature,top_p,seed,max_tokens"]
    evaluate(server.url, tmp_path / "b", file, "--samples", "4", *omit)
    assert len(server.requests) == before + 4 and "refuses" not in capsys.readouterr().err
    free = plain(lambda *_: r"\boxed{3}")
    evaluate(free.url, tmp_path / "c", file, "--samples", "4")
    warnings = compare(read_run(tmp_path / "a"), read_run(tmp_path / "c"))["warnings"]
    assert warnings == [
        "parameters left out of s: max_tokens (100%), seed (100%), temperature (100%), top_p (100%), now none"
    ]
    assert "left_out" not in (tmp_path / "c" / "results.json").read_text()
    with pytest.raises(AssertionError, match="2"):
        evaluate(free.url, tmp_path / "b", file, "--samples", "4")
    assert 'omit = ["max_tokens", "seed", "temperature", "top_p"], now null' in capsys.readouterr().err


def test_judges_leave_out_what_is_refused(plain: Plain) -> None:
    server = plain(particular)

    async def ask() -> tuple[str, list[PlayerReply], set[str]]:
        judge = ChatEndpoint(server.url, "plain", {}, 20.0)
        player = ModelPlayer(server.url, "plain", {}, 20.0, concurrent=1, tries=1, temperature=1.0, max_tokens=64)
        said = await player.say(Ask(role="judge", purpose="verdict", messages=BODY["messages"]), 1)
        judged = await judge.ask(BODY["messages"], 64)
        await judge.close()
        await player.close()
        return judged, said, player.left_out

    judged, said, left_out = asyncio.run(ask())
    assert judged == said[0].text == r"\boxed{3}" and left_out == {"max_tokens", "temperature", "seed"}
    assert {body.get("max_completion_tokens") for body in server.requests[-1:]} == {64}


def test_a_refused_value_is_no_refused_parameter(plain: Plain) -> None:
    server = plain(lambda *_: JSONResponse(REFUSALS[""][0], 400))
    with pytest.raises(RequestRefused, match="too large"):
        ask(server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [
    {"error": {"message": "Provider is out of order", "code": 502}},
    {"error": "Provider is out of order", "choices": []},
    {"choices": [{"error": {"message": "Provider is out of order"}, "message": {"content": ""}}]},
    {"choices": [{"finish_reason": "error", "message": {"content": "1"}}], "error": {"message": "out of order"}},
])  # fmt: skip
def test_an_error_with_status_200_is_told_and_asked_again(plain: Plain, body: dict[str, Any]) -> None:
    server = plain(lambda _, call: "yes" if call else JSONResponse(body))
    assert ask(server.url, tries=2) == ("yes", 2)
    with pytest.raises(NoResponse, match="an error in place of a completion: .*out of order"):
        ask(plain(lambda *_: JSONResponse(body)).url, tries=1)


USAGE = ("prompt_tokens", "completion_tokens", "completion_tokens_details")
ODD = [12.0, "12", "12.0", None, [], {}, True, -1, 1.5, "many", 1e300, 10**30]


def test_an_odd_usage_costs_no_response(plain: Plain) -> None:
    usages = [*ODD, *({name: value} for name in USAGE for value in ODD)]
    bodies = [{"choices": [{"message": {"content": "yes"}}], "usage": value} for value in usages]
    server = plain(lambda _, call: JSONResponse(bodies[call]))
    assert [ask(server.url, tries=1) for _ in usages] == [("yes", 1)] * len(usages)
    assert {read_replies(json.dumps(body).encode())[0].text for body in bodies} == {"yes"}


def test_a_reply_that_is_nested_too_deeply_is_none(plain: Plain) -> None:
    deep, app = Response(b"[" * 200_000, media_type="application/json"), FastAPI()
    for path in ("/v1/models", "/version"):
        app.get(path, response_model=None)(lambda: deep)

    async def look(url: str) -> tuple[list[dict[str, Any]], str]:
        client = EvaluationClient(EvaluationSettings(url=url))
        try:
            return await client.models(), await weights_of(client, "m")
        finally:
            await client.close()

    with running(app) as address:
        assert asyncio.run(look(f"{address}/v1")) == ([], "")
    with pytest.raises(NoResponse):
        ask(plain(lambda *_: deep).url, tries=1)


def test_counts_are_read() -> None:
    assert [read_count(value) for value in ODD] == [12, 12, 12, *[None] * 9]


@pytest.mark.parametrize(("change", "reasoning"), [
    ({"reasoning": {"text": "a"}}, "a"), ({"reasoning": {"content": "a"}}, "a"), ({"reasoning": ["a"]}, "a"),
    ({"reasoning": [{"type": "text", "text": "a"}]}, "a"), ({"reasoning": {"effort": 3}}, ""), ({"reasoning": 3}, ""),
    ({"reasoning_content": {}, "reasoning": "a"}, "a"), ({"refusal": 5, "audio": {}, "annotations": "x"}, ""),
    ({"tool_calls": {}}, ""), ({"tool_calls": []}, ""), ({"tool_calls": ""}, ""), ({"content": ["yes"]}, ""),
    ({"content": {"type": "text", "text": "yes"}}, ""),
])  # fmt: skip
def test_odd_fields_cost_no_response(change: dict[str, Any], reasoning: str) -> None:
    choice = {"message": {"content": "yes", **change}, "finish_reason": {"x": 1}, "reasoning_language": "de"}
    found = ChatCompletion.model_validate_json(json.dumps({"choices": [choice, None], "model": 7, "id": []}))
    assert parse_message(found.choices[0].message) == (reasoning, "yes", [])
    assert found.choices[0].finish_reason is None


def test_error_texts_of_any_shape() -> None:
    assert explain_error(b'{"error": {"message": "a\\nb", "code": 400}}') == ("a b", "400")
    assert explain_error(b'{"detail": "d"}') == ("d", "") and explain_error(b'{"error": "e"}') == ("e", "")
    assert explain_error(b"<html>\x1b[31m \xff") == ("<html> [31m \ufffd", "")
    assert explain_error(b"[1]") == ("[1]", "") and explain_error(b"[" * 100_000)[1] == ""


@pytest.mark.parametrize(("content", "reasoning", "answer"), [
    ("<think>a</think>b", "a", "b"),
    ("\n<think>\na\n</think>\n\nb\n", "a", "b"),
    ("a</think>b", "a", "b"),
    ("a[/THINK]b", "a", "b"),
    ("[THINK]a</think>b[/THINK]c", "a</think>b", "c"),
    ("<think>a", "a", ""),
    ("b", "", "b"),
    ("", "", ""),
    ("<think></think>b", "", "b"),
])  # fmt: skip
def test_reasoning_between_tags(content: str, reasoning: str, answer: str) -> None:
    assert split(content) == (reasoning, answer)
