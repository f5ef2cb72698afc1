"""Renders chat responses: OpenAI's objects, with the thoughts under both field names and the measured language."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from serve.api.schemas import ReasoningFormat
from serve.engine import Candidate
from serve.response.generation import Plan, Response, Try
from serve.response.reasoning import Piece
from serve.response.tools import Call
from verify.format import Tags
from verify.language import detect

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class Reply:
    """Renders the response to one request in the reasoning format that the client asked for."""

    def __init__(self, model: str, format: ReasoningFormat, tags: Tags):
        self.id, self.created, self.model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model
        self.format, self.tags = format, tags
        self._inside: set[int] = set()
        """indices of choices whose thoughts are open in the text (format inline)"""

    def head(self, kind: str) -> Json:
        """Return the fields that every object begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    # ---- whole ---------------------------------------------------------------------------------------------------

    def whole(self, responses: Sequence[Response], plan: Plan, prompt_tokens: int, with_logprobs: bool) -> Json:
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
        thoughts, answer = response.thoughts.strip(), response.answer.strip()
        message: Json = {"role": "assistant", "content": answer, "refusal": None, "annotations": []}
        if response.calls:
            message["tool_calls"] = [call_object(call) for call in response.calls]
        if self.format == "inline" and thoughts:
            message["content"] = f"{self.tags.open}\n{thoughts}\n{self.tags.close}\n{answer}"
        elif self.format == "mistral":
            chunk = {"type": "thinking", "thinking": [{"type": "text", "text": thoughts}], "closed": True}
            message["content"] = [*([chunk] if thoughts else []), {"type": "text", "text": answer}]
        elif self.format not in ("hidden", "inline"):
            message |= dict.fromkeys(self.names(), thoughts or None)
        if response.calls and not message["content"]:
            message["content"] = None
        return message

    def names(self) -> list[str]:
        """Return the names of the fields that hold the thoughts."""
        return {
            "both": ["reasoning", "reasoning_content"], "openai": ["reasoning"], "deepseek": ["reasoning_content"],
        }.get(self.format, [])  # fmt: skip

    # ---- streamed ------------------------------------------------------------------------------------------------

    def first(self, index: int) -> bytes:
        """Return the event that opens a choice."""
        return self.event(index, {"role": "assistant", "content": ""})

    def call(self, index: int, number: int, call: Call) -> bytes:
        """Return the event of a complete tool call; number: of the call in its choice, 0-based."""
        return self.event(index, {"tool_calls": [{"index": number, **call_object(call)}]})

    def piece(self, index: int, piece: Piece, ranked: Json | None = None) -> bytes:
        """Return the event of some text; empty if the client does not want it. ranked: log-probs of its tokens."""
        if self.format == "inline":
            text = piece.text
            if piece.thinking and index not in self._inside:
                text = f"{self.tags.open}\n{text}"
                self._inside.add(index)
            elif not piece.thinking and index in self._inside:
                text = f"{self.tags.close}\n{text}"
                self._inside.discard(index)
            return self.event(index, {"content": text}, ranked)
        if not piece.thinking:
            return self.event(index, {"content": piece.text}, ranked)
        if self.format == "mistral":
            chunk = {"type": "thinking", "thinking": [{"type": "text", "text": piece.text}]}
            return self.event(index, {"content": [chunk]}, ranked)
        names = self.names()
        return self.event(index, dict.fromkeys(names, piece.text), ranked) if names or ranked else b""

    def last(self, index: int, response: Response, plan: Plan, ranked: Json | None = None) -> bytes:
        """Return the event that ends a choice. ranked: log-probs of tokens that had no text of their own."""
        told = language_object(response, plan)
        return self.event(index, {}, ranked, response, reasoning_language=told)

    def event(
        self, index: int, delta: Json, ranked: Json | None = None, ended: Response | None = None, **more: Any
    ) -> bytes:
        """Return one server-sent event of a choice. ended: its response, on the last event."""
        choice = {"index": index, "delta": delta, "finish_reason": ended and ended.finish_reason, "logprobs": ranked}
        choice |= {"stop_reason": ended.stop_reason} if ended else {}
        return sse({**self.head("chat.completion.chunk"), "choices": [choice], **more})

    def usage_event(self, responses: Sequence[Response], prompt_tokens: int) -> bytes:
        """Return the event with the token counts, which comes last if the client asked for it."""
        return sse({**self.head("chat.completion.chunk"), "choices": [], "usage": usage(responses, prompt_tokens)})


def sse(value: Json) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


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


def language_object(response: Response, plan: Plan) -> Json:
    """Return the requested language, the measured one, and whether they match; null where undetermined."""
    found = response.measured
    return {
        "requested": plan.choice.code or None,
        "source": plan.choice.source,
        "enforcement": plan.enforcement if plan.choice.code else None,
        "detected": (found.thoughts.language or None) if found else None,
        "share": round(found.thoughts.share, 3) if found and found.thoughts.language else None,
        "answer_detected": (found.answer.language or None) if found else None,
        "match": found.match if found else None,
        "tries": response.tries,
        **({"first_try": first_try_object(response.first_try)} if response.first_try is not None else {}),
    }


def first_try_object(found: Try) -> Json:
    """Return the object of a try that was discarded for its language; its tokens are in the usage."""
    spoken = detect(found.thoughts or found.answer)
    return {
        "thoughts": found.thoughts, "answer": found.answer, "tokens": found.tokens,
        "reasoning_tokens": found.thinking_tokens, "detected": spoken.language or None,
    }  # fmt: skip


def call_object(call: Call) -> Json:
    """Return a tool call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs(tokens: Sequence[Sequence[Candidate]]) -> Json:
    """Return log-probs in OpenAI's form."""

    def one(candidate: Candidate) -> Json:
        text = candidate.text
        return {"token": text, "logprob": candidate.logprob, "bytes": list(text.encode("utf-8", "replace"))}

    return {"content": [{**one(sampled), "top_logprobs": [one(top) for top in rest]} for sampled, *rest in tokens]}
