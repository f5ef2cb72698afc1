r"""Checks Magistral's format rules and splits a response into its parts.

The rules: the response starts with <think>; there is exactly one <think> ... </think> pair; after </think> stands a
\boxed{...} (mathematics) or a fenced block that names its language (code). Models whose tokenizer has the control
tokens [THINK] and [/THINK] are held to the same rules with those: `check_tokens` counts tokens, so that the same
letters spelled out in ordinary tokens are neither an opening nor a close.
Source: Magistral (2506.10910), section 2.2.1; the control tokens are those of mistral-common's tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from verify.extract import extract_answer
from verify.fence import Fence, first_program

OPEN = "<think>"
CLOSE = "</think>"


class Tags(NamedTuple):
    """The pair of tags that open and close the thoughts."""

    open: str
    close: str


TEXT = Tags(OPEN, CLOSE)
CONTROL = Tags("[THINK]", "[/THINK]")


class Parts(NamedTuple):
    """The parts of a response, or the first rule that it broke."""

    thoughts: str
    """text between the think tags; "" when a rule failed"""
    solution: str
    """text after </think>; "" when a rule failed"""
    answer: str | None
    r"""content of the last \boxed{...} of the solution; the source text of the program for code"""
    failed: str
    """the first broken rule in words, "" when the format is right"""
    program: Fence | None = None
    """for code: the first fenced block of the solution that names a language"""

    @property
    def ok(self) -> bool:
        """True when every rule holds."""
        return not self.failed


def _broken(rule: str) -> Parts:
    return Parts("", "", None, rule)


def _graded_part(thoughts: str, solution: str, domain: str, close: str) -> Parts:
    """Check the last rule, that something to grade follows the thoughts, and return the parts."""
    if domain == "code":
        program = first_program(solution)
        if program is None:
            where = "only inside the thoughts" if first_program(thoughts) else "nowhere"
            return _broken(f"no closed ``` block that names a language after {close} (found {where})")
        return Parts(thoughts, solution, program.source, "", program)
    answer = extract_answer(solution)
    if answer is None:
        where = "only inside the thoughts" if extract_answer(thoughts) is not None else "nowhere"
        return _broken(f"no balanced \\boxed{{...}} after {close} (found {where})")
    return Parts(thoughts, solution, answer, "")


def tags_of(response: str, *, opened: bool = False) -> Tags:
    """Return the tags of a text: [THINK] when it starts so (opened: when only [/THINK] closes it), else <think>.

    For text whose tokens are no longer known; otherwise use `check_tokens`.
    """
    if opened:
        return CONTROL if CONTROL.close in response and CLOSE not in response else TEXT
    return CONTROL if response.startswith(CONTROL.open) else TEXT


def after_thoughts(response: str) -> str | None:
    """Return the text after the thoughts, whatever else is wrong with the format; None when they are never closed.

    A response without thoughts is all solution; one that only closes them was opened by its chat template.
    """
    if not response.startswith((TEXT.open, CONTROL.open)):
        return response.rpartition(tags_of(response, opened=True).close)[2]
    _, closed, solution = response.rpartition(tags_of(response).close)
    return solution if closed else None


def check_format(response: str, *, opened: bool = False, domain: str = "math", tags: Tags | None = None) -> Parts:
    """Check the rules in order and return the parts, or the first rule that failed.

    `opened`: the chat template already ended the prompt with <think>, so the rules hold for that tag and the response
    together. No white space is forgiven before the first <think>: the paper says "starts with".
    `domain`: "code" needs a program, every other one a box. `tags`: None chooses with `tags_of`.
    """
    begin, end = tags or tags_of(response, opened=opened)
    text = begin + response if opened else response
    if not text.startswith(begin):
        return _broken(f"does not start with {begin}")
    opens, closes = text.count(begin), text.count(end)
    if closes == 0:
        return _broken(f"{begin} is never closed by {end}")
    if opens > 1 or closes > 1:
        return _broken(f"needs exactly one {begin} and one {end}, found {opens} and {closes}")
    thoughts, _, solution = text[len(begin) :].partition(end)
    return _graded_part(thoughts, solution, domain, end)


def check_tokens(
    ids: Sequence[int],
    control: tuple[int, int],
    decode: Callable[[Sequence[int]], str],
    *,
    opened: bool = False,
    domain: str = "math",
) -> Parts:
    """Apply the rules of `check_format` to sampled tokens, for tokenizers with control tokens for thoughts.

    ids: [tokens] of the completion, `control`: ids of [THINK] and [/THINK], `decode`: ids to text. `opened`: the
    prompt ends with [THINK]. A completion that does not begin with the control token may still use <think> as text.
    """
    begin, end = control
    if not opened and (not ids or ids[0] != begin):
        return check_format(decode(ids), domain=domain, tags=TEXT)
    body = list(ids) if opened else list(ids[1:])
    opens, closes = 1 + body.count(begin), body.count(end)
    if closes == 0:
        return _broken(f"{CONTROL.open} is never closed by {CONTROL.close}")
    if opens > 1 or closes > 1:
        return _broken(f"needs exactly one {CONTROL.open} and one {CONTROL.close}, found {opens} and {closes}")
    cut = body.index(end)
    return _graded_part(decode(body[:cut]), decode(body[cut + 1 :]), domain, CONTROL.close)
