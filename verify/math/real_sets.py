r"""Reads sets of real numbers in any notation: intervals, inequalities, unions, set-builders, finite sets.

(-\infty,3], x \leq 3, 3 \geq x, x \in (-\infty,3] and \{x \mid x \leq 3\} are one set: sorted disjoint pieces, each
with two ends that belong to it or not. Ends are compared by `value.same_value`, so they are exact to 1,500 digits.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cmp_to_key
from typing import Any, NamedTuple

import mpmath

from verify.math.brackets import COMMA, split_top
from verify.math.expression import parse
from verify.math.relation import ORDERS, Link, links, same_links
from verify.math.token import NotUnderstood
from verify.math.tree import Node, symbols
from verify.math.value import constant, same_value

MAX_PIECES = 40
MAX_DEPTH = 8


class End(NamedTuple):
    """One end of a piece: `value` gives its order, `node` decides equality (None: infinite)."""

    value: Any
    node: Node | None
    inside: bool


class Piece(NamedTuple):
    """An interval, or a point when both ends are the same."""

    low: End
    high: End


class RealSet(NamedTuple):
    """A set of real numbers: its pieces in order, and the variable when it was named."""

    pieces: tuple[Piece, ...]
    variable: str = ""


_LOW, _HIGH = End(-mpmath.inf, None, False), End(mpmath.inf, None, False)
_LINE = (Piece(_LOW, _HIGH),)
_CUP = re.compile(r"\\cup(?![A-Za-z])|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])|或")
CAP = re.compile(
    r"\\cap(?![A-Za-z])|\\land(?![A-Za-z])|\\wedge(?![A-Za-z])|(?<![A-Za-z\\])and(?![A-Za-z])|且|,|;|\\text\s*\{\s*且\s*\}"
)
_MINUS = re.compile(r"\\(?:setminus|backslash|smallsetminus)(?![A-Za-z])")
_MEMBER = re.compile(r"^([A-Za-z]|\\[a-z]+)\s*\\in(?![A-Za-z])\s*(.*)$", re.DOTALL)
BUILDER = re.compile(
    r"^\\\{\s*([A-Za-z])\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|R)\s*)?(?:\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|\||:)(.*)\\\}$",
    re.DOTALL,
)
_REAL = re.compile(
    r"^(?:\\mathbb\s*\{?R\}?|R|\(-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)|\\text\s*\{\s*all real numbers\s*\})$"
)
_INTERVAL = re.compile(r"^([\[(])(.*)([\])])$", re.DOTALL)
_NOT_BOTH = re.compile(r"^([A-Za-z])\s*\\neq\s*\\pm\s*([^\\,;<>=|]+)$")
_INFINITE = re.compile(r"^([+-]?)\s*\{?\s*\\infty\s*\}?$")
_DISTANCE = re.compile(r"^\|([^|]+)\|\s*(<|>|\\leq|\\geq)\s*([^|<>=]+)$")
_SQUARE = re.compile(r"^([A-Za-z])\s*\^\s*\{?2\}?\s*(<|>|\\leq|\\geq)\s*([^|<>=]+)$")
HINT = re.compile(
    r"[<>|]|(?<![A-Za-z])or(?![A-Za-z])|\\(?:leq|geq|neq|cup|cap|setminus|backslash|in|mid|lor|land|vee|wedge|emptyset)(?![A-Za-z])|R|且|或"
)
"""matches a text that may be a set other than a plain interval"""


def interval_of(text: str) -> tuple[bool, str, str, bool] | None:
    """Return the ends of an interval, between whether the first belongs to it and whether the last does; None for other
    texts."""
    match = _INTERVAL.match(text)
    ends = split_top(match.group(2), COMMA) if match else []
    return (match.group(1) == "[", ends[0], ends[1], match.group(3) == "]") if match and len(ends) == 2 else None


def _end(text: str, inside: bool) -> End:
    infinite = _INFINITE.match(text)
    if infinite:
        return _LOW if infinite.group(1) == "-" else _HIGH
    node = parse(text)
    return _finite(node, inside)


def _finite(node: Node, inside: bool) -> End:
    value = constant(node)
    if value is None or mpmath.im(value) != 0:
        raise NotUnderstood("an end with parameters")
    return End(mpmath.re(value), node, inside)


def _same_end(left: End, right: End) -> bool:
    if left.node is None or right.node is None:
        return bool(left.value == right.value)
    return same_value(left.node, right.node)


def _is_point(piece: Piece) -> bool:
    return piece.low.node is not None and piece.low.node == piece.high.node


def _compare(left: End, right: End) -> int:
    return 0 if _same_end(left, right) else (-1 if left.value < right.value else 1)


def _compare_starts(left: Piece, right: Piece) -> int:
    return _compare(left.low, right.low) or int(right.low.inside) - int(left.low.inside)


def _ordered(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Sort the pieces, drop empty ones, and join touching and overlapping ones."""
    if len(pieces) > MAX_PIECES:
        raise NotUnderstood("too many pieces")
    kept = []
    for piece in pieces:
        order = _compare(piece.low, piece.high)
        if order < 0 or (order == 0 and piece.low.inside and piece.high.inside):
            kept.append(piece)
    kept.sort(key=cmp_to_key(_compare_starts))
    joined: list[Piece] = []
    for piece in kept:
        last = joined[-1] if joined else None
        order = _compare(piece.low, last.high) if last else 1
        if last is None or order > 0 or (order == 0 and not (piece.low.inside or last.high.inside)):
            joined.append(piece)
            continue
        further = _compare(piece.high, last.high)
        if further > 0 or (further == 0 and piece.high.inside):
            joined[-1] = Piece(last.low, piece.high)
    return tuple(joined)


def _outside(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return the complement on the real line."""
    gaps, low = [], _LOW
    for piece in pieces:
        if piece.low.node is not None:
            gaps.append(Piece(low, piece.low._replace(inside=not piece.low.inside)))
        low = piece.high._replace(inside=not piece.high.inside)
        if piece.high.node is None:
            return _ordered(gaps)
    gaps.append(Piece(low, _HIGH))
    return _ordered(gaps)


def _common(left: tuple[Piece, ...], right: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return _outside(_ordered([*_outside(left), *_outside(right)]))


def _solve(link: Link) -> tuple[tuple[Piece, ...], str]:
    """Return the pieces and the variable of a relation that is linear in it. Raises NotUnderstood for others."""
    names = symbols(link.difference)
    if not _is_linear(link.difference):
        raise NotUnderstood("not linear")
    if len(names) != 1 or link.sign not in ORDERS | {"\\neq", "="}:
        raise NotUnderstood("not a relation of one variable")
    (name,) = names
    at: list[Node] = [_put(link.difference, name, ("num", Fraction(k))) for k in (0, 1)]
    slope: Node = ("+", at[1], ("-", at[0]))
    line: Node = ("+", ("*", slope, ("sym", name)), at[0])
    steep = constant(slope)
    if steep is None or steep == 0 or mpmath.im(steep) != 0 or not same_value(link.difference, line):
        raise NotUnderstood("not linear")
    inside = link.sign in ("\\leq", "=")
    border: Node = ("/", ("-", at[0]), slope)
    if link.sign == "\\neq":
        end = _finite(border, False)
        return (Piece(_LOW, end), Piece(end, _HIGH)), name
    end = _finite(border, inside)
    if link.sign == "=":
        return (Piece(end, end),), name
    return ((Piece(_LOW, end),) if steep > 0 else (Piece(end, _HIGH),)), name


def _is_linear(node: Node) -> bool:
    """Return whether a tree is built by sums and constant factors, so that two points determine it."""
    if not symbols(node) or node[0] == "sym":
        return True
    if node[0] == "*":
        return any(not symbols(part) for part in node[1:]) and all(_is_linear(part) for part in node[1:])
    if node[0] == "/":
        return not symbols(node[2]) and _is_linear(node[1])
    return node[0] in ("+", "-") and all(_is_linear(part) for part in node[1:])


def _put(node: Node, name: str, value: Node) -> Node:
    if node == ("sym", name):
        return value
    return tuple(_put(part, name, value) if isinstance(part, tuple) else part for part in node)


def _join(parts: list[RealSet], pieces: tuple[Piece, ...]) -> RealSet:
    names = {part.variable for part in parts if part.variable}
    if len(names) > 1:
        raise NotUnderstood("several variables")
    return RealSet(pieces, names.pop() if names else "")


def read(text: str, depth: int = 0) -> RealSet:
    """Read normalised text as a set of real numbers. Raises NotUnderstood when it is not one."""
    if depth > MAX_DEPTH:
        raise NotUnderstood(text[:80])
    text = _NOT_BOTH.sub(r"\1 \\neq \2 \\land \1 \\neq -(\2)", text.strip())
    builder = BUILDER.match(text)
    if builder:
        inner = read(builder.group(2), depth + 1)
        if inner.variable != builder.group(1):
            raise NotUnderstood(text[:80])
        return inner._replace(variable="")
    if _REAL.match(text):
        return RealSet(_LINE)
    if re.match(r"^\\mathbb\{R\}\s*[\^_]\s*\{?\s*[+-]\s*\}?$", text):
        zero = End(mpmath.mpf(0), ("num", Fraction(0)), False)
        return RealSet((Piece(zero, _HIGH) if "+" in text else Piece(_LOW, zero),))
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return RealSet(())
    for separator, combine in ((_CUP, "or"), (_MINUS, "minus"), (CAP, "and")):
        parts = split_top(text, separator)
        if len(parts) > 1:
            return _combined([part for part in parts if part], combine, depth + 1)
    member = _MEMBER.match(text)
    if member:
        inner = read(member.group(2), depth + 1)
        return RealSet(inner.pieces, member.group(1).lstrip("\\") if not inner.variable else "?")
    return _simple(text, depth + 1)


def _combined(parts: list[str], combine: str, depth: int) -> RealSet:
    if not parts:
        raise NotUnderstood("nothing to combine")
    sets = [read(part, depth) for part in parts]
    if combine == "or":
        return _join(sets, _ordered([piece for real_set in sets for piece in real_set.pieces]))
    if any(real_set.variable and len(real_set.pieces) == 1 and _is_point(real_set.pieces[0]) for real_set in sets):
        raise NotUnderstood("x = 1, x = 2 is a list")
    pieces = sets[0].pieces
    for real_set in sets[1:]:
        pieces = _common(pieces, _outside(real_set.pieces) if combine == "minus" else real_set.pieces)
    if combine == "and" and not pieces:
        raise NotUnderstood("x < 1, x > 3 is no way to say that there is no solution")
    return _join(sets, pieces)


def _simple(text: str, depth: int) -> RealSet:
    if text.startswith("\\{") and text.endswith("\\}"):
        ends = [_end(item, True) for item in split_top(text[2:-2], COMMA)]
        if any(end.node is None for end in ends):
            raise NotUnderstood(text[:80])
        return RealSet(_ordered([Piece(end, end) for end in ends]))
    if interval := interval_of(text):
        closed, first, last, closed_too = interval
        low, high = _end(first, closed), _end(last, closed_too)
        if not low.value < high.value and not (low.inside and high.inside and _same_end(low, high)):
            raise NotUnderstood("no interval")
        return RealSet(_ordered([Piece(low, high)]))
    if text.startswith("(") and text.endswith(")") and len(split_top(text[1:-1], COMMA)) == 1:
        return read(text[1:-1], depth)
    finite = within_infinity(text)
    distance, square = _DISTANCE.match(finite), _SQUARE.match(finite)
    if distance or square:
        inside, sign, far = (distance or square).groups()  # type: ignore[union-attr]
        far = rf"\sqrt{{{far}}}" if square else far
        if not _finite(parse(far), True).value > 0:
            raise NotUnderstood(text[:80])
        if sign in (">", "\\geq"):
            other = {">": "<", "\\geq": "\\leq"}[sign]
            return read(f"{inside} {sign} {far} \\lor {inside} {other} -({far})", depth)
        return read(f"-({far}) {sign} {inside} {sign} {far}", depth)
    chain = links(finite) if finite else []
    if chain is None:
        raise NotUnderstood(text[:80])
    pieces: tuple[Piece, ...] = _LINE
    names = set()
    for link in chain:
        solved, name = _solve(link)
        pieces = _common(pieces, _ordered(list(solved)))
        names.add(name)
    if len(names) != 1:
        raise NotUnderstood(text[:80])
    return RealSet(pieces, names.pop().lstrip("\\"))


def within_infinity(text: str) -> str:
    r"""Remove the infinite ends of a chain: -\infty < x < 3 is x < 3."""
    text = re.sub(r"^-\s*\\infty\s*(?:<|\\leq)\s*|\s*(?:>|\\geq)\s*-\s*\\infty$", "", text)
    return re.sub(r"\s*(?:<|\\leq)\s*\+?\s*\\infty$|^\+?\s*\\infty\s*(?:>|\\geq)\s*", "", text)


def same_open_chain(interval: str, chain: str) -> bool | None:
    """Compare an interval whose ends have parameters with a chain: (a,b) is a < x < b. None for other pairs."""
    parts = interval_of(interval)
    given = links(within_infinity(chain))
    if parts is None or not given:
        return None
    closed, first, last, closed_too = parts
    names = {side[1] for link in given for side in (link.left, link.right) if side[0] == "sym"}
    signs = ["\\leq" if inside else "<" for inside in (closed, closed_too)]
    for name in sorted(names):
        if name in (first, last):
            continue
        own = links(within_infinity(f"{first} {signs[0]} {name} {signs[1]} {last}"))
        if own and same_links(own, given):
            return True
    return False


def same_real_set(left: RealSet, right: RealSet) -> bool:
    """Return whether two sets have equal pieces, and the same variable where both name one."""
    if left.variable and right.variable and left.variable != right.variable:
        return False
    if len(left.pieces) != len(right.pieces):
        return False
    return all(
        one.low.inside == other.low.inside
        and one.high.inside == other.high.inside
        and _same_end(one.low, other.low)
        and _same_end(one.high, other.high)
        for one, other in zip(left.pieces, right.pieces, strict=True)
    )
