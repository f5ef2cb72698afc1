r"""Sets given by a rule with an integer: \{2k+1 \mid k \in \mathbb{Z}\}, \{n^2 : 1 \le n \le 5\}, \{1, 2, 3, \ldots\}.

Two families are equal when every member near the beginning of one is a member of the other, both ways; finite ones when
all are. Members are computed with 60 digits and compared relatively. Two rules of which one is named differently
(k and n, 2k+1 and 2k-1) are one set. Whether 0 is in \mathbb{N} is left open: both readings are tried, the same on both
sides. What it does not do: two parameters, or solve the conditions. Who calls this: `algebra.py`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import mpmath

from verify.math.expression import Node, parse, symbols
from verify.math.relation import Link, links
from verify.math.solution import holds
from verify.math.structure import split_top
from verify.math.token import NotUnderstood
from verify.math.value import DIGITS, Undefined, value_at

_REACH, _CORE = 80, 12
"""parameters that are tried, and those whose members must be found on the other side"""
_MOST = 400
_MP = mpmath.mp
_BAR = re.compile(r"\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|\||:")
_COMMA = re.compile(r"[,;]|\\(?:land|wedge)(?![A-Za-z])|(?<![A-Za-z\\])and(?![A-Za-z])|且")
_OR = re.compile(r"\\(?:lor|vee|cup)(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])|或|,|;")
_SET = re.compile(r"^(?:\\mathbb\s*\{?\s*([ZN])\s*\}?|([ZN]))\s*(.*)$", re.DOTALL)
_MEMBER = re.compile(r"^(.+?)\s*\\in(?![A-Za-z])\s*(.+)$", re.DOTALL)
_NAME = re.compile(r"^[A-Za-z]$")
_POSITIVE = re.compile(r"^[\^_]\s*\{?\s*(?:\+|\*|>\s*0|\\geq\s*1|\\ast)\s*\}?$")
_FROM_ZERO = re.compile(r"^[\^_]\s*\{?\s*(?:0|\\geq\s*0|0\s*\+|\+\s*0)\s*\}?$")
_NEGATIVE = re.compile(r"^[\^_]\s*\{?\s*(?:-|<\s*0)\s*\}?$")
HINT = re.compile(r"\\ldots|\\in(?![A-Za-z])\s*(?:\\mathbb\s*\{?\s*)?[ZN]|^\\mathbb\s*\{?\s*[ZN]|\\mid|\||:")
"""whether a text may be a family"""


class Family(NamedTuple):
    """Members, those of them that must be found on the other side, and whether there are no more."""

    members: list[Any]
    core: list[Any]
    finite: bool


def _range(text: str, zero: bool) -> range:
    """The integers of \\mathbb{Z}, \\mathbb{N} and their halves. Raises NotUnderstood."""
    match = _SET.match(text.strip())
    if match is None:
        raise NotUnderstood(text[:80])
    name, rest = match.group(1) or match.group(2), match.group(3).strip()
    if rest and _POSITIVE.match(rest):
        return range(1, _REACH)
    if _FROM_ZERO.match(rest):
        return range(_REACH)
    if _NEGATIVE.match(rest) and name == "Z":
        return range(-_REACH, 0)
    if rest:
        raise NotUnderstood(text[:80])
    return range(-_REACH, _REACH) if name == "Z" else range(0 if zero else 1, _REACH)


def _value(node: Node, point: dict[str, Any]) -> Any:
    try:
        return value_at(node, point)
    except Undefined as error:
        raise NotUnderstood("a member without a value") from error


def _bounds(conditions: list[Link], name: str, numbers: range) -> tuple[range, bool]:
    """The range that linear conditions leave, far beyond the reach where they are finite; and whether it is finite."""
    ends = []
    for link in conditions:
        for side in (link.left, link.right):
            if not symbols(side):
                ends.append(abs(mpmath.re(_value(side, {}))))
    far = int(max(ends, default=0)) + _REACH
    if far > 5_000:
        raise NotUnderstood("too many members")
    wide = range(-far if numbers.start < 0 else numbers.start, far if numbers.stop > 0 else numbers.stop)
    kept = [k for k in wide if all(holds(link, name, _MP.mpf(k)) for link in conditions)]
    finite = wide.start not in kept[:1] if wide.start < 0 else True
    finite = finite and (wide.stop - 1) not in kept[-1:]
    return (range(kept[0], kept[-1] + 1) if kept and len(kept) == kept[-1] - kept[0] + 1 else _sparse(kept)), finite


def _sparse(kept: list[int]) -> range:
    if kept:
        raise NotUnderstood("a condition with holes")
    return range(0)


def _of_rule(rules: list[str], name: str, domain: str, conditions: list[str], zero: bool) -> Family:
    """Members of rules in one integer parameter."""
    numbers, finite = _range(domain, zero), False
    found: list[Link] = []
    for condition in conditions:
        chain = links(condition)
        if chain is None or any(symbols(link.difference) != {name} for link in chain):
            raise NotUnderstood(condition[:80])
        found += chain
    if found:
        numbers, finite = _bounds(found, name, numbers)
    trees = [parse(rule) for rule in rules]
    if any(symbols(tree) - {name} for tree in trees) or not any(symbols(tree) for tree in trees):
        raise NotUnderstood("not one parameter")
    if finite and len(numbers) > _MOST:
        raise NotUnderstood("too many members")
    near = numbers if finite else sorted(numbers, key=abs)[: 2 * _CORE]
    members = [_value(tree, {name: _MP.mpf(k)}) for tree in trees for k in numbers]
    core = [_value(tree, {name: _MP.mpf(k)}) for tree in trees for k in near]
    return Family(members, core, finite)


def _of_builder(inside: str, zero: bool) -> Family:
    left, *rest = split_top(inside, _BAR)
    if not rest:
        raise NotUnderstood(inside[:80])
    conditions = split_top(rest[-1], _COMMA)
    domain, name = "", ""
    member = _MEMBER.match(left)
    if member and _NAME.match(member.group(1)):
        name, domain, left = member.group(1), member.group(2), member.group(1)
    kept = []
    for condition in conditions:
        member = _MEMBER.match(condition)
        if member and _NAME.match(member.group(1)) and not domain:
            name, domain = member.group(1), member.group(2)
        elif condition:
            kept.append(condition)
    if not name:
        raise NotUnderstood(inside[:80])
    element = next((part for part in kept if re.match(rf"^{re.escape(left)}\s*=", part)), "")
    if left != name and _NAME.match(left) and element:
        kept.remove(element)
        left = element.partition("=")[2]
    return _of_rule([left], name, domain, kept, zero)


def _of_dots(items: list[str]) -> Family:
    """1, 2, 3, \\ldots and 0, 1, \\ldots, 9: an arithmetic progression of whole numbers."""
    if items.count("\\ldots") != 1:
        raise NotUnderstood("several gaps")
    at = items.index("\\ldots")
    given = [_value(parse(item), {}) for item in items[:at]]
    last = [_value(parse(item), {}) for item in items[at + 1 :]]
    if any(mpmath.im(value) != 0 or value != int(value) for value in given + last) or len(given) < 2:
        raise NotUnderstood("no whole numbers")
    step = given[1] - given[0]
    plain = all(after - before == step for before, after in zip(given, given[1:], strict=False))
    if not plain or step == 0 or len(given) < (2 if last else 3) or len(last) > 1:
        raise NotUnderstood("no arithmetic progression")
    if last:
        count = (last[0] - given[0]) / step
        if count != int(count) or not len(given) <= count < _MOST:
            raise NotUnderstood("no arithmetic progression")
        members = [given[0] + step * k for k in range(int(count) + 1)]
        return Family(members, members, True)
    members = [given[0] + step * k for k in range(_REACH)]
    return Family(members, members[:_CORE], False)


def _read(text: str, zero: bool) -> Family:
    """Read a family. Raises NotUnderstood when the text is none."""
    text = text.strip()
    if _SET.match(text):
        numbers = list(_range(text, zero))
        near = sorted(numbers, key=abs)[:_CORE]
        return Family([_MP.mpf(k) for k in numbers], [_MP.mpf(k) for k in near], False)
    if text.startswith("\\{") and text.endswith("\\}"):
        inside = text[2:-2].strip()
        if _BAR.search(inside) and "\\ldots" not in inside:
            return _of_builder(inside, zero)
        return _of_items(inside)
    *rules, domain = split_top(text, _COMMA)
    member = _MEMBER.match(domain)
    if member and _NAME.match(member.group(1)) and rules:
        stated = [re.sub(r"^[A-Za-z]\s*=\s*", "", part) for rule in rules for part in split_top(rule, _OR) if part]
        return _of_rule(stated, member.group(1), member.group(2), [], zero)
    return _of_items(text)


def _of_items(text: str) -> Family:
    items = [item.strip() for item in split_top(text, _COMMA)]
    if "\\ldots" in items:
        return _of_dots(items)
    trees = [parse(item) for item in items if item]
    if any(symbols(tree) for tree in trees) or not trees:
        raise NotUnderstood("members with parameters")
    members = [_value(tree, {}) for tree in trees]
    return Family(members, members, True)


def _within(some: list[Any], many: list[Any]) -> bool:
    """Whether every member of `some` is one of `many`."""
    small = _MP.mpf(10) ** (15 - DIGITS)

    def equal(one: Any, other: Any) -> bool:
        return bool(abs(one - other) <= max(abs(one), abs(other), small) * small)

    with _MP.workdps(DIGITS + 20):
        return all(any(equal(one, other) for other in many) for one in some)


def same_family(gold: str, answer: str) -> bool:
    """Whether both texts are the same set of numbers. Raises NotUnderstood when one of them is no family."""
    for zero in (False, True):
        left, right = _read(gold, zero), _read(answer, zero)
        if left.finite == right.finite and _within(left.core, right.members) and _within(right.core, left.members):
            return True
    return False
