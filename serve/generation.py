"""Generates one response, chunk by chunk, and enforces the language of its reasoning (enforcement.py).

All tries count in the usage, with their reasoning, and `first_try` holds the discarded one. The result does not depend
on how fast tokens arrive: an engine returns them one by one, and a try or its reasoning ends at the same token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from enum import Enum

from serve.enforcement import CLEAR_LETTERS, Means, is_clear, means_of, most_tries, texts_of
from serve.engine import Constraint, Delta, SamplingParameters, ServingEngine
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
                for piece in [chunk.text] if reader is None else reader.feed(chunk.text):
                    if is_stray(piece, constraint):
                        strays += 1
                    else:
                        yield append(piece, response)
                if len(response.calls) == plan.most_calls > 0:
                    response.finish_reason = "stop"
                    break  # there must be no more
    for piece in [] if reader is None or response.calls[plan.most_calls - 1 :] else reader.feed("", last=True):
        if is_stray(piece, constraint):
            strays += 1
        else:
            yield append(piece, response)
    check_form(constraint, response, strays)
    if response.calls and response.finish_reason == "stop":
        response.finish_reason = "tool_calls"
    texts = (response.sampled_reasoning, response.answer, plan.choice.code)
    if len(response.reasoning) + len(response.answer) > LONG:
        response.measured = await asyncio.to_thread(measure, *texts)
    else:
        response.measured = measure(*texts)


def is_stray(piece: str | ParsedCall, constraint: Constraint | None) -> bool:
    """Whether a part of the answer is where the constraint wants a call and is none; clients do not get it."""
    if constraint is None or isinstance(piece, ParsedCall):
        return False
    return constraint.kind == "grammar" or (constraint.kind == "structural_tag" and OPEN in piece)


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


def append(piece: str | ParsedCall, response: Response) -> Chunk | ParsedCall:
    """Add a part of the answer, text or a call, to the response, and return what is to be yielded."""
    if isinstance(piece, ParsedCall):
        response.calls.append(piece)
        return piece
    response.add(Chunk(False, piece))
    return Chunk(False, piece)


async def in_language(
    engine: ServingEngine, prompts: PromptRenderer, plan: GenerationPlan, response: Response
) -> AsyncGenerator[Chunk, None]:
    """Sample until the reasoning is in the requested language or the tries are used up."""
    earlier, tries = len(response.logprobs), most_tries(prompts, plan)
    for number in range(1, tries + 1):
        response.tries = number
        del response.logprobs[earlier:]
        means = means_of(number, prompts, plan, response)
        kept: list[Chunk] | None = [] if number < tries else None
        size, look_at = 0, CLEAR_LETTERS
        async with contextlib.aclosing(sample(engine, prompts, plan, means, response)) as chunks:
            async for chunk in chunks:
                if kept is None:
                    yield chunk
                    continue
                kept.append(chunk)
                size += len(chunk.text)
                reasoning_ended = len(kept) > 1 and kept[-2].thinking and not chunk.thinking
                if size < look_at and not reasoning_ended:
                    continue
                look_at = size + LOOK_EVERY
                clear = is_clear(kept, plan, last=size > MOST_HELD)
                if clear is False:
                    break
                if clear:
                    for early in kept:
                        yield early
                    kept = None
        if not kept or is_clear(kept, plan, last=True):
            for early in kept or []:
                yield early
            break
        response.first_try = DiscardedTry(*texts_of(kept), response.tokens, response.thinking_tokens)


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


class Phase(Enum):
    """Where a try is."""

    BEFORE = "before the reasoning"
    REASONING = "in the reasoning of the model"
    ENDED = "in reasoning to which the server has written an end"
    ANSWER = "in the answer"


class Try:
    """One try of a response, sampled in legs: stops and a constraint apply to the answer only, so that the reasoning is
    sampled without them, up to its closing tag. The model decides whether there is reasoning: a first leg is free, and
    where it begins an answer that must have a form, its few tokens are sampled again under the constraint.

        BEFORE or REASONING -- the closing tag, or no reasoning --> ANSWER
        BEFORE or REASONING -- the budget is used up, or the model ends without the closing tag --> ENDED --> ANSWER
    """

    def __init__(self, prompts: PromptRenderer, plan: GenerationPlan, means: Means, response: Response):
        self.prompts, self.plan, self.response = prompts, plan, response
        self.sampling, self.prompt_ids = plan.sampling, plan.prompt_ids
        if response.tries > 1 and self.sampling.seed is not None:  # the same one would draw the same tokens
            self.sampling = replace(self.sampling, seed=self.sampling.seed + plan.choices)
        self.masked = plan.choice.code if means == "constrain" else ""
        """the language in whose letters the reasoning must be, "" for any"""
        self.first_words = ""
        """what the server has written at the beginning of the reasoning"""
        prefill, formed = means == "prefill", self.sampling.constraint is not None and plan.thinking_budget != 0
        written = prefill or (formed and (bool(self.masked) or prompts.tags.channels))
        begun = not prompts.chat.think_closed and written
        if begun:
            code = plan.choice.code if prefill else ""
            self.prompt_ids, self.first_words = prompts.begin_reasoning(self.prompt_ids, code)
        opened = prompts.opened or begun
        self.splitter = CountingSplitter(prompts, response, opened=opened, begun=prefill and begun)
        if prompts.chat.think_closed:
            self.splitter.state = State.ANSWER  # the prompt closes the reasoning
        self._prefilled, self._earlier = prefill, response.tokens
        self._before = (response.tokens, response.thinking_tokens, len(response.logprobs))
        self._ended = self._answered = self._undecided = self._again = False
        self._ids: list[int] = []
        """[tokens] of this leg"""
        self._text = ""
        """of this leg, as the engine has sent it so far"""

    @property
    def phase(self) -> Phase:
        """The phase, as far as the text has been read."""
        if self.splitter.state is State.ANSWER:
            return Phase.ANSWER
        if self._ended:
            return Phase.ENDED
        return Phase.REASONING if self.splitter.state is State.THINKING else Phase.BEFORE

    @property
    def is_beyond(self) -> bool:
        """Whether the server must end the reasoning now."""
        budget = self.plan.thinking_budget
        return self.phase in (Phase.BEFORE, Phase.REASONING) and self.splitter.is_beyond(budget)

    def end_reasoning(self) -> list[Chunk]:
        """Write the end of the reasoning, and return its text."""
        self._ended = True
        begun = self._prefilled or self.response.tokens > self._earlier
        text, added = self.prompts.end_reasoning(self.plan.choice.code, self.splitter, begun=begun)
        chunks = self.splitter.force(text, added, self.sampling.max_tokens)
        self._go_on(added)
        return chunks

    def begin_leg(self) -> SamplingParameters:
        """Begin a leg, and return how to sample it. Reasoning is sampled up to its closing tag, without the constraint
        and the stops, or in the letters of the language `masked`. While it is unclear whether there is reasoning, stops
        and the constraint of calls in a text may be needed: what occurs of them in the reasoning interrupts it once."""
        self._ids, self._text = [], ""
        sampling, prompts, state = self.sampling, self.prompts, self.splitter.state
        form, before = sampling.constraint, state is State.BEFORE
        leg, unclear = sampling, before and (form is None or self._again)
        self._undecided = before and form is not None and not self._again
        limited = self.masked or form or sampling.stop or sampling.stop_token_ids
        if state is not State.ANSWER and limited:
            mask = form if unclear else None
            if self.masked:
                mask = reasoning_mask(self.masked, prompts.chat, prompts.tags, opened=state is State.THINKING)
            leg = replace(
                sampling, constraint=mask, include_stop=False, stop=sampling.stop if unclear else [],
                stop_token_ids=sampling.stop_token_ids if unclear else [], through=prompts.through[0],
                through_id=prompts.through[1],
            )  # fmt: skip
        self._leg_formed = leg.constraint is not None and leg.constraint is form
        return replace(leg, constraint=None) if self.splitter.calling else leg  # which is of calls in the text

    def take(self, delta: Delta) -> list[Chunk]:
        """Take the next part of a leg, and return the text that is settled."""
        self._ids += delta.token_ids
        self._text += delta.text
        self.response.logprobs += delta.logprobs
        chunks = self.splitter.feed(delta.text, delta.token_ids)
        if self._is_unformed and not self._may_go_on(delta.finish_reason):
            return []
        self._answered = self._answered or not all(chunk.thinking for chunk in chunks)
        return chunks

    @property
    def _is_unformed(self) -> bool:
        """Whether the leg has begun an answer without the constraint that applies to it."""
        return self._undecided and self.splitter.state is State.ANSWER and not self.splitter.has_reasoning

    def _may_go_on(self, finish_reason: str | None) -> bool:
        """Whether an answer that was begun without its constraint fits it so far: text in which no call has begun."""
        form, text = self.sampling.constraint, self._text.lstrip()
        called = text.startswith(OPEN) or OPEN.startswith(text)
        return form is not None and form.kind == "structural_tag" and not (called or finish_reason)

    @property
    def is_to_interrupt(self) -> bool:
        """Whether the leg must not go on: the budget is used up within the reasoning, or the answer lacks its
        constraint, or reasoning has that of calls."""
        if self._is_unformed:
            return True
        opened = (self._again and self._leg_formed) or self.is_beyond
        return self.phase is Phase.REASONING and not self.response.finish_reason and opened

    def _begin_answer(self) -> list[Chunk]:
        """Forget the first leg, whose words are no reasoning: they are sampled again, under the constraint."""
        response, self._again = self.response, True
        response.tokens, response.thinking_tokens, logprobs = self._before
        del response.logprobs[logprobs:]
        response.finish_reason, response.stop_reason = "", None
        self.splitter = CountingSplitter(self.prompts, response, opened=False, begun=False)
        form = self.sampling.constraint
        if form is None or form.kind != "structural_tag":  # others leave no room for reasoning
            self.splitter.state = State.ANSWER
        return []

    def interrupt_leg(self) -> list[Chunk]:
        """End a leg before its own end, and return the text that the engine has held back."""
        if self._is_unformed and not self._may_go_on(self.response.finish_reason):
            return self._begin_answer()
        text = self._withheld().rstrip("\ufffd")
        self._go_on(self._ids)
        return self.splitter.feed(text)

    def end_leg(self, leg: SamplingParameters) -> tuple[list[Chunk], bool]:
        """Read the end of a leg. Return the text that the engine left out, and whether the try is over."""
        response = self.response
        if self._undecided and self.splitter.state is State.BEFORE:  # blanks, or nothing
            return self._begin_answer(), False
        over = response.finish_reason != "stop" or self._is_over(leg)
        chunks = self.splitter.feed(self._omitted_stop(leg, over))
        if over:
            return chunks, True
        unclosed, stop_ids = response.stop_reason is None, self.prompts.chat.stop_ids
        self._go_on([token for token in self._ids if not (unclosed and token in stop_ids)])
        response.finish_reason, response.stop_reason = "", None
        if unclosed and self.phase in (Phase.BEFORE, Phase.REASONING):
            chunks += self.end_reasoning()
        return chunks, False

    def _is_over(self, leg: SamplingParameters) -> bool:
        """Return whether a leg that reached a stop completes the try. A stop in the reasoning, or a blank one before
        the first word of the answer, is ordinary text."""
        reason, answering = self.response.stop_reason, self.phase is Phase.ANSWER
        if reason is None:  # the model's own end
            return self.sampling.constraint is None or answering or self._again
        return reason != leg.through and answering and (self._answered or bool(str(reason).strip()))

    def _omitted_stop(self, leg: SamplingParameters, over: bool) -> str:
        """Return the text of a stop that the engine left out although it is part of the response."""
        reason = self.response.stop_reason
        if reason is None or reason == leg.through or (over and self.sampling.include_stop == leg.include_stop):
            return ""
        return reason if over and isinstance(reason, str) else self._withheld()

    def _withheld(self) -> str:
        """Return the end of a leg's text that the engine has not sent yet: it could be the beginning of a stop."""
        whole = self.prompts.chat.tokenizer.decode(self._ids, skip_special_tokens=False)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""

    def _go_on(self, ids: list[int]) -> None:
        """Let the next leg begin after these tokens, which the limits count."""
        limit, least = self.sampling.max_tokens - len(ids), max(self.sampling.min_tokens - len(ids), 0)
        self.sampling = replace(self.sampling, max_tokens=limit, min_tokens=least)
        self.prompt_ids = self.prompt_ids + ids


async def sample(
    engine: ServingEngine, prompts: PromptRenderer, plan: GenerationPlan, means: Means, response: Response
) -> AsyncGenerator[Chunk, None]:
    """Sample one try, split into reasoning and answer; adds to the counts of `response`."""
    attempt, over = Try(prompts, plan, means, response), False
    if attempt.first_words:
        yield Chunk(True, attempt.first_words, forced=True)
    while not over:
        for chunk in attempt.end_reasoning() if attempt.is_beyond else ():
            yield chunk
        if attempt.sampling.max_tokens < 1:
            response.finish_reason = "length"
            break
        leg = attempt.begin_leg()
        async with contextlib.aclosing(engine.generate(attempt.prompt_ids, leg)) as deltas:
            async for delta in deltas:
                for chunk in attempt.take(delta):
                    yield chunk
                response.finish_reason, response.stop_reason = delta.finish_reason or "", delta.stop_reason
                if attempt.is_to_interrupt:
                    chunks = attempt.interrupt_leg()
                    break
            else:
                chunks, over = attempt.end_leg(leg)
        for chunk in chunks:
            yield chunk
    for chunk in attempt.splitter.end():
        yield chunk
