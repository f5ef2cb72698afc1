r"""Compares two answers as far as exact arithmetic, units, words and outer form can decide.

Order: size limits; equal spelling; form by form (`structure.py`) with exact numbers (`quantity.py`) and words
(`words.py`).
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache

from shared.types import Verdict
from verify.extract import within_limits
from verify.math.chinese import HAN_NAMES
from verify.math.english import NOUNS
from verify.math.expression import parse
from verify.math.normal import normalise, spelling_key
from verify.math.number import TooLarge, exact_value
from verify.math.pair import paired
from verify.math.quantity import Quantity, in_base_units, quantity, without_unit
from verify.math.structure import same_form
from verify.math.token import GREEK, NotUnderstood
from verify.math.tree import Node
from verify.math.unit import is_forgivable
from verify.math.words import as_set, choices, clock, same_choice, same_words, words_of

SIGNIFICANT_DIGITS = 6
"""a decimal with at least so many significant digits may stand for an exact non-decimal number"""

CUT_DIGITS = 8
"""with at least so many it may also be cut off instead of rounded: 3.1415926535"""

_HUGE = re.compile(r"\d{5,}!|[\d)}]\^\s*\{?-?\d{5,}|\d\^\s*\{[^{}]*\d\s*\^|\d\^\s*\(?\d+\^|!{2,}")
_PRIMES = (10**18 + 9, 2**64 - 59)
MAX_REMAINDER_FACTORIAL = 5_000
"""larger factorials are equal only when they are written alike"""
_SUM = re.compile(r"\d\s*[-+*/]|[-+*/^]\s*\d|\\frac|\\sqrt")
_BASE = re.compile(r"\d_\{?\d")
_BASE_NAMES = "two three four five six seven eight nine ten eleven twelve"
_BASE_WORDS = {name: base for base, name in enumerate(_BASE_NAMES.split(), start=2)} | {"sixteen": 16}
_BASES = "|".join(_BASE_WORDS)
_BASED = re.compile(
    r"^(-?)\(?([0-9A-Z ]*\d[0-9A-Z ]*?)\)?\s*"
    rf"(?:_\s*\{{?|\(?\s*base\s*)\s*(?:\\text\s*\{{)?({_BASES}|\d{{1,2}})\}}*\)?$"
)
_PLAIN_TEXT = re.compile(r"^\\text\s*\{\s*([0-9A-Z ]+)\s*\}(?=\s*_)")
_NAME = re.compile(
    rf"^(?:m?\s*\\angle\s*[A-Z]{{1,3}}|(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK - {'perp', 'parallel'}))}))"
    rf"(?:_\{{?\w+\}}?)?'?(?:(?:\^\{{-1\}})?\([A-Za-z, ]+\)|(?<=[A-Zfgh])\^\{{-1\}})?|\|?[A-Z]{{2,3}}\|?"
    rf"|(?:\\text\s*\{{\s*)?(?i:{NOUNS}|max|min|rate)(?:\s*\}})?|{HAN_NAMES})$"
)
_ANSWER_NAME = re.compile(r"(?:\\text\s*\{\s*)?(?:answer|result)|答案", re.IGNORECASE)
_REGION = re.compile(
    r"[<>|]|\\\{\s*[A-Za-z]\s*(?:\\in[^:{}]*)?:|\\(?:leq|geq|neq|cup|cap|setminus|backslash|in|mid|lor|land)(?![A-Za-z])"
    r"|\\mathbb|\\equiv|\\bigcup|\(mod |且|或"
)
_PARAMETER = re.compile(
    r"[,;\s]*\(?\s*(?:\\text\s*\{\s*,?\s*(?:for|where|with)?\s*(?:any|all|each)?\s*(?:integers?)?\s*\}|for|where|with)?"
    r"\s*([a-zA-Z])\s*\\in\s*\\mathbb\{Z\}\s*\)?$"
)
_WITH_COMMA = re.compile(r"(-?\s*(?:0|[1-9]\d*(?=,(?!\d{3}(?!\d)))|[1-9]\d{3,}(?=,))),(\d+(?![\d,;]).*)$", re.DOTALL)
APPROXIMATELY = re.compile(r"\\(?:approx|simeq|thickapprox|doteq)(?![A-Za-z])")


@lru_cache(maxsize=8192)
def prepared(text: str) -> str:
    r"""Return normalised text with "x \approx 0.33" as an equation and with integer parameters called n."""
    text = normalise(text)
    if len(text) < 60 and not text.isdigit():
        meant = as_set(text)
        if meant is not None:
            return meant
    if "\\" not in text:
        return text
    parts = APPROXIMATELY.split(text)
    if len(parts) == 2 and "," not in text:
        before, after = parts[0].strip(), parts[1].strip()
        if not before or _NAME.match(before):
            text = f"{before}={after}" if before else after
    parameter = _PARAMETER.search(text)
    if parameter and "\\mathbb{Z}" in text and text[: parameter.start()].strip():
        name = parameter.group(1)
        text = text[: parameter.start()].strip()
        if name != "n" and re.search(r"(?<![A-Za-z\\])n(?![A-Za-z])", text):
            return f"{text}, {name} \\in Z"
        if re.search(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])", text):
            text = re.sub(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])", "n", text) + ", n \\in Z"
    return text


def _same_number(ground_truth: Quantity, answer: Quantity) -> bool:
    if (ground_truth.percent and answer.unit) or (answer.percent and ground_truth.unit):
        return False
    left, right = ground_truth.value, answer.value
    if ground_truth.percent != answer.percent and left == right:
        return True  # the percent sign was dropped as a unit, on either side
    if ground_truth.percent or answer.percent:
        left, right = (left / 100 if ground_truth.percent else left), (right / 100 if answer.percent else right)
    elif bool(ground_truth.unit) != bool(answer.unit) and not is_forgivable(ground_truth.unit or answer.unit):
        return False
    elif ground_truth.unit and answer.unit:
        units = {ground_truth.unit.rstrip("s"), answer.unit.rstrip("s")}
        if units == {"£", "pound"}:
            return left == right
        left, left_unit = in_base_units(left, ground_truth.unit)
        right, right_unit = in_base_units(right, answer.unit)
        if left_unit != right_unit:
            return False
    if left == right:
        return True
    if (
        ground_truth.significant
        or ground_truth.percent
        or answer.significant < SIGNIFICANT_DIGITS
        or ground_truth.value.denominator == 1
    ):
        return False
    one_unit = not (ground_truth.unit and answer.unit) or ground_truth.unit == answer.unit
    return one_unit and not answer.percent and rounds_to(right, answer.decimals, left, answer.significant)


def rounds_to(decimal: Fraction, decimals: int, exact: Fraction, significant: int) -> bool:
    """Return whether `decimal`, with `decimals` digits after the point, is `exact` rounded, or cut off far enough."""
    unit = Fraction(1, 10**decimals)
    if 2 * abs(decimal - exact) <= unit:
        return True
    gap = exact - decimal if decimal > 0 else decimal - exact
    return significant >= CUT_DIGITS and 0 <= gap < unit


def _in_base(text: str) -> Fraction | None:
    r"""Return the value of 204_5, 204_{five} or "204 (base 5)", else None. Raises TooLarge for wrong base or digit."""
    match = _BASED.match(_PLAIN_TEXT.sub(r"\1", text))
    if match is None:
        return None
    base = _BASE_WORDS.get(match.group(3)) or int(match.group(3))
    digits = [int(digit, 36) for digit in match.group(2).replace(" ", "")]
    if not 2 <= base <= 36 or max(digits) >= base:
        raise TooLarge
    value = 0
    for digit in digits:
        value = value * base + digit
    return Fraction(-value if match.group(1) else value)


def is_named(side: str) -> bool:
    """Return whether a side of an equation is a name, which stands before a value: "x", "f(x)", "|AB|", "area"."""
    return _NAME.match(side) is not None


def _split_equation(text: str) -> tuple[str, str] | None:
    """Return (name, value) of "x = 5"; None when the left side is not a name or there are several equations."""
    name, _, value = text.partition("=")
    if "=" in value or _SUM.search(name) or not is_named(name.strip()):
        return None
    return name.strip(), value.strip()


def same_scalar(ground_truth: str, answer: str) -> bool | None:
    """Compare two values without algebra; None when algebra is needed."""
    if spelling_key(ground_truth) == spelling_key(answer):
        return True
    try:
        left_base, right_base = _in_base(ground_truth), _in_base(answer)
        if left_base is not None or right_base is not None:
            left_value = exact_value(ground_truth) if left_base is None else left_base
            right_value = exact_value(answer) if right_base is None else right_base
            return left_value is not None and left_value == right_value
        left, right = quantity(ground_truth), quantity(answer)
    except TooLarge:
        return _same_tree(ground_truth, answer)
    if left and right:
        return _same_number(left, right)
    if _HUGE.search(answer) or _HUGE.search(ground_truth):
        return _same_tree(ground_truth, answer)
    if _BASE.search(ground_truth) or _BASE.search(answer):
        return False
    if same_choice(ground_truth, answer):
        return True
    cut = (
        _split_equation(ground_truth if "=" in ground_truth else answer)
        if ("=" in ground_truth) != ("=" in answer)
        else None
    )
    words = words_of(cut[1]) if cut is not None and not _ANSWER_NAME.match(cut[0]) else None
    if cut is not None and words is not None and (len(words) == 1 or len(cut[0]) > 1):
        return False  # A = B is no choice of B, and yes = no no answer
    if cut is not None:
        return same_scalar(cut[1], answer) if "=" in ground_truth else same_scalar(ground_truth, cut[1])
    (gold_value, gold_unit), (answer_value, answer_unit) = without_unit(ground_truth), without_unit(answer)
    if (gold_unit or answer_unit) and words_of(gold_value) is None and words_of(answer_value) is None:
        return None  # 6√2 feet: algebra with a unit, no words
    left_words, right_words = words_of(ground_truth), words_of(answer)
    if left_words is not None or right_words is not None:
        return left_words is not None and right_words is not None and same_words(left_words, right_words)
    return None


def _same_tree(ground_truth: str, answer: str) -> bool:
    """Compare numbers too large to compute: written as the same expression, or with the same remainders."""
    try:
        left, right = _as_quotients(parse(ground_truth)), _as_quotients(parse(answer))
        if left == right or max(map(len, (ground_truth, answer))) > 200:
            return left == right
        return all(_remainder(left, prime) == _remainder(right, prime) for prime in _PRIMES)
    except (NotUnderstood, ValueError):
        return False


def _remainder(node: Node, prime: int) -> int:
    """Return the value of a number modulo a prime. Raises ValueError for what has none, or takes too long."""
    if node[0] == "num":
        return int(node[1].numerator * pow(node[1].denominator, -1, prime) % prime)
    if node[0] == "call" and node[1] == "factorial" and node[2][0] == "num":
        return _factorial_remainder(node[2][1], prime)
    if node[0] == "^":
        size = node[2][1] if node[2][0] == "-" else node[2]
        if size[0] != "num" or size[1].denominator != 1:
            raise ValueError("no whole exponent")
        return pow(_remainder(node[1], prime), int(size[1] if size is node[2] else -size[1]), prime)
    if node[0] not in ("+", "-", "*", "/"):
        raise ValueError("no arithmetic")
    values = [_remainder(part, prime) for part in node[1:]]
    if node[0] == "-":
        return -values[0] % prime
    if node[0] == "/":
        return values[0] * pow(values[1], -1, prime) % prime
    return (sum(values) if node[0] == "+" else math.prod(values)) % prime


@lru_cache(maxsize=64)
def _factorial_remainder(count: Fraction, prime: int) -> int:
    if count.denominator != 1 or not 0 <= count <= MAX_REMAINDER_FACTORIAL:
        raise ValueError("no factorial")
    value = 1
    for factor in range(2, int(count) + 1):
        value = value * factor % prime
    return value


def _as_quotients(node: Node) -> Node:
    """Write x^{-1} as 1/x, everywhere in a tree."""
    node = tuple(_as_quotients(part) if isinstance(part, tuple) else part for part in node)
    unity: Node = ("num", Fraction(1))
    return ("/", unity, node[1]) if node[0] == "^" and node[2] in (("-", unity), ("num", Fraction(-1))) else node


def decide(ground_truth: str, answer: str) -> Verdict | None:
    """Grade without SymPy: return a verdict, or None when a worker process is needed. Never raises, never slow."""
    if not ground_truth.strip():
        return Verdict.UNVERIFIABLE
    if not answer.strip():
        return Verdict.WRONG
    if not within_limits(answer):
        return Verdict.WRONG
    if not within_limits(ground_truth):
        return Verdict.UNVERIFIABLE
    return _decide(ground_truth, answer)


def _decimal_comma(ground_truth: str, answer: str) -> str:
    """Return the answer "0,75" as "0.75" where the ground truth is one number, not an integer: a list could not equal
    it. Three digits after the comma are thousands, unless a zero stands before it."""
    match = _WITH_COMMA.match(answer)
    if match is None or (true := quantity(ground_truth)) is None or true.value.denominator == 1:
        return answer
    return f"{match.group(1)}.{match.group(2)}"


@lru_cache(maxsize=16384)
def _decide(ground_truth: str, answer: str) -> Verdict | None:
    """`decide` for pairs within the limits: only those may fill the cache."""
    left, right = paired(prepared(ground_truth), prepared(answer))
    if left and spelling_key(left) == spelling_key(right):
        return Verdict.CORRECT
    if not left or not right:
        return Verdict.WRONG if left else Verdict.UNVERIFIABLE
    right = _decimal_comma(left, right)
    at, other = clock(left), clock(right)
    if at and other and not (left.count(":") == right.count(":") == 2 and not at[1] and ":0" not in left + right):
        return Verdict.CORRECT if at[0] == other[0] else Verdict.WRONG
    if at and at[1]:
        return Verdict.WRONG  # 8:34 p.m. is nothing but a time
    chosen = choices(left)
    if chosen and chosen == choices(right):
        return Verdict.CORRECT
    if APPROXIMATELY.search(left) or APPROXIMATELY.search(right):
        return None
    same = None if _REGION.search(left) or _REGION.search(right) else same_form(left, right, same_scalar)
    if same is None:
        return None
    return Verdict.CORRECT if same else Verdict.WRONG
