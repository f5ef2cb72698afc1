r"""Equality of expressions, equations and inequalities by SymPy. Runs only inside worker processes.

LaTeX -> SymPy by latex2sympy2-extended (a grammar, no eval); equality by our own rules, because math-verify rounds to
six decimals and so takes 2^{-99} for 2^{-98}: structural equality, then values at random points with 50 digits and a
*relative* tolerance of 1e-30, then simplify. What it does not do: limit its own time or memory (`pool.py` and
`worker.py` do). Who calls this: `worker.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from sympy.core.relational import Equality, Relational, Unequality

from shared.types import Verdict
from verify.normal import normalise
from verify.structure import same_form
from verify.symbolic import SIGNIFICANT_DIGITS, rounds_to, same_scalar

_DIGITS = 50
_TOLERANCE = sympy.Float("1e-30", _DIGITS)
_POINTS = 3
_MANY_POINTS = 6
_DECIMAL = re.compile(r"^-?\d*\.\d+$")
_PLAIN_CONFIG = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")


class NotUnderstood(Exception):
    """The text is no expression that the parser knows as a whole."""


@lru_cache(maxsize=512)
def parse(text: str) -> Any:
    """Parse normalised LaTeX; raises NotUnderstood. Letters are real symbols unless i is one of them."""
    spelled = re.sub(r"(\d|\))\s*\^\\circ", r"\1 \\cdot \\frac{\\pi}{180}", text)
    spelled = re.sub(r"\\text\s*\{[^{}]*\}", " ", spelled)
    spelled = re.sub(r"(?<![A-Za-z\\])(sqrt|sin|cos|tan|ln|log|pi)(?![A-Za-z])", r"\\\1 ", spelled)
    spelled = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", spelled)
    imaginary = re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])", spelled) is not None
    try:
        tree = latex2sympy(spelled, is_real=not imaginary, convert_degrees=False, normalization_config=_PLAIN_CONFIG)
    except MemoryError:
        raise
    except Exception as error:  # the grammar raises many kinds; all mean the same
        raise NotUnderstood(text) from error
    if tree is None or not isinstance(tree, (sympy.Basic, sympy.MatrixBase)):
        raise NotUnderstood(text)
    if imaginary:
        tree = tree.subs({symbol: sympy.I for symbol in tree.free_symbols if symbol.name == "i"})
    # a decimal literal is an exact number: as a Float it would carry binary noise into the comparison
    return tree.xreplace({number: sympy.Rational(str(number)) for number in tree.atoms(sympy.Float)})


def _value(expression: Any) -> Any:
    """Complex value with 50 digits, or None where there is none."""
    value = sympy.N(expression, _DIGITS, maxn=400)
    if value.has(sympy.nan, sympy.zoo, sympy.oo) or value.free_symbols or not value.is_number:
        return None
    parts = value.as_real_imag()
    return value if all(part.is_Float or part.is_Rational for part in parts) else None


def _close(left: Any, right: Any) -> bool:
    scale = max(abs(left), abs(right))
    return bool(scale == 0 or abs(left - right) <= _TOLERANCE * scale)


def same_expression(left: Any, right: Any) -> bool:
    """Equality of two expressions: structure, then points, then simplify."""
    if left == right:
        return True
    if left.has(sympy.oo, sympy.zoo, sympy.nan) or right.has(sympy.oo, sympy.zoo, sympy.nan):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: str(symbol.name))
    if not symbols:
        values = _value(left), _value(right)
        return None not in values and _close(*values)
    agreed = 0
    for point in _points(symbols):
        values = _value(left.subs(point)), _value(right.subs(point))
        if None in values:
            continue
        if min(point.values()) < 0 and not all(value.is_real for value in values):
            continue  # 2 ln x and ln x^2: nobody means the complex logarithm
        if not _close(*values):
            return False
        agreed += 1
        if agreed == _MANY_POINTS:
            return True
    return agreed >= _POINTS and bool(sympy.simplify(left - right) == 0)


def _points(symbols: list[Any]) -> Iterator[dict[Any, Any]]:
    """Reproducible random values: mostly small (towers of powers stay finite), some negative, some larger.

    As 60-digit floats: SymPy would take exact roots of exact rationals, and x^{x^2} costs it a minute.
    """
    dice = random.Random(7)
    for index in range(4 * _MANY_POINTS):
        low, high = ((101, 1201), (-1201, 1201), (101, 1201), (1001, 4999))[index % 4]
        yield {symbol: sympy.Float(dice.randint(low, high) or 1, _DIGITS + 10) / 997 for symbol in symbols}


def _same_relation(left: Any, right: Any) -> bool:
    """Equations are equal up to a constant factor, inequalities up to a positive one (or a mirrored sign)."""
    if isinstance(left, (Equality, Unequality)) or isinstance(right, (Equality, Unequality)):
        if left.func is not right.func:
            return False
        return _constant_ratio(left.lhs - left.rhs, right.lhs - right.rhs) is not None
    mirrored = left.reversed
    for candidate in (left, mirrored):
        if candidate.func is right.func:
            ratio = _constant_ratio(candidate.lhs - candidate.rhs, right.lhs - right.rhs)
            if ratio is not None and ratio.is_positive:
                return True
    negated = type(left)(-left.lhs, -left.rhs, evaluate=False).reversed if left.is_Relational else None
    return bool(negated is not None and negated.func is right.func and negated == right)


def _constant_ratio(left: Any, right: Any) -> Any:
    if left == 0 or right == 0:
        return sympy.Integer(1) if left == right else None
    if left.free_symbols != right.free_symbols:
        return None
    ratio = sympy.simplify(left / right)
    return ratio if not ratio.free_symbols and ratio.is_real and ratio != 0 else None


def same_tree(left: Any, right: Any) -> bool:
    """Compare two parsed answers by type."""
    if isinstance(left, sympy.MatrixBase) or isinstance(right, sympy.MatrixBase):
        return (
            isinstance(left, sympy.MatrixBase)
            and isinstance(right, sympy.MatrixBase)
            and left.shape == right.shape
            and all(same_expression(one, other) for one, other in zip(left, right, strict=True))
        )
    if isinstance(left, Relational) and isinstance(right, Relational):
        return _same_relation(left, right)
    if isinstance(left, sympy.And) and isinstance(right, sympy.And) and len(left.args) == len(right.args):
        rest = list(right.args)
        for one in left.args:
            partner = next((other for other in rest if same_tree(one, other)), None)
            if partner is None:
                return False
            rest.remove(partner)
        return True
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return same_expression(left, right)
    return bool(type(left) is type(right) and left == right)


def _same_value(gold: str, answer: str) -> bool | None:
    """Items: cheap rules first, then trees. Raises NotUnderstood only for the gold."""
    cheap = same_scalar(gold, answer)
    if cheap is not None:
        return cheap
    if "=" in gold and "=" not in answer:
        gold = gold.partition("=")[2].strip()
    if "=" in answer and "=" not in gold:
        answer = answer.partition("=")[2].strip()
    true_tree = parse(gold)
    try:
        tree = parse(answer)
    except NotUnderstood:
        return False
    if same_tree(true_tree, tree):
        return True
    if _DECIMAL.match(answer) and not _DECIMAL.match(gold) and isinstance(true_tree, sympy.Expr):
        digits = answer.lstrip("-").replace(".", "").lstrip("0")
        value = None if true_tree.free_symbols else _value(true_tree)
        if value is not None and value.is_real and len(digits) >= SIGNIFICANT_DIGITS:
            return rounds_to(Fraction(answer), len(answer.partition(".")[2]), Fraction(str(value)))
    return False


def equal(gold: str, answer: str) -> Verdict:
    """Grade one pair: CORRECT, WRONG, or UNVERIFIABLE when the gold cannot be parsed."""
    try:
        same = same_form(normalise(gold), normalise(answer), _same_value)
    except NotUnderstood:
        return Verdict.UNVERIFIABLE
    return Verdict.CORRECT if same else Verdict.WRONG
