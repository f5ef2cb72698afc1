"""Rules by which the language of a response is enforced.

    prompt    the prompt asks for the language, nothing more
    constrain as prompt, and words in foreign scripts are masked in the reasoning (letter_mask.py)
    prefill   the reasoning begins with a phrase in it, which the model did not choose
    retry     the first words (of the reasoning, or of the answer where there is none) are held back until their
              language is clear; where it is another one, the completion is aborted and sampled once more
    strict    as retry; and a response that ends up in another language, without an answer or cut is an error

Only what the model wrote itself is examined: never a phrase that the server put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from serve.errors import ApiError
from serve.letter_mask import has_letters_of_its_own
from serve.plan import GenerationPlan, Response
from serve.reasoning import Chunk
from serve.reasoning_language import CUT, MISMATCH, NO_ANSWER, is_written
from serve.system_prompts import PromptRenderer
from shared.tool_calls import OPEN
from verify.language import Detection, spoken_in

CLEAR_LETTERS = 80
"""letters of reasoning from which its language can be detected (fewer mislead: "Hmm, wait" is French)"""
Means = Literal["ask", "constrain", "prefill"]
"""how a try brings the language about: the prompt asks for it, and besides the reasoning is held to its letters, or
begins with a phrase in it"""


def most_tries(prompts: PromptRenderer, plan: GenerationPlan) -> int:
    """Return how many tries a response may take: one where a second one would be the same as the first."""
    if plan.enforcement not in ("retry", "strict") or not plan.choice.code:
        return 1
    return 2 if plan.sampling.temperature > 0 or can_begin(prompts, plan) else 1


def means_of(number: int, prompts: PromptRenderer, plan: GenerationPlan, response: Response) -> Means:
    """Return the means of a try, counted from 1. A second one is held to the letters of a language that has its own.
    Else a model that was trained to follow requests is asked again, since a phrase that it never saw in training
    derails it; so is one that is to write no reasoning."""
    code = plan.choice.code
    if not code or not can_begin(prompts, plan) or response.end_reasoning_early:
        return "ask"
    if plan.enforcement == "constrain" or plan.enforcement == "prefill":
        return plan.enforcement
    if number == 1:
        return "ask"
    if has_letters_of_its_own(code) and not prompts.tags.channels:
        return "constrain"
    return "ask" if prompts.trained and plan.sampling.temperature > 0 else "prefill"


def can_begin(prompts: PromptRenderer, plan: GenerationPlan) -> bool:
    """Whether there is reasoning to begin: neither template nor request rule it out."""
    return not prompts.chat.think_closed and plan.thinking_budget != 0


def texts_of(kept: Sequence[Chunk]) -> tuple[str, str]:
    """Return the reasoning and the answer that the model wrote."""
    reasoning, answer = (
        "".join(chunk.text for chunk in kept if chunk.thinking is kind and not chunk.forced) for kind in (True, False)
    )
    return reasoning, answer


def is_clear(kept: Sequence[Chunk], plan: GenerationPlan, last: bool = False) -> bool | None:
    """Return whether the response so far is in the requested language; None while it is too short to decide. `last`: no
    more text follows. Without reasoning, its answer is examined, up to its first call."""
    text, answer = texts_of(kept)
    over = last or answer != ""
    if not is_written(text):
        text, over = answer.partition(OPEN)[0] if plan.tools else answer, last
    detection, match = spoken_in(text, plan.choice.code)
    if detection.units < CLEAR_LETTERS and not over:
        return None
    return match is not False if over else match


def is_answered(response: Response, prompts: PromptRenderer) -> bool:
    """Whether there is a call, or some text that is no tag, no control token, no blank and no invisible character."""
    text = prompts.markup.sub("", response.answer)
    return bool(response.calls) or any(letter.isprintable() and letter != " " for letter in text)


def check_language(responses: Sequence[Response], plan: GenerationPlan, prompts: PromptRenderer) -> None:
    """Raises ApiError for the first response that does not pass where the language is enforced strictly: one in another
    language, one without an answer, and one that was cut. What has too few words for a language passes."""
    if plan.enforcement != "strict" or not plan.choice.code:
        return
    for response in responses:
        measured, code = response.measured, plan.choice.code
        answered = is_answered(response, prompts)
        if measured is not None and measured.match is False:
            texts = {"reasoning": response.sampled_reasoning, "answer": response.answer}
            spoken = {name: spoken_in(text, code) for name, text in texts.items()}
            was = ", ".join(
                f"{name} {described(detection, code)}" for name, (detection, match) in spoken.items() if match is False
            )
            raise refusal(f"not in {code} in any try: {was}; try another seed, or the enforcement prompt", MISMATCH)
        if response.cut:
            raise refusal(
                f"the response was cut {'in' if answered else 'before'} its answer: give more max_tokens "
                f"(max_output_tokens), or a smaller thinking_token_budget or reasoning_effort", CUT,
            )  # fmt: skip
        if not answered:
            ended = "the model ended" if response.stop_reason is None else f"stop {response.stop_reason!r} was reached"
            raise refusal(f"{ended} without an answer: try another seed, or the enforcement prompt", NO_ANSWER)


def described(detection: Detection, code: str) -> str:
    """Say in which language a text is that is not in `code`."""
    if detection.language == code:
        return f"{code} with words of other languages"
    return f"{detection.share:.0%} {detection.language}" if detection.language else "in no language that is known"


def refusal(message: str, code: str) -> ApiError:
    """Return the error that takes the place of a response."""
    return ApiError(422, message, code=code)
