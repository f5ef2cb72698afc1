r"""Computes exact values of plain arithmetic: integers, decimals, fractions, powers, factorials -> Fraction.

Own tokens and a small recursive-descent parser over a fixed grammar: no name is ever looked up, nothing is evaluated by
Python, and every intermediate result is bounded *before* it is computed, so 9^{9^{9^9}} costs microseconds.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 100_000
"""largest numerator or denominator that is computed, bits (about 30,000 decimal digits)"""
MAX_FACTORIAL = 2_000
MAX_DEPTH = 40


class TooLarge(Exception):
    """The text is arithmetic, but its value is beyond the bounds."""


class _NotArithmetic(Exception):
    """The text holds something that is not plain arithmetic."""


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<repeating>\d*\.\d*\\(?:overline|bar|dot)\{\d+\})
    | (?P<number>[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.?\d*(?:[eE][+-]?\d{1,6}(?![\w.]))?|\.\d+)
    | (?P<word>\\(?:frac|cdot|times|div|sqrt|binom)(?![A-Za-z]))
    | (?P<sign>[-+*/^!(){}\[\]])
    )""",
    re.VERBOSE,
)
_MIXED = re.compile(r"^(-?\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}$|^(-?\d+) +(\d+)/(\d+)$")
_SPACED = re.compile(r"^-?\d{1,3}(?: \d{3})+(?:\.\d+)?$")


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooLarge
    return value


def _divide(top: Fraction, bottom: Fraction) -> Fraction:
    if bottom == 0:
        raise _NotArithmetic
    return _bounded(top / bottom)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        root = _root(base, exponent.denominator)
        return _power(root, Fraction(exponent.numerator))
    count = exponent.numerator
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and bits * abs(count) > MAX_BITS:
        raise TooLarge
    if base == 0 and count <= 0:
        raise _NotArithmetic
    if abs(base) in (0, 1):
        return base if count % 2 else abs(base)
    return base**count


def _root(value: Fraction, degree: int) -> Fraction:
    """Return the exact square root of a non-negative rational. Raises _NotArithmetic when there is none."""
    if degree != 2 or value < 0:
        raise _NotArithmetic
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top != value.numerator or bottom * bottom != value.denominator:
        raise _NotArithmetic
    return Fraction(top, bottom)


def _factorial(value: Fraction, step: int = 1) -> Fraction:
    """Return n! or, with step 2, the double factorial n!!."""
    if value.denominator != 1 or value < 0:
        raise _NotArithmetic
    if value > MAX_FACTORIAL:
        raise TooLarge
    return _bounded(Fraction(math.prod(range(value.numerator, 1, -step))))


def _literal(text: str) -> Fraction:
    text = text.replace(",", "")
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_BITS // 4:
        raise TooLarge
    return _bounded(Fraction(text.rstrip(".") if not exponent else f"{mantissa.rstrip('.')}e{exponent}"))


def repeating(text: str) -> Fraction:
    whole, _, rest = text.partition(".")
    fixed, _, period = rest.partition("\\")
    period = period[period.index("{") + 1 : -1]
    scale = 10 ** len(fixed)
    return (
        Fraction(int(whole or 0))
        + Fraction(int(fixed or 0), scale)
        + Fraction(int(period), scale * (10 ** len(period) - 1))
    )


class _Parser:
    """sum := product (+|- product)*; product := power ((*|/) power | implicit)*; power := atom!* (^ power)?"""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _NotArithmetic
            self.tokens.append((str(match.lastgroup), match.group().strip()))
            position = match.end()
        self.at = 0
        self.depth = 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self) -> tuple[str, str]:
        if self.at >= len(self.tokens):
            raise _NotArithmetic
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, sign: str) -> None:
        if self.take()[1] != sign:
            raise _NotArithmetic

    def group(self, opening: str, closing: str) -> Fraction:
        self.expect(opening)
        value = self.sum()
        self.expect(closing)
        return value

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = self.take()[1]
            term = self.product()
            value = _bounded(value + term if sign == "+" else value - term)
        self.depth -= 1
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while True:
            sign = self.peek()
            if sign in ("*", "\\cdot", "\\times"):
                self.take()
                value = _bounded(value * self.signed())
            elif sign in ("/", "\\div"):
                self.take()
                value = _divide(value, self.signed())
            elif self.multiplies(sign):
                value = _bounded(value * self.power())
            else:
                return value

    def multiplies(self, sign: str) -> bool:
        """Whether the next token is a factor without a sign between: 2(3), 2\\sqrt{4}, (2)\\frac{1}{2}, 2!3!."""
        before = self.tokens[self.at - 1][1]
        return (
            sign in ("(", "\\sqrt")
            or (before == "!" and sign[:1].isdigit())
            or (sign == "\\frac" and before in (")", "}"))
        )

    def signed(self) -> Fraction:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take()[1] == "-"
        value = self.power()
        return -value if negative else value

    def power(self) -> Fraction:
        base = self.atom()
        while self.peek() == "!":
            self.take()
            double = self.peek() == "!"
            if double:
                self.take()
            base = _factorial(base, 2 if double else 1)
        if self.peek() != "^":
            return base
        self.take()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge
        exponent = self.group("{", "}") if self.peek() == "{" else self.signed()
        self.depth -= 1
        return _power(base, exponent)

    def atom(self) -> Fraction:
        if self.peek() == "(":
            return self.group("(", ")")
        if self.peek() == "{":
            return self.group("{", "}")
        kind, text = self.take()
        if kind == "number":
            return _literal(text)
        if kind == "repeating":
            return repeating(text)
        if text == "\\frac":
            return _divide(self.group("{", "}"), self.group("{", "}"))
        if text == "\\binom":
            top, bottom = self.group("{", "}"), self.group("{", "}")
            if top.denominator != 1 or bottom.denominator != 1 or not 0 <= bottom <= top:
                raise _NotArithmetic
            if top > MAX_FACTORIAL:
                raise TooLarge
            return Fraction(math.comb(top.numerator, bottom.numerator))
        if text == "\\sqrt" and self.peek() == "{":
            return _root(self.group("{", "}"), 2)
        raise _NotArithmetic


def exact_value(text: str) -> Fraction | None:
    r"""Return the exact value of normalised arithmetic, or None when it is not plain arithmetic.

    Mixed numbers ("2\frac{1}{4}", "2 1/4") and grouped digits ("1,000", "1 000") are numbers. Raises TooLarge when it
    is arithmetic whose value is beyond the bounds.
    """
    mixed = _MIXED.match(text)
    if mixed:
        whole, top, bottom = (int(ratio) for ratio in mixed.groups() if ratio is not None)
        if bottom == 0:
            return None
        ratio = Fraction(top, bottom)
        return whole - ratio if mixed.group().startswith("-") else whole + ratio
    if _SPACED.match(text):
        text = text.replace(" ", "")
    try:
        parser = _Parser(text)
        value = parser.sum()
    except _NotArithmetic:
        return None
    return value if parser.at == len(parser.tokens) else None
