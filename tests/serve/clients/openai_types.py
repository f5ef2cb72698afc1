"""The types of the openai package, strictly; without our packages, as its users have it."""

import openai.types.chat
import openai.types.responses
from pydantic import TypeAdapter

KINDS = {
    "chat": openai.types.chat.ChatCompletion,
    "chat chunk": openai.types.chat.ChatCompletionChunk,
    "completion": openai.types.Completion,
    "response": openai.types.responses.Response,
    "event": openai.types.responses.ResponseStreamEvent,
}


def check(rows):
    """How many rows there are, [name of a type, object as JSON]. Raises ValidationError for one that does not fit."""
    types = {kind: TypeAdapter(KINDS[kind]) for kind in {kind for kind, _ in rows}}
    for kind, text in rows:
        types[kind].validate_json(text, strict=True)
    return len(rows)
