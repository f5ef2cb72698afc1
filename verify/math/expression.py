r"""Parses LaTeX of one value to a small tree: own tokens, own Pratt parser, a fixed list of names, no evaluation.

It reads the whole text or refuses it: a prefix is never taken for the answer, which is what most LaTeX parsers do at an
unknown token. Trees are those of `tree.py`.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from verify.math.token import (
    DECORATIONS,
    GREEK,
    LOGARITHMS,
    OPAQUE,
    SEVERAL,
    TRIGONOMETRIC,
    UNARY,
    NotUnderstood,
    literal,
    tokens_of,
)
from verify.math.tree import Node, mentions, symbols

MAX_DEPTH = 60

_APPLIED = frozenset(("f", "g", "h", "F", "G", "\\phi", "\\varphi", "\\psi", "\\Phi", "\\Psi", "\\Omega", "\\Theta"))
_SIGNS = frozenset(("\\cdot", "\\times", "\\div")) | OPAQUE
_OPENERS = {"(": ")", "[": "]", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "\\lvert": "\\rvert"}
_ADJOINT = ("*", "\\dagger")
_DIFFERENTIALS = ("d", "\\partial", "\\Delta")
_CLOSING = frozenset((")", "]", "}", "\\rfloor", "\\rceil", "\\rvert", ",", ""))


class _Parser:
    """A Pratt parser with the precedences sum (10) < product (20) < sign (25) < power (30) < postfix (40)."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at, self.depth, self.bars = text, tokens_of(text), 0, 0, 0
        self.no_mixed = 0

    def fail(self) -> NotUnderstood:
        return NotUnderstood(self.text[:80])

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self) -> str:
        self.at += 1
        if self.at > len(self.tokens):
            raise self.fail()
        return self.tokens[self.at - 1]

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise self.fail()

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail()
        value = self.product()
        while self.peek() in ("+", "-"):
            sign, term = self.take(), self.product()
            value = ("+", value, term if sign == "+" else ("-", term))
        self.depth -= 1
        return value

    def starts_factor(self) -> bool:
        token = self.peek()
        if token == "|":
            return self.bars == 0
        return token not in _CLOSING and token not in "+-*/^_!'" and token not in _SIGNS

    def product(self) -> Node:
        value = self.signed()
        while True:
            token = self.peek()
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                value = _times(token, value, self.signed())
            elif token in ("/", "\\div"):
                self.take()
                value = ("/", value, self.signed())
            elif token in OPAQUE:
                self.take()
                value = ("call", "?" + token, value, self.signed())
            elif token == "\\bmod":
                self.take()
                value = ("call", "mod", value, self.signed())
            elif self.starts_factor():
                if token[0].isdigit() and self.tokens[self.at - 1] not in ("!", "i", ")"):
                    raise self.fail()  # "2 3" and "x2" are no products that anyone means
                value = ("*", value, self.power())
            else:
                return value

    def signed(self) -> Node:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        value = self.power()
        return ("-", value) if negative else value

    def power(self) -> Node:
        value = self.postfix(self.atom())
        if self.peek() != "^":
            return value
        self.take()
        if self.peek() == "\\circ":
            self.take()
            return ("*", value, ("/", ("const", "pi"), ("num", Fraction(180))))
        if self.peek() in _ADJOINT or (self.peek() == "{" and self.peek(1) in _ADJOINT and self.peek(2) == "}"):
            self.at += 1 if self.peek() != "{" else 3
            return ("call", "?adjoint", value)
        return self.postfix(("^", value, self.exponent()))

    def postfix(self, value: Node) -> Node:
        while self.peek() == "!":
            self.take()
            double = self.peek() == "!"
            if double:
                self.take()
            value = ("call", "factorial2" if double else "factorial", value)
        return value

    def exponent(self) -> Node:
        if self.peek() == "{":
            return self.group()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail()
        self.no_mixed += 1  # x^2\frac{1}{2} is no x^{5/2}
        value = self.signed()
        self.no_mixed -= 1
        self.depth -= 1
        return value

    def group(self) -> Node:
        self.expect("{")
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.bars = bars
        self.expect("}")
        return value

    def argument(self) -> Node:
        """Read one LaTeX argument: a group or a single token."""
        if self.peek() == "{":
            return self.group()
        token = self.take()
        if token[0].isdigit() or token.isalpha():
            return self.symbol(token) if token.isalpha() else ("num", literal(token))
        if token.startswith("\\"):
            self.at -= 1
            return self.atom()
        raise self.fail()

    def arguments(self, closing: str) -> list[Node]:
        bars, self.bars = self.bars, 0
        nodes = [self.sum()]
        while self.peek() == ",":
            self.take()
            nodes.append(self.sum())
        self.bars = bars
        self.expect(closing)
        return nodes

    def atom(self) -> Node:
        token = self.peek()
        if token == "{":
            return self.group()
        self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return self.mixed(("num", literal(token)))
        if token == "|" or token in _OPENERS:
            return self.enclosed(token)
        if token.isalpha():
            return self.symbol(token)
        if token.startswith("\\"):
            return self.command(token[1:])
        raise self.fail()

    def mixed(self, whole: Node) -> Node:
        r"""Read a mixed number: 2\frac{1}{3} is a sum."""
        mark = self.at
        if self.no_mixed or self.peek() != "\\frac" or whole[1].denominator != 1:
            return whole
        self.take()
        top, bottom = self.argument(), self.argument()
        plain = top[0] == "num" and bottom[0] == "num"
        if plain and 0 < top[1] < bottom[1] and self.peek() != "^":
            return ("+", whole, ("/", top, bottom))
        self.at = mark
        return whole

    def enclosed(self, token: str) -> Node:
        self.bars += token == "|"
        bars = self.bars
        if token != "|":
            self.bars = 0
        value = self.sum()
        self.expect("|" if token == "|" else _OPENERS[token])
        self.bars = bars - (token == "|")
        names = {"|": "abs", "\\lvert": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
        return ("call", names[token], value) if token in names else value

    def name_tail(self) -> str:
        """Read the subscripts and primes of a name, as written."""
        tail = ""
        while self.peek() in ("_", "'"):
            if self.take() == "'":
                tail += "'"
                continue
            start, level = self.at, 0
            while True:
                token = self.take()
                level += (token == "{") - (token == "}")
                if level <= 0:
                    break
            tail += "_" + "".join(part for part in self.tokens[start : self.at] if part not in "{}")
        return tail

    def symbol(self, name: str) -> Node:
        tail = self.name_tail()
        if name in ("C", "A") and tail[1:].isdigit() and self.peek() == "^":
            return self.chosen(name, tail)
        if not tail and name in ("e", "i"):
            return ("const", name)
        if name in _APPLIED or tail.endswith("'"):
            if self.peek() == "(":
                self.take()
                return ("call", "?" + name + tail, *self.arguments(")"))
        elif self.peek() == "(" and self.has_comma():
            self.take()
            nodes = self.arguments(")")
            if not tail and name in ("C", "P", "A") and len(nodes) == 2:
                return ("call", "binom" if name == "C" else "permutations", *nodes)
            return ("call", "?" + name + tail, *nodes)  # u(x, t)
        return ("sym", name + tail)

    def has_comma(self) -> bool:
        """Return whether the bracket that opens here holds several values."""
        level = 0
        for token in self.tokens[self.at :]:
            level += (token in "([{") - (token in ")]}")
            if level == 0:
                return False
            if token == "," and level == 1:
                return True
        return False

    def chosen(self, name: str, tail: str) -> Node:
        """Read C_5^2 and A_5^2, Chinese combinations and permutations; C_1^2 is the square of a constant."""
        mark = self.at
        self.take()
        taken = self.exponent()
        if taken[0] == "num" and taken[1] <= int(tail[1:]) and taken[1].denominator == 1:
            return ("call", "binom" if name == "C" else "permutations", ("num", Fraction(int(tail[1:]))), taken)
        self.at = mark
        return ("sym", name + tail)

    def command(self, name: str) -> Node:
        if name in ("pi", "infty"):
            return ("const", name)
        derivative = self.derivative() if name == "frac" else None
        if derivative is not None:
            return derivative
        if name in ("frac", "binom"):
            top, bottom = self.argument(), self.argument()
            return ("/", top, bottom) if name == "frac" else ("call", "binom", top, bottom)
        if name == "sqrt":
            return self.root()
        if name in UNARY and name not in GREEK:
            return self.function(name)
        if name in SEVERAL and self.peek() == "(":
            self.take()
            return ("call", name, *self.arguments(")"))
        if name in DECORATIONS:
            self.at -= 1
            return self.decorated()
        if name in GREEK:
            return self.symbol("\\" + name)
        raise self.fail()

    def derivative(self) -> Node | None:
        r"""Read \frac{dy}{dx} and the like as names, not quotients; None for other fractions."""
        if self.peek() != "{" or self.peek(1) not in _DIFFERENTIALS:
            return None
        sign, end = self.peek(1), self.at
        for _ in range(2):
            level = 0
            while end < len(self.tokens):
                level += (self.tokens[end] == "{") - (self.tokens[end] == "}")
                end += 1
                if level == 0:
                    break
        inside = self.tokens[self.at : end]
        bottom = inside.index("}") + 1
        while bottom < len(inside) and inside[bottom] != "{":
            bottom += 1
        if inside[bottom + 1 : bottom + 2] != [sign]:
            return None
        self.at = end
        return ("sym", "\\frac" + "".join(inside))

    def decorated(self) -> Node:
        r"""Read \hat{x} as a name, and \overline{2+3i} as a conjugate."""
        start = self.at
        name, inside = self.take(), self.argument()
        if name == "\\overline" and mentions(inside, "const", "i") and not symbols(inside):
            return ("call", "conj", inside)
        marked = self.tokens[start + 1 : self.at]
        marked = marked[1:-1] if marked[0] == "{" else marked  # \hat\theta is \hat{\theta}
        return ("sym", f"{name}{{{''.join(marked)}}}{self.name_tail()}")

    def root(self) -> Node:
        degree: Node = ("num", Fraction(2))
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            self.expect("]")
        if self.peek() == "(":
            self.take()
            (inside,) = self.arguments(")")
            return ("call", "root", inside, degree)
        return ("call", "root", self.argument(), degree)

    def function(self, name: str) -> Node:
        base = exponent = None
        while self.peek() in ("_", "^"):
            if self.take() == "_":
                base = self.argument()
            else:
                exponent = self.exponent() if self.peek() == "{" else self.argument()
        if self.peek() == "(":
            self.take()
            inside = self.arguments(")")
            if len(inside) != 1:
                raise self.fail()
            argument = inside[0]
        else:
            argument = self.bare_argument(name)
        if exponent == ("-", ("num", Fraction(1))) and name in TRIGONOMETRIC:
            name, exponent = ("ar" if name.endswith("h") else "arc") + name, None
        call: Node = ("call", name, argument) if base is None else ("call", name, argument, base)
        return call if exponent is None else ("^", call, exponent)

    def bare_argument(self, name: str) -> Node:
        r"""Read the argument of \sin 2x, \ln x^2, \tan\frac{\pi}{3}: factors up to the next sign, function, bracket."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail()
        value = self.signed()
        self.depth -= 1
        while self.starts_factor() and not self.starts_function():
            if self.peek() in _OPENERS or self.peek()[0].isdigit():
                break
            value = ("*", value, self.power())
        if name not in LOGARITHMS and self.peek() == "/" and self.peek(1)[:1].isdigit():
            self.take()
            value = ("/", value, self.power())
        return value

    def starts_function(self) -> bool:
        token = self.peek()
        return token.startswith("\\") and token[1:] in UNARY


def _times(sign: str, left: Node, right: Node) -> Node:
    """Return a product; of two vectors the cross or the dot product, which are functions of their own."""
    if all(part[0] == "sym" and str(part[1]).startswith(("\\vec", "\\overrightarrow")) for part in (left, right)):
        return ("call", "?cross", left, right) if sign == "\\times" else ("call", "?dot", *sorted((left, right)))
    return ("*", left, right)


@lru_cache(maxsize=2048)
def parse(text: str) -> Node:
    """Parse a normalised expression as a whole. Raises NotUnderstood."""
    parser = _Parser(text)
    if not parser.tokens:
        raise NotUnderstood(text)
    value = parser.sum()
    if parser.at != len(parser.tokens):
        raise NotUnderstood(text[:80])
    return value
