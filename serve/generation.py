"""One response from the engine: tries until the thoughts are in the language that is wanted, cut into pieces.

    prompt    the prompt asks for the language, nothing more
    prefill   the thoughts begin with a phrase in it, which the model did not choose
    retry     the first words of thought are held back until their language is clear; where it is another one, the
              completion is aborted and sampled again with prefill
    strict    as retry; and a response that ends up in another language is an error, not a response

All tries are counted in the usage. What this does not do: HTTP (chat.py). Who calls this: chat.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from serve.engine import Candidate, Engine, Sampling
from serve.language import Choice, Measured, measure
from serve.phrases import PHRASES
from serve.prompt import Prompts
from serve.reasoning import Piece, Splitter, State
from serve.schemas import Enforcement
from verify.language import spoken_in

MOST_TRIES = 2
CLEAR_LETTERS = 80
"""so many letters of thought tell their language (fewer mislead: "Hmm, wait" is French)"""


@dataclass(frozen=True)
class Plan:
    """What is to be generated, the same for all choices of a request."""

    prompt_ids: list[int]
    sampling: Sampling
    choice: Choice
    enforcement: Enforcement
    thinking_budget: int | None = None
    """tokens after which thoughts are ended with a phrase; None: never"""

    def of(self, index: int) -> Plan:
        """For one of several choices: with a seed of its own."""
        seed = self.sampling.seed
        return self if seed is None or not index else replace(self, sampling=replace(self.sampling, seed=seed + index))


@dataclass
class Response:
    """What one choice came to; complete when the iterator of `generate` has ended."""

    thoughts: str = ""
    answer: str = ""
    finish_reason: str = ""
    tokens: int = 0
    """sampled, over all tries"""
    thinking_tokens: int = 0
    tries: int = 0
    measured: Measured | None = None
    logprobs: list[list[Candidate]] = field(default_factory=list)
    """[tokens of the last try]"""

    @property
    def mismatch(self) -> bool:
        """It was measured, and it is in another language than the one wanted."""
        return self.measured is not None and self.measured.match is False


async def generate(engine: Engine, prompts: Prompts, plan: Plan, response: Response) -> AsyncGenerator[Piece, None]:
    """Sample one response, piece by piece; fills `response`. Closing the iterator aborts it in the engine."""
    looked_after = plan.enforcement in ("retry", "strict") and plan.choice.code in PHRASES
    for number in range(1, (MOST_TRIES if looked_after else 1) + 1):
        response.tries, response.logprobs = number, []
        prefill = plan.choice.code in PHRASES and (plan.enforcement == "prefill" or number > 1)
        held: list[Piece] | None = [] if looked_after and number < MOST_TRIES else None
        async with contextlib.aclosing(sample(engine, prompts, plan, prefill, response)) as pieces:
            async for piece in pieces:
                if held is None:
                    yield tell(piece, response)
                    continue
                held.append(piece)
                clear = is_clear(held, plan.choice.code)
                if clear is False:
                    break
                if clear:
                    for early in held:
                        yield tell(early, response)
                    held = None
            else:
                if held is None or is_clear(held, plan.choice.code, last=True) is not False:
                    for early in held or []:
                        yield tell(early, response)
                    held = None
        if held is None:
            break
    response.measured = measure(response.thoughts, response.answer, plan.choice.code)


def tell(piece: Piece, response: Response) -> Piece:
    """Write a piece into the response."""
    if piece.thinking:
        response.thoughts += piece.text
    else:
        response.answer += piece.text
    return piece


def is_clear(held: list[Piece], code: str, last: bool = False) -> bool | None:
    """Whether the thoughts so far are in a language; None while they are too short to tell. `last`: no more comes."""
    thoughts = "".join(piece.text for piece in held if piece.thinking)
    over = last or not held[-1].thinking
    found, match = spoken_in(thoughts, code)
    if found.units < CLEAR_LETTERS and not over:
        return None
    return match is not False if over else match


async def sample(
    engine: Engine, prompts: Prompts, plan: Plan, prefill: bool, response: Response
) -> AsyncGenerator[Piece, None]:
    """One try, cut into thoughts and answer; counts into `response`. Thoughts beyond their budget are ended."""
    code, sampling, begin = plan.choice.code, plan.sampling, ""
    prompt_ids = plan.prompt_ids
    if prefill:
        prompt_ids, begin = prompts.begin_thoughts(prompt_ids, code)
        # the same seed would draw the same start again
        sampling = replace(sampling, seed=None if sampling.seed is None else sampling.seed + response.tries - 1)
        yield Piece(True, begin)
    splitter = Splitter(prompts.tags, opened=prompts.opened, begun=prefill, control=prompts.chat.think_ids)
    thoughts_may_go_on = plan.thinking_budget != 0
    ids: list[int] = []
    while True:
        if not thoughts_may_go_on:
            text, added = prompts.end_thoughts(code, inside=splitter.state is State.THINKING)
            for piece in splitter.feed(text, added):
                yield piece
            response.thinking_tokens = splitter.thinking_tokens
            response.tokens += len(added)
            prompt_ids = prompt_ids + ids + added
            sampling = replace(sampling, max_tokens=sampling.max_tokens - len(ids) - len(added))
            if sampling.max_tokens < 1:
                response.finish_reason = "length"
                break
        async with contextlib.aclosing(engine.generate(prompt_ids, sampling)) as deltas:
            async for delta in deltas:
                response.tokens += len(delta.token_ids)
                response.logprobs += delta.logprobs
                ids += delta.token_ids
                for piece in splitter.feed(delta.text, delta.token_ids):
                    yield piece
                response.thinking_tokens = splitter.thinking_tokens
                response.finish_reason = delta.finish_reason or response.finish_reason
                over = plan.thinking_budget is not None and splitter.thinking_tokens >= plan.thinking_budget
                if over and thoughts_may_go_on and splitter.state is State.THINKING and not delta.finish_reason:
                    thoughts_may_go_on = False
                    break
            else:
                break
    for piece in splitter.end():
        yield piece
    response.thinking_tokens = splitter.thinking_tokens
