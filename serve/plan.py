"""What to generate for a request, and the response that comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from serve.engine import Candidate, SamplingParameters
from serve.reasoning import Chunk
from serve.reasoning_language import Enforcement, LanguageChoice, Measured
from shared.tool_calls import ParsedCall


@dataclass(frozen=True)
class GenerationPlan:
    """What to generate for a request; the same for all of its choices."""

    prompt_ids: list[int]
    sampling: SamplingParameters
    """its constraint applies to the answer only"""
    choice: LanguageChoice
    enforcement: Enforcement
    choices: int = 1
    """how many; second tries have the seeds after those of all choices"""
    thinking_budget: int | None = None
    """tokens after which the reasoning is ended with a phrase; None for no limit"""
    tools: frozenset[str] = frozenset()
    """names of the tools that may be called"""
    most_calls: int = 0
    template: Mapping[str, Any] = field(default_factory=dict)
    """arguments of the chat template that the request gives"""

    def for_choice(self, index: int) -> GenerationPlan:
        """Return the plan of one of several choices, with a seed of its own."""
        seed = self.sampling.seed
        return self if seed is None or not index else replace(self, sampling=replace(self.sampling, seed=seed + index))


class DiscardedTry(NamedTuple):
    """A discarded try, up to the point where its language was clear."""

    reasoning: str
    """without texts that the server put in"""
    answer: str
    tokens: int
    thinking_tokens: int


@dataclass
class Response:
    """The result of one choice; complete when the iterator of `generate` has ended."""

    reasoning: str = ""
    """The reasoning that clients see."""
    sampled_reasoning: str = ""
    """The part that the model wrote: only this is measured."""
    prefilled: list[str] = field(default_factory=list)
    """Texts that the server put into it, in order: first words, and phrases that end it."""
    answer: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    """the stop of the request that ended the answer; None if the model ended it"""
    tokens: int = 0
    """number of sampled tokens, over all tries"""
    thinking_tokens: int = 0
    """those of them that belong to the reasoning, over all tries, tags included"""
    tries: int = 0
    first_try: DiscardedTry | None = None
    """the discarded first try, if there was a second one"""
    measured: Measured | None = None
    logprobs: list[list[Candidate]] = field(default_factory=list)
    """[tokens], those of a discarded try left out"""
    end_reasoning_early: bool = False
    """whether the client wants the answer now: the reasoning is ended as if its budget were used up"""

    @property
    def cut(self) -> bool:
        """Whether its tokens were used up before it ended."""
        return self.finish_reason == "length"

    def add(self, chunk: Chunk) -> None:
        """Add some text to the reasoning or the answer."""
        if not chunk.thinking:
            self.answer += chunk.text
            return
        self.reasoning += chunk.text
        if not chunk.forced:
            self.sampled_reasoning += chunk.text
        elif text := chunk.text.strip():
            self.prefilled.append(text)
