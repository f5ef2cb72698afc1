"""The state of a server process: it admits requests, plans and samples their responses, and replaces a dead engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fastapi import Request

from serve.adapters import ServedAdapter
from serve.enforcement import check_language
from serve.engine import CrashingRequest, EngineDied, EngineRefused, SamplingParameters, ServingEngine
from serve.errors import ApiError
from serve.generation import generate
from serve.keys import Client
from serve.metrics import Metrics
from serve.plan import GenerationPlan, Response
from serve.reasoning import Chunk
from serve.reasoning_language import AUTO, OFF, LanguageChoice, Source, choose_language, read_tag
from serve.schemas import ChatRequest, GenerationRequest
from serve.settings import ServerSettings
from serve.system_prompts import PromptRenderer
from serve.tools import describe_form
from shared.chat import joined
from shared.errors import ModelError
from shared.tool_calls import ParsedCall

LOOK_EVERY_S = 0.25
RESTARTS_IN_A_ROW = 5
EFFORTS = {"none": 0.0, "minimal": 0.02, "low": 0.1, "medium": 0.3, "high": 0.6}
"""reasoning_effort -> share of the model's context that reasoning may take; higher efforts have no bound"""
MOST_CALLS = 32
LONGER = "or take a model with a longer context"
LANGUAGE_HEADER = "x-reasoning-language"
TEMPLATE_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""reasoning_effort -> the argument of that name of chat templates that read one (gpt-oss)"""
LARGE = 20_000
"""characters of a request above which `in_thread_if_long` works in a thread"""
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
log = logging.getLogger("serve")


class AdmissionPermit:
    """The places that the completions of one request occupy: until the end of its `with` block, or until `close` if the
    block has kept them, for a response that is streamed after it."""

    def __init__(self, server: Server, client: Client, count: int):
        self._server, self._client, self._count, self._kept = server, client, count, False
        server.admitted += count
        client.admitted += count

    def __enter__(self) -> AdmissionPermit:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None or not self._kept:
            self.close()

    def keep(self) -> AdmissionPermit:
        """Return the permit, which the end of the block does not close."""
        self._kept = True
        return self

    def close(self) -> None:
        """Give the places back; has no effect a second time."""
        self._server.admitted -= self._count
        self._client.admitted -= self._count
        self._count = 0


class Server:
    """Serves one model: its engine, its prompts, and the requests that are admitted."""

    def __init__(
        self, settings: ServerSettings, engine: ServingEngine, prompts: PromptRenderer, max_tokens: int,
        adapters: dict[str, ServedAdapter] | None = None,
    ):  # fmt: skip
        self.settings, self.engine, self.prompts, self.max_tokens = settings, engine, prompts, max_tokens
        self.adapters = adapters or {}
        """by the name that clients call"""
        self.metrics = Metrics()
        self.name = settings.name or model_name(Path(settings.model))
        self.ready = self.draining = False
        self.failure: Exception | None = None
        """the error with which the engine failed to start, if it did"""
        self.on_failure: Callable[[], None] | None = None
        """what ends a server that answers while the engine starts; None: it answers when the engine has started"""
        self.on_ready: Callable[[], None] = lambda: None
        """called when requests can be answered for the first time"""
        self.admitted = 0
        """number of completions that are admitted and have not ended"""
        self.live: dict[str, tuple[Client, dict[int, Response]]] = {}
        """id -> the client of a response that is being streamed, and its choices that go on"""
        self.restarts = self.reloads = 0
        gauge = self.metrics.add_gauge
        gauge("completions_under_way", "running or waiting", lambda: self.admitted)
        gauge("completions_most", "that are admitted", lambda: settings.max_sequences + settings.queue)
        gauge("ready", "1 when requests can be answered", lambda: self.ready and not self.draining)
        gauge("engine_restarts", "since the start", lambda: self.restarts)
        gauge("reloads", "newer weights that were taken", lambda: self.reloads)
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine and its watch. Raises ModelError, ConfigError, unless there is `on_failure`."""
        try:
            await self.engine.start()
        except Exception as error:
            self.failure = error
            if self.on_failure is None:
                raise
            self.on_failure()
            return
        self.ready = True
        adapted = {name: adapter.prompts for name, adapter in self.adapters.items()}
        for name, prompts in {self.name: self.prompts, **adapted}.items():
            if prompts.warning and self.settings.reasoning_language != OFF:
                log.warning("%s: %s", name, prompts.warning)
        log.info("%s is ready", self.name)
        self.on_ready()
        self._watch = asyncio.create_task(self._keep_alive(), name="engine watch")

    async def _keep_alive(self) -> None:
        """Restart the engine whenever it dies, until restarts fail too often in a row."""
        failed = 0
        while failed < RESTARTS_IN_A_ROW:
            await asyncio.sleep(LOOK_EVERY_S)
            if await self.engine.is_alive():
                continue
            self.ready = False
            log.error("the engine died; starting it again")
            try:
                await self.engine.restart()
            except Exception:  # whatever it is, it is logged, and the next try may go better
                failed += 1
                log.exception("the engine did not start (%d of %d)", failed, RESTARTS_IN_A_ROW)
                await asyncio.sleep(failed)
                continue
            failed = 0
            self.restarts += 1
            self.ready = True
        log.critical("the engine does not start: this server stays not ready")
        await self.engine.stop()

    def check_model(self, asked: str) -> str:
        """Return the name of the model that is asked for: "" means the one that adapters are of. Raises ApiError for
        one that is not served."""
        if asked not in ("", self.name, *self.adapters):
            names = ", ".join(f'"{name}"' for name in (self.name, *self.adapters))
            message = f'there is no model "{asked[:100]}" here, only {names}'
            raise ApiError(404, message, code="model_not_found", param="model")
        return asked or self.name

    def prompts_of(self, model: str, arguments: Mapping[str, Any] | None = None) -> PromptRenderer:
        """The prompts of a model by its name, or of an adapter. arguments: of the chat template. Raises ApiError."""
        prompts = self.adapters[model].prompts if model in self.adapters else self.prompts
        try:
            return prompts.with_arguments(arguments or {})
        except ModelError as error:
            raise ApiError(
                400, message_of(error, prompts), code="invalid_value", param="chat_template_kwargs"
            ) from error

    def template_arguments(self, body: ChatRequest) -> Mapping[str, Any]:
        """Return the arguments of the chat template that a request gives: its own, and its effort where the template
        reads one and takes that value. Raises ApiError."""
        effort, given = TEMPLATE_EFFORTS.get(body.reasoning_effort or "", ""), body.chat_template_kwargs
        prompts = self.prompts_of(body.model)
        if not effort or "reasoning_effort" in given or not prompts.chat.template.reads("reasoning_effort"):
            return given
        try:
            prompts.with_arguments({"reasoning_effort": effort})
        except ModelError:  # its efforts have other names
            return given
        return {"reasoning_effort": effort, **given}

    def admit(self, count: int, client: Client) -> AdmissionPermit:
        """Take places for `count` completions. Raises ApiError before any work is done: 400 for more than ever fit, 503
        if none are free, 429 if the client has used up its own."""
        most = self.settings.max_sequences + self.settings.queue
        if count > most:
            message = f"{count} completions in one request, of {most} that fit here"
            raise ApiError(400, message, code="too_many", param="n")
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=10)
        if not self.ready:
            raise ApiError(503, "the engine is starting: try again", code="engine_starting", retry_after_s=5)
        if self.admitted + count > most:
            raise ApiError(
                503, f"{self.admitted} completions are running or waiting: try again", code="server_overloaded",
                retry_after_s=2,
            )  # fmt: skip
        client.check(count)
        return AdmissionPermit(self, client, count)

    def check_size(self, characters: int, param: str) -> None:
        """Raises ApiError for a text that cannot fit the context, before it is tokenised."""
        if characters > self.max_tokens * self.prompts.longest:
            message = f"{characters} characters do not fit the model's context of {self.max_tokens} tokens: "
            raise ApiError(400, f"{message}shorten it, {LONGER}", code="context_length_exceeded", param=param)

    def check_tokens(self, token_ids: Collection[int], param: str, field: str = "") -> None:
        """Raises ApiError for a token id that is not in the model's vocabulary. field: put before the message."""
        size, highest = len(self.prompts.chat.tokenizer), max(token_ids, default=0)
        if highest >= size:
            message = f"{field}token {highest} is not one of the model's {size}"
            raise ApiError(400, message, code="unknown_token", param=param)

    def sampling(
        self, body: GenerationRequest, limits: Mapping[str, int | None], prompt_ids: Sequence[int], prompt: str,
        code: str = "",
    ) -> SamplingParameters:  # fmt: skip
        """Return how to sample a completion of a prompt, and count the prompt's tokens. limits: the fields that bound
        its tokens, of which the last one given counts; prompt: the prompt's field; code: language of a chat's
        reasoning. Raises ApiError."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_tokens(getattr(body, name) or [], name, f"{name}: ")
        for name, limit in limits.items():
            if limit is not None and limit > self.max_tokens:
                context = f"the model's context of {self.max_tokens} tokens"
                message = f"{name} = {limit} is more than {context}: give less, or leave it out"
                raise ApiError(400, message, code="invalid_value", param=name)
        room = self.max_tokens - len(prompt_ids)
        if room < 1:
            parts, repair = self._parts(body, code) if isinstance(body, ChatRequest) else ("", "shorten it")
            message = f"the prompt has {len(prompt_ids)} tokens{parts}, the model's context {self.max_tokens}: "
            raise ApiError(400, f"{message}{repair}, {LONGER}", code="context_length_exceeded", param=prompt)
        most = min([limit for limit in limits.values() if limit is not None][-1:] + [room])
        if body.min_tokens > most:
            message = f"min_tokens = {body.min_tokens} is more than the {most} tokens that this completion may have"
            raise ApiError(400, message, code="invalid_value", param="min_tokens")
        self.metrics.count_tokens(len(prompt_ids), 0, 0)
        sampling = body.sampling(self.settings.temperature, self.settings.top_p, most)
        return replace(sampling, adapter=body.model) if body.model in self.adapters else sampling

    def _parts(self, body: ChatRequest, code: str) -> tuple[str, str]:
        """What fills a prompt beside its turns, with its tokens, and what the client can do about it."""
        chat, form = (prompts := self.prompts_of(body.model)).chat, describe_form(body.offered, body.constraint)
        theirs = [message.text for message in body.messages if message.role in ("system", "developer")]
        what, repair = ("tools", "give fewer tools") if body.offered else ("response_format", "give a smaller schema")
        asked = form.text.replace("{given}", form.given) if form else ""
        texts = {what: asked, "system prompt": joined(prompts.system_prompt(code), *theirs)}
        parts = ", ".join(f"{name} {len(chat.encode(text))}" for name, text in texts.items() if text)
        return f" ({parts})" * bool(parts), repair if form else "shorten it"

    def render(
        self, body: ChatRequest, request: Request, client: Client, prompt: str = "messages"
    ) -> tuple[LanguageChoice, list[int]]:
        """Return the language of a response and its [prompt_tokens]. prompt: name of its field. Raises ApiError."""
        settings = self.settings
        try:
            asked = read_tag(request.headers[LANGUAGE_HEADER]) if LANGUAGE_HEADER in request.headers else ""
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value", param=LANGUAGE_HEADER) from error
        prompts, default = self.prompts_of(body.model, self.template_arguments(body)), settings.reasoning_language
        candidates: list[tuple[str, Source]] = [
            (body.reasoning_language or "", "body"), (asked, "header"), (client.language, "key"),
            (OFF if prompts.bare and default == AUTO else default, "default"),
        ]  # fmt: skip
        turns = [message.text for message in body.messages if message.role == "user"]
        choice = choose_language(
            candidates, turns, request.headers.get("accept-language", ""), settings.fallback_language
        )
        try:
            return choice, prompts.render(body.messages, choice.code, describe_form(body.offered, body.constraint))
        except ModelError as error:
            message = f"this conversation does not fit the model's form: {message_of(error, prompts)}"
            raise ApiError(400, message, code="unknown_form", param=prompt) from error

    async def plan(
        self, body: ChatRequest, request: Request, client: Client, prompt: str = "messages",
        limits: Mapping[str, int | None] | None = None,
    ) -> GenerationPlan:  # fmt: skip
        """Return the language, prompt and sampling of a request. prompt, limits: names of its fields, and the values of
        those that bound its tokens; by default a chat's. Raises ApiError."""
        limits = limits or {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
        return await in_thread_if_long(body.characters, self._plan, body, request, client, prompt, limits)

    def _plan(
        self, body: ChatRequest, request: Request, client: Client, prompt: str, limits: Mapping[str, int | None]
    ) -> GenerationPlan:
        settings, constraint = self.settings, body.constraint
        self.check_size(body.characters, prompt)
        choice, prompt_ids = self.render(body, request, client, prompt)
        enforcement = body.reasoning_language_enforcement or settings.reasoning_language_enforcement
        if choice.code and enforcement == "constrain" and self.prompts_of(body.model).tags.channels:
            message = "constrain is not for models that write in channels: give prompt, prefill, retry or strict"
            raise ApiError(400, message, code="unsupported_value", param="reasoning_language_enforcement")
        sampling = self.sampling(body, limits, prompt_ids, prompt, choice.code)
        sampling = replace(sampling, logprobs=body.top_logprobs if body.logprobs else None, constraint=constraint)
        budget = body.thinking_token_budget
        if budget is None and (share := EFFORTS.get(body.reasoning_effort or "")) is not None:
            budget = round(share * self.max_tokens)
        if budget is None and constraint is not None:
            budget = sampling.max_tokens // 2  # what must have a form must also have room
        return GenerationPlan(
            prompt_ids, sampling, choice, choices=body.n,
            enforcement=enforcement,
            thinking_budget=budget, tools=frozenset(tool.function.name for tool in body.offered),
            most_calls=MOST_CALLS if body.parallel_tool_calls else 1,
            template=self.template_arguments(body),
        )  # fmt: skip

    async def sample_responses(self, plan: GenerationPlan, count: int) -> list[Response]:
        """Sample complete responses. Raises ApiError."""
        responses = [Response() for _ in range(count)]
        await exhaust(self.sample(plan, index, response) for index, response in enumerate(responses))
        check_language(responses, plan, self.prompts)
        return responses

    async def sample(
        self, plan: GenerationPlan, index: int, response: Response
    ) -> AsyncGenerator[Chunk | ParsedCall, None]:
        """Yield the chunks of one response. Raises ApiError, also for errors of the engine."""
        try:
            with engine_errors():
                prompts = self.prompts_of(plan.sampling.adapter, plan.template)
                async with contextlib.aclosing(
                    generate(self.engine, prompts, plan.for_choice(index), response)
                ) as chunks:
                    async for chunk in chunks:
                        yield chunk
        finally:
            self.metrics.count_response(response, plan)

    @contextlib.contextmanager
    def controlled(self, response_id: str, client: Client, index: int, response: Response) -> Iterator[None]:
        """Context in which the client may control a choice of a response."""
        _, choices = self.live.setdefault(response_id, (client, {}))
        choices[index] = response
        try:
            yield
        finally:
            del choices[index]
            if not choices:
                del self.live[response_id]

    async def drain(self) -> None:
        """Admit no more requests, and wait for those under way, for at most `drain_s` seconds."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s):
                while self.admitted:
                    await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop the watch and the engine."""
        self.ready = False
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self.engine.stop()


def model_name(folder: Path) -> str:
    """Return the name of a model: the run's name for an export of a run, else the folder's."""
    folder = Path(folder).absolute()
    run = folder.parent if folder.name in ("latest", "best") else folder.parent.parent
    is_export = folder.name in ("latest", "best") or folder.parent.name == "hf"
    return run.name if is_export else folder.name


def message_of(error: ModelError, prompts: PromptRenderer) -> str:
    """Return what clients read of an error: without the model's folder, a path of the server's machine."""
    return str(error).replace(f"{prompts.chat.folder}: ", "")


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Context manager that turns errors of the engine into ApiError."""
    try:
        yield
    except EngineDied as error:
        message = "the engine died and is started again: try again"
        raise ApiError(503, message, code="engine_restarting", retry_after_s=5) from error
    except CrashingRequest as error:
        raise ApiError(500, str(error), code="engine_killed", retry=False) from error
    except EngineRefused as error:
        raise ApiError(400, str(error).splitlines()[0][:300], code="invalid_value") from error


async def in_thread_if_long(
    characters: int, work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result:
    """Return the result of `work`. Tokenising many characters takes long, and responses under way must not wait for it:
    in that case the work is done in a thread."""
    if characters > LARGE:
        return await asyncio.to_thread(work, *arguments, **named)
    return work(*arguments, **named)


async def exhaust(iterators: Iterable[AsyncGenerator[Any, None]]) -> None:
    """Run iterators concurrently to their ends, for what they do and not for what they yield; one failure cancels the
    others."""

    async def run(iterator: AsyncGenerator[Any, None]) -> None:
        async with contextlib.aclosing(iterator) as values:
            async for _ in values:
                pass

    async with asyncio.TaskGroup() as group:
        for iterator in iterators:
            group.create_task(run(iterator))
