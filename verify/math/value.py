r"""Computes values of expression trees with mpmath, and compares two trees by their values.

Every number is bounded before it is computed: powers and exponentials whose result would have more than 20,000 bits,
factorials above 3,000 and the like raise Undefined. Equality is always *relative*: two values agree when they differ by
less than 1e-40 of their size, and once more with far more digits, so 2^{-99} is not 2^{-98} and \pi + 10^{-60} is not
\pi. Where only rounding noise is left of a difference, more digits make it shrink, and it counts as zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import mpmath

from verify.math.token import INVERSE
from verify.math.tree import Node, mentions, symbols

DIGITS = 60
MORE_DIGITS = 1_500
"""digits of the second comparison of constants"""
MAX_BITS = 4_900
MAX_FACTORIAL = 3_000
_POINTS = 6
_LEAST_POINTS = 3
_MP = mpmath.mp


class Undefined(Exception):
    """There is no finite value within the bounds at this point."""


def _size(value: Any) -> int:
    """Return log2 of the magnitude, rounded up; -1 where that is not finite."""
    magnitude = _MP.mag(value)
    return int(magnitude) if mpmath.isfinite(magnitude) else -1


def _checked(value: Any) -> Any:
    if not mpmath.isfinite(value) or (value != 0 and not -4 * MAX_BITS < _size(value) <= MAX_BITS):
        raise Undefined  # rounding noise may be small; a power that small is refused before it is computed
    return value


def _power(base: Any, exponent: Any) -> Any:
    if base == 0:
        if exponent == 0 or mpmath.re(exponent) <= 0:
            raise Undefined
        return _MP.mpf(0)
    if _size(exponent) > 64:
        raise Undefined
    growth = abs(exponent) * (abs(_MP.log(abs(base), 2)) + (8 if isinstance(exponent, mpmath.mpc) else 0))
    if growth > MAX_BITS:
        raise Undefined
    if mpmath.im(exponent) == 0 and mpmath.isint(mpmath.re(exponent)):
        return base ** int(mpmath.re(exponent))
    return _MP.power(base, exponent)


def _root(value: Any, degree: Any) -> Any:
    if mpmath.im(degree) != 0 or not mpmath.isint(mpmath.re(degree)) or not 0 < mpmath.re(degree) < 10_000:
        if degree == 0:
            raise Undefined
        return _power(value, 1 / degree)
    count = int(mpmath.re(degree))
    if mpmath.im(value) == 0 and mpmath.re(value) < 0 and count % 2:
        return -_MP.root(-mpmath.re(value), count)
    return _MP.root(value, count)


def _logarithm(value: Any, base: Any = None) -> Any:
    if value == 0 or base == 0 or base == 1:
        raise Undefined
    return _MP.log(value) if base is None else _MP.log(value) / _MP.log(base)


def _bounded(function: Callable[..., Any], limit: int, least: float | None = None) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        if any(abs(value) > limit or (least is not None and mpmath.re(value) < least) for value in values):
            raise Undefined
        return function(*values)

    return call


def _real_part_only(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(value: Any) -> Any:
        if mpmath.im(value) != 0:
            raise Undefined
        nearest = _MP.nint(value)
        if abs(value - nearest) < _MP.mpf(10) ** (-_MP.dps // 2):
            value = nearest
        return function(value)

    return call


def _integers(function: Callable[..., int]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        if any(mpmath.im(value) != 0 or not mpmath.isint(value) or abs(value) > 10**15 for value in values):
            raise Undefined
        return _MP.mpf(function(*(int(value) for value in values)))

    return call


def _mod(value: Any, modulus: Any) -> Any:
    if modulus == 0:
        raise Undefined
    return value - modulus * _MP.floor(value / modulus)


def _permutations(count: Any, taken: Any) -> Any:
    return _MP.gamma(count + 1) / _MP.gamma(count - taken + 1)


def _opaque(name: str, values: tuple[Any, ...]) -> Any:
    """Return the value of an unknown function: smooth, generic, the same for the same name."""
    seed = random.Random(name).randint(1, 10**6)
    total = _MP.mpf(seed) / 997
    for index, value in enumerate(values):
        if _size(value) > 200:
            raise Undefined
        total = total + value / (7 + index + seed % 11)  # else it would be periodic
        total = total + _MP.sin(value * (3 + index) + seed) + _MP.cos(value * (1 + seed % 7) / (2 + index))
    return total


def _functions() -> dict[str, Callable[..., Any]]:
    import math

    table: dict[str, Callable[..., Any]] = {
        "root": _root, "ln": _logarithm, "abs": abs, "floor": _real_part_only(_MP.floor),
        "log": lambda value, base=None: _logarithm(value, 10 if base is None else base),
        "lg": lambda value: _logarithm(value, 10), "ceil": _real_part_only(_MP.ceil), "Re": mpmath.re, "Im": mpmath.im,
        "cis": lambda value: _power(_MP.e, _MP.mpc(0, 1) * value),
        "exp": lambda value: _power(_MP.e, value), "factorial": _bounded(_MP.factorial, MAX_FACTORIAL),
        "factorial2": _bounded(_MP.fac2, MAX_FACTORIAL), "binom": _bounded(_MP.binomial, 10**5),
        "permutations": _bounded(_permutations, MAX_FACTORIAL), "Gamma": _bounded(_MP.gamma, MAX_FACTORIAL),
        "zeta": _bounded(_MP.zeta, 50, 1.0001), "erf": _bounded(_MP.erf, 25), "mod": _mod, "max": max, "min": min,
        "gcd": _integers(math.gcd), "lcm": _integers(math.lcm), "sgn": mpmath.sign, "arg": mpmath.arg,
        "conj": mpmath.conj, "arsinh": _MP.asinh, "arcosh": _MP.acosh, "artanh": _MP.atanh,
    }  # fmt: skip
    for name in ["sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth"]:
        table[name] = _bounded(getattr(_MP, name), 500 if name.endswith("h") else 10**300)
    for name in INVERSE:
        if name.startswith("arc") and not name.endswith("h"):
            table[name] = getattr(_MP, "a" + name.removeprefix("arc"))
    return table


_FUNCTIONS = _functions()


def evaluate(node: Node, point: dict[str, Any]) -> Any:
    """Return the value of a tree at a point with the working precision of mpmath. Raises Undefined."""
    kind = node[0]
    if kind == "num":
        return _MP.mpf(node[1].numerator) / node[1].denominator
    if kind == "sym":
        return point[node[1]]
    if kind == "const":
        if node[1] == "infty":
            raise Undefined
        return {"pi": +_MP.pi, "e": +_MP.e, "i": _MP.mpc(0, 1)}[node[1]]
    if kind == "-":
        return -evaluate(node[1], point)
    if kind == "call":
        values = tuple(evaluate(part, point) for part in node[2:])
        if node[1].startswith("?") or node[1] not in _FUNCTIONS:
            return _opaque(node[1], values)
        return _checked(_FUNCTIONS[node[1]](*values))
    left, right = evaluate(node[1], point), evaluate(node[2], point)
    if kind == "+":
        return _checked(left + right)
    if kind == "*":
        return _checked(left * right)
    if kind == "/":
        if right == 0:
            raise Undefined
        return _checked(left / right)
    return _checked(_power(left, right))


def value_at(node: Node, point: dict[str, Any], digits: int = DIGITS) -> Any:
    """As `evaluate` with `digits` digits. Raises Undefined for every arithmetic failure."""
    try:
        with _MP.workdps(digits + 20):
            return evaluate(node, point)
    except (ArithmeticError, ValueError, TypeError, OverflowError, KeyError, mpmath.libmp.NoConvergence) as error:
        raise Undefined from error


def constant(node: Node, digits: int = DIGITS) -> Any:
    """Return the value of a tree without variables, or None."""
    if symbols(node):
        return None
    try:
        return value_at(node, {}, digits)
    except Undefined:
        return None


def _agree(left: Node, right: Node, point: dict[str, Any], digits: int) -> bool:
    left_value, right_value = value_at(left, point, digits), value_at(right, point, digits)
    with _MP.workdps(digits + 20):
        gap, scale = abs(left_value - right_value), max(abs(left_value), abs(right_value))
        if gap <= scale * _MP.mpf(10) ** (20 - digits):
            return True
        if gap > _MP.mpf(10) ** (10 - digits):
            return False
    # both tiny: rounding noise shrinks with more digits, a real difference does not
    again = abs(value_at(left, point, 2 * digits) - value_at(right, point, 2 * digits))
    return bool(again < gap * _MP.mpf(10) ** (-digits // 2))


def is_real(value: Any) -> bool:
    """Return whether a value is real up to rounding noise."""
    return bool(abs(mpmath.im(value)) <= abs(mpmath.re(value)) * _MP.mpf(10) ** (-DIGITS // 2))


def sample_points(
    names: list[str], whole: frozenset[str] = frozenset(), stepped: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the points that `same_value` tries: reproducible random ones, small (towers of powers stay finite), some
    negative, some larger.

    Steps (floor and ceiling) need larger ones, or all their values are 0. No point is a simple fraction.
    """
    dice = random.Random(7)
    odd = _MP.sqrt(2) / 2**31
    for index in range(4 * _POINTS):
        low, high = ((101, 1201), (-1201, 1201), (101, 1201), (1001, 7999))[index % 4]
        if stepped:
            low, high = -40_000, 40_000
        yield {
            name: _MP.mpf(dice.randint(1, 40))
            if name in whole
            else _MP.mpf((dice.randint(low, high) or 1) * 2**20 + dice.randint(1, 2**20)) / 2**30 + odd
            for name in names
        }


def _alternates(node: Node) -> frozenset[str]:
    """Return the variables in the exponent of a negative number: they mean integers, as n in (-1)^n."""
    exponents: frozenset[str] = frozenset()
    if node[0] == "^" and node[1][0] == "-" and node[1][1][0] == "num":
        exponents = symbols(node[2])
    return exponents.union(*(_alternates(part) for part in node[1:] if isinstance(part, tuple)))


_KINKED = ("abs", "max", "min", "sgn", "floor", "ceil", "mod")


def _kinks(node: Node) -> bool:
    """Return whether a tree has corners or steps, so that it may follow different formulas in different places."""
    if node[0] == "call" and node[1] in _KINKED:
        return bool(symbols(node))
    if node[0] == "call" and node[1] == "root" and node[3] == ("num", Fraction(2)):
        return _squares(node[2])
    return any(_kinks(part) for part in node[1:] if isinstance(part, tuple))


def _squares(node: Node) -> bool:
    """Return whether a variable stands under a power."""
    if node[0] == "^" and symbols(node[1]):
        return True
    return any(_squares(part) for part in node[1:] if isinstance(part, tuple))


def _numbers(node: Node) -> frozenset[Fraction]:
    if node[0] == "num":
        return frozenset((node[1],))
    return frozenset().union(*(_numbers(part) for part in node[1:] if isinstance(part, tuple)))


def _agree_far(left: Node, right: Node, names: list[str]) -> bool:
    """Whether two trees with corners agree far out and around every number in them, wherever both have a real value."""
    marks = {Fraction(size) for size in (3, 30, 300)} | {abs(number) for number in _numbers(left) | _numbers(right)}
    for mark in sorted(marks)[:12]:
        beside = Fraction(1, 7)
        for first in (-2 * mark - 1, -mark - beside, -mark + beside, mark - beside, 2 * mark + 1):
            point = {name: _MP.mpf(first.numerator) / first.denominator + index for index, name in enumerate(names)}
            try:
                values = value_at(left, point), value_at(right, point)
                if all(is_real(value) for value in values) and not _agree(left, right, point, DIGITS):
                    return False
            except Undefined:
                continue
    return True


def same_value(left: Node, right: Node) -> bool:
    """True when two trees are equal at every point tried, relatively; constants are compared twice."""
    if left == right:
        return True
    names = sorted(symbols(left) | symbols(right))
    if not names:
        try:
            return _agree(left, right, {}, DIGITS) and _agree(left, right, {}, MORE_DIGITS)
        except Undefined:
            return False
    whole = _alternates(left) | _alternates(right)
    if (_kinks(left) or _kinks(right)) and not _agree_far(left, right, names):
        return False
    complex_meant = mentions(left, "const", "i") or mentions(right, "const", "i")
    real, other = 0, []
    stepped = any(mentions(tree, "call", name) for tree in (left, right) for name in ("floor", "ceil", "mod"))
    for point in sample_points(names, whole, stepped):
        try:
            values = value_at(left, point), value_at(right, point)
            if not complex_meant and not all(is_real(value) for value in values):
                other.append(point)  # 2 ln x and ln x^2 for x < 0: nobody means the complex logarithm
                continue
            if not _agree(left, right, point, DIGITS):
                return False
        except Undefined:
            continue
        real += 1
        if real == _POINTS:
            return _agree_again(left, right, point)
    if real >= _LEAST_POINTS:
        return True
    return real == 0 and len(other) >= _LEAST_POINTS and all(_agree(left, right, point, DIGITS) for point in other)


def _agree_again(left: Node, right: Node, point: dict[str, Any]) -> bool:
    try:
        return _agree(left, right, point, 4 * DIGITS)
    except Undefined:
        return False


def as_fraction(value: Any) -> Fraction:
    """Return a real mpmath value as a fraction, exactly as far as it was computed."""
    sign, mantissa, exponent, _ = mpmath.mpf(mpmath.re(value))._mpf_
    fraction = Fraction(int(mantissa)) * (Fraction(2) ** int(exponent))
    return -fraction if sign else fraction
