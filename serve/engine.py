"""The engine interface of the server: streamed sampling, abort, health, reload; vllm_engine.py implements it.

Without vLLM, so that settings, request bodies and tests do not wait for its import.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol


class EngineDied(Exception):
    """Raised when the engine process is gone; a retry may reach its successor."""


class CrashingRequest(Exception):
    """Raised for a request that has killed engines and is not sampled again."""

    def __init__(self) -> None:
        super().__init__("this request was running when the engine died twice; it is not tried again")


class EngineRefused(Exception):
    """Raised when the engine does not accept a request as it is; the message says why."""


class Constraint(NamedTuple):
    """A form that an answer must have; enforced by the engine, token by token."""

    kind: Literal["json", "json_object", "grammar", "structural_tag"]
    """vLLM's name of the kind"""
    value: str


class Candidate(NamedTuple):
    """A possible token at a position, with its log-prob."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class SamplingParameters:
    """The sampling parameters of one completion."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    """stop tokens in addition to the model's own"""
    include_stop: bool = False
    """whether the text of `stop` is returned too"""
    ignore_eos: bool = False
    """whether the model's own stop tokens do not end the completion"""
    min_tokens: int = 0
    skip_special_tokens: bool = False
    logprobs: int | None = None
    """number of most probable tokens to return next to the sampled one; None for no log-probs at all"""
    prompt_logprobs: int | None = None
    """the same for the prompt's tokens, at temperature 1 whatever the sampling"""
    adapter: str = ""
    """name of the adapter that answers; "" for the model alone"""
    constraint: Constraint | None = None
    """the form that the whole completion must have"""
    through: str = ""
    """text at which the completion ends, and which is included in it"""
    through_id: int | None = None
    """token id of `through` if it is a control token"""


class Delta(NamedTuple):
    """The part of a completion that one step of the engine added."""

    text: str
    token_ids: list[int]
    logprobs: list[list[Candidate]]
    """[tokens] the sampled token first, then the most probable ones; [] unless requested"""
    finish_reason: str | None = None
    """"stop" or "length" on the last delta"""
    prompt_logprobs: Sequence[list[Candidate]] = ()
    """[prompt_tokens - 1] on one delta if requested: each token from the second on, then the most probable ones"""
    stop_reason: str | int | None = None
    """on the last delta: which of `stop`, `stop_token_ids` or `through` ended it; None for the model's own end"""


class ServingEngine(Protocol):
    """The interface that the server requires of an engine."""

    version: str
    """name of the weights in use"""

    async def start(self) -> None:
        """Start, and return when ready to generate. Raises ModelError."""

    def generate(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        """Sample one completion, one token per delta. Closing the iterator aborts it. Raises EngineDied, EngineRefused,
        CrashingRequest."""

    async def is_alive(self) -> bool:
        """Whether the engine process is there."""

    async def reload(self, model_dir: str, patience_s: float) -> None:
        """Load the weights of another export of the same model. New completions wait for them; those under way end
        first, or after `patience_s` seconds continue with them. Raises ModelError, and keeps the old ones."""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Let new completions of an adapter use this version of it. Raises ModelError, and keeps the old one."""

    async def restart(self) -> None:
        """Replace a dead engine process; completions under way continue in the new one. Raises ModelError, and they
        then wait for the next try, until `stop`."""

    async def stop(self) -> None:
        """End the engine process; completions under way end with EngineDied."""
