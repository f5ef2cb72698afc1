"""Generates one response, chunk by chunk, and enforces the language of its reasoning (enforcement.py).

All tries count in the usage, with their reasoning, and `first_try` holds the discarded one. The result does not depend
on how fast tokens arrive: an engine returns them one by one, and a try or its reasoning ends at the same token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from serve.enforcement import CLEAR_LETTERS, Means, is_clear, means_of, most_tries, texts_of
from serve.engine import Constraint, SamplingParameters, ServingEngine
from serve.errors import ApiError
from serve.letter_mask import reasoning_mask
from serve.plan import DiscardedTry, GenerationPlan, Response
from serve.reasoning import Chunk, ReasoningCounter, Splitter, State
from serve.reasoning_language import measure
from serve.system_prompts import PromptRenderer
from shared.json_reader import parse_json
from shared.tool_calls import OPEN, CallReader, ParsedCall

LOOK_EVERY = 40
"""minimum number of characters between two detections on reasoning that is held back"""
LONG = 2000
"""characters; the language of longer texts is detected in a thread, so that other responses do not wait for it"""
MOST_HELD = 2000
"""characters of reasoning that are held back at most; if its language is still unclear, it is sent as it is"""


async def generate(
    engine: ServingEngine, prompts: PromptRenderer, plan: GenerationPlan, response: Response
) -> AsyncGenerator[Chunk | ParsedCall, None]:
    """Sample one response chunk by chunk, filling `response`. Closing the iterator aborts it in the engine."""
    reader = CallReader(plan.tools, plan.most_calls) if plan.tools else None
    constraint, strays = plan.sampling.constraint, 0
    async with contextlib.aclosing(in_language(engine, prompts, plan, response)) as chunks:
        async for chunk in chunks:
            if chunk.thinking:
                response.add(chunk)
                yield chunk
            else:
                for found in [chunk.text] if reader is None else reader.feed(chunk.text):
                    if is_stray(found, constraint):
                        strays += 1
                    else:
                        yield append(found, response)
                if len(response.calls) == plan.most_calls > 0:
                    response.finish_reason = "stop"
                    break  # there must be no more
    for found in [] if reader is None or response.calls[plan.most_calls - 1 :] else reader.feed("", last=True):
        if is_stray(found, constraint):
            strays += 1
        else:
            yield append(found, response)
    check_form(constraint, response, strays)
    if response.calls and response.finish_reason == "stop":
        response.finish_reason = "tool_calls"
    texts = (response.sampled_reasoning, response.answer, plan.choice.code)
    if len(response.reasoning) + len(response.answer) > LONG:
        response.measured = await asyncio.to_thread(measure, *texts)
    else:
        response.measured = measure(*texts)


def is_stray(found: str | ParsedCall, constraint: Constraint | None) -> bool:
    """Whether a part of the answer stands where the constraint wants a call and is none; clients do not get it."""
    if constraint is None or isinstance(found, ParsedCall):
        return False
    return constraint.kind == "grammar" or (constraint.kind == "structural_tag" and OPEN in found)


def check_form(constraint: Constraint | None, response: Response, strays: int) -> None:
    """Raises ApiError for a response that ended by itself and is not complete in the form that its constraint asks: the
    engine ends it where its grammar leaves no token. strays: parts of it that should be calls and are none."""
    if constraint is None or response.finish_reason != "stop" or response.stop_reason is not None:
        return
    complete = not strays and (constraint.kind != "grammar" or bool(response.calls))
    if constraint.kind in ("json", "json_object"):
        try:
            parse_json(response.answer)
        except ValueError:
            complete = False
    if not complete:
        response.finish_reason = "error"
        message = "the response ended before it had the form that the request asks: change the schema"
        raise ApiError(500, message, code="form_not_kept", retry=False)


def append(found: str | ParsedCall, response: Response) -> Chunk | ParsedCall:
    """Add a part of the answer, text or a call, to the response, and return what is to be yielded."""
    if isinstance(found, ParsedCall):
        response.calls.append(found)
        return found
    response.add(Chunk(False, found))
    return Chunk(False, found)


async def in_language(
    engine: ServingEngine, prompts: PromptRenderer, plan: GenerationPlan, response: Response
) -> AsyncGenerator[Chunk, None]:
    """Sample until the reasoning is in the requested language or the tries are used up."""
    earlier, tries = len(response.logprobs), most_tries(prompts, plan)
    for number in range(1, tries + 1):
        response.tries = number
        del response.logprobs[earlier:]
        means = means_of(number, prompts, plan, response)
        held: list[Chunk] | None = [] if number < tries else None
        size, look_at = 0, CLEAR_LETTERS
        async with contextlib.aclosing(sample(engine, prompts, plan, means, response)) as chunks:
            async for chunk in chunks:
                if held is None:
                    yield chunk
                    continue
                held.append(chunk)
                size += len(chunk.text)
                reasoning_ended = len(held) > 1 and held[-2].thinking and not chunk.thinking
                if size < look_at and not reasoning_ended:
                    continue
                look_at = size + LOOK_EVERY
                clear = is_clear(held, plan, last=size > MOST_HELD)
                if clear is False:
                    break
                if clear:
                    for early in held:
                        yield early
                    held = None
        if not held or is_clear(held, plan, last=True):
            for early in held or []:
                yield early
            break
        response.first_try = DiscardedTry(*texts_of(held), response.tokens, response.thinking_tokens)


class CountingSplitter(Splitter):
    """Splits one try into reasoning and answer, and adds its tokens to the counts of the response."""

    def __init__(self, prompts: PromptRenderer, response: Response, *, opened: bool, begun: bool):
        tags, control = prompts.tags, prompts.control
        super().__init__(tags, opened=opened, begun=begun, control=control, exact=prompts.whole)
        self._counter = ReasoningCounter(prompts.letters, tags, opened=opened, begun=begun, control=control)
        self._response, self._earlier = response, response.thinking_tokens

    def feed(self, text: str, token_ids: Sequence[int] = (), most: int | None = None) -> list[Chunk]:
        """Take the next text and its tokens, of which at most `most` count; return the chunks that are settled."""
        self._counter.feed(token_ids[:most])
        self._response.tokens += len(token_ids[:most])
        self._response.thinking_tokens = self._earlier + self._counter.tokens
        return super().feed(text, token_ids)

    def force(self, text: str, token_ids: Sequence[int], most: int) -> list[Chunk]:
        """Take text that the server writes, as `feed` takes the model's. A tag that the model has begun is text."""
        before: list[Chunk] = []
        if self.inside:
            before, self._held = list(self._emit(True, self._held)), ""
        return before + [chunk._replace(forced=True) for chunk in self.feed(text, token_ids, most)]

    def is_beyond(self, budget: int | None) -> bool:
        """Return whether the reasoning must end: its budget is used up, or the client wants the answer now. It ends in
        its text, not in the header of a message."""
        if self.state is State.THINKING and not self.inside:
            return False
        return self._response.end_reasoning_early or (budget is not None and self._counter.tokens >= budget)


async def sample(
    engine: ServingEngine, prompts: PromptRenderer, plan: GenerationPlan, means: Means, response: Response
) -> AsyncGenerator[Chunk, None]:
    """Sample one try, split into reasoning and answer; adds to the counts of `response`. Reasoning beyond its budget
    is ended with a phrase, and the answer is sampled after it. A constraint and stops apply to the answer only:
    the reasoning is sampled without them, up to its closing tag."""
    sampling, prompt_ids, budget, begun = plan.sampling, plan.prompt_ids, plan.thinking_budget, False
    prefill, earlier = means == "prefill", response.tokens
    if response.tries > 1 and sampling.seed is not None:
        sampling = replace(sampling, seed=sampling.seed + plan.choices)  # the same one would draw the same tokens
    if not prompts.chat.think_closed and (prefill or (sampling.constraint is not None and budget != 0)):
        begun, (prompt_ids, begin) = True, prompts.begin_reasoning(prompt_ids, plan.choice.code if prefill else "")
        if begin:
            yield Chunk(True, begin, forced=True)
    splitter = CountingSplitter(prompts, response, opened=prompts.opened or begun, begun=prefill and begun)
    if prompts.chat.think_closed:
        splitter.state = State.ANSWER  # the prompt closes the reasoning
    ended = cut = answered = False
    """ended: the reasoning, by a phrase; cut: by the model, without closing tag; answered: some answer was yielded"""
    while True:
        if not ended and splitter.state is not State.ANSWER and (cut or splitter.is_beyond(budget)):
            ended = True
            text, added = prompts.end_reasoning(plan.choice.code, splitter, begun=prefill or response.tokens > earlier)
            for chunk in splitter.force(text, added, sampling.max_tokens):
                yield chunk
            prompt_ids, sampling = prompt_ids + added, remaining(sampling, len(added))
        if sampling.max_tokens < 1:
            response.finish_reason = "length"
            break
        now = sampling_in(sampling, prompts, splitter.state, plan.choice.code if means == "constrain" else "")
        if splitter.calling:  # the constraint is of answers, and of calls in their text
            now = replace(now, constraint=None)
        ids, text_so_far = list[int](), ""
        async with contextlib.aclosing(engine.generate(prompt_ids, now)) as deltas:
            async for delta in deltas:
                ids += delta.token_ids
                text_so_far += delta.text
                response.logprobs += delta.logprobs
                for chunk in splitter.feed(delta.text, delta.token_ids):
                    answered = answered or not chunk.thinking
                    yield chunk
                response.finish_reason, response.stop_reason = delta.finish_reason or "", delta.stop_reason
                going = splitter.state is State.THINKING and not ended and not delta.finish_reason
                if going and splitter.is_beyond(budget):
                    for chunk in splitter.feed(withheld(prompts, text_so_far, ids).rstrip("\ufffd")):
                        yield chunk
                    break
            else:
                over = response.finish_reason != "stop" or is_over(sampling, now, splitter.state, response, answered)
                for chunk in splitter.feed(omitted_stop(prompts, sampling, now, response, over, text_so_far, ids)):
                    yield chunk
                if over:
                    break
                if response.stop_reason is None:
                    cut, ids = True, [token for token in ids if token not in prompts.chat.stop_ids]
                response.finish_reason, response.stop_reason = "", None
        prompt_ids, sampling = prompt_ids + ids, remaining(sampling, len(ids))
    for chunk in splitter.end():
        yield chunk


def remaining(sampling: SamplingParameters, tokens: int) -> SamplingParameters:
    """Return the sampling that remains after `tokens` tokens: its limits are reduced by them."""
    return replace(sampling, max_tokens=sampling.max_tokens - tokens, min_tokens=max(sampling.min_tokens - tokens, 0))


def sampling_in(
    sampling: SamplingParameters, prompts: PromptRenderer, state: State, masked: str = ""
) -> SamplingParameters:
    """Return how to sample from this state. A constraint and stops apply to the answer only, so reasoning is sampled
    separately, up to its closing tag, in the letters of the language `masked` if that is one. While it is unclear
    whether there is reasoning, stops may be needed: one that occurs in the reasoning interrupts it once."""
    if state is State.ANSWER or not (masked or sampling.constraint or sampling.stop or sampling.stop_token_ids):
        return sampling
    mask = reasoning_mask(masked, prompts.chat, prompts.tags, opened=state is State.THINKING) if masked else None
    unclear = state is State.BEFORE and sampling.constraint is None
    return replace(
        sampling, constraint=mask, include_stop=False, stop=sampling.stop if unclear else [],
        stop_token_ids=sampling.stop_token_ids if unclear else [], through=prompts.through[0],
        through_id=prompts.through[1],
    )  # fmt: skip


def is_over(
    sampling: SamplingParameters, now: SamplingParameters, state: State, response: Response, answered: bool
) -> bool:
    """Return whether a completion that reached a stop, sampled with `now`, is complete. A stop in the reasoning, or a
    blank one before the first word of the answer, is ordinary text."""
    reason = response.stop_reason
    if reason is None:  # the model's own end
        return sampling.constraint is None or state is State.ANSWER
    return reason != now.through and state is State.ANSWER and (answered or bool(str(reason).strip()))


def omitted_stop(
    prompts: PromptRenderer, sampling: SamplingParameters, now: SamplingParameters, response: Response, over: bool,
    text_so_far: str, ids: list[int],
) -> str:  # fmt: skip
    """Return the text of a stop that the engine left out although it is part of the response."""
    reason = response.stop_reason
    if reason is None or reason == now.through or (over and sampling.include_stop == now.include_stop):
        return ""
    if over and isinstance(reason, str):
        return reason
    return withheld(prompts, text_so_far, ids)


def withheld(prompts: PromptRenderer, text_so_far: str, ids: list[int]) -> str:
    """Return the end of a text that the engine has sampled and not yet told: it could be the beginning of a stop."""
    whole = prompts.chat.tokenizer.decode(ids, skip_special_tokens=False)
    return whole[len(text_so_far) :] if whole.startswith(text_so_far) else ""
