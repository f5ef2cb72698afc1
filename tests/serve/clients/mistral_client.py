"""Mistral's SDK, unmodified: python mistral_client.py URL; prints what it got as JSON."""

import json
import sys

from mistralai.client import Mistral

client = Mistral(server_url=sys.argv[1], api_key="none", timeout_ms=30_000)
ask = {"model": "tiny", "messages": [{"role": "user", "content": "How many apples?"}]}


def read(content):
    """(reasoning, text) of a content: a list of chunks, or a string."""
    chunks = [content] if not isinstance(content, list) else content
    reasoning = "".join(part.text for chunk in chunks if getattr(chunk, "type", "") == "thinking"
                       for part in chunk.thinking)  # fmt: skip
    return reasoning, "".join(chunk if isinstance(chunk, str) else getattr(chunk, "text", "") for chunk in chunks)


whole = client.chat.complete(**ask)
streamed = [read(choice.delta.content) for event in client.chat.stream(**ask) for choice in event.data.choices
            if choice.delta.content]  # fmt: skip
print(json.dumps({
    "whole": read(whole.choices[0].message.content),
    "chunks": [type(chunk).__name__ for chunk in whole.choices[0].message.content],
    "streamed": ["".join(part) for part in zip(*streamed, strict=True)],
    "tokens": whole.usage.completion_tokens,
}))  # fmt: skip
