r"""Sets given by a rule with an integer: \{2k+1 \mid k \in \mathbb{Z}\}, \{n^2 : 1 \le n \le 5\}, \{1, 2, 3, \ldots\}.

Two families are equal when every member near the beginning of one is a member of the other, both ways; finite ones when
all are. Members are computed with 60 digits and compared by 40. Rules that are only written differently
(k and n, 2k+1 and 2k-1) are one set. Whether 0 is in \mathbb{N} is left open: both readings are tried, the same on both
sides.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import mpmath

from verify.math.brackets import BAR, split_top
from verify.math.expression import parse
from verify.math.relation import Link, links
from verify.math.solution import holds
from verify.math.token import NotUnderstood
from verify.math.tree import Node, symbols
from verify.math.value import DIGITS, Undefined, value_at

_REACH = 120
"""parameters that are tried at least; more where the texts hold larger numbers"""
_CORE = 6
"""one in so many of them must have its member found on the other side"""
_MOST = 1_000
_MP = mpmath.mp
_COMMA = re.compile(r"[,;]|\\(?:land|wedge)(?![A-Za-z])|(?<![A-Za-z\\])and(?![A-Za-z])|且")
_OR = re.compile(r"\\(?:lor|vee|cup)(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])|或|,|;")
_SET = re.compile(r"^(?:\\mathbb\s*\{?\s*([ZN])\s*\}?|([ZN]))\s*(.*)$", re.DOTALL)
_MEMBER = re.compile(r"^(.+?)\s*\\in(?![A-Za-z])\s*(.+)$", re.DOTALL)
_NAME = re.compile(r"^[A-Za-z]$")
_STATED = re.compile(r"^[A-Za-z]\s*=\s*")
_NUMBER = re.compile(r"\d{1,9}")
_POSITIVE = re.compile(r"^[\^_]\s*\{?\s*(?:\+|\*|>\s*0|\\geq\s*1|\\ast)\s*\}?$")
_FROM_ZERO = re.compile(r"^[\^_]\s*\{?\s*(?:0|\\geq\s*0|0\s*\+|\+\s*0)\s*\}?$")
_NEGATIVE = re.compile(r"^[\^_]\s*\{?\s*(?:-|<\s*0)\s*\}?$")
HINT = re.compile(r"\\ldots|\\in(?![A-Za-z])\s*(?:\\mathbb\s*\{?\s*)?[ZN]|^\\mathbb\s*\{?\s*[ZN]|\\mid|\||:")
"""matches a text that may be a family"""


class IntegerSet(NamedTuple):
    """A set: its members, those that must be found on the other side, whether these are all, and a stated name."""

    members: list[Any]
    core: list[Any]
    finite: bool
    name: str = ""


class Reading(NamedTuple):
    """How texts are read: whether 0 is in \\mathbb{N}, and up to which parameter."""

    zero: bool
    reach: int


def integers(text: str, how: Reading) -> range:
    """Return the integers of \\mathbb{Z}, \\mathbb{N} and their halves. Raises NotUnderstood."""
    match = _SET.match(text.strip())
    if match is None:
        raise NotUnderstood(text[:80])
    name, rest = match.group(1) or match.group(2), match.group(3).strip()
    if _POSITIVE.match(rest) and not (name == "Z" and "*" in rest):
        return range(1, how.reach)
    if _FROM_ZERO.match(rest):
        return range(how.reach)
    if _NEGATIVE.match(rest) and name == "Z":
        return range(-how.reach, 0)
    if rest:
        raise NotUnderstood(text[:80])
    return range(-how.reach, how.reach) if name == "Z" else range(0 if how.zero else 1, how.reach)


def _value(node: Node, point: dict[str, Any]) -> Any:
    try:
        return value_at(node, point)
    except Undefined as error:
        raise NotUnderstood("a member without a value") from error


def _bounds(conditions: list[Link], name: str, numbers: range) -> tuple[range, bool]:
    """Return the range of the tried numbers that the conditions leave, and whether it ends before they do."""
    kept = [k for k in numbers if all(holds(link, name, _MP.mpf(k)) for link in conditions)]
    open_below = numbers.start < 0 and numbers.start in kept[:1]
    open_above = numbers.stop > 0 and numbers[-1] in kept[-1:]
    finite = not (open_below or open_above)
    left = range(kept[0], kept[-1] + 1) if kept else range(0)
    if len(left) != len(kept):
        raise NotUnderstood("a condition with holes")
    return left, finite


def _of_rule(rules: list[str], name: str, domain: str, conditions: list[str], how: Reading) -> IntegerSet:
    """Compute the members of rules in one integer parameter. Raises NotUnderstood."""
    numbers, finite = integers(domain, how), False
    bounds: list[Link] = []
    for condition in conditions:
        chain = links(condition)
        if chain is None or any(symbols(link.difference) != {name} for link in chain):
            raise NotUnderstood(condition[:80])
        bounds += chain
    if bounds:
        numbers, finite = _bounds(bounds, name, numbers)
    trees = [parse(rule) for rule in rules]
    if any(symbols(tree) - {name} for tree in trees) or not any(symbols(tree) for tree in trees):
        raise NotUnderstood("not one parameter")
    if finite and len(numbers) > _MOST:
        raise NotUnderstood("too many members")
    near = numbers if finite else sorted(numbers, key=abs)[: len(numbers) // _CORE]
    members = [_value(tree, {name: _MP.mpf(k)}) for tree in trees for k in numbers]
    core = [_value(tree, {name: _MP.mpf(k)}) for tree in trees for k in near]
    return IntegerSet(members, core, finite)


def _of_builder(inside: str, how: Reading) -> IntegerSet:
    left, *rest = split_top(inside, BAR)
    bar = BAR.search(inside, len(left))
    if not rest or bar is None:
        raise NotUnderstood(inside[:80])
    conditions = split_top(inside[bar.end() :], _COMMA)
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
    return _of_rule([left], name, domain, kept, how)


def _of_dots(items: list[str], how: Reading) -> IntegerSet:
    """Read an arithmetic progression of whole numbers: 1, 2, 3, \\ldots or 0, 1, \\ldots, 9."""
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
        return IntegerSet(members, members, True)
    members = [given[0] + step * k for k in range(how.reach)]
    return IntegerSet(members, members[: how.reach // _CORE], False)


def read_integer_set(text: str, how: Reading | None = None) -> IntegerSet:
    """Read a family; without `how`, only to see whether it is one. Raises NotUnderstood when the text is not."""
    how, text = how or Reading(False, _REACH), text.strip()
    if _SET.match(text):
        numbers = list(integers(text, how))
        near = sorted(numbers, key=abs)[: len(numbers) // _CORE]
        return IntegerSet([_MP.mpf(k) for k in numbers], [_MP.mpf(k) for k in near], False)
    if text.startswith("\\{") and text.endswith("\\}"):
        inside = text[2:-2].strip()
        if BAR.search(inside) and "\\ldots" not in inside:
            return _of_builder(inside, how)
        return _of_items(inside, how)
    *rules, domain = split_top(text, _COMMA)
    member = _MEMBER.match(domain)
    if member and _NAME.match(member.group(1)) and rules:
        stated = [part for rule in rules for part in split_top(rule, _OR) if part]
        names = {part[0] for part in stated if _STATED.match(part)}
        if len(names) > 1:
            raise NotUnderstood("several names")
        family = _of_rule([_STATED.sub("", part) for part in stated], member.group(1), member.group(2), [], how)
        return family._replace(name="".join(names))
    return _of_items(text, how)


def _of_items(text: str, how: Reading) -> IntegerSet:
    items = [item.strip() for item in split_top(text, _COMMA)]
    if "\\ldots" in items:
        return _of_dots(items, how)
    trees = [parse(item) for item in items if item]
    if any(symbols(tree) for tree in trees) or not trees:
        raise NotUnderstood("members with parameters")
    members = [_value(tree, {}) for tree in trees]
    return IntegerSet(members, members, True)


def _within(some: list[Any], many: list[Any]) -> bool:
    """Return whether every member of `some` is one of `many`, up to 40 digits."""
    with _MP.workdps(DIGITS + 20):
        known = {key(value) for value in many}
        return all(key(value) in known for value in some)


def key(value: Any) -> str:
    """Return a value as text with 40 digits; rounding noise around 0 is "0"."""
    parts = (mpmath.re(value), mpmath.im(value))
    return " ".join(mpmath.nstr(part, 40) if abs(part) > _MP.mpf(10) ** -40 else "0" for part in parts)


def same_integer_set(ground_truth: str, answer: str) -> bool:
    """Return whether both texts are the same set of numbers. Raises NotUnderstood when one is not a family."""
    largest = max((int(number) for number in _NUMBER.findall(ground_truth + " " + answer)), default=0)
    if largest > 400:
        raise NotUnderstood("too many members")
    for zero in (False, True):
        how = Reading(zero, _REACH + 8 * largest)
        left, right = read_integer_set(ground_truth, how), read_integer_set(answer, how)
        if left.name and right.name and left.name != right.name:
            return False
        if left.finite == right.finite and _within(left.core, right.members) and _within(right.core, left.members):
            return True
    return False
