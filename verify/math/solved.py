r"""Decides whether an answer states its values or only a condition that they satisfy: x = 3 states it, 2x = 6 does not.

A relation is solved when a name stands alone on one side and on no other: x = 3, 2 < x, 1 < x < 3, f(x) = 2x + 1, and
|x| < 3 besides. Where the ground truth is solved, the policy's must be, or repeating the problem would be rewarded.
An equation between coordinates (y = 2x + 3) is a curve, between members of a sequence (a_{n+1} = 2a_n) a recurrence,
between a name and its derivative a differential equation, between two names (x = y) itself: nothing is solved there,
and every equivalent form of it is as good.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from verify.math.brackets import BAR, bracketed, split_top
from verify.math.expression import parse
from verify.math.plain import is_named
from verify.math.quantity import without_unit
from verify.math.relation import ORDERS, cut
from verify.math.token import NotUnderstood
from verify.math.tree import Node, symbols

_PARTS = re.compile(
    r"[,;]|\\(?:cup|cap|land|lor|vee|wedge)(?![A-Za-z])|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[或且和与]"
)
_MEMBER = re.compile(r"^.{1,40}?\\in(?![A-Za-z])")
_COORDINATES = frozenset(
    ("x", "y", "z", "X", "Y", "Z", "r", "\\rho", "\\theta", "\\phi", "\\varphi"),
)


class _Relation(NamedTuple):
    """A chain of relations: its sides as text, as trees where they can be parsed, and its signs."""

    sides: list[str]
    trees: list[Node | None]
    signs: list[str]

    def unknowns(self, at: int) -> frozenset[str]:
        """Return the names that a side mentions: variables, functions, and letters where it cannot be read."""
        tree = self.trees[at]
        if tree is None:
            return frozenset(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", self.sides[at]))
        return symbols(tree) | _functions(tree)

    def isolated(self) -> dict[str, frozenset[str]]:
        """Return {name: names on the other sides} for every name that stands alone on one side and on no other."""
        definitions = {}
        for at in range(len(self.sides)):
            others = frozenset[str]().union(*(self.unknowns(other) for other in range(len(self.sides)) if other != at))
            name = self.name(at, bool(others))
            if name and name not in others and name.partition("(")[0] not in others:
                definitions[name] = others
        return definitions

    def name(self, at: int, others: bool) -> str:
        tree, side = self.trees[at], self.sides[at].strip()
        if tree is not None and tree[0] == "sym":
            return str(tree[1])
        if tree is not None and tree[0] == "call" and str(tree[1]).startswith("?"):
            return str(tree[1])
        if is_named(side):
            return side
        if tree is None or others:
            return ""
        if tree[:2] == ("call", "abs") and tree[2][0] == "sym" and set(self.signs) <= ORDERS:
            return str(tree[2][1])  # |x| < 3
        return side if len(self.sides) > 2 and set(self.signs) == {"="} and is_sum_of_names(tree) else ""


def is_sum_of_names(node: Node) -> bool:
    """Return whether a tree is a sum of names, as m + n before "= 100 + 13 = 113"; x + y = 5 is an equation."""
    return node[0] == "sym" or (node[0] == "+" and all(is_sum_of_names(part) for part in node[1:]))


def _functions(node: Node) -> frozenset[str]:
    own = frozenset((str(node[1]),)) if node[0] == "call" and str(node[1]).startswith("?") else frozenset[str]()
    return own.union(*(_functions(part) for part in node[1:] if isinstance(part, tuple)))


def _relations(text: str, depth: int = 0) -> list[_Relation]:
    """Return the relations that a text states, including those inside a set-builder."""
    relations = []
    for statement in split_top(text, _PARTS) if "\\begin" not in text else ():  # cases: values and when they hold
        pair = bracketed(statement) or bracketed(_MEMBER.sub("", statement).strip())
        if pair and depth < 4:
            element, *conditions = split_top(pair[1], BAR) if pair[0] == "{}" else [pair[1]]
            if not conditions or "," not in element:  # else a set of points: a curve
                relations += _relations(conditions[-1] if conditions else element, depth + 1)
            continue
        sides, signs = cut(statement)
        if signs:
            relations.append(_Relation(sides, [_tree(side) for side in sides], signs))
    return [one for one in relations if any(one.unknowns(at) for at in range(len(one.sides)))]


def _tree(side: str) -> Node | None:
    try:
        return parse(without_unit(side)[0])
    except NotUnderstood:
        return None


def _is_stem(name: str, other: str) -> bool:
    """Return whether two names have one stem, as a_{n+1} and a_n, or y' and y."""
    return name.split("_")[0].rstrip("'") == other.split("_")[0].rstrip("'")


def _is_definition(name: str, others: frozenset[str]) -> bool:
    """Whether an isolated name is the unknown, and not one coordinate of a curve, one member of a sequence."""
    if name in _COORDINATES and others & _COORDINATES:
        return False
    return not any(_is_stem(name, other) for other in others)


def restates(ground_truth: str, answer: str) -> bool:
    """Return whether `ground_truth` is solved and `answer` is only a condition on its unknowns."""
    asked: frozenset[str] = frozenset()
    for relation in _relations(ground_truth):
        isolated = relation.isolated()
        if not isolated or len(isolated) == len(relation.sides) > 1:
            return False  # a condition itself, or a relation of names: x = y
        if not any(_is_definition(name, others) for name, others in isolated.items()):
            return False
        asked |= isolated.keys() if any(isolated.values()) else frozenset()
    for relation in _relations(answer):
        isolated = relation.isolated()
        if not isolated:
            return True
        if asked and any(isolated.values()) and not asked & isolated.keys():
            return True  # V = \pi r^2 h where h = V / (\pi r^2) is asked for
    return False
