r"""Splits LaTeX expressions into tokens (numbers, commands, names, signs), and lists the names that are known.

Letters in a row are known names or one symbol each; capitals in a row ("AB") are one symbol.
"""

from __future__ import annotations

import re
from fractions import Fraction

from verify.math.number import repeating

MAX_TOKENS = 300

_TRIGONOMETRIC_NAMES = "sin cos tan cot sec csc sinh cosh tanh coth"
_INVERSE_NAMES = "arcsin arccos arctan arccot arcsec arccsc arsinh arcosh artanh"
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar aleph nabla partial "
    "imath jmath wp Upsilon Pi angle triangle perp parallel"
)
_DECORATION_NAMES = "overline bar hat vec tilde dot ddot mathbb mathcal mathfrak mathscr widehat widetilde"
TRIGONOMETRIC = frozenset(_TRIGONOMETRIC_NAMES.split())
INVERSE = frozenset(_INVERSE_NAMES.split())
_OTHER_NAMES = "exp cis Re Im arg det tr sgn deg dim ker"
LOGARITHMS = frozenset(("ln", "log", "lg"))
UNARY = TRIGONOMETRIC | INVERSE | LOGARITHMS | set(_OTHER_NAMES.split())
SEVERAL = frozenset(("max", "min", "gcd", "lcm", "Gamma", "zeta", "erf"))
_SPELLED = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "arctg": "arctan", "tg": "tan", "ctg": "cot", "cosec": "csc",
    "sqrt": "sqrt", "pi": "pi", "binom": "binom", "choose": "choose", "infty": "infty", "frac": "frac", "mod": "bmod",
    "log10": "lg",
}  # fmt: skip
_LETTER_NAMES = {name: name for name in (UNARY | SEVERAL) - {"arg", "tr", "deg", "dim", "ker"}} | _SPELLED
OPAQUE = frozenset(("\\oplus", "\\otimes", "\\circ", "\\rtimes", "\\ltimes", "\\odot", "\\ominus", "\\bullet"))
"""operations of which only the name is known"""
GREEK = frozenset(_GREEK_NAMES.split())
DECORATIONS = frozenset(_DECORATION_NAMES.split())
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d*\.\d*\\overline\{\d{1,30}\}|[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.?\d*(?:[eE][+-]?\d{1,5}(?![\w.]))?|\.\d+)"
    r"|(?P<command>\\[A-Za-z]+)|(?P<capitals>[A-Z]{2,}(?![a-z]))|(?P<letters>[A-Za-z]+)|(?P<sign>[-+*/^_!(){}\[\]|,']))"
)


class NotUnderstood(Exception):
    """The text as a whole is not an expression that the parser knows."""


def tokens_of(text: str) -> list[str]:
    """Return all tokens of an expression. Raises NotUnderstood at the first character that begins none."""
    tokens: list[str] = []
    text = text.strip()
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(tokens) > MAX_TOKENS:
            raise NotUnderstood(text[:80])
        position = match.end()
        kind, token = match.lastgroup, match.group().strip()
        if kind == "letters":
            tokens += _split_letters(token)
        else:
            tokens.append(token)
    return tokens


def _split_letters(run: str) -> list[str]:
    """Split letters in a row into known names, else one symbol per letter. Raises NotUnderstood for a long word."""
    parts: list[str] = []
    unknown = 0
    while run:
        name = next((run[:size] for size in range(min(6, len(run)), 1, -1) if run[:size] in _LETTER_NAMES), "")
        if name:
            parts.append("\\" + _LETTER_NAMES[name])
            run, unknown = run[len(name) :], 0
            continue
        parts.append(run[0])
        run, unknown = run[1:], unknown + 1
        if unknown > 4:
            raise NotUnderstood(run)
    return parts


def literal(token: str) -> Fraction:
    """Return the exact value of a number token."""
    if token.endswith("}"):
        return repeating(token)
    return Fraction(token.replace(",", "").rstrip(".").replace(".e", "e"))
