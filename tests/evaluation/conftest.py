"""Servers that say what a test tells them, in the plain shape of OpenAI's API, and evaluations of them."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from evaluation.__main__ import main
from tests.serve.conftest import model_folder as model_folder
from tests.serve.conftest import running
from tests.serve.conftest import serve as serve

Answer = Callable[[dict[str, Any], int], str | dict[str, Any] | Response]
"""(request, number of the request) -> content, whole message, or response"""
Plain = Callable[..., "PlainServer"]


@pytest.fixture(autouse=True)
def one_checker(monkeypatch):
    """A process that checks answers takes seconds to start: one for each evaluation, not one for each core."""
    monkeypatch.setattr("evaluation.__main__.worker_count", lambda _: 1)


class PlainServer:
    """Of a model "plain": /v1/models and /v1/chat/completions, nothing of ours."""

    def __init__(self, answer: Answer, language: dict[str, Any] | None = None, **usage: int):
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.app = FastAPI()
        self.card: dict[str, Any] = {"id": "plain"}

        @self.app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [self.card]}

        @self.app.post("/v1/chat/completions", response_model=None)
        async def chat(request: Request) -> dict[str, Any] | Response:
            body = await request.json()
            self.requests.append(body)
            self.headers.append(dict(request.headers))
            said = answer(body, len(self.requests) - 1)
            if isinstance(said, Response):
                return said
            message = {"content": said} if isinstance(said, str) else dict(said)
            reason = message.pop("finish_reason", "stop")
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
            choice |= {"reasoning_language": language} if language else {}
            return {"id": "1", "object": "chat.completion", "model": "plain", "choices": [choice],
                    "usage": {"prompt_tokens": 10, "completion_tokens": 20, **usage}}  # fmt: skip


@pytest.fixture
def plain():
    """plain(answer): a running server."""
    with ExitStack() as stack:

        def begin(answer: Answer, language: dict[str, Any] | None = None, **usage: int) -> PlainServer:
            server = PlainServer(answer, language, **usage)
            server.url = stack.enter_context(running(server.app)) + "/v1"
            return server

        yield begin


def prompt_of(body: dict[str, Any]) -> str:
    """What the last turn of a request says."""
    return str(body["messages"][-1]["content"])


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def evaluate(url: str, out: Path, *arguments: str | Path) -> dict[str, Any]:
    """Run the command to its end in this process; returns results.json."""
    code = main([*map(str, arguments), "--url", url, "--out", str(out)])
    assert code in (0, 1), code
    results: dict[str, Any] = json.loads((out / "results.json").read_bytes())
    assert (code == 1) == any(score["errors"] for score in results["benchmarks"].values())
    return results


def figures(url: str, out: Path, file: str | Path, *arguments: str, samples: int = 1) -> Any:
    """What an evaluation of one benchmark found."""
    [scores] = evaluate(url, out, file, "--samples", str(samples), *arguments)["benchmarks"].values()
    return scores


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_bytes().splitlines()]
