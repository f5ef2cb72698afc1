r"""Refuses completions that Magistral's rules would reward but should not, each rule by its name in `reward.refuse`.

    empty         nothing in the box                                                    -> format broken
    thoughtless   no reasoning, one word, one thing again and again, the problem copied  -> format broken
    hidden        boxes in comments, in code or struck out are not seen                 -> format broken, or another box
    denied        the answer is denied, called a guess, or one of several               -> answer wrong
    unstated      the answer's line is not the last one, or holds more than it     -> answer wrong; off by default
    restated      a computation that is still to be done, for a plain number            -> answer wrong
    foreign       words in \text{}, code and boxes count for the language               -> no language bonus

The rules on answers hold for problems whose answer is compared. Of the rules on the format, answers that stand in
no box (programs) are checked only for "thoughtless", all others also for "empty" and "hidden". A row with tests of its
own is not checked for "restated".
"""

from __future__ import annotations

import re
from collections.abc import Collection

from shared.types import Problem, Verdict
from verify.doubt import doubted
from verify.extract import extract_answer, find_answer, find_boxes
from verify.format import Parts
from verify.math.plain import decide
from verify.statement import stated
from verify.thoughts import thoughtless
from verify.unworked import unworked
from verify.verifiers import verifier_of
from verify.visible import visible

_BLANK = re.compile(
    r"\\(?:text\w*|math\w+|operatorname|mbox|displaystyle|left|right|q?quad|[lc]?dots|[hv]?phantom\s*\{[^{}]*\}"
    r"|[hv]space\*?\s*\{[^{}]*\}|boxed|ldots|cdots|hfill|null|relax)(?![A-Za-z])|\\[,;:! ]"
)
_CONTENT = re.compile(r"[^\W_]|[∅∞πθφ⊥⊤]|\\[A-Za-z]|\\[{]\s*\\[}]|[+]|[<>=≤≥]")


def refuse_format(problem: Problem, parts: Parts, rules: Collection[str]) -> Parts:
    """Return the parts of a well-formed completion after these rules: as they are, with another answer, or broken."""
    if "thoughtless" in rules and (why := thoughtless(problem.text, parts.reasoning)):
        return _broken(f"the reasoning {why}")
    if verifier_of(problem.domain).answer_in != "box":
        return parts
    answer = parts.answer or ""
    if "hidden" in rules:
        seen = extract_answer(visible(parts.response))
        if seen is None:
            return _broken("the box stands only in a comment, in code or struck out")
        answer = seen
    if "empty" in rules and not _CONTENT.search(_BLANK.sub("", answer)):
        return _broken("the box is empty")
    return parts._replace(answer=answer)


def refuse_answer(problem: Problem, parts: Parts, rules: Collection[str]) -> str:
    """Return why the answer of a well-formed completion is wrong, whatever it equals; "" when it is to be compared."""
    answer = parts.answer or ""
    if verifier_of(problem.domain).answer_in != "box" or not problem.verified:
        return ""
    if "denied" in rules or "unstated" in rules:
        response = visible(parts.response) if "hidden" in rules else parts.response
        ends = {end for _, end in find_answer(response)}
        boxes = find_boxes(response)
        own = [span for span in boxes if span[1] - 1 in ends]
        others = [span for span in boxes if span[1] - 1 not in ends]

        def same(other: str) -> bool:
            return decide(answer, other) is Verdict.CORRECT

        if "denied" in rules and own and (why := doubted(problem.text, response, own, others, same)):
            return f"the answer is {why}"
        if "unstated" in rules and own and not stated(response, own):
            return "the answer is not a last line of its own"
    if "restated" in rules and problem.tests is None and unworked(problem.text, problem.answer, answer):
        return "the answer is still to be computed"
    return ""


def _broken(rule: str) -> Parts:
    return Parts("", "", None, rule)
