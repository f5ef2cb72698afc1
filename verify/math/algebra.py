r"""Compares what takes more than exact arithmetic: expressions, equations, inequalities, sets of the real line.

Everything is read by our own grammar as a whole (`expression.py`) and compared by values with relative error at high
precision (`value.py`); integrals, sums, products and limits go to SymPy (`calculus.py`). Runs only inside worker
processes.
"""

from __future__ import annotations

import re
from fractions import Fraction

import mpmath

from shared.types import Verdict
from verify.math import builder, congruence, integer_sets, periodic
from verify.math.calculus import is_calculus, same_calculus
from verify.math.expression import parse
from verify.math.number import TooLarge
from verify.math.pair import paired
from verify.math.plain import APPROXIMATELY, SIGNIFICANT_DIGITS, prepared, rounds_to, same_scalar
from verify.math.quantity import quantity, without_unit
from verify.math.real_sets import HINT, read, same_open_chain, same_real_set
from verify.math.relation import cut, links, same_links
from verify.math.solution import condition_of, is_solution
from verify.math.solved import is_sum_of_names, restates
from verify.math.structure import form, same_form
from verify.math.token import NotUnderstood
from verify.math.tree import Node
from verify.math.unit import is_forgivable, unit
from verify.math.value import Undefined, as_fraction, constant, same_value

_FUNCTION_OF = re.compile(r"(?<![A-Za-z\\])([fghyT])\(([a-z])\)")
_DECIMAL = re.compile(r"^-?\d*\.\d+$")
_NEAR = re.compile(r"^[$€£¥]?\s*(-?\d+(?:\.(\d+))?)(?!.*(?:\bor\b|\band\b|[,;]))")
_SIGN = re.compile(r"[<>=]|\\(?:leq|geq|neq|cong|sim|subseteq|supseteq|subset|supset|propto)(?![A-Za-z])")


def _is_name(node: Node) -> bool:
    """Return whether a tree is a name that may stand before its value: x, x_1, f(x)."""
    return node[0] == "sym" or (node[0] == "call" and str(node[1]).startswith("?"))


def _is_relation(text: str) -> bool:
    """Return whether a relation sign stands outside of all brackets."""
    return _SIGN.search(text) is not None and bool(cut(text)[1])


def _result(text: str) -> str:
    """Return the value that a chain of equations ends in: "S = 2+2 = 4" -> "4". Raises NotUnderstood for none."""
    sides, signs = cut(text)
    if set(signs) != {"="}:
        raise NotUnderstood(text[:80])
    if len(sides) == 2 and _is_name(_valued(sides[1])) and not _is_name(_valued(sides[0])):
        sides.reverse()
    first = _valued(sides[0])
    values = sides[1:] if _is_name(first) or (len(sides) > 2 and is_sum_of_names(first)) else sides
    trees = [_valued(side) for side in values]
    if not all(same_value(trees[-1], tree) for tree in trees[:-1]):
        raise NotUnderstood(text[:80])
    return values[-1]


def _valued(side: str) -> Node:
    """Parse one side of a chain, without its unit; a percentage becomes its value. Raises NotUnderstood."""
    try:
        value = quantity(side)
    except TooLarge:
        value = None
    if value is not None:
        return ("num", value.value / (100 if value.percent else 1))
    return parse(without_unit(side)[0])


def _same_relation(ground_truth: str, answer: str) -> bool:
    truth_relates, answer_relates = _is_relation(ground_truth), _is_relation(answer)
    if truth_relates and answer_relates:
        try:
            true_links = links(ground_truth)
        except NotUnderstood:
            _result(ground_truth)  # 0.56 = 56\\% is a value
            return False
        try:
            given_links = links(answer)
        except NotUnderstood:
            return False
        return true_links is not None and given_links is not None and same_links(true_links, given_links)
    try:
        if truth_relates:
            return _same_value(_result(ground_truth), answer) is True
        return _same_value(ground_truth, _result(answer)) is True
    except NotUnderstood:
        return False


def _same_value(ground_truth: str, answer: str) -> bool | None:
    """Compare two items: cheap rules first, then trees. Raises NotUnderstood only for the ground_truth."""
    cheap = same_scalar(ground_truth, answer)
    if cheap is not None:
        return cheap
    if _is_relation(ground_truth) or _is_relation(answer):
        return _same_relation(ground_truth, answer)
    (ground_truth, true_unit), (answer, given_unit) = without_unit(ground_truth), without_unit(answer)
    if bool(true_unit) != bool(given_unit) and not is_forgivable(true_unit or given_unit):
        return False
    if true_unit and given_unit:
        left, right = unit(true_unit), unit(given_unit)
        if left.dimensions != right.dimensions:
            return False
        if left.factor != right.factor:
            answer = f"({answer})({right.factor / left.factor})"
    if is_calculus(ground_truth):
        return same_calculus(ground_truth, answer)
    try:
        true_tree = parse(ground_truth)
    except NotUnderstood:
        if quantity(ground_truth) is None:
            raise
        return False  # a number with a unit, a percentage: understood, and no number is like it on the other side
    try:
        if is_calculus(answer):
            return same_calculus(ground_truth, answer)
        tree = parse(answer)
    except NotUnderstood:
        return False
    if same_value(true_tree, tree):
        return True
    return bool(_DECIMAL.match(answer)) and not _DECIMAL.match(ground_truth) and _is_rounded(answer, true_tree)


def _is_rounded(answer: str, exact: Node) -> bool:
    """Return whether a decimal of enough digits is the exact value, rounded."""
    digits = answer.lstrip("-").replace(".", "").lstrip("0")
    value = constant(exact) if len(digits) >= SIGNIFICANT_DIGITS else None
    if value is None or mpmath.im(value) != 0:
        return False
    return rounds_to(Fraction(answer), len(answer.partition(".")[2]), as_fraction(value), len(digits))


def _as_set(text: str) -> str:
    """Return a bare list of values as a set, and everything else as it is."""
    return rf"\{{{text}\}}" if not _SIGN.search(text) and form(text).kind == "list" else text


def _same_region(ground_truth: str, answer: str) -> bool | None:
    """Compare as sets of the real line when both are such; None when one is not."""
    if not HINT.search(ground_truth) and not HINT.search(answer):
        return None
    ground_truth, answer = (_FUNCTION_OF.sub(r"\1", text) for text in (ground_truth, answer))
    try:
        return same_real_set(read(_as_set(ground_truth)), read(_as_set(answer)))
    except NotUnderstood:
        pass  # no set of one variable; perhaps a chain
    try:
        return same_open_chain(ground_truth, answer) or same_open_chain(answer, ground_truth) or None
    except NotUnderstood:
        return None


def _same_solution(ground_truth: str, answer: str) -> bool | None:
    """Compare a condition, which only the ground truth may be, with its solution; None when they are no such pair."""
    if not HINT.search(ground_truth):
        return None
    try:
        return is_solution(condition_of(ground_truth), read(_as_set(answer)))
    except (NotUnderstood, Undefined):
        return None


def _same_family(ground_truth: str, answer: str) -> bool | None:
    """Compare as congruences, or as sets with an integer parameter or members left out; None when one is neither."""
    for hint, compare in (
        (congruence.HINT, congruence.same_congruence),
        (integer_sets.HINT, integer_sets.same_integer_set),
        (periodic.HINT, periodic.same_strips),
        (builder.HINT, builder.same_builder),
    ):
        try:
            if hint.search(ground_truth) or hint.search(answer):
                return compare(ground_truth, answer)
        except NotUnderstood:
            continue
    return None


def _settled(text: str) -> str:
    r"""Drop the decimal after an exact value: "\sqrt{2} \approx 1.41". Raises NotUnderstood when they differ."""
    parts = APPROXIMATELY.split(text)
    if len(parts) == 1:
        return text
    exact, near = parts[0].strip(), _NEAR.match(parts[-1].strip())
    value = constant(_valued(exact.rpartition("=")[2])) if len(parts) == 2 and near else None
    if near is None or value is None or mpmath.im(value) != 0:
        raise NotUnderstood(text[:80])
    exactly, written, unit_size = (
        as_fraction(value),
        Fraction(near.group(1)),
        Fraction(1, 10 ** len(near.group(2) or "")),
    )
    cut_off = abs(written) <= abs(exactly) < abs(written) + unit_size
    if 2 * abs(exactly - written) > unit_size and not cut_off:
        raise NotUnderstood(text[:80])
    return exact


def _understood(ground_truth: str) -> bool:
    """Return whether a ground truth can be read as a set, although not as a value."""
    for read_it in (read, condition_of, integer_sets.read_integer_set, congruence.read, periodic.read, builder.read):
        try:
            read_it(ground_truth)
        except (NotUnderstood, Undefined):
            continue
        return True
    return False


def equal(ground_truth: str, answer: str) -> Verdict:
    """Grade one pair: CORRECT, WRONG, or UNVERIFIABLE when the ground_truth cannot be parsed."""
    left, right = paired(prepared(ground_truth), prepared(answer))
    try:
        left = _settled(left)
    except NotUnderstood:
        return Verdict.UNVERIFIABLE
    try:
        right = _settled(right)
    except NotUnderstood:
        return Verdict.WRONG
    if restates(left, right):
        return Verdict.WRONG
    try:
        same = _same_region(left, right)
        for compare in (_same_solution, _same_family):
            same = compare(left, right) if same is None else same
        if same is None:
            same = same_form(left, right, _same_value)
    except NotUnderstood:
        return Verdict.WRONG if _understood(left) else Verdict.UNVERIFIABLE
    return Verdict.CORRECT if same else Verdict.WRONG
