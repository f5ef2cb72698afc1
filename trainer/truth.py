r"""Puts the true answer in the place of a completion's own, for JEPO (arXiv 2503.19618).

    sampled   <think> ... </think> The sum is 4, so \boxed{4}.<end>
    kept      <think> ... </think> The sum is 4, so \boxed{           the sampled tokens themselves, not encoded again
    truth                                                  5}<end>    log pi of these tokens is L_i of jensen.py

The paper cuts behind the words "the final answer is". Our form has a cue of its own in every language, the box that is
graded, so the cut is there. What stands before it is part of the thoughts c_i of the bound, the summary too, and a
summary may have named an answer already ("4" above): then L_i says mostly whether that one was right. The bound holds
for any cut, but thoughts that are followed by a wrong summary are blamed for it.
A token over the cut, as "{4" for "\boxed{4}", is not kept: its letters before the cut begin the truth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from shared.chat import Chat
from shared.types import Group, Verdict
from verify.extract import find_answer
from verify.scorer import parts_of

FEW = 32
"""tokens from the end of a completion among which its box is looked for first; then twice as many"""


class Forced(NamedTuple):
    """A completion whose answer is replaced: its first `thoughts` tokens, then `truth`."""

    thoughts: int
    """leading sampled tokens that are kept"""
    truth: list[int]
    """[tokens] of the true answer, of the brace that closes its box, and the end of the sequence"""


def put_answer(chat: Chat, completion_ids: list[int], answer: str) -> Forced | None:
    r"""Cut a completion where the answer that is graded begins, and put the true one there.

    completion_ids: [tokens] as sampled. The text of the result is the completion's up to \boxed{, then `answer`, "}"
    and the end of the sequence. Of boxes that are one answer together ("\boxed{1} and \boxed{2}") the first is the cue.
    None when the format is broken by the rules that rewards go by (no box after the thoughts, thoughts never closed):
    such a completion gives no answer, gets the cue penalty and is in no bound (section 4 of the paper).
    """
    parts = parts_of(chat, completion_ids, "math")
    if not parts.ok:
        return None
    text = chat.decode(completion_ids)
    first, _ = find_answer(parts.solution)[0]
    kept, rest = cut(chat, completion_ids, text, len(text) - len(parts.solution) + first)
    return Forced(kept, [*encode_inside(chat, f"{rest}{answer}}}"), chat.eos_id])


def cut(chat: Chat, ids: list[int], text: str, at: int) -> tuple[int, str]:
    """(number of leading tokens whose text ends before or at character `at`, the text between them and `at`).

    ids: [tokens], text: chat.decode(ids). No token is split, and no character whose bytes are in several tokens.
    """
    count = FEW
    while count < len(ids) and len(chat.decode(ids[-count:])) <= len(text) - at:
        count *= 2
    low = max(len(ids) - count, 0)
    before = len(text) - len(chat.decode(ids[low:]))
    # of the tokens from `low` on the first that ends behind the cut; whole texts then decide, since decoding a part may
    # lose a blank or half a character
    behind = bisect_right(range(low, len(ids)), at - before, key=lambda end: len(chat.decode(ids[low:end])))
    kept = low + behind
    while len(head := chat.decode(ids[:kept])) > at or not text.startswith(head):
        kept -= 1
    return kept, text[len(head) : at]


def encode_inside(chat: Chat, text: str) -> list[int]:
    """[tokens] of text that goes on after other text: without the blank that some tokenizers begin every text with."""
    if chat.decode(chat.encode("x") * 2) == "xx":
        return chat.encode(text)
    line = chat.encode("\n")
    return chat.encode(f"\n{text}")[len(line) :]


def bounded_groups(groups: Sequence[Group], bound_for: str) -> list[bool]:
    """[groups] True for those that jepo trains by its bound (objective.bound_for); the others by their rewards.

        every       all
        unsolved    no completion is right; those of open problems never are
        open        the problem is open

    Programming problems have tests and no true answer, hence no bound. Raises ValueError for another name.
    """
    if bound_for not in ("every", "unsolved", "open"):
        raise ValueError(f"objective.bound_for = '{bound_for}' is not known")
    return [bool(group.prompt.problem.answer) and _is_bounded(group, bound_for) for group in groups]


def _is_bounded(group: Group, bound_for: str) -> bool:
    if bound_for == "open":
        return not group.prompt.problem.verified
    if bound_for == "unsolved":
        return all(reward is None or reward.verdict is not Verdict.CORRECT for reward in group.rewards)
    return True
