r"""Compares unions of intervals with a parameter: \bigcup_{k \in \mathbb{Z}} (2k, 2k+1), 2k < x < 2k+1, k \in Z.

Two of them are equal when every interval near the beginning of one is an interval of the other, both ways. A union of
points is a family of numbers, and the real line without such a family is compared by what is left out.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import mpmath

from verify.math import integer_sets
from verify.math.brackets import bracketed, split_top
from verify.math.expression import parse
from verify.math.real_sets import BUILDER, interval_of
from verify.math.relation import links
from verify.math.token import NotUnderstood
from verify.math.tree import Node, symbols
from verify.math.value import DIGITS, Undefined, value_at

HINT = re.compile(r"\\bigcup(?![A-Za-z])|\\in(?![A-Za-z])\s*(?:\\mathbb\s*\{?\s*)?[ZN]")
_REACH = 60
_CORE = 10
_BIG = re.compile(
    r"\\bigcup\s*_\s*\{\s*([A-Za-z])\s*(?:\\in(?![A-Za-z])\s*([^{}]*(?:\{[^{}]*\}[^{}]*)?)"
    r"|=\s*-\s*\\infty\s*\}\s*\^\s*\{?\s*\+?\s*\\infty\s*)\}\s*"
)
_BEHIND = re.compile(
    r"[,;\s]*\(?\s*(?:for|where|with)?\s*([A-Za-z])\s*\\in(?![A-Za-z])\s*((?:\\mathbb\s*\{?\s*)?[ZN]\S*?)\s*\)?$"
)
_NAME = re.compile(r"^([A-Za-z])\s*\\in(?![A-Za-z])\s*")
_CUP = re.compile(r"\\(?:cup|lor)(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])|或")
_LEFT_OUT = re.compile(
    r"^(?:([A-Za-z])\s*\\neq\s*(.*)|\\mathbb\s*\{?R\}?\s*\\(?:setminus|backslash)(?![A-Za-z])\s*(.*))$", re.DOTALL
)


class Strips(NamedTuple):
    """Intervals as (closed, low, high, closed) in the parameter `name`, which runs through `domain`."""

    pieces: list[tuple[bool, Node, Node, bool]]
    name: str
    domain: str


def _cut(text: str) -> tuple[str, str, str]:
    """Return (body, parameter, domain) of a union with its sign before or parameter after it. Raises NotUnderstood."""
    builder = BUILDER.match(text.strip())
    text = (builder.group(2) if builder else text).strip()
    big = _BIG.search(text)
    if big and not text[: big.start()].strip(" =").rstrip("\\in").strip(" xtn\\"):
        return text[big.end() :].strip(), big.group(1), big.group(2) or "Z"
    behind = _BEHIND.search(text)
    if behind is None or not text[: behind.start()].strip():
        raise NotUnderstood(text[:80])
    return text[: behind.start()].strip(), behind.group(1), behind.group(2)


def _piece(text: str) -> tuple[bool, Node, Node, bool]:
    if interval := interval_of(text):
        closed, low, high, closed_too = interval
        return closed, parse(low), parse(high), closed_too
    chain = links(text)
    if chain is None or len(chain) != 2 or chain[0].right != chain[1].left:
        chain = chain[::-1] if chain else None
    if chain is None or len(chain) != 2 or chain[0].right != chain[1].left or chain[0].right[0] != "sym":
        raise NotUnderstood(text[:80])
    if any(link.sign not in ("<", "\\leq") for link in chain):
        raise NotUnderstood(text[:80])
    return chain[0].sign == "\\leq", chain[0].left, chain[1].right, chain[1].sign == "\\leq"


def read(text: str) -> Strips:
    """Read normalised text as a union of intervals. Raises NotUnderstood."""
    body, name, domain = _cut(text)
    body = _NAME.sub("", body)
    pair = bracketed(body)
    if pair and pair[0] in ("()", "[]") and (_CUP.search(pair[1]) or bracketed(pair[1])):
        body = pair[1]
    pieces = [_piece(part) for part in split_top(body, _CUP)]
    if any((symbols(low) | symbols(high)) - {name} for _, low, high, _ in pieces):
        raise NotUnderstood("ends with other parameters")
    return Strips(pieces, name, domain)


def _members(strips: Strips, reach: int) -> list[tuple[str, ...]]:
    members = []
    for k in sorted(integer_sets.integers(strips.domain, integer_sets.Reading(False, reach)), key=abs):
        for closed, low, high, closed_too in strips.pieces:
            point = {strips.name: mpmath.mpf(k)}
            try:
                ends = [value_at(end, point, DIGITS) for end in (low, high)]
            except Undefined as error:
                raise NotUnderstood("an end without a value") from error
            members.append((str(closed), *(integer_sets.key(end) for end in ends), str(closed_too)))
    return members


def same_strips(ground_truth: str, answer: str) -> bool:
    """Return whether two unions with a parameter are one set. Raises NotUnderstood when one is not such a union."""
    left_family, right_family = (_as_family(text) for text in (ground_truth, answer))
    if left_family and right_family:
        return left_family[0] == right_family[0] and integer_sets.same_integer_set(left_family[1], right_family[1])
    left, right = read(ground_truth), read(answer)
    near, far = ([_members(side, reach) for side in (left, right)] for reach in (_CORE, _REACH))
    return all(set(near[side]) <= set(far[1 - side]) for side in (0, 1))


def _as_family(text: str) -> tuple[Any, str] | None:
    r"""Return (left out, family) of \bigcup \{k\pi\}, x \neq k\pi and \mathbb{R} \setminus \{k\pi \mid k \in Z\}."""
    try:
        body, name, domain = _cut(text)
    except NotUnderstood:
        body, name, domain = text.strip(), "", ""
    out = _LEFT_OUT.match(body)
    if out is None and "\\bigcup" not in text:
        return (False, text) if text.startswith("\\{") else None
    inside = (out.group(2) or out.group(3)).strip() if out else body
    if not name:
        return (out is not None, inside)
    pair = bracketed(inside)
    inside = pair[1] if pair and pair[0] == "{}" else inside
    if out is None and not (pair and pair[0] == "{}"):
        return None
    return (out is not None, rf"\{{{inside} \mid {name} \in {domain}\}}")
