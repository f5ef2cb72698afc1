r"""Checks Magistral's format rules and splits a completion into its parts.

The rules: the completion starts with <think>; there is exactly one <think> ... </think> pair; after </think> stands an
answer: a \boxed{...} (mathematics), a fenced block that names its language (code), or what else the verifier of the
problem's domain reads (`verify/verifiers`). Models whose tokenizer has the control
tokens [THINK] and [/THINK] are held to the same rules with those: `check_tokens` counts tokens, so that the same
letters spelled out in ordinary tokens are neither an opening nor a close.
Source: Magistral (2506.10910), section 2.2.1; the control tokens are those of mistral-common's tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shared.reasoning_tags import CONTROL, TEXT, Tags
from verify.verifiers import Verifier, verifier_of

if TYPE_CHECKING:
    from shared.chat import Chat


class Parts(NamedTuple):
    """The parts of a completion, or the first rule that it broke."""

    reasoning: str
    """text between the think tags; "" when a rule failed"""
    response: str
    """text after </think>; "" when a rule failed"""
    answer: str | None
    r"""text for the verifier of the domain: content of the last \boxed{...}, source text of the program, ..."""
    failed: str
    """the first broken rule in words, "" when the format is right"""
    language: str = ""
    """the word after the fence of an answer in a fenced block, in lower case"""

    @property
    def ok(self) -> bool:
        """True when every rule holds."""
        return not self.failed


def broken(rule: str) -> Parts:
    """Return what is left of a completion that breaks a rule: the rule in words."""
    return Parts("", "", None, rule)


def _with_answer(reasoning: str, response: str, verifier: Verifier, close: str) -> Parts:
    """Check the last rule, that an answer follows the reasoning, and return the parts."""
    answer = verifier.extract(response)
    if answer is None:
        where = "only inside the reasoning" if verifier.extract(reasoning) is not None else "nowhere"
        return broken(f"{verifier.missing} after {close} (found {where})")
    return Parts(reasoning, response, answer.source, "", answer.language)


def tags_of(completion: str, *, opened: bool = False) -> Tags:
    """Return the tags of a text: [THINK] when it starts so (opened: when only [/THINK] closes it), else <think>.

    For text whose tokens are no longer known; otherwise use `check_tokens`.
    """
    if opened:
        return CONTROL if CONTROL.close in completion and TEXT.close not in completion else TEXT
    return CONTROL if completion.startswith(CONTROL.open) else TEXT


def after_reasoning(completion: str) -> str | None:
    """Return the text after the reasoning, whatever else is wrong with the format; None when it is never closed.

    A completion without reasoning is all response; one that only closes it was opened by its chat template.
    """
    if not completion.startswith((TEXT.open, CONTROL.open)):
        return completion.rpartition(tags_of(completion, opened=True).close)[2]
    _, closed, response = completion.rpartition(tags_of(completion).close)
    return response if closed else None


def check_format(
    completion: str, *, opened: bool = False, verifier: Verifier | None = None, tags: Tags | None = None
) -> Parts:
    """Check the rules in order and return the parts, or the first rule that failed.

    `opened`: the chat template already ended the prompt with <think>, so the rules hold for that tag and the completion
    together. No white space is forgiven before the first <think>: the paper says "starts with".
    `verifier`: of the problem, says how an answer is given; None for a box. `tags`: None chooses with `tags_of`.
    """
    begin, end = (tags or tags_of(completion, opened=opened))[:2]
    text = begin + completion if opened else completion
    if not text.startswith(begin):
        return broken(f"does not start with {begin}")
    opens, closes = text.count(begin), text.count(end)
    if closes == 0:
        return broken(f"{begin} is never closed by {end}")
    if opens > 1 or closes > 1:
        return broken(f"needs exactly one {begin} and one {end}, found {opens} and {closes}")
    reasoning, _, response = text[len(begin) :].partition(end)
    return _with_answer(reasoning, response, verifier or verifier_of("math"), end)


def check_tokens(
    ids: Sequence[int],
    control: tuple[int, int],
    decode: Callable[[Sequence[int]], str],
    *,
    opened: bool = False,
    verifier: Verifier | None = None,
) -> Parts:
    """Apply the rules of `check_format` to sampled tokens, for tokenizers with control tokens for reasoning.

    ids: [tokens] of the completion, `control`: ids of [THINK] and [/THINK], `decode`: ids to text. `opened`: the
    prompt ends with [THINK]. A completion that does not begin with the control token may still use <think> as text.
    """
    begin, end = control
    if not opened and (not ids or ids[0] != begin):
        return check_format(decode(ids), verifier=verifier, tags=TEXT)
    body = list(ids) if opened else list(ids[1:])
    opens, closes = 1 + body.count(begin), body.count(end)
    if closes == 0:
        return broken(f"{CONTROL.open} is never closed by {CONTROL.close}")
    if opens > 1 or closes > 1:
        return broken(f"needs exactly one {CONTROL.open} and one {CONTROL.close}, found {opens} and {closes}")
    cut = body.index(end)
    return _with_answer(decode(body[:cut]), decode(body[cut + 1 :]), verifier or verifier_of("math"), CONTROL.close)


def parts_of(chat: Chat, ids: Sequence[int], verifier: Verifier | None = None) -> Parts:
    """The format of a completion: by its tokens where the model has control tokens for reasoning, else by its text.

    ids: [tokens] as sampled. The response of the result is the end of `chat.decode(ids)`.
    verifier: of the problem, None for an answer in a box.
    """
    control = chat.think_ids
    if control is None or chat.think_prefix.startswith("<think>"):
        return check_format(chat.think_prefix + chat.decode(ids), verifier=verifier)
    if CONTROL.close in chat.think_prefix:
        return check_tokens([*chat.encode(chat.think_prefix), *ids], control, chat.decode, verifier=verifier)
    opened = chat.think_prefix.startswith(CONTROL.open)
    return check_tokens(ids, control, chat.decode, opened=opened, verifier=verifier)
