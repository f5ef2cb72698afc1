"""What another try may help, when, and what a server said."""

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from evaluation import client as clients
from evaluation.client import EvaluationClient, NoResponse, RequestRefused, retry_after_s, weights_of
from evaluation.settings import EvaluationSettings
from evaluation.tables import compare, read_run
from oversight.players import ModelPlayer, read_replies
from oversight.prompts import Ask
from shared.chat_endpoint import ChatEndpoint, HttpStatus, explain_error, read_count, refused_parameter
from tests.evaluation.conftest import evaluate, records, write_rows
from tests.serve.conftest import running
from tests.tables import read_table

REFUSALS = read_table("evaluation/refusals")
"""bodies that refuse a parameter, as servers word them, and those that refuse something else"""
SENT = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.95, "seed": 1}
BODY = {"messages": [{"role": "user", "content": "x"}]}


async def ask(url: str, **settings: float) -> tuple[str, int]:
    """One question: the content and the number of tries."""
    client = EvaluationClient(EvaluationSettings(url=url, **settings))  # type: ignore[arg-type]
    try:
        got = await client.ask(BODY)
    finally:
        await client.close()
    return str(got.reply.choices[0].message.content), got.tries


async def test_retry_after_is_honoured(plain):
    server = plain(lambda _, call: "yes" if call else JSONResponse({}, 429, {"Retry-After": "2"}))
    began = time.monotonic()
    assert await ask(server.url) == ("yes", 2)
    assert time.monotonic() - began >= 2


def test_retry_after_as_number_and_date():
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after_s(httpx.Headers({"Retry-After": "7"})) == 7
    assert 27 < (retry_after_s(httpx.Headers({"Retry-After": soon})) or 0) <= 30
    assert retry_after_s(httpx.Headers({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})) == 0
    for value in ("", "soon", "-1"):
        assert retry_after_s(httpx.Headers({"Retry-After": value})) is None


async def test_tries_have_an_end(plain):
    server = plain(lambda *_: JSONResponse({"detail": "busy"}, 503, {"Retry-After": "0"}))
    with pytest.raises(NoResponse, match="status 503: busy") as failed:
        await ask(server.url, tries=3)
    assert failed.value.tries == len(server.requests) == 3


async def test_a_slow_server_has_a_deadline(plain):
    with pytest.raises(NoResponse, match=r"no response in 0.2 s|Timeout"):
        await ask(plain(lambda *_: time.sleep(0.6) or "late").url, tries=1, deadline_s=0.2)


@pytest.mark.parametrize(("body", "words", "code"), [
    ({"error": {"message": "bad", "code": "nope"}}, "status 400: bad", "nope"),
    (next(row["body"] for row in REFUSALS if not row["refused"]), "too large", ""),
])  # fmt: skip
async def test_refusals_are_not_repeated(plain, body, words, code):
    """A refused value is no refused parameter."""
    server = plain(lambda *_: JSONResponse(body, 400))
    with pytest.raises(RequestRefused, match=words) as refused:
        await ask(server.url)
    assert refused.value.code == code and len(server.requests) == 1


@pytest.mark.parametrize(("reply", "words"), [
    ({"content": 3}, ""), ({"content": "x", "tool_calls": "f"}, ""), ({"content": [3]}, ""),
    (Response(b"[" * 200_000, media_type="application/json"), ""),
    (Response("upstream connect error", 200), ": upstream connect error"),
])  # fmt: skip
async def test_what_is_no_chat_completion(plain, reply, words):
    with pytest.raises(NoResponse, match="no chat completion" + words):
        await ask(plain(lambda *_: reply).url, tries=1)


@pytest.mark.parametrize("row", REFUSALS, ids=str)
@pytest.mark.parametrize("status", [400, 422, 403])
def test_which_parameter_a_refusal_names(row, status):
    refusal = httpx.Response(status, json=row["body"])
    assert refused_parameter(HttpStatus(refusal, refusal.content), SENT) == (row["refused"] if status != 403 else "")


def particular(body: dict[str, Any], _: int) -> str | JSONResponse:
    """A model that reasons: it refuses all parameters of sampling, one at a time."""
    for row in REFUSALS:
        if row["refused"] in body:
            return JSONResponse(row["body"], 400)
    return r"\boxed{3}" if body["max_completion_tokens"] else "no limit"


def test_refused_parameters_are_left_out_told_once_and_recorded(plain, tmp_path, capsys):
    server, file = plain(particular), write_rows(tmp_path / "s.jsonl", {"problem": "1 + 2", "answer": "3"})
    found = evaluate(server.url, tmp_path / "a", file, "--samples", "4", "--concurrency", "2")["benchmarks"]["s"]
    told = capsys.readouterr().err
    assert found["pass_at"]["1"] == 1 and found["errors"] == 0
    assert found["left_out"] == dict.fromkeys(sorted(SENT), 1.0)
    assert any("100.0% of the responses are to requests without seed" in line for line in found["warnings"])
    assert {tuple(sorted(one["left_out"])) for one in records(tmp_path / "a")} == {tuple(sorted(SENT))}
    assert [told.count(f"refuses {name}, which is left out from now on: ") for name in SENT] == [1] * 4
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


async def test_judges_leave_out_what_is_refused(plain):
    server = plain(particular)
    judge = ChatEndpoint(server.url, "plain", {}, 20.0)
    player = ModelPlayer(server.url, "plain", {}, 20.0, concurrent=1, tries=1, temperature=1.0, max_tokens=64)
    replies = await player.say(Ask(role="judge", purpose="verdict", messages=BODY["messages"]), 1)
    judged = await judge.ask(BODY["messages"], 64)
    await judge.close()
    await player.close()
    assert judged == replies[0].text == r"\boxed{3}" and player.left_out == {"max_tokens", "temperature", "seed"}
    assert server.requests[-1]["max_completion_tokens"] == 64


@pytest.mark.parametrize("body", [
    {"error": {"message": "Provider is out of order", "code": 502}},
    {"error": "Provider is out of order", "choices": []},
    {"choices": [{"error": {"message": "Provider is out of order"}, "message": {"content": ""}}]},
    {"choices": [{"finish_reason": "error", "message": {"content": "1"}}], "error": {"message": "out of order"}},
])  # fmt: skip
async def test_an_error_with_status_200_is_told_and_asked_again(plain, body):
    server = plain(lambda _, call: "yes" if call else JSONResponse(body))
    assert await ask(server.url, tries=2) == ("yes", 2)
    with pytest.raises(NoResponse, match="an error in place of a completion: .*out of order"):
        await ask(plain(lambda *_: JSONResponse(body)).url, tries=1)


USAGE = ("prompt_tokens", "completion_tokens", "completion_tokens_details")
ODD = [12.0, "12", "12.0", None, [], {}, True, -1, 1.5, "many", 1e300, 10**30]


async def test_an_odd_usage_costs_no_response(plain):
    usages = [*ODD, *({name: value} for name in USAGE for value in ODD)]
    bodies = [{"choices": [{"message": {"content": "yes"}}], "usage": value} for value in usages]
    server = plain(lambda _, call: JSONResponse(bodies[call]))
    assert [await ask(server.url, tries=1) for _ in usages] == [("yes", 1)] * len(usages)
    assert {read_replies(json.dumps(body).encode())[0].text for body in bodies} == {"yes"}
    assert [read_count(value) for value in ODD] == [12, 12, 12, *[None] * 9]


async def test_lists_that_are_nested_too_deeply_are_none():
    app = FastAPI()
    for path in ("/v1/models", "/version"):
        app.get(path, response_model=None)(lambda: Response(b"[" * 200_000, media_type="application/json"))
    with running(app) as address:
        client = EvaluationClient(EvaluationSettings(url=f"{address}/v1"))
        assert (await client.models(), await weights_of(client, "m")) == ([], "")
        await client.close()


@pytest.mark.parametrize("row", read_table("evaluation/odd_messages"), ids=str)
def test_odd_fields_cost_no_response(row):
    choice = {"message": {"content": "yes", **row["change"]}, "finish_reason": {"x": 1}, "reasoning_language": "de"}
    text = json.dumps({"choices": [choice, None], "model": 7, "id": []})
    [read] = clients.ChatCompletion.model_validate_json(text).choices
    assert clients.parse_message(read.message) == (row["reasoning"], "yes", []) and read.finish_reason is None


def test_error_texts_of_any_shape():
    assert explain_error(b'{"error": {"message": "a\\nb", "code": 400}}') == ("a b", "400")
    assert explain_error(b'{"detail": "d"}') == ("d", "") and explain_error(b'{"error": "e"}') == ("e", "")
    assert explain_error(b"<html>\x1b[31m \xff") == ("<html> [31m \ufffd", "")
    assert explain_error(b"[1]") == ("[1]", "") and explain_error(b"[" * 100_000)[1] == ""


@pytest.mark.parametrize(("content", "reasoning", "answer"), [
    ("<think>a</think>b", "a", "b"), ("\n<think>\na\n</think>\n\nb\n", "a", "b"), ("a</think>b", "a", "b"),
    ("a[/THINK]b", "a", "b"), ("[THINK]a</think>b[/THINK]c", "a</think>b", "c"), ("<think>a", "a", ""), ("b", "", "b"),
    ("", "", ""), ("<think></think>b", "", "b"),
])  # fmt: skip
def test_reasoning_between_tags(content, reasoning, answer):
    assert clients.split(content) == (reasoning, answer)
