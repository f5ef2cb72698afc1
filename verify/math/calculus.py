r"""Compares integrals, sums, products and limits, which our own grammar (`expression.py`) does not read, with SymPy.

LaTeX -> SymPy by latex2sympy2-extended (a grammar, no eval), loaded before a worker reports ready; equality by
structure, then by value with 60 digits and a relative tolerance of 1e-45, then by simplify. math-verify's own
comparison is not used: it rounds to six decimals and so takes 2^{-99} for 2^{-98}. Only text made of known commands
comes here, because the grammar stops at an unknown token and returns what it has.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from typing import Any

from verify.math.token import NotUnderstood

_DIGITS = 60
_POINTS = 6
_CALCULUS = re.compile(r"\\(?:int|iint|sum|prod|lim)(?![A-Za-z])")
_KNOWN = re.compile(
    r"^(?:\\(?:int|sum|prod|lim|to|infty|frac|sqrt|sin|cos|tan|ln|log|exp|pi|cdot|times|binom|rightarrow)(?![A-Za-z])"
    r"|[A-Za-z0-9\s+\-*/^_=(){},.!|])*$"
)


def is_calculus(text: str) -> bool:
    """Return whether a text holds an integral, sum, product or limit, which is for SymPy."""
    return _CALCULUS.search(text) is not None


_FIRST = (
    (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
    (r"\int_0^{\infty} e^{-x^2} dx", r"\sqrt{\pi}"),
    (r"\sum_{k=1}^{\infty} \frac{1}{k^2}", r"\frac{\pi^2}{6}"),
    (r"\sum_{k=0}^{n} \binom{n}{k}", "2^n"),
    (r"\lim_{x\to 0} \frac{\sin x}{x}", "1"),
)
"""one pair of each kind for which SymPy builds tables"""


def load() -> None:
    """Import SymPy and the grammar, and let them build their tables: the first of each kind takes up to 0.5 s."""
    for pair in _FIRST:
        same_calculus(*pair)


@lru_cache(maxsize=256)
def _tree(text: str) -> Any:
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy

    if not _KNOWN.match(text):
        raise NotUnderstood(text[:80])
    config = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
    try:
        tree = latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=config)
    except MemoryError:
        raise
    except Exception as error:  # the grammar raises many kinds; all mean the same
        raise NotUnderstood(text[:80]) from error
    if not isinstance(tree, sympy.Expr):
        raise NotUnderstood(text[:80])
    return tree.xreplace({number: sympy.Rational(str(number)) for number in tree.atoms(sympy.Float)})


def same_calculus(ground_truth: str, answer: str) -> bool:
    """Return whether two expressions are equal, of which at least one holds an integral, sum, product or limit.

    Raises NotUnderstood when one of them cannot be read.
    """
    import sympy

    for tree in (_tree(ground_truth), _tree(answer)):
        for limit in tree.atoms(sympy.Limit):
            inside, name, at, _ = limit.args
            if at.is_finite and sympy.limit(inside, name, at, "-") != sympy.limit(inside, name, at, "+"):
                raise NotUnderstood("a limit that differs from side to side")
    left, right = _tree(ground_truth).doit(), _tree(answer).doit()
    if left == right:
        return True
    names = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: str(symbol.name))
    dice = random.Random(7)
    agreed = 0
    for index in range(_POINTS if names else 1):
        sign = -1 if index % 2 else 1
        point = {name: sign * sympy.Float(dice.randint(101, 1201), _DIGITS + 10) / 997 for name in names}
        values = [sympy.N(side.subs(point), _DIGITS, maxn=400) for side in (left, right)]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        if abs(values[0] - values[1]) > max(abs(values[0]), abs(values[1])) * sympy.Float("1e-45"):
            return False
        agreed += 1
    return agreed > 0 or bool(sympy.simplify(left - right) == 0)
