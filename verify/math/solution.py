r"""Compares a condition with its solution: x^2 < 9 and -3 < x < 3, \{x \mid x^2 = 4\} and \{-2, 2\}.

Nothing is solved. The set that one side states is checked against the condition of the other: at its ends, right
beside them, at many points between and beyond, and, for polynomials, at every real root. What samples alone cannot
decide is refused: equations and sets without any end, unless the condition is a polynomial.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import mpmath

from verify.math.brackets import split_top
from verify.math.real_sets import BUILDER, CAP, RealSet
from verify.math.relation import ORDERS, Link, links
from verify.math.token import NotUnderstood
from verify.math.tree import Node, symbols
from verify.math.value import DIGITS, Undefined, value_at

_MAX_DEGREE = 8
_BETWEEN = 24
_NEAR = tuple(mpmath.mpf(10) ** power for power in (-12, -6, -3, -2, -1))
_FAR = tuple(mpmath.mpf(10) ** power for power in range(4))
_MP = mpmath.mp


def holds(link: Link, name: str, at: Any) -> bool:
    """Return whether a relation of the variable `name` holds at a point; where a side has no real value it does not.

    Raises NotUnderstood for relations that are not between numbers.
    """
    if link.sign not in ORDERS | {"=", "\\neq"}:
        raise NotUnderstood(link.sign)
    try:
        left, right = (value_at(side, {name: at}) for side in (link.left, link.right))
    except Undefined:
        return False
    with _MP.workdps(DIGITS + 20):
        small = _MP.mpf(10) ** (15 - DIGITS)
        if any(abs(mpmath.im(value)) > abs(value) * small for value in (left, right)):
            return False
        left, right = mpmath.re(left), mpmath.re(right)
        equal = abs(left - right) <= max(abs(left), abs(right), small) * small
    if link.sign in ("\\leq", "="):
        return bool(equal or (link.sign == "\\leq" and left < right))
    return not equal and (link.sign == "\\neq" or bool(left < right))


def _roots(difference: Node, name: str) -> list[Any] | None:
    """Return the real roots when the difference is a polynomial of low degree in its variable, else None."""
    with _MP.workdps(DIGITS + 20):
        shift = 1 / _MP.pi  # no pole is there
        try:
            values = [value_at(difference, {name: k + shift}) for k in range(_MAX_DEGREE + 4)]
        except Undefined:
            return None
        size = max(abs(value) for value in values) or _MP.mpf(1)
        degree, row, leading = -1, values, []
        while any(abs(value) > size * _MP.mpf(10) ** (20 - DIGITS) for value in row):
            leading.append(row[0])
            row = [after - before for before, after in zip(row, row[1:], strict=False)]
            degree += 1
            if degree > _MAX_DEGREE:
                return None
        if degree < 1:
            return [] if degree == 0 else None
        coefficients = [_MP.mpf(0)]
        falling = [_MP.mpf(1)]  # coefficients, lowest first, of t (t - 1) ... / k!
        for order, value in enumerate(leading):
            coefficients += [_MP.mpf(0)] * (len(falling) - len(coefficients))
            coefficients = [a + value * b for a, b in zip(coefficients, falling, strict=True)]
            shifted = [_MP.mpf(0), *falling]
            falling = [(a - order * b) / (order + 1) for a, b in zip(shifted, [*falling, _MP.mpf(0)], strict=True)]
        try:
            roots = mpmath.polyroots(coefficients[::-1], maxsteps=200, extraprec=400)
        except mpmath.libmp.NoConvergence:
            return None
        close = _MP.mpf(10) ** (-DIGITS // 4)  # of a multiple root only a share of the digits is right
        return [mpmath.re(root) + shift for root in roots if abs(mpmath.im(root)) <= close * max(1, abs(root))]


def _borders(node: Node) -> list[Node]:
    """Return the divisors of a tree and what is in its roots, logarithms and bars: where these vanish it may break."""
    borders = [part for child in node[1:] if isinstance(child, tuple) for part in _borders(child)]
    if node[0] == "/" and symbols(node[2]):
        borders.append(node[2])
    if node[0] == "call" and symbols(node):
        if node[1] not in ("root", "ln", "log", "lg", "abs", "exp"):
            raise NotUnderstood("a function whose breaks are not known")
        if node[1] != "exp":
            borders.append(node[2])
    return borders


def _cleared(node: Node) -> Node:
    """Return a difference times all its `_borders`: apart from theirs it has the same zeros."""
    for divisor in _borders(node):
        node = ("*", node, divisor)
    return node


def _points(ends: list[Any]) -> Iterator[Any]:
    dice = random.Random(11)
    if not ends:
        ends = [_MP.mpf(0)]
    for low, high in zip(ends, ends[1:], strict=False):
        for index in range(_BETWEEN):
            yield low + (high - low) * (index + _MP.mpf(dice.random())) / _BETWEEN
        for near in _NEAR:
            yield low + (high - low) * near
            yield high - (high - low) * near
    for step in (*_NEAR, *_FAR):
        for scale in (1, _MP.mpf(dice.random()) + 1):
            yield ends[0] - step * scale
            yield ends[-1] + step * scale


def _contains(real_set: RealSet, at: Any, close: Any) -> bool | None:
    """Return whether a point lies in a set; None when it is too near to an end to tell."""
    for piece in real_set.pieces:
        for end in (piece.low, piece.high):
            if end.node is not None and abs(end.value - at) <= close:
                return None
        if piece.low.value < at < piece.high.value:
            return True
    return False


def condition_of(text: str) -> list[Link]:
    """Return the relations that an inequality, several of them ("and") or a set-builder states. Raises NotUnderstood.

    An equation is a condition only inside a set-builder: on its own it is an answer in its own right.
    """
    builder = BUILDER.match(text)
    conditions: list[Link] = []
    for statement in split_top(builder.group(2) if builder else text, CAP):
        chain = links(statement)
        if chain is None or (builder is None and any(link.sign == "=" for link in chain)):
            raise NotUnderstood(text[:80])
        conditions += chain
    return conditions


def is_solution(condition: list[Link], real_set: RealSet) -> bool:
    """Return whether a set is exactly where all relations hold. Raises NotUnderstood where that is undecided."""
    names = frozenset().union(*(symbols(link.difference) for link in condition))
    if len(names) != 1 or (real_set.variable not in ("", *names)):
        raise NotUnderstood("not one variable")
    (name,) = names
    parts = [part for link in condition for part in _borders(link.difference)]
    border_roots = [_roots(part, name) for part in parts]
    if any(found is None for found in border_roots):
        raise NotUnderstood("a pole or a corner that is not found")
    cleared = [_cleared(link.difference) for link in condition]
    roots = [_roots(difference, name) for difference in cleared]
    polynomial = all(found is not None for found in roots)
    ends = sorted({end.value for piece in real_set.pieces for end in piece[:2] if end.node is not None})
    if not polynomial and (not ends or any(link.sign in ("=", "\\neq") for link in condition)):
        raise NotUnderstood("samples cannot decide this")
    for piece in real_set.pieces:
        for end in piece[:2]:
            if end.node is None:
                continue
            exact = value_at(end.node, {})
            if all(holds(link, name, mpmath.re(exact)) for link in condition) is not _belongs(real_set, end.value):
                return False
    with _MP.workdps(DIGITS + 20):
        at_roots = [(root, index) for index, found in enumerate(roots) for root in found or []]
        borders = {root for found in border_roots for root in found or []}
        at_roots = [(at, index) for at, index in at_roots if all(abs(at - border) > 1e-12 for border in borders)]
        between = [_MP.mpf(k) / 12 for k in range(-60, 61)] + sorted(borders)
        between += _points(sorted({*ends, *borders, *(at for at, _ in at_roots)}))
        for at, zero in [*at_roots, *((at, -1) for at in between)]:
            inside = _contains(real_set, at, _MP.mpf(10) ** (-13))
            if inside is not None and inside is not _hold(condition, name, at, zero):
                return False
    return True


def _hold(condition: list[Link], name: str, at: Any, zero: int) -> bool:
    """Return whether all relations hold; in relation `zero` both sides count as equal, as they nearly are at a root."""
    return all(
        link.sign in ("=", "\\leq") if index == zero else holds(link, name, at) for index, link in enumerate(condition)
    )


def _belongs(real_set: RealSet, value: Any) -> bool:
    """Whether an end belongs to its set."""
    for piece in real_set.pieces:
        if piece.low.value < value < piece.high.value:
            return True
        if any(end.node is not None and end.value == value and end.inside for end in piece[:2]):
            return True
    return False
