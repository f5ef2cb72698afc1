r"""Magistral's format rules for mathematics: is a response well formed, and what are its two parts?

The rules: the response starts with <think>; there is exactly one <think> ... </think> pair; \boxed{...} stands after
</think>. What this does not do: grade the answer, or strip special tokens (the caller decodes them to text first).
Who calls this: `reward.py`. Source: Magistral (2506.10910), section 2.2.1.
"""

from __future__ import annotations

from typing import NamedTuple

from verify.extract import extract_answer

OPEN = "<think>"
CLOSE = "</think>"


class Parts(NamedTuple):
    """A response cut in two, or the rule that it broke."""

    thoughts: str
    """text between the think tags; "" when a rule failed"""
    solution: str
    """text after </think>; "" when a rule failed"""
    answer: str | None
    r"""content of the last \boxed{...} of the solution"""
    failed: str
    """the first broken rule in words, "" when the format is right"""

    @property
    def ok(self) -> bool:
        """True when every rule holds."""
        return not self.failed


def _broken(rule: str) -> Parts:
    return Parts("", "", None, rule)


def check_format(response: str, *, opened: bool = False) -> Parts:
    """Check the rules in order and return the parts, or the first rule that failed.

    `opened`: the chat template already ended the prompt with <think>, so the rules hold for that tag and the response
    together. No white space is forgiven before the first <think>: the paper says "starts with".
    """
    text = OPEN + response if opened else response
    if not text.startswith(OPEN):
        return _broken(f"does not start with {OPEN}")
    opens, closes = text.count(OPEN), text.count(CLOSE)
    if closes == 0:
        return _broken(f"{OPEN} is never closed by {CLOSE}")
    if opens > 1 or closes > 1:
        return _broken(f"needs exactly one {OPEN} and one {CLOSE}, found {opens} and {closes}")
    thoughts, _, solution = text[len(OPEN) :].partition(CLOSE)
    answer = extract_answer(solution)
    if answer is None:
        where = "only inside the thoughts" if extract_answer(thoughts) is not None else "nowhere"
        return _broken(f"no balanced \\boxed{{...}} after {CLOSE} (found {where})")
    return Parts(thoughts, solution, answer, "")
