r"""Compares congruences: x \equiv 3 \pmod{7}, x \equiv \pm 1 \pmod{5}, 3 \pmod 7, as residues of a modulus.

Two of them are equal when the modulus is, what is congruent is written alike (or is missing on one side), and the
residues are the same set modulo it. Against 7k + 3 they are a family of integers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from verify.math import integer_sets
from verify.math.brackets import split_top
from verify.math.expression import parse
from verify.math.number import TooLarge, exact_value
from verify.math.token import NotUnderstood
from verify.math.tree import Node
from verify.math.value import same_value

HINT = re.compile(r"\\equiv(?![A-Za-z])|\(mod ")
_MOD = r"(?:\(\s*mod (?P<inside>.+)\)|\\bmod\s*(?P<behind>.+)|\\?mod\s*(?P<bare>\S+))"
_CONGRUENCE = re.compile(rf"^(?:(?P<left>.+?)\s*\\equiv\s*)?(?P<right>.+?)\s*,?\s*{_MOD}$")
_OR = re.compile(r"[,;]|\\lor(?![A-Za-z])|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|[或和且]")
_EITHER = re.compile(r"\\lor(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])|或")
_PM = re.compile(r"\\pm(?![A-Za-z])")


class Congruence(NamedTuple):
    """A congruence: its left side ("" when it was not named), the residues, and the modulus."""

    left: str
    residues: list[str]
    modulus: str


def read(text: str) -> Congruence:
    """Read normalised text as one congruence. Raises NotUnderstood."""
    several = [part for part in split_top(text, _EITHER) if part]
    if len(several) > 1 and all(_CONGRUENCE.match(part) for part in several):
        each = [read(part) for part in several]
        if len({(one.left, one.modulus) for one in each}) > 1:
            raise NotUnderstood(text[:80])
        return each[0]._replace(residues=[residue for one in each for residue in one.residues])
    match = _CONGRUENCE.match(text)
    if match is None or "\\equiv" in match["right"]:
        raise NotUnderstood(text[:80])
    left = (match["left"] or "").strip()
    parts = [part for part in split_top(match["right"], _OR) if part]
    parts = [re.sub(rf"^{re.escape(left)}\s*\\equiv", "", part).strip() if left else part for part in parts]
    residues = [_PM.sub(sign, part) for part in parts for sign in ("+-" if _PM.search(part) else "+")]
    return Congruence(left, residues, (match["inside"] or match["behind"] or match["bare"]).strip())


def _integer(text: str) -> int | None:
    try:
        value = exact_value(text.lstrip("+ "))
    except TooLarge:
        return None
    return int(value) if value is not None and value.denominator == 1 else None


def _same_text(left: str, right: str) -> bool:
    if left == right:
        return True
    try:
        return same_value(parse(left.lstrip("+ ")), parse(right.lstrip("+ ")))
    except NotUnderstood:
        return False


def _tree(text: str) -> Node:
    return parse(text.lstrip("+ "))


def same_congruence(ground_truth: str, answer: str) -> bool:
    """Return whether two texts, one of them a congruence, say the same. Raises NotUnderstood when that is unclear."""
    try:
        true = read(ground_truth)
    except NotUnderstood:
        return _same_members(read(answer), ground_truth)
    try:
        given = read(answer)
    except NotUnderstood:
        return _same_members(true, answer)
    for text in (*true.residues, true.modulus, *([true.left] if true.left else [])):
        _tree(text)
    if not _same_text(true.modulus, given.modulus) or (
        true.left and given.left and not _same_text(true.left, given.left)
    ):
        return False
    modulus = _integer(true.modulus)
    true_values, given_values = ([_integer(residue) for residue in side.residues] for side in (true, given))
    if modulus and None not in true_values and None not in given_values:
        return {value % modulus for value in true_values if value is not None} == {
            value % modulus for value in given_values if value is not None
        }
    if len(true_values) != len(given_values):
        return False
    return all(any(_same_text(residue, found) for found in given.residues) for residue in true.residues)


def _same_members(congruence: Congruence, text: str) -> bool:
    """Compare a congruence of a name with a family of integers: 7k + 3. Raises NotUnderstood for other congruences."""
    modulus = _integer(congruence.modulus)
    if not modulus or not re.match(r"^[A-Za-z]?$", congruence.left) or None in map(_integer, congruence.residues):
        raise NotUnderstood("no family of integers")
    name = f"{congruence.left}=" if congruence.left and congruence.left != "n" else ""
    rules = " or ".join(f"{name}{modulus}n+({residue.lstrip('+ ')})" for residue in congruence.residues)
    try:
        return integer_sets.same_integer_set(f"{rules}, n \\in Z", text)
    except NotUnderstood:
        return False
