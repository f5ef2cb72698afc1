r"""Compares equations and inequalities: chains are cut into links, links compared up to a constant factor.

"c > b > a" and "a < b < c" have the same links. An equation stays the same when both sides are multiplied by a number,
an inequality when that number is positive; nothing else is granted (x = y is not x^2 = y^2, and y = 1/x is not xy = 1).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath

from verify.math.brackets import split_top
from verify.math.expression import parse
from verify.math.tree import Node, symbols
from verify.math.value import DIGITS, Undefined, same_value, sample_points, value_at

_OTHERS = ("\\cong", "\\sim", "\\propto", "\\subset", "\\subseteq", "\\supset", "\\supseteq")
_SIGN = re.compile(rf"\\(?:leq|geq|neq|approx)(?![A-Za-z])|<|>|=|(?:{'|'.join(map(re.escape, _OTHERS))})(?![A-Za-z])")
_TURNED = {">": "<", "\\geq": "\\leq", "\\supset": "\\subset", "\\supseteq": "\\subseteq"}
ORDERS = frozenset(("<", ">", "\\leq", "\\geq"))


class Link(NamedTuple):
    """One relation, turned so that its sign is never > or \\geq."""

    left: Node
    sign: str
    right: Node

    @property
    def difference(self) -> Node:
        return ("+", self.left, ("-", self.right))


def cut(text: str) -> tuple[list[str], list[str]]:
    """Return the sides and signs of a chain, at the top level of brackets."""
    sides = split_top(text, _SIGN)
    signs: list[str] = []
    position = 0
    for side in sides[:-1]:
        position = text.index(side, position) + len(side)
        match = _SIGN.search(text, position)
        assert match is not None
        signs.append(match.group())
        position = match.end()
    return sides, signs


def links(text: str) -> list[Link] | None:
    """Return the links of a chain in one direction, or None when it is not a chain. Raises NotUnderstood."""
    sides, signs = cut(text)
    if not signs or "" in sides:
        return None
    trees = [parse(side) for side in sides]
    chain = []
    for left, sign, right in zip(trees, signs, trees[1:], strict=False):
        if sign in _TURNED:
            left, sign, right = right, _TURNED[sign], left
        chain.append(Link(left, sign, right))
    return chain


def ratio(left: Node, right: Node) -> Any:
    """Return the constant left / right as a number, or None when it is not constant."""
    names = sorted(symbols(left) | symbols(right))
    if symbols(left) != symbols(right) or not names:
        return None  # f(0) = 0 is not f(1) = 0
    quotient: Node = ("/", left, right)
    for point in sample_points(names):
        try:
            first = value_at(quotient, point)
        except Undefined:
            continue
        if mpmath.im(first) != 0 or first == 0:
            return None
        near = _short(first)
        scaled: Node = ("*", ("num", near), right)
        return first if near and same_value(left, scaled) else (first if _constant(quotient, first, names) else None)
    return None


def _short(value: Any) -> Fraction:
    """Return the simple fraction that a value seems to be; 0 for none."""
    size = abs(mpmath.re(value))
    if not 1e-9 < size < 1e9:
        return Fraction(0)
    return Fraction(str(mpmath.nstr(mpmath.re(value), 40))).limit_denominator(10**6)


def _constant(quotient: Node, first: Any, names: list[str]) -> bool:
    agreed = 0
    for point in sample_points(names):
        try:
            value = value_at(quotient, point)
        except Undefined:
            continue
        if abs(value - first) > abs(first) * mpmath.mpf(10) ** (-DIGITS // 2 - 10):
            return False
        agreed += 1
    return agreed >= 3


def same_link(left: Link, right: Link) -> bool:
    """Return whether two links are equal up to a factor: any for = and \\neq, a positive one for orders."""
    if left.sign != right.sign:
        return False
    if same_value(left.left, right.left) and same_value(left.right, right.right):
        return True
    if left.sign in _OTHERS:
        turned = left.sign in ("\\cong", "\\sim")
        return turned and same_value(left.left, right.right) and same_value(left.right, right.left)
    factor = ratio(left.difference, right.difference)
    if factor is None:
        return False
    return bool(left.sign not in ORDERS or mpmath.re(factor) > 0)


def same_links(left: list[Link], right: list[Link]) -> bool:
    """Return whether every link of one side has its own partner on the other."""
    rest = list(right)
    for link in left:
        partner = next((other for other in rest if same_link(link, other)), None)
        if partner is None:
            return False
        rest.remove(partner)
    return not rest
