"""POST /v1/chat/completions, streamed or not, and its control endpoint for "answer now".

A request is admitted, gets its language and its prompt, and then as many responses as it asked for. When a client
disconnects, its completions are aborted at once, in both modes. Responses are OpenAI's objects, with the reasoning
where `reasoning_format` says, and with the measured language.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from fastapi.responses import Response as HttpResponse

from serve.enforcement import check_language
from serve.engine import Candidate
from serve.errors import ApiError
from serve.keys import Client
from serve.limits import ChatClient
from serve.parameters import RequestBody
from serve.plan import DiscardedTry, GenerationPlan, Response
from serve.reasoning import Chunk, ReasoningFormat
from serve.schemas import ChatRequest
from serve.server import Server
from serve.streams import STREAMED, EventStream, Json, merge, until_disconnect
from serve.system_prompts import PromptRenderer
from shared.tool_calls import ParsedCall
from verify.language import detect

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request, client: ChatClient) -> HttpResponse:
    """Sample one or more responses to a conversation."""
    server: Server = request.app.state.server
    model = server.check_model(body.model)
    with server.admit(body.n, client) as permit:
        plan = await server.plan(body, request, client)
        form = body.reasoning_format or server.settings.reasoning_format if body.include_reasoning else "hidden"
        renderer = ChatRenderer(model, form, server.prompts_of(body.model, plan.template), body.wants_usage)
        if body.stream:
            return EventStream(stream(server, body, plan, renderer, client), permit.keep(), headers(plan))
        responses = await until_disconnect(request, server.sample_responses(plan, body.n))
    return JSONResponse(renderer.whole(responses, plan, len(plan.prompt_ids), body.logprobs), headers=headers(plan))


class Control(RequestBody):
    """The body of POST /v1/chat/completions/control."""

    id: str
    """Id of a response that is being streamed."""
    action: Literal["reasoning_end"]
    """reasoning_end: the reasoning ends now, with a phrase, and the answer follows"""


@router.post("/v1/chat/completions/control")
async def control(body: Control, request: Request, client: ChatClient) -> dict[str, int]:
    """ "Answer now": end the reasoning of a response under way. Returns how many of its choices this reaches."""
    server: Server = request.app.state.server
    owner, responses = server.live.get(body.id, (None, {}))
    if owner is not client:
        raise ApiError(404, f"no response {body.id[:60]} is being streamed", code="not_found", param="id")
    thinking = [response for response in responses.values() if not response.answer and not response.finish_reason]
    for response in thinking:
        response.end_reasoning_early = True
    return {"ended": len(thinking)}


def headers(plan: GenerationPlan) -> dict[str, str]:
    """Return the headers of a response: the language that was requested of the model."""
    return {"X-Reasoning-Language": plan.choice.code} if plan.choice.code else {}


def stream(
    server: Server, body: ChatRequest, plan: GenerationPlan, renderer: ChatRenderer, client: Client
) -> AsyncGenerator[bytes, None]:
    """Return the server-sent events of a request; an error in the middle is an event of its own."""
    responses = [Response() for _ in range(body.n)]

    async def feed(index: int) -> AsyncGenerator[list[Json], None]:
        response, sent = responses[index], 0

        def ranked() -> Json | None:
            nonlocal sent
            new, sent = response.logprobs[sent:], len(response.logprobs)
            return logprobs(new) if new else None

        yield [renderer.event(index, {"role": "assistant", "content": ""})]
        with server.controlled(renderer.id, client, index, response):
            async with contextlib.aclosing(server.sample(plan, index, response)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, ParsedCall):
                        call = {"index": len(response.calls) - 1, **call_object(chunk)}
                        yield [renderer.event(index, {"tool_calls": [call]})]
                    else:
                        yield renderer.chunk(index, chunk, ranked())
        check_language([response], plan, server.prompts)
        yield [renderer.last(index, response, plan, ranked())]

    def last() -> list[Json]:
        return [renderer.usage_event(responses, len(plan.prompt_ids))] if body.wants_usage else []

    return merge([feed(index) for index in range(body.n)], server.settings.ping_s, last=last)


class ChatRenderer:
    """Renders the response to one request in the reasoning format that the client asked for."""

    def __init__(self, model: str, format: ReasoningFormat, prompts: PromptRenderer, wants_usage: bool):
        """wants_usage: a last event counts the tokens, and the events before it have null instead."""
        self.id, self.created, self.model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model
        self.format, self.tags = format, prompts.shown
        self._line = "" if prompts.whole else "\n"
        """around tags; "" for texts that come back in later requests as they are, and the model sees them again"""
        self._inside: set[int] = set()
        """indices of choices whose reasoning is open in the text (format inline)"""
        self.wants_usage = wants_usage

    def head(self, kind: str) -> Json:
        """Return the fields that every object begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(
        self, responses: Sequence[Response], plan: GenerationPlan, prompt_tokens: int, with_logprobs: bool
    ) -> Json:
        """Return the object of a response that is not streamed."""
        choices = [
            {
                "index": index,
                "message": self.message(response),
                "finish_reason": response.finish_reason,
                "stop_reason": response.stop_reason,
                "logprobs": logprobs(response.logprobs) if with_logprobs else None,
                "reasoning_language": language_object(response, plan),
            }
            for index, response in enumerate(responses)
        ]
        whole = {**self.head("chat.completion"), "choices": choices, "usage": usage(responses, prompt_tokens)}
        # of several choices none speaks for the others
        return whole | ({"reasoning_language": choices[0]["reasoning_language"]} if len(choices) == 1 else {})

    def message(self, response: Response) -> Json:
        """Return the assistant's message."""
        reasoning, answer = response.reasoning, response.answer
        message: Json = {"role": "assistant", "content": answer, "refusal": None, "annotations": []}
        if response.calls:
            message["tool_calls"] = [call_object(call) for call in response.calls]
        if self.format == "inline" and reasoning:
            line = self._line
            message["content"] = f"{self.tags.open}{line}{reasoning}{line}{self.tags.close}{line}{answer}"
        elif self.format == "mistral":
            thinking = {"type": "thinking", "thinking": [{"type": "text", "text": reasoning}], "closed": True}
            message["content"] = [*([thinking] if reasoning else []), {"type": "text", "text": answer}]
        elif self.format not in ("hidden", "inline"):
            message |= dict.fromkeys(self.names(), reasoning or None)
        if response.calls and not message["content"]:
            message["content"] = None
        return message

    def names(self) -> list[str]:
        """Return the names of the fields that hold the reasoning."""
        return {
            "both": ["reasoning", "reasoning_content"], "openai": ["reasoning"], "deepseek": ["reasoning_content"],
        }.get(self.format, [])  # fmt: skip

    def chunk(self, index: int, chunk: Chunk, ranked: Json | None = None) -> list[Json]:
        """Return the event of some text; none if the client does not want it. ranked: log-probs of its tokens."""
        if self.format == "inline":
            text = chunk.text
            if chunk.thinking and index not in self._inside:
                text = f"{self.tags.open}{self._line}{text}"
                self._inside.add(index)
            elif not chunk.thinking:
                text = self._close(index) + text
            return [self.event(index, {"content": text}, ranked)]
        if not chunk.thinking:
            return [self.event(index, {"content": chunk.text}, ranked)]
        if self.format == "mistral":
            thinking = {"type": "thinking", "thinking": [{"type": "text", "text": chunk.text}]}
            return [self.event(index, {"content": [thinking]}, ranked)]
        names = self.names()
        return [self.event(index, dict.fromkeys(names, chunk.text), ranked)] if names or ranked else []

    def _close(self, index: int) -> str:
        """Return the text that ends the reasoning of a choice (format inline); "" where none is open."""
        if index not in self._inside:
            return ""
        self._inside.discard(index)
        return f"{self._line}{self.tags.close}{self._line}"

    def last(self, index: int, response: Response, plan: GenerationPlan, ranked: Json | None = None) -> Json:
        """Return the event that ends a choice. ranked: log-probs of tokens that had no text of their own."""
        delta = {"content": close} if (close := self._close(index)) else {}
        return self.event(index, delta, ranked, response, reasoning_language=language_object(response, plan))

    def event(
        self, index: int, delta: Json, ranked: Json | None = None, ended: Response | None = None, **more: Any
    ) -> Json:
        """Return one event of a choice. ended: its response, on the last event."""
        choice = {"index": index, "delta": delta, "finish_reason": ended and ended.finish_reason, "logprobs": ranked}
        choice |= {"stop_reason": ended.stop_reason} if ended else {}
        more |= {"usage": None} if self.wants_usage else {}
        return {**self.head("chat.completion.chunk"), "choices": [choice], **more}

    def usage_event(self, responses: Sequence[Response], prompt_tokens: int) -> Json:
        """Return the event with the token counts, which comes last if the client asked for it."""
        return {**self.head("chat.completion.chunk"), "choices": [], "usage": usage(responses, prompt_tokens)}


def usage(responses: Sequence[Response], prompt_tokens: int) -> Json:
    """Return the token counts of a request; the tokens of discarded tries count too."""
    sampled = sum(response.tokens for response in responses)
    thinking = sum(response.thinking_tokens for response in responses)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "completion_tokens_details": {"reasoning_tokens": thinking},
    }


def language_object(response: Response, plan: GenerationPlan) -> Json:
    """Return the requested language, the measured one, and whether they match; null where undetermined."""
    measured = response.measured
    return {
        "requested": plan.choice.code or None,
        "source": plan.choice.source,
        "enforcement": plan.enforcement if plan.choice.code else None,
        "detected": (measured.reasoning.language or None) if measured else None,
        "share": round(measured.reasoning.share, 3) if measured and measured.reasoning.language else None,
        "answer_detected": (measured.answer.language or None) if measured else None,
        "match": measured.match if measured else None,
        "tries": response.tries,
        **({"prefilled": response.prefilled} if response.prefilled else {}),
        **({"first_try": first_try_object(response.first_try)} if response.first_try is not None else {}),
    }


def first_try_object(first: DiscardedTry) -> Json:
    """Return the object of a try that was discarded for its language; its tokens are in the usage."""
    spoken = detect(first.reasoning or first.answer)
    return {
        "reasoning": first.reasoning, "answer": first.answer, "tokens": first.tokens,
        "reasoning_tokens": first.thinking_tokens, "detected": spoken.language or None,
    }  # fmt: skip


def call_object(call: ParsedCall) -> Json:
    """Return a tool call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs(tokens: Sequence[Sequence[Candidate]]) -> Json:
    """Return log-probs in OpenAI's form."""

    def token(candidate: Candidate) -> Json:
        text = candidate.text
        return {"token": text, "logprob": candidate.logprob, "bytes": list(text.encode("utf-8", "replace"))}

    return {"content": [{**token(sampled), "top_logprobs": [token(top) for top in rest]} for sampled, *rest in tokens]}
