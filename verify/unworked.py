r"""Detects answers that are a computation still to be done, where the ground truth is plain numbers.

"What is 2+3*4?" answered by \boxed{2+3*4} equals the true 14, and nothing was computed. Only spelling is examined: a
ground truth without an operation in it asks for an answer without one. Customary spellings of numbers are no
operations: fractions and mixed numbers, decimals, percentages, powers of ten, and a lone power or root that the problem
does not write itself. Ground truths that are expressions (2\sqrt{3}, 10!, \pi/4, x+1) take expressions.
"""

from __future__ import annotations

import math
import re

_MOST = 2_000
_WORDS = re.compile(
    r"\\(?:text|textbf|mathbf|mathrm|mbox|textrm|textit|operatorname\*?)\s*\{([^{}]*)\}(?:\s*\^\s*\{?[23]\}?)?"
)
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)(?!\d)")
_RAISED = re.compile(r"[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_PLAIN_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_NOISE = re.compile(
    r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|limits)(?![A-Za-z])|\\[,;!: ]|\\q?quad\b|[\s~$]|\\(?=[$%])"
)
_SPELLINGS = (
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=\d)[xX](?=10\^)"), "*"),
    (re.compile(r"\{(\d+)\}/\{(\d+)\}"), r"\1/\2"),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|[×·⋅∗]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\{,\}"), ""),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\frac([0-9])([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{(\\frac\{\d+\}\{\d+\})\}"), r"\1"),
    (re.compile(r"\^\{(-?\d+)\}"), r"^\1"),
    (re.compile(r"\^(?:\\circ(?![A-Za-z])|\{\\circ\}|°)"), ""),
)
_NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+|\d*\.\\overline\{?\d+\}?|\d*\.\d*\\overline\{\d+\})"
_PLAIN = re.compile(rf"[-+±]?{_NUMBER}(?:_\{{?\d+\}}?)?(?:\\?%|[eE][-+]?\d+)?")
_FRACTION = re.compile(
    rf"[-+]?(?:\d+)?\\frac\{{-?({_NUMBER})\}}\{{-?({_NUMBER})\}}|[-+]?({_NUMBER})/({_NUMBER})"
    rf"|[-+]?\d+\+\\frac\{{\d+\}}\{{\d+\}}"
)
_PI = re.compile(
    r"[-+]?(?:\d+\*?)?(?:\\pi|π)(?:/\d+)?|[-+]?(?:\d+\*?)?\\frac\{\d*\*?(?:\\pi|π)\}\{\d+\}"
    r"|[-+]?\\frac\{\d+\}\{\d+\}\*?(?:\\pi|π)"
)
_SCIENTIFIC = re.compile(rf"[-+]?{_NUMBER}\*10\^-?\d+|[-+]?10\^-?\d+")
_POWER = re.compile(
    r"[-+]?(?:\d+|\(-?\d+\)|\(\\frac\{\d+\}\{\d+\}\)|\(\d+/\d+\)|\{\d+\})\^-?\d+"
    r"|[-+]?\\sqrt(?:\[\d+\])?(?:\{\d+\}|\d)"
)
_PENDING = re.compile(
    r"[\d)}\]!|][-+*/^]\(?[-\d.\\({|]|\d!|\)!|\d\((?=[-\d\\.(])|\)\(|\)\d"
    r"|\\(?:[dt]?binom|choose|sum|prod|int|lim|gcd|lcm|max|min|log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arc\w+"
    r"|sqrt|det|frac"
    r"|[lr]?floor|lfloor|lceil|lvert|bmod|mod|pmod|varphi)(?![A-Za-z])"
    r"|\|[^|A-Za-z]*\d[^|]*\|"
    r"|(?<![A-Za-z\\])(?:gcd|lcm|max|min|log|ln|exp|sin|cos|tan|sqrt|abs|binom|floor|ceil|mod|sum|det)(?![A-Za-z])"
    r"|(?<=\d)(?:plus|minus|times|mod|choose|over|divided)(?=\d)|\d[CP]\d|[CPA]_\d|[√∑∏∫⌊⌈]"
)
_CALL = re.compile(r"(?<![A-Za-z])(?:[CP]|gcd|lcm|max|min|mod|nCr|nPr)\(-?\d+,")
_PARTS = re.compile(
    r"[,;=≈\[\]<>≤≥]|\\(?:approx|leq?|geq?|lt|gt|leqslant|geqslant|in|cup|cap|mid|[{}])(?![A-Za-z])|\\[{}]"
)
_LETTERS = re.compile(
    r"(?<!\\)(?<![A-Za-z])[A-Za-z](?![A-Za-z])|\\(?:pi|alpha|beta|theta|phi|varphi|infty|omega)(?![A-Za-z])|[π∞]"
)


def unworked(problem: str, ground_truth: str, answer: str) -> bool:
    """Return whether `ground_truth` is made of plain numbers while `answer` still has something to compute in it."""
    if max(len(ground_truth), len(answer)) > _MOST:
        return False
    truth, got = _spell(ground_truth), _spell(answer)
    if (
        truth == got
        or _LETTERS.search(truth)
        or not re.search(r"\d", truth)
        or not all(_is_number(part) for part in _split(truth))
    ):
        return False
    if _CALL.search(got) and not truth.startswith("("):
        return True
    text = _spell(problem)
    values = [part for part in re.split(r"=|≈|\\approx", got) if not _PENDING.search(part) and re.search(r"\d", part)]
    if "=" in got and values:
        return False
    return any(_pending(part, text, truth) for part in _split(got))


def _spell(text: str) -> str:
    """Return the text with one spelling for each operation, without blanks and words."""
    text = _WORDS.sub(
        lambda run: f" {run.group(1)} " if re.search(r"\d|^(?:gcd|lcm|mod|max|min)$", run.group(1)) else " ", text
    )
    text = _RAISED.sub(lambda run: "^" + run.group().translate(_PLAIN_DIGITS), text)
    text = _NOISE.sub("", _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    for pattern, spelled in _SPELLINGS:
        text = pattern.sub(spelled, text)
    return text.strip(".")


def _split(text: str) -> list[str]:
    """Split a text at commas, brackets and relation signs; parts without a digit are dropped."""
    return [part for part in _PARTS.split(_outside(text)) if re.search(r"\d", part)]


def _outside(text: str) -> str:
    """Return a tuple or a number in brackets without them."""
    while re.fullmatch(r"\((?:[^()]*)\)|\{(?:[^{}]*)\}", text) and not re.fullmatch(r"\{\d+\}\^.*", text):
        text = text[1:-1]
    return text


def _is_number(text: str) -> bool:
    """Return whether a part is a customary spelling of a number, units after it aside."""
    for form in (_SCIENTIFIC, _FRACTION, _PLAIN):
        match = form.match(text)
        if match and not re.search(
            r"[-+*/^!\d(|\\]", re.sub(r"\\(?:%|circ)|[A-Za-z]+(?:\^\d|/[A-Za-z]+)*", "", text[match.end() :])
        ):
            return True
    return False


def _pending(text: str, problem: str, truth: str) -> bool:
    """Return whether a part of the answer still has something to compute."""
    text = re.sub(r"^([-+]?)\((.*)\)$", r"\1\2", _outside(text)) if text.count("(") == 1 else _outside(text)
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        over, under = fraction.group(1) or fraction.group(3), fraction.group(2) or fraction.group(4)
        if over and under and over.isdigit() and under.isdigit() and int(under):
            whole = int(over) % int(under) == 0 and int(under) > 1
            reducible = math.gcd(int(over), int(under)) > 1
            return whole or (reducible and (text in problem or f"{over}/{under}" in problem))
        return False
    if _is_number(text) or _PI.fullmatch(text):
        return False
    if _POWER.fullmatch(text):
        return text.lstrip("+-") in problem or (text.startswith("\\sqrt") or "sqrt" in text) and "sqrt" not in truth
    return bool(_PENDING.search(text))
