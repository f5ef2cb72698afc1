"""POST /v1/responses, the stateless part of OpenAI's Responses API, streamed or not: a chat under other names.

The server stores nothing: clients send the whole conversation, and parameters that need stored state are refused.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from fastapi.responses import Response as HttpResponse
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from serve import parameters
from serve.chat import headers, language_object
from serve.enforcement import check_language
from serve.errors import ApiError, explain_first
from serve.json_schemas import Schema
from serve.limits import ChatClient
from serve.messages import MOST_TOOLS, Content
from serve.parameters import Items, RequestBody, RequestPart, needs
from serve.plan import GenerationPlan, Response
from serve.schemas import MOST_MESSAGES, ChatRequest, Effort, ReasoningRequest
from serve.server import Server
from serve.streams import STREAMED, EventStream, Json, merge, until_disconnect
from serve.tools import Name
from shared.tool_calls import ParsedCall

router = APIRouter()


class MessageItem(RequestPart):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(RequestPart):
    """A tool call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str = "{}"


class ResultItem(RequestPart):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(RequestPart):
    """Reasoning of an earlier turn, for models that were trained on whole histories."""

    type: Literal["reasoning"]
    content: Items[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """Its text; "" where it has none that can be read."""
        parts = [part.get("text") for part in self.content or ()]
        return "".join(part for part in parts if isinstance(part, str))


KINDS = ("message", "function_call", "function_call_output", "reasoning")


def kind_of(item: Any) -> str:
    """Return the tag of an item's type; a message may omit its type."""
    return f"-{item.get('type') or 'message'}"


def read_item(item: Any) -> Any:
    """Return the item. Raises PydanticCustomError if its type is not supported."""
    if not isinstance(item, dict):
        raise PydanticCustomError("item", "an item of the input is an object")
    if kind_of(item)[1:] not in KINDS:
        message = "items of type {kind} are not supported: send " + ", ".join(KINDS)
        raise PydanticCustomError("item", message, {"kind": str(item["type"])[:40]})
    return item


Item = Annotated[
    Annotated[MessageItem, Tag("-message")] | Annotated[CallItem, Tag("-function_call")]
    | Annotated[ResultItem, Tag("-function_call_output")] | Annotated[ReasoningItem, Tag("-reasoning")],
    Discriminator(kind_of), BeforeValidator(read_item),
]  # fmt: skip
Input = Annotated[
    Annotated[str, Tag("-text")] | Annotated[Items[Item], Field(min_length=1, max_length=MOST_MESSAGES), Tag("-items")],
    Discriminator(lambda given: "-items" if isinstance(given, list) else "-text"),
]


class NamedFunctionTool(RequestPart):
    """The one tool that must be called."""

    type: Literal["function"]
    name: Name


class FunctionTool(NamedFunctionTool):
    """A tool that may be called."""

    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Reasoning(RequestBody):
    """How much the model is to think."""

    effort: Effort | None = None


class TextFormat(RequestPart):
    """The form that the answer must have."""

    model_config = needs("type", "json_schema", "schema")
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: Schema | None = Field(None, alias="schema")


class TextSettings(RequestBody):
    """Settings of the answer's text."""

    format: TextFormat = TextFormat()


class ResponsesRequest(ReasoningRequest):
    """The body of POST /v1/responses."""

    model_config = parameters.body_rules(parameters.TOOL_RULE, parameters.TEXT_RULE)
    input: Input
    """the conversation: a text, or items"""
    instructions: str | None = None
    """a system message before it"""
    max_output_tokens: int | None = Field(None, ge=1)
    """the same as max_tokens of chats"""
    tools: Annotated[Items[FunctionTool], Field(max_length=MOST_TOOLS)] = []
    """functions that the model may call"""
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool = "auto"
    """whether it may or must call one"""
    text: TextSettings | None = None
    """format: the answer, not the reasoning, is held to it by the engine"""
    reasoning: Reasoning | None = None
    """effort: how much to think, as reasoning_effort of chats"""
    include: list[Literal["reasoning.encrypted_content"]] = []
    """reasoning.encrypted_content is no mistake, but reasoning is returned in the clear, and that of earlier turns not
    read; nothing else can be included"""

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises ApiError."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            add_item(messages, item)
        chat: Json = {
            **self.model_dump(include=set(ReasoningRequest.model_fields), exclude_unset=True), "messages": messages,
            "tools": [
                {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}
                for tool in self.tools
            ],
            "tool_choice": self.tool_choice, "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }  # fmt: skip
        if isinstance(self.tool_choice, NamedFunctionTool):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text and self.text.format.type != "text":
            form = self.text.format
            schema = {"json_schema": {"schema": form.json_schema}} if form.json_schema is not None else {}
            chat["response_format"] = {"type": form.type, **schema}
        try:
            return ChatRequest.model_validate(chat)
        except ValidationError as error:
            first = explain_first(error.errors())
            if first.param is not None and first.param.startswith("messages"):
                first.param = first.param.replace("messages", "input", 1)
            raise first from error


def add_item(messages: list[Json], item: Item) -> None:
    """Add an item to the turns of a chat; reasoning begins a turn of the assistant, and its text and calls are added to
    it."""
    last, given = messages[-1] if messages else {}, item.model_dump()
    begun = last.get("role") == "assistant"
    if isinstance(item, ReasoningItem):
        messages.append({"role": "assistant", "reasoning": item.text})
    elif isinstance(item, CallItem):
        if not begun:
            messages.append({"role": "assistant"})
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif isinstance(item, ResultItem):
        messages.append({"role": "tool", "content": given["output"], "tool_call_id": item.call_id})
    elif begun and item.role == "assistant" and last.keys() == {"role", "reasoning"}:
        last["content"] = given["content"]
    else:
        messages.append({"role": item.role, "content": given["content"]})


@router.post("/v1/responses", response_model=None, responses=STREAMED)
async def responses(body: ResponsesRequest, request: Request, client: ChatClient) -> HttpResponse:
    """Sample one response to a conversation."""
    server: Server = request.app.state.server
    model = server.check_model(body.model)
    with server.admit(1, client) as permit:
        chat, limits = body.as_chat(), {"max_output_tokens": body.max_output_tokens}
        plan = await server.plan(chat, request, client, "input", limits)
        renderer = ResponsesRenderer(model, body)
        if body.stream:
            return EventStream(stream(server, plan, renderer), permit.keep(), headers(plan))
        response, *_ = await until_disconnect(request, server.sample_responses(plan, 1))
    return JSONResponse(renderer.whole(response, plan), headers=headers(plan))


class ResponsesRenderer:
    """Renders one response as items: reasoning, text, calls."""

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

    def whole(self, response: Response, plan: GenerationPlan) -> Json:
        """Return the object of a response that has ended."""
        prompt = len(plan.prompt_ids)
        return {
            **self.head("incomplete" if response.cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if response.cut else None,
            "output": self.output(response),
            "usage": {
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": response.tokens,
                "output_tokens_details": {"reasoning_tokens": response.thinking_tokens},
                "total_tokens": prompt + response.tokens,
            },
            "reasoning_language": language_object(response, plan),
        }  # fmt: skip

    def output(self, response: Response) -> list[Json]:
        """Return the items of a response: the last one is incomplete where it was cut."""
        reasoning = response.reasoning if self.body.include_reasoning else ""
        items = [self.reasoning(new_id("rs"), reasoning)] if reasoning else []
        if response.answer or not (response.calls or response.cut):
            items.append(self.answer(new_id("msg"), response.answer))
        if response.cut and items and not response.calls:
            items[-1]["status"] = "incomplete"
        return [*items, *map(self.call, response.calls)]

    def reasoning(self, item_id: str, text: str, status: str = "completed") -> Json:
        """Return the item of the reasoning."""
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def answer(self, item_id: str, text: str, status: str = "completed") -> Json:
        """Return the item of the answer."""
        return {"id": item_id, "type": "message", "role": "assistant", "status": status,
                "content": [] if status == "in_progress" else [text_part(text)]}  # fmt: skip

    def call(self, call: ParsedCall, status: str = "completed") -> Json:
        """Return the item of a tool call."""
        return {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name,
                "arguments": call.arguments if status == "completed" else "", "status": status}  # fmt: skip

    def event(self, kind: str, **values: Any) -> Json:
        """Return one event, with the next sequence number."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}


def text_part(text: str) -> Json:
    """Return the object of a text part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def new_id(kind: str) -> str:
    """Return a new id for an object; kind: its prefix."""
    return f"{kind}_{uuid.uuid4().hex}"


def stream(server: Server, plan: GenerationPlan, renderer: ResponsesRenderer) -> AsyncGenerator[bytes, None]:
    """Return the server-sent events of one response."""
    response, items = Response(), ItemEvents(renderer)

    async def feed() -> AsyncGenerator[list[Json], None]:
        for kind in ("response.created", "response.in_progress"):
            yield [renderer.event(kind, response=renderer.head("in_progress"))]
        async with contextlib.aclosing(server.sample(plan, 0, response)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, ParsedCall):
                    yield items.close() + items.call(chunk)
                elif renderer.body.include_reasoning or not chunk.thinking:
                    yield items.text("reasoning" if chunk.thinking else "answer", chunk.text)
        check_language([response], plan, server.prompts)
        if not (response.answer or response.calls or response.cut):
            yield items.text("answer", "")
        yield items.close("incomplete" if response.cut else "completed")

    def last() -> list[Json]:
        whole = {**renderer.whole(response, plan), "output": items.done}
        return [renderer.event(f"response.{whole['status']}", response=whole)]

    def failed(error: ApiError) -> Json:
        reason = {"code": error.code or "server_error", "message": error.message}
        head = renderer.head("failed") | {"error": reason, "reasoning_language": language_object(response, plan)}
        return renderer.event("response.failed", response=head)

    return merge([feed()], server.settings.ping_s, last=last, failed=failed, done=b"")


class ItemEvents:
    """Renders the items of a streamed response as events; at most one item is open at a time."""

    def __init__(self, renderer: ResponsesRenderer):
        self._renderer = renderer
        self._kind = self._id = self._text = ""
        self.done: list[Json] = []
        """items that have ended"""

    def text(self, kind: str, text: str) -> list[Json]:
        """Return the events of some text of the reasoning or the answer; closes an open item of the other kind."""
        events: list[Json] = []
        if kind != self._kind:
            events = self.close() + self._open(kind)
        self._text += text
        if not text:
            return events
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        more: Json = {} if kind == "reasoning" else {"logprobs": []}
        return [*events, self._renderer.event(name, **self._place(), delta=text, **more)]

    def _place(self) -> Json:
        return {"item_id": self._id, "output_index": len(self.done), "content_index": 0}

    def _open(self, kind: str) -> list[Json]:
        self._kind, self._id, self._text = kind, new_id("rs" if kind == "reasoning" else "msg"), ""
        renderer = self._renderer
        make = renderer.reasoning if kind == "reasoning" else renderer.answer
        item = make(self._id, "", "in_progress")
        events = [renderer.event("response.output_item.added", output_index=len(self.done), item=item)]
        if kind == "answer":
            events.append(renderer.event("response.content_part.added", **self._place(), part=text_part("")))
        return events

    def close(self, status: str = "completed") -> list[Json]:
        """Return the events that close the open item with a status, if there is one."""
        if not self._kind:
            return []
        renderer, where, text = self._renderer, self._place(), self._text
        if self._kind == "reasoning":
            item = renderer.reasoning(self._id, text, status)
            events = [renderer.event("response.reasoning_text.done", **where, text=text)]
        else:
            item = renderer.answer(self._id, text, status)
            events = [
                renderer.event("response.output_text.done", **where, text=text, logprobs=[]),
                renderer.event("response.content_part.done", **where, part=text_part(text)),
            ]
        events.append(renderer.event("response.output_item.done", output_index=len(self.done), item=item))
        self.done.append(item)
        self._kind = ""
        return events

    def call(self, call: ParsedCall) -> list[Json]:
        """Return the events of a complete tool call."""
        renderer, item, index = self._renderer, self._renderer.call(call), len(self.done)
        self.done.append(item)
        where = {"item_id": item["id"], "output_index": index}
        return [
            renderer.event("response.output_item.added", output_index=index, item=renderer.call(call, "in_progress")),
            renderer.event("response.function_call_arguments.delta", **where, delta=call.arguments),
            renderer.event("response.function_call_arguments.done", **where, arguments=call.arguments, name=call.name),
            renderer.event("response.output_item.done", output_index=index, item=item),
        ]
