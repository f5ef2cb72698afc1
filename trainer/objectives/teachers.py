"""A teacher at an API, asked for the log-probs that it gives to the tokens which the policy sampled.

    POST {objective.teacher.url}/completions  {"prompt": [token ids], "prompt_logprobs": 0, "max_tokens": 1, ...}
    -> choices[0].prompt_logprobs = [null, {"token id": {"logprob": ...}}, ...], one for each token sent

as vLLM's server and `python -m serve` have it: log-softmax of the teacher's logits, at temperature 1, without top-p or
penalties. One token is sampled and not used; the teacher's context must have room for it. Every entry must be that of
the token sent, and a finite log-prob, else the run stops. (OpenAI's `echo` gives texts instead of token ids, which
cannot be checked; it is not used.)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from shared.chat_endpoint import ApiEndpoint, HttpStatus, key_headers
from shared.errors import ConfigError, NonFinite, RunError
from shared.json_reader import decode_json, parse_json
from trainer.objectives.objective import ServedTeacher

BUSY = (429, 502, 503, 504)
"""statuses that may pass in a moment: the request is sent again"""
FAILED = 500
"""status of vLLM's server while its engine dies; it may be started again"""
NO_KEY = (401, 403)
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 16.0
"""seconds between two attempts: the first pause, doubled each time, and the longest"""
MAX_REPLY_BYTES = 256 << 20
MINUS_INFINITY = -9999.0
"""vLLM's server writes this for minus infinity"""
ROUNDING = 1e-3
"""how far above 0 a log-prob may be"""


class Entry(msgspec.Struct):
    """The teacher's log-prob of one token at one position."""

    logprob: float | None = None


class TeacherChoice(msgspec.Struct):
    """A completion in a reply; its text is not read."""

    prompt_logprobs: list[dict[int, Entry] | None] | None = None


class TeacherReply(msgspec.Struct):
    """The reply to a request for log-probs."""

    choices: list[TeacherChoice]


class Card(msgspec.Struct):
    """A model in the API's list."""

    id: str
    max_model_len: int | None = None
    """tokens of its context; OpenAI's own list does not have it"""


class Cards(msgspec.Struct):
    """The API's list of models."""

    data: list[Card]


class Decoded(msgspec.Struct):
    """The reply of /detokenize: the text of tokens."""

    prompt: str


class Teacher:
    """The model at the address objective.teacher.url, asked over HTTP for log-probs."""

    def __init__(self, settings: ServedTeacher, deadline_s: float):
        """deadline_s: for one request with all its attempts. Raises ConfigError where the variable of the key is not
        set."""
        self.model, self.deadline_s = settings.model, deadline_s
        headers = key_headers(settings.key_variable, "objective.teacher.key_variable")
        self.endpoint = ApiEndpoint(settings.url, self.model, headers, deadline_s)
        self.url = self.endpoint.url
        self.name = f'objective.teacher.url = "{self.url}"'
        self.proven = False
        """whether it has answered correctly before, so that a failure may be temporary"""

    async def start(self, probes: Sequence[list[int]], decode: Callable[[list[int]], str], most_tokens: int) -> str:
        """Ask the server once for everything that it must be able to do; returns one line about it for people.

        probes: token ids of some prompts, two or more each. decode: tokens to their text with control tokens, as the
        policy's tokenizer has it. most_tokens: of a prompt with its completion. Raises ConfigError.
        """
        texts = [decode(probe) for probe in probes]
        try:
            context = await self._find_model(most_tokens)
            same = [await self._same_tokens(probe, text) for probe, text in zip(probes, texts, strict=True)]
            for probe in probes:
                await self.score(probe[:1], probe[1:])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ConfigError(
                f"{self.name} cannot be asked ({type(error).__name__}: {str(error)[:300]}): start that server, or give "
                "its address up to the API's version, which mostly is /v1"
            ) from error
        except RunError as error:
            raise ConfigError(str(error)) from error
        self.proven = True
        length = f"{context} tokens of context" if context else "context unknown"
        tokenizer = "the same tokenizer" if all(same) else "tokenizer not compared, as the server has no /detokenize"
        return f"teacher: {self.model} at {self.url}, {length}, {tokenizer}"

    async def score(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
        """[completion_tokens] log-probs of the completion's tokens after the prompt (of at least one token).

        Raises RunError when the teacher does not answer in time, refuses, or answers for other tokens; NonFinite.
        """
        tokens = [*prompt_ids, *completion_ids]
        body = {
            "model": self.model, "prompt": tokens, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0,
        }  # fmt: skip
        async with self.endpoint.free():
            try:
                data = await self._ask("POST", f"{self.url}/completions", body)
            except ValueError as error:  # a status, or a reply that is too long
                raise RunError(f"{self.name} gives no log-probs of {len(tokens)} tokens: {error}") from error
        try:
            return read(data, tokens, len(prompt_ids))
        except RunError as error:
            raise type(error)(f"{self.name}, model {self.model}: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self.endpoint.close()

    async def _ask(
        self, method: str, address: str, body: dict[str, Any] | None = None, absent: tuple[type[Exception], ...] = ()
    ) -> bytes:
        """One reply, requested until the deadline. Raises HttpStatus for one that will not pass, RunError at the
        deadline.

        absent: errors of the connection that are raised at once.
        """
        pause, failure = FIRST_PAUSE_S, "no reply"
        try:
            async with asyncio.timeout(self.deadline_s):
                while True:
                    try:
                        return await self.endpoint.request(method, address, body, MAX_REPLY_BYTES)
                    except HttpStatus as error:
                        if error.code in NO_KEY:
                            raise RunError(f"{self.name}: {error}: see objective.teacher.key_variable") from error
                        if error.code not in BUSY and not (error.code == FAILED and self.proven):
                            raise
                        failure = str(error)
                    except absent:
                        raise
                    except httpx.HTTPError as error:
                        failure = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MOST_PAUSE_S)
        except TimeoutError as error:
            raise RunError(
                f"{self.name} did not answer for {self.deadline_s:g} s, at last with {failure[:300]}: see to that "
                "server and start the run again, it goes on from its last checkpoint"
            ) from error

    async def _find_model(self, most_tokens: int) -> int | None:
        """The model's context in tokens, if the API has it. Raises ConfigError, and HTTPError if no server answers."""
        data = await self._ask("GET", f"{self.url}/models", absent=(httpx.ConnectError,))
        cards = decode_json(data, Cards).data
        card = next((one for one in cards if one.id == self.model), None)
        if card is None:
            names = ", ".join(f'"{one.id}"' for one in cards[:20]) or "none"
            raise ConfigError(f'objective.teacher.model = "{self.model}": {self.url} has no such model, only {names}')
        if card.max_model_len is not None and card.max_model_len <= most_tokens:
            raise ConfigError(
                f"{self.name} has a context of {card.max_model_len} tokens; a prompt with its completion can have "
                f"{most_tokens} here, and one more is sampled: serve the teacher with a longer context, or set "
                f"model.max_tokens to at most {card.max_model_len - 1}"
            )
        return card.max_model_len

    async def _same_tokens(self, token_ids: list[int], text: str) -> bool:
        """True if the server decodes the ids to `text`, False if it cannot be asked. Raises ConfigError otherwise."""
        body = {"model": self.model, "tokens": token_ids}
        try:
            data = await self._ask("POST", f"{self.url.removesuffix('/v1')}/detokenize", body)
        except HttpStatus as error:
            if error.code in (404, 405):
                return False
            raise
        decoded = decode_json(data, Decoded).prompt
        if decoded != text:
            raise ConfigError(
                f'objective.teacher.model = "{self.model}" has another tokenizer than the policy: it reads '
                f"{decoded[:80]!r} where the policy reads {text[:80]!r}: choose a teacher of the same family"
            )
        return True


def read(data: bytes, token_ids: list[int], start: int) -> list[float]:
    """Log-probs of token_ids[start:] from a reply to a request for them. Raises RunError, NonFinite."""
    try:
        choices = decode_json(data, TeacherReply).choices
    except msgspec.DecodeError as error:
        if not isinstance(error, msgspec.ValidationError) and is_json(data):  # as Python has it: with NaN
            raise NonFinite("a log-prob is NaN or infinite") from error
        raise RunError(f"its reply cannot be read ({error})") from error
    table = choices[0].prompt_logprobs if choices else None
    if table is None:
        raise RunError("its replies hold no prompt_logprobs: serve it with `vllm serve` or `python -m serve`")
    if len(table) != len(token_ids):
        raise RunError(f"{len(token_ids)} tokens were sent, and {len(table)} log-probs came")
    logprobs = []
    for position in range(start, len(token_ids)):
        entry = (table[position] or {}).get(token_ids[position])
        if entry is None:
            others = ", ".join(map(str, table[position] or {})) or "none"
            raise RunError(
                f"token {token_ids[position]} was sent at position {position}, and a log-prob came of {others}"
            )
        value = entry.logprob
        if value is None or not math.isfinite(value) or value <= MINUS_INFINITY:
            raise NonFinite(f"the log-prob of token {token_ids[position]} at position {position} is {value}")
        if value > ROUNDING:
            raise RunError(f"{value} at position {position} is no log-prob: serve it with --logprobs-mode raw_logprobs")
        logprobs.append(value)
    return logprobs


def is_json(data: bytes) -> bool:
    """Whether Python's json module, which accepts NaN and infinities too, can read the data."""
    try:
        parse_json(data)
    except ValueError:
        return False
    return True
