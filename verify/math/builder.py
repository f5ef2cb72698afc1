r"""Compares set-builders with any condition: \{(x,y) \mid x + y = 1\}, \{z \in \mathbb{C} : |z| \le 1\}.

Two of them are equal when, with the names of one written for those of the other, the elements, the set they come from
(real numbers where none is named) and the relations are. Sets of numbers that can be listed or drawn on the line are
compared by their members elsewhere (`real_sets.py`, `integer_sets.py`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from verify.math.brackets import BAR, bracketed, split_top
from verify.math.normal import spelling_key
from verify.math.real_sets import CAP
from verify.math.relation import Link, links, same_links
from verify.math.token import NotUnderstood

HINT = re.compile(r"^\\\{.*(?:\\mid|\||:)", re.DOTALL)
_FROM = re.compile(r"^(.*?)\s*\\in(?![A-Za-z])\s*(.*)$", re.DOTALL)
_NAMES = re.compile(r"^\(?([A-Za-z](?:_\{?\w\}?)?(?:\s*,\s*[A-Za-z](?:_\{?\w\}?)?)*)\)?$")
_REAL = re.compile(r"^\\mathbb\{R\}(?:\s*\^\s*\{?\d\}?)?$|^$")


class Builder(NamedTuple):
    """A set-builder: the names of an element, the set it comes from, and its conditions."""

    names: list[str]
    source: str
    conditions: list[str]


def read(text: str) -> Builder:
    """Read normalised text as a set-builder of a name or a tuple of names. Raises NotUnderstood."""
    pair = bracketed(text)
    element, *rest = split_top(pair[1], BAR) if pair and pair[0] == "{}" else [""]
    if not rest or pair is None:
        raise NotUnderstood(text[:80])
    bar = BAR.search(pair[1], len(element))
    conditions = [part for part in split_top(pair[1][bar.end() if bar else 0 :], CAP) if part]
    membership = _FROM.match(element)
    source = membership.group(2) if membership else ""
    names = _NAMES.match((membership.group(1) if membership else element).strip())
    if names is None:
        raise NotUnderstood(text[:80])
    return Builder([name.strip() for name in names.group(1).split(",")], source, conditions)


def same_builder(ground_truth: str, answer: str) -> bool:
    """Return whether two builders are the same set, renamed. Raises NotUnderstood when the ground_truth is not
    understood."""
    true = read(ground_truth)
    true_links = [link for part in true.conditions for link in _links(part)]
    try:
        given = read(answer)
        if len(true.names) != len(given.names) or _source(true) != _source(given):
            return False
        renamed = [_renamed(part, dict(zip(given.names, true.names, strict=True))) for part in given.conditions]
        return same_links(true_links, [link for part in renamed for link in _links(part)])
    except NotUnderstood:
        return False


def _links(condition: str) -> list[Link]:
    chain = links(condition)
    if not chain:
        raise NotUnderstood(condition[:80])
    return chain


def _source(builder: Builder) -> str:
    source = builder.source.strip()
    return "" if _REAL.match(source) else spelling_key(source)


def _renamed(text: str, names: dict[str, str]) -> str:
    """Replace all names at once, also x by y and y by x."""
    any_name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![A-Za-z\\])(?:{any_name})(?![A-Za-z_])", lambda match: names[match.group()], text)
