"""POST /tokenize and /detokenize: the tokens of a text or a conversation, and the text of tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Discriminator, Tag

from serve.completions import Tokens
from serve.limits import ChatClient
from serve.parameters import RequestBody, RequestPart
from serve.schemas import ChatRequest
from serve.server import Server, in_thread_if_long

router = APIRouter()


class DetokenizeRequest(RequestBody):
    """The body of POST /detokenize."""

    model: str = ""
    tokens: Tokens


class TextRequest(RequestBody):
    """The body of POST /tokenize for a text."""

    model: str = ""
    prompt: str


TokenizeRequest = Annotated[
    Annotated[TextRequest, Tag("-text")] | Annotated[ChatRequest, Tag("-chat")],
    Discriminator(lambda body: "-chat" if isinstance(body, dict) and "messages" in body else "-text"),
]


class TokenizeResponse(RequestPart):
    """The token ids of a text or conversation, and their number."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(RequestPart):
    """The text of tokens."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, client: ChatClient) -> TokenizeResponse:
    """Return the tokens of a text as it is, or of a conversation as the model gets it, with the system prompt."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    client.check(0)
    if isinstance(body, ChatRequest):
        _, ids = await in_thread_if_long(body.characters, server.render, body, request, client)
    else:
        ids = await in_thread_if_long(len(body.prompt), server.prompts.chat.encode, body.prompt)
    return TokenizeResponse(tokens=ids, count=len(ids), max_model_len=server.max_tokens)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, client: ChatClient) -> dict[str, str | None]:
    """Return the special tokens under the names of vLLM's server, for clients that tokenise by these endpoints."""
    server: Server = request.app.state.server
    tokenizer = server.prompts.chat.tokenizer
    return {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, client: ChatClient) -> DetokenizeResponse:
    """Return the text of tokens, control tokens included."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    client.check(0)
    server.check_tokens(body.tokens, "tokens")
    tokenizer = server.prompts.chat.tokenizer
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))
