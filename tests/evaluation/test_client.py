"""What another try may help, when, and what a server said."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from fastapi.responses import JSONResponse

from evaluation.client import EvaluationClient, NoResponse, RequestRefused, explain, retry_after_s, split
from evaluation.settings import EvaluationSettings
from tests.evaluation.conftest import Plain

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


@pytest.mark.parametrize("message", [{"content": 3}, {"content": "x", "tool_calls": "f"}, {"reasoning": ["x"]}])
def test_what_is_no_chat_completion(plain: Plain, message: dict[str, object]) -> None:
    with pytest.raises(NoResponse, match="no chat completion"):
        ask(plain(lambda *_: message).url, tries=1)


def test_error_texts_of_any_shape() -> None:
    assert explain(b'{"error": {"message": "a\\nb", "code": 400}}') == ("a b", "400")
    assert explain(b'{"detail": "d"}') == ("d", "") and explain(b'{"error": "e"}') == ("e", "")
    assert explain(b"<html>\x1b[31m \xff") == ("<html> [31m \ufffd", "")
    assert explain(b"[1]") == ("[1]", "") and explain(b"[" * 100_000)[1] == ""


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
