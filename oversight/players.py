"""Who answers the requests of a protocol: models behind OpenAI-compatible endpoints.

Game = await hold(play, choose)     players that wait for a network; `choose` says who gets a request
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Callable
from typing import Any, Generic

import msgspec

from oversight.prompts import Ask, Play, PlayerReply, Result
from shared.chat_endpoint import AGAIN, FAILURES, ApiEndpoint, HttpStatus, read_count
from shared.json_reader import decode_json

FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
MAX_REPLY_BYTES = 16 << 20
SEEDS = 1 << 31
TOP = 20
"""number of tokens whose log-probs are asked for with a verdict"""


class Game(msgspec.Struct, Generic[Result]):
    """The outcome of a protocol, and what it took."""

    result: Result
    tokens: int = 0
    """sampled by all players"""
    prompt_tokens: int = 0
    calls: int = 0


async def hold(play: Play[Result], choose: Callable[[Ask], ModelPlayer], seed: str = "") -> Game[Result]:
    """Run a protocol with players. seed: of every request's own seed. Raises what the players raise."""
    game: Game[Any] = Game(None)
    asks = next(play)
    while True:
        numbered = enumerate(asks, game.calls)
        replies = await asyncio.gather(*(choose(ask).say(ask, _seed(f"{seed}\0{number}")) for number, ask in numbered))
        game.calls += len(asks)
        game.tokens += sum(reply.tokens for samples in replies for reply in samples)
        game.prompt_tokens += sum(samples[0].prompt_tokens for samples in replies)
        try:
            asks = play.send(list(replies))
        except StopIteration as end:
            game.result = end.value
            return game


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % SEEDS


class ModelPlayer(ApiEndpoint):
    """A model behind an OpenAI-compatible endpoint."""

    def __init__(
        self, url: str, model: str, headers: dict[str, str], deadline_s: float, *, concurrent: int, tries: int,
        temperature: float, max_tokens: int,
    ):  # fmt: skip
        """temperature, max_tokens: of sampled replies; greedy ones are at most max_tokens long, too."""
        super().__init__(url, model, headers, deadline_s, concurrent)
        self.tries, self.temperature, self.max_tokens = tries, temperature, max_tokens

    async def say(self, ask: Ask, seed: int) -> list[PlayerReply]:
        """Return `ask.samples` replies; busy servers are asked again. Raises one of FAILURES."""
        body: dict[str, Any] = {
            "model": self.model, "messages": ask.messages, "max_tokens": self.max_tokens, "seed": seed,
            "temperature": 0.0 if ask.greedy else self.temperature, "n": ask.samples,
        }  # fmt: skip
        if ask.purpose == "verdict" and ask.greedy:
            body |= {"logprobs": True, "top_logprobs": TOP}
        async with self.free():
            for number in range(1, self.tries + 1):
                try:
                    return read_replies((await self.complete(body, MAX_REPLY_BYTES)).data)
                except FAILURES as error:
                    final = isinstance(error, HttpStatus) and error.code not in AGAIN
                    if isinstance(error, HttpStatus) and error.code == 400 and "logprobs" in body:
                        body = {name: value for name, value in body.items() if "logprobs" not in name}
                    elif final or number == self.tries:
                        raise
                    await asyncio.sleep(min(FIRST_WAIT_S * 2 ** (number - 1), MOST_WAIT_S) * random.uniform(0.5, 1.0))
        raise ValueError("no reply: tries must be at least 1")


class _Token(msgspec.Struct):
    token: str
    logprob: float


class _Position(_Token):
    top_logprobs: list[_Token] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None


def read_replies(data: bytes) -> list[PlayerReply]:
    """Return the replies of a response of /chat/completions. Raises ValueError if it holds none.

    Without a count of tokens a reply counts a token for every four characters, begun ones included.
    """
    try:
        completion = decode_json(data, _Completion)
    except msgspec.DecodeError as error:
        raise ValueError(f"no chat completion: {error}") from None
    if not completion.choices:
        raise ValueError("a response without choices")
    texts = [_text(choice.message.content) for choice in completion.choices]
    usage = completion.usage if isinstance(completion.usage, dict) else {}
    lengths = [-(-len(text) // 4) for text in texts]
    counted, prompt_tokens = (read_count(usage.get(name)) for name in ("completion_tokens", "prompt_tokens"))
    total = sum(lengths) if counted is None else counted
    return [
        PlayerReply(
            text, probability_of_first(choice.logprobs.content or []) if choice.logprobs else None,
            total * (number + 1) // len(texts) - total * number // len(texts), prompt_tokens or 0,
        )
        for number, (text, choice) in enumerate(zip(texts, completion.choices, strict=True))
    ]  # fmt: skip


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message; chunks that are no text, such as reasoning, are left out."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content or ""


def probability_of_first(positions: list[_Position]) -> float | None:
    """Return p(1) / (p(1) + p(2)) at the last token that is one of them; None if there is none."""
    for position in reversed(positions):
        if position.token.strip(" <>*:\n") in ("1", "2"):
            weights = {"1": 0.0, "2": 0.0}
            for token in position.top_logprobs or [position]:
                if (name := token.token.strip(" <>*:\n")) in weights:
                    weights[name] += math.exp(min(token.logprob, 0.0))
            total = weights["1"] + weights["2"]
            return weights["1"] / total if total else None
    return None
