"""The HTTP application of the dashboard: its page, and what the page asks for. Read-only, for this machine only,
and for whoever has the token of its link (access.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from dashboard.access import TokenMiddleware
from dashboard.columns import AXES
from dashboard.group import TokenDecoder, show_group, show_tokens
from dashboard.rollouts import MARKS
from dashboard.run_folder import RunFolders
from dashboard.test_case import NoTestCase, write_test
from serve.errors import ApiError, on_error, respond
from serve.keys import ApiKeys
from serve.limits import LOCAL, AuthMiddleware
from serve.page import load_files, send
from serve.page import router as pages
from shared.clean_text import clean

LOOK_S = 0.4
"""seconds between two looks at the folders, while somebody watches"""
COMMENT_S = 15.0
"""seconds after which a silent stream says something, so that a client that has gone is noticed"""
FILES = load_files(Path(__file__).parent / "page")
FILE_PAGES = APIRouter(routes=[route for route in pages.routes if getattr(route, "path", "") == "/page/{name:path}"])
"""the files of the chat page: the dashboard uses its libraries and what draws texts"""


class Watch:
    """Looks at all run folders, for any number of watchers at most every LOOK_S."""

    def __init__(self, folders: RunFolders):
        self._folders, self._seen, self._at = folders, {}, 0.0  # type: ignore[var-annotated]
        self._lock = asyncio.Lock()

    async def look(self) -> dict[str, tuple[int, ...]]:
        """Run -> its signature, as of LOOK_S ago at most."""
        async with self._lock:
            if time.monotonic() - self._at >= LOOK_S:
                self._seen = await asyncio.to_thread(lambda: {run.name: run.signature() for run in self._folders.all()})
                self._at = time.monotonic()
            return self._seen


def answer(content: Any) -> Response:
    """JSON that no cache keeps; numbers that are not finite are null."""
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(msgspec.json.encode(content), media_type="application/json", headers=headers)


def create_app(root: Path, token: str) -> FastAPI:
    """Create the application for a folder of runs, or for one run. token: what every request must show."""
    folders = RunFolders(root)
    app = FastAPI(title="Maestrale dashboard", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(TokenMiddleware, token=token)
    # the first to see a request: foreign machines, host names and pages, and everything but reading, are refused
    app.add_middleware(AuthMiddleware, api_keys=ApiKeys([]), hosts=LOCAL)
    for kind in (ApiError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(LookupError, _not_found)
    add_pages(app)
    add_runs(app, root, folders)
    add_rollouts(app, folders)
    add_events(app, Watch(folders))
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    words = "there is no such run here" if isinstance(error, KeyError) else str(error)
    return respond(ApiError(422 if isinstance(error, NoTestCase) else 404, words, code="not_found"))


def add_pages(app: FastAPI) -> None:
    """Add the page and the files that it loads."""

    @app.get("/")
    def page(request: Request) -> Response:
        return send("index.html", request, FILES)

    @app.get("/dashboard/{name:path}")
    def file(name: str, request: Request) -> Response:
        return send(name, request, FILES)

    app.include_router(FILE_PAGES)


def add_runs(app: FastAPI, root: Path, folders: RunFolders) -> None:
    """Add the requests for runs and their numbers."""

    @app.get("/api/runs")
    def runs() -> Response:
        summaries = sorted((run.summary() for run in folders.all()), key=lambda summary: -summary["written"])
        return answer({"root": clean(str(root)), "now": time.time(), "runs": summaries})

    @app.get("/api/runs/{name}")
    def run(name: str) -> Response:
        return answer(folders.find(name).overview())

    @app.get("/api/runs/{name}/series")
    def series(
        name: str, metric: Annotated[list[str], Query(min_length=1, max_length=40)], axis: str = "step",
        points: Annotated[int, Query(ge=10, le=5000)] = 800, low: float | None = None, high: float | None = None,
    ) -> Response:  # fmt: skip
        if axis not in AXES:
            raise ApiError(400, f"axis is one of {', '.join(AXES)}", code="invalid_value", param="axis")
        return answer(folders.find(name).series(metric, axis, points, low, high))

    @app.get("/api/differences")
    def differences(run: Annotated[list[str], Query(max_length=40)]) -> Response:
        return answer(folders.differences(run))


def add_rollouts(app: FastAPI, folders: RunFolders) -> None:
    """Add the requests for groups and their completions."""
    decoder, find = TokenDecoder(), folders.find

    @app.get("/api/runs/{name}/rollouts")
    def steps(name: str) -> Response:
        return answer(find(name).rollouts.steps())

    @app.get("/api/runs/{name}/rollouts/{step}")
    def groups(name: str, step: int, start: Annotated[int, Query(ge=0)] = 0) -> Response:
        return answer(find(name).rollouts.listed(step, start))

    @app.get("/api/runs/{name}/search")
    def search(
        name: str, mark: str = "", text: Annotated[str, Query(max_length=500)] = "", before: int | None = None
    ) -> Response:
        if mark and mark not in MARKS:
            raise ApiError(400, f"mark is one of {', '.join(MARKS)}", code="invalid_value", param="mark")
        return answer(find(name).rollouts.search(mark, text, before))

    @app.get("/api/runs/{name}/rollouts/{step}/{line}")
    def group(name: str, step: int, line: int) -> Response:
        return answer(show_group(find(name), step, line))

    @app.get("/api/runs/{name}/rollouts/{step}/{line}/{sample}/tokens")
    def tokens(name: str, step: int, line: int, sample: int, start: int = 0) -> Response:
        return answer(show_tokens(find(name), decoder, step, line, sample, start))

    @app.get("/api/runs/{name}/rollouts/{step}/{line}/{sample}/test")
    def test(name: str, step: int, line: int, sample: int) -> Response:
        headers = {"X-Content-Type-Options": "nosniff"}
        return PlainTextResponse(write_test(find(name), step, line, sample), headers=headers)


def add_events(app: FastAPI, watch: Watch) -> None:
    """Add the stream that says which runs changed."""

    @app.get("/api/events")
    async def events() -> StreamingResponse:
        async def stream() -> AsyncGenerator[bytes, None]:
            before, sent_at = await watch.look(), time.monotonic()
            yield b": watching\n\n"
            while True:
                await asyncio.sleep(LOOK_S)
                now = await watch.look()
                changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
                before = now
                if changed:
                    yield b"event: changed\ndata: " + msgspec.json.encode(changed) + b"\n\n"
                    sent_at = time.monotonic()
                elif time.monotonic() - sent_at > COMMENT_S:
                    yield b": nothing new\n\n"
                    sent_at = time.monotonic()

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
