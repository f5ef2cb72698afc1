"""The types of the openai package, strictly: python openai_types.py FILE; prints how many objects fit, as JSON.

FILE: JSONL of [name of a type, object as JSON].
"""

import json
import sys
from pathlib import Path

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
    """How many objects there are. Raises ValidationError for the first that does not fit."""
    types = {kind: TypeAdapter(KINDS[kind]) for kind in {kind for kind, _ in rows}}
    for kind, text in rows:
        types[kind].validate_json(text, strict=True)
    return len(rows)


if __name__ == "__main__":
    print(json.dumps(check([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()])))
