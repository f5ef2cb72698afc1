"""The HTTP application: `python -m serve --model DIR`, or `MAESTRALE_MODEL=DIR uvicorn serve.app:app`.

Every path here is meant for clients; the engine has no network interface of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from serve import chat, completions, page, responses, tokenization
from serve import settings as serve_settings
from serve.adapters import ServedAdapter, read_adapters
from serve.engine import ServingEngine
from serve.errors import ApiError, ErrorBody, on_error
from serve.follow import follow, follow_adapters
from serve.keys import load as load_keys
from serve.limits import LOCAL, AuthMiddleware, BodyLimitMiddleware, ChatClient, MetricsClient
from serve.metrics import RequestMiddleware
from serve.server import Server, model_name
from serve.settings import ServerSettings
from serve.system_prompts import PromptRenderer
from serve.vllm_engine import VllmEngine, version_of
from shared.errors import ConfigError, ModelError
from shared.http_limits import REQUEST_ID
from shared.model import hf
from shared.model.folder import load_config


def create_app(settings: ServerSettings | None = None, engine: ServingEngine | None = None) -> FastAPI:
    """Create the application. engine: default vLLM with the settings' model. Raises ConfigError, ModelError."""
    settings = settings or serve_settings.load()
    if not settings.model:
        raise ConfigError("model is missing: give the folder of a model, e.g. --model runs/quickstart/latest")
    if settings.follow and not Path(settings.model).is_dir():
        raise ConfigError(f"follow: {settings.model} is no folder here that could lead to newer exports")
    api_keys = load_keys(settings.keys)
    folder = hf.resolve(settings.model).resolve()
    max_tokens = settings.max_tokens or context_of(folder)
    name = settings.name or model_name(Path(settings.model))
    adapters = read_adapters(settings.adapter, folder, name, settings.system_prompt, settings.template)
    prompts = PromptRenderer.of_model(folder, settings.system_prompt, arguments=settings.template)
    engine = engine or make_engine(settings, folder, max_tokens, adapters, prompts)
    server = Server(settings, engine, prompts, max_tokens, adapters)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncGenerator[None, None]:
        starting = asyncio.create_task(server.start(), name="start of the engine")
        if server.on_failure is None:
            await starting
        follower = follow_adapters(server, folder) if adapters else follow(server, Path(settings.model), folder)
        following = asyncio.create_task(follower) if settings.follow else follower.close()
        try:
            yield
        finally:
            under_way = [task for task in (starting, following) if task is not None]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await server.stop()

    errors: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "An error"}}
    app = FastAPI(
        title="Maestrale", version=version("maestrale"), lifespan=life, responses=errors,
        redirect_slashes=False,  # a redirection would lead to whatever host the client names
        docs_url=None, redoc_url=None,  # the framework's pages load programs from elsewhere; /docs is our own
    )  # fmt: skip
    app.state.server = server
    # the last one added is the first to see a request
    app.add_middleware(BodyLimitMiddleware, most_bytes=settings.body_bytes, deadline_s=settings.body_s)
    origins = settings.allowed_origins
    app.add_middleware(
        AuthMiddleware, api_keys=api_keys, hosts=(*LOCAL, settings.host) if settings.at_home else (), origins=origins
    )
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=[REQUEST_ID, "X-Reasoning-Language", "Retry-After"],
        )  # fmt: skip
    app.add_middleware(RequestMiddleware, metrics=server.metrics, lines=settings.access_log)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    for router in (chat.router, completions.router, responses.router, tokenization.router, page.router):
        app.include_router(router)
    add_models(app, server)
    add_health(app, server)
    return app


def make_engine(
    settings: ServerSettings, folder: Path, max_tokens: int, adapters: dict[str, ServedAdapter], prompts: PromptRenderer
) -> VllmEngine:
    """Return the engine of a model's folder, with the ends of its prompts' turns. Raises ConfigError, ModelError."""
    hf.check(folder)
    chats = [prompts.chat, *(adapter.prompts.chat for adapter in adapters.values())]
    return VllmEngine(
        str(folder), max_tokens=max_tokens, max_sequences=settings.max_sequences, dtype=settings.dtype,
        cache_bytes=settings.cache_bytes, gpu_share=settings.gpu_memory_utilization,
        tensor_parallel=settings.tensor_parallel, quantization=settings.quantization, adapters=adapters,
        stop_ids={token for chat in chats for token in chat.stop_ids},
    )  # fmt: skip


def __getattr__(name: str) -> FastAPI:
    """Create `serve.app:app` on first access, with the settings of the environment and its file."""
    if name == "app":
        return create_app()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def context_of(folder: Path) -> int:
    """Return the context length of a model, prompt and completion together, in tokens. Raises ModelError."""
    path = folder / "config.json"
    try:
        return int(load_config(folder)["max_position_embeddings"])
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ModelError(f"{path} does not tell max_position_embeddings ({error}): set --max-tokens") from error


def add_models(app: FastAPI, server: Server) -> None:
    """Add the endpoints that list the served model."""
    card = {"object": "model", "created": int(time.time()), "owned_by": "maestrale",
            "max_model_len": server.max_tokens}  # fmt: skip
    cards = {name: {"id": name, **card} for name in (server.name, *server.adapters)}

    @app.get("/v1/models")
    async def models(client: ChatClient) -> dict[str, Any]:
        return {"object": "list", "data": list(cards.values())}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, client: ChatClient) -> dict[str, Any]:
        if not name:
            raise HTTPException(404)
        return cards[server.check_model(name)]


def add_health(app: FastAPI, server: Server) -> None:
    """Add the endpoints for liveness, readiness, version, and for Prometheus."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if server.draining or not server.ready or not await server.engine.is_alive():
            what = "shutting down" if server.draining else "the engine is starting"
            raise ApiError(503, what, code="not_ready", retry_after_s=5)
        return {"status": "ready"}

    @app.get("/version")
    async def versions() -> dict[str, Any]:
        names = {"version": version("maestrale"), "model": server.name, "weights": server.engine.version}
        adapters = {name: version_of(str(served.folder)) for name, served in server.adapters.items()}
        return {**names, "adapters": adapters} if adapters else names

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(client: MetricsClient) -> PlainTextResponse:
        return PlainTextResponse(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)
