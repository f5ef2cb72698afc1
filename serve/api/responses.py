"""POST /v1/responses, the stateless part of OpenAI's Responses API, streamed or not: a chat under other names.

The server stores nothing: clients send the whole conversation, and parameters that need stored state are refused.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from fastapi.responses import Response as HttpResponse

from serve.api.bounds import IN_RESPONSES
from serve.api.chat import headers, make_plan, mismatch, one, pieces
from serve.api.errors import ApiError
from serve.api.gate import ChatClient
from serve.api.replies import Json, language_object, sse
from serve.api.responses_request import ResponsesRequest, TextSettings
from serve.api.streams import STREAMED, EventStream, apart, merge, unless_gone
from serve.response.generation import Plan, Response
from serve.response.tools import Call
from serve.server import Server

router = APIRouter()


@router.post("/v1/responses", response_model=None, responses=STREAMED)
async def responses(body: ResponsesRequest, request: Request, client: ChatClient) -> HttpResponse:
    """Sample one response to a conversation."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    seats = server.admit(1, client)
    try:
        chat = body.as_chat()
        plan = await apart(chat.characters, make_plan, server, chat, request, client, IN_RESPONSES)
        reply = ResponsesReply(server.name, body)
        if body.stream:
            return EventStream(stream(server, plan, reply), seats, headers(plan))
        response = await unless_gone(request, one(server, plan, 0))
        seats.close()
        if plan.enforcement == "strict" and response.mismatch:
            raise mismatch([response], plan)
        return JSONResponse(reply.whole(response, plan), headers=headers(plan))
    except BaseException:
        seats.close()
        raise


class ResponsesReply:
    """Renders one response as items: thoughts, text, calls."""

    def __init__(self, model: str, body: ResponsesRequest):
        self.id, self.created, self.model, self.body = new_id("resp"), int(time.time()), model, body
        self._number = 0

    def head(self, status: str) -> Json:
        """Return the fields that every response object begins with."""
        body = self.body
        return {
            "id": self.id, "object": "response", "created_at": self.created, "model": self.model, "status": status,
            "background": False, "error": None, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {}, "output": [],
            "parallel_tool_calls": body.parallel_tool_calls, "previous_response_id": None, "store": False,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "temperature": body.temperature, "top_p": body.top_p, "truncation": "disabled", "usage": None,
            "text": (body.text or TextSettings()).model_dump(exclude_none=True, by_alias=True),
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
        }  # fmt: skip

    def whole(self, response: Response, plan: Plan) -> Json:
        """Return the object of a response that has ended."""
        cut = response.finish_reason == "length"
        prompt = len(plan.prompt_ids)
        return {
            **self.head("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.output(response),
            "usage": {
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": response.tokens,
                "output_tokens_details": {"reasoning_tokens": response.thinking_tokens},
                "total_tokens": prompt + response.tokens,
            },
            "reasoning_language": language_object(response, plan),
        }  # fmt: skip

    def output(self, response: Response) -> list[Json]:
        """Return the items of a complete response."""
        items = []
        if (thoughts := response.thoughts.strip()) and self.body.include_reasoning:
            items.append(self.thoughts(new_id("rs"), thoughts))
        if (answer := response.answer.strip()) or not response.calls:
            items.append(self.answer(new_id("msg"), answer))
        return items + [self.call(call) for call in response.calls]

    def thoughts(self, item_id: str, text: str, status: str = "completed") -> Json:
        """Return the item of the thoughts."""
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def answer(self, item_id: str, text: str, status: str = "completed") -> Json:
        """Return the item of the answer."""
        content = [text_part(text)] if text or status == "completed" else []
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def call(self, call: Call, status: str = "completed") -> Json:
        """Return the item of a tool call."""
        return {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name,
                "arguments": call.arguments if status == "completed" else "", "status": status}  # fmt: skip

    def event(self, kind: str, **values: Any) -> bytes:
        """Return one server-sent event, with the next sequence number."""
        self._number += 1
        return f"event: {kind}\n".encode() + sse({"type": kind, "sequence_number": self._number - 1, **values})


def text_part(text: str) -> Json:
    """Return the object of a text part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def new_id(kind: str) -> str:
    """Return a new id for an object; kind: its prefix."""
    return f"{kind}_{uuid.uuid4().hex}"


async def stream(server: Server, plan: Plan, reply: ResponsesReply) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of one response."""
    response, parts = Response(), Parts(reply)

    async def feed() -> AsyncGenerator[bytes, None]:
        yield reply.event("response.created", response=reply.head("in_progress"))
        yield reply.event("response.in_progress", response=reply.head("in_progress"))
        async with contextlib.aclosing(pieces(server, plan, 0, response)) as found:
            async for piece in found:
                if isinstance(piece, Call):
                    yield parts.close() + parts.call(piece)
                elif reply.body.include_reasoning or not piece.thinking:
                    yield parts.text("thoughts" if piece.thinking else "answer", piece.text)
        if plan.enforcement == "strict" and response.mismatch:
            raise mismatch([response], plan)
        if not response.answer and not response.calls:
            yield parts.text("answer", "")
        yield parts.close()

    def last() -> bytes:
        whole = {**reply.whole(response, plan), "output": parts.done}
        return reply.event(f"response.{whole['status']}", response=whole)

    def failed(error: ApiError) -> bytes:
        told = {"code": error.code or "server_error", "message": error.message}
        return reply.event("response.failed", response={**reply.head("failed"), "error": told})

    events = merge([feed()], server.settings.ping_s, last=last, failed=failed)
    async with contextlib.aclosing(events):
        async for event in events:
            yield event


class Parts:
    """Renders the items of a streamed response as events; at most one item is open at a time."""

    def __init__(self, reply: ResponsesReply):
        self._reply = reply
        self._kind = self._id = self._text = ""
        self.done: list[Json] = []
        """items that are complete"""

    def text(self, kind: str, text: str) -> bytes:
        """Return the events of some text of the thoughts or the answer; closes an open item of the other kind."""
        events = b""
        if kind != self._kind:
            events = self.close() + self._open(kind)
        self._text += text
        if not text:
            return events
        name = "response.reasoning_text.delta" if kind == "thoughts" else "response.output_text.delta"
        more: Json = {} if kind == "thoughts" else {"logprobs": []}
        return events + self._reply.event(name, **self._place(), delta=text, **more)

    def _place(self) -> Json:
        return {"item_id": self._id, "output_index": len(self.done), "content_index": 0}

    def _open(self, kind: str) -> bytes:
        self._kind, self._id, self._text = kind, new_id("rs" if kind == "thoughts" else "msg"), ""
        reply = self._reply
        make = reply.thoughts if kind == "thoughts" else reply.answer
        item = make(self._id, "", "in_progress")
        events = reply.event("response.output_item.added", output_index=len(self.done), item=item)
        if kind == "answer":
            events += reply.event("response.content_part.added", **self._place(), part=text_part(""))
        return events

    def close(self) -> bytes:
        """Return the events that close the open item, if there is one."""
        if not self._kind:
            return b""
        reply, place, text = self._reply, self._place(), self._text
        if self._kind == "thoughts":
            item = reply.thoughts(self._id, text.strip())
            events = reply.event("response.reasoning_text.done", **place, text=text)
        else:
            item = reply.answer(self._id, text.strip())
            events = reply.event("response.output_text.done", **place, text=text, logprobs=[])
            events += reply.event("response.content_part.done", **place, part=text_part(text))
        events += reply.event("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)
        self._kind = ""
        return events

    def call(self, call: Call) -> bytes:
        """Return the events of a complete tool call."""
        reply, place = self._reply, {"item_id": f"fc_{call.id}", "output_index": len(self.done)}
        item = reply.call(call)
        self.done.append(item)
        index = place["output_index"]
        return (
            reply.event("response.output_item.added", output_index=index, item=reply.call(call, "in_progress"))
            + reply.event("response.function_call_arguments.delta", **place, delta=call.arguments)
            + reply.event("response.function_call_arguments.done", **place, arguments=call.arguments, name=call.name)
            + reply.event("response.output_item.done", output_index=index, item=item)
        )
