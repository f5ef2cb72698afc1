"""Bounds of a request by the model: token ids in its vocabulary, and no more tokens than fit its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serve.api.errors import ApiError
from serve.api.schemas import SamplingBody
from serve.server import Server


class Names(NamedTuple):
    """Names of fields at an endpoint, for its error messages."""

    prompt: str
    most: str
    newer: str
    """a newer name of `most`, which takes precedence"""


IN_CHATS = Names("messages", "max_tokens", "max_completion_tokens")
IN_RESPONSES = Names("input", "max_output_tokens", "max_output_tokens")


def check_tokens(server: Server, body: SamplingBody) -> None:
    """Raises ApiError for a token id that is not in the model's vocabulary."""
    size = len(server.prompts.chat.tokenizer)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        highest = max(getattr(body, name) or [], default=0)
        if highest >= size:
            message = f"{name}: token {highest} is not one of the model's {size}"
            raise ApiError(400, message, code="invalid_value", param=name)


def most_tokens(
    server: Server, body: SamplingBody, asked: Sequence[tuple[str, int | None]], prompt_ids: list[int], prompt: str
) -> int:
    """Return how many tokens a completion may have: the last given value of `asked`, limited to the room that the
    prompt leaves. Raises ApiError."""
    given = None
    for name, wanted in asked:
        given = wanted or given
        if wanted is not None and wanted > server.max_tokens:
            context = f"the model's context of {server.max_tokens} tokens"
            message = f"{name} = {wanted} is more than {context}: give less, or leave it out"
            raise ApiError(400, message, code="invalid_value", param=name)
    room = server.room_for(prompt_ids, prompt)
    most = min(given or room, room)
    if body.min_tokens > most:
        message = f"min_tokens = {body.min_tokens} is more than the {most} tokens that this completion may have"
        raise ApiError(400, message, code="invalid_value", param="min_tokens")
    return most
