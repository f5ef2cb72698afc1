"""POST /tokenize and /detokenize: the tokens of a text or a conversation, and the text of tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag

from serve.api.base import Body, Items, Parameters
from serve.api.chat import render
from serve.api.errors import ApiError
from serve.api.gate import ChatClient
from serve.api.schemas import ChatRequest
from serve.api.streams import apart
from serve.server import Server

router = APIRouter()
MOST_TOKENS = 1_000_000


class DetokenizeRequest(Parameters):
    """The body of POST /detokenize."""

    model: str = ""
    tokens: Annotated[Items[Annotated[int, Field(ge=0, strict=True)]], Field(max_length=MOST_TOKENS)]


class TextRequest(Parameters):
    """The body of POST /tokenize for a text."""

    model: str = ""
    prompt: str


TokenizeRequest = Annotated[
    Annotated[TextRequest, Tag("-text")] | Annotated[ChatRequest, Tag("-chat")],
    Discriminator(lambda body: "-chat" if isinstance(body, dict) and "messages" in body else "-text"),
]


class Tokens(Body):
    """The token ids of a text or conversation, and their number."""

    tokens: list[int]
    count: int
    max_model_len: int


class Decoded(Body):
    """The text of tokens."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, client: ChatClient) -> Tokens:
    """Return the tokens of a text as it stands, or of a conversation as the model gets it, with the system prompt."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    client.check(0)
    if isinstance(body, ChatRequest):
        _, ids = await apart(body.characters, render, server, body, request, client)
    else:
        ids = await apart(len(body.prompt), server.prompts.chat.encode, body.prompt)
    return Tokens(tokens=ids, count=len(ids), max_model_len=server.max_tokens)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, client: ChatClient) -> Decoded:
    """Return the text of tokens, control tokens included."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    client.check(0)
    tokenizer = server.prompts.chat.tokenizer
    if body.tokens and max(body.tokens) >= len(tokenizer):
        raise ApiError(400, f"token {max(body.tokens)} is not one of the model's {len(tokenizer)}", param="tokens")
    return Decoded(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))
