"""Hostile answers, as many as wanted, the same ones every time: towers, nesting, injections, megabytes, broken text."""

import random
from collections.abc import Callable, Iterator

from tests.tables import read_table

GOLDS = ("7", "x^2+1", "(1,2)", "\\text{yes}", "[0,1)", "\\{1,2,3\\}", "x \\leq 3", "y=2x+1", "\\frac{\\pi}{2}")
_INJECTIONS = [
    "__import__('os').system('kill -9 0')", "__import__('os').mkdir('owned')", "exec('raise SystemExit')",
    "().__class__.__bases__[0].__subclasses__()", "open('/etc/passwd').read()", "lambda: (yield)", "{{7*7}}",
    "\\input{/etc/passwd}", "\\write18{touch owned}", "'; DROP TABLE answers; --", "\\def\\a{\\a\\a}\\a",
    "eval(compile('1','','eval'))",
]  # fmt: skip
_TOWERS = ["9^{9^{9^9}}", "9**9**9**9", "5^(5^(5^5))", "(10^9)!", "((9!)!)!", "2^{10^{18}}", "10^{10^{10}}", "1e999999"]
_CALCULUS = [
    "\\int_0^{10^9} e^{x^2} dx", "\\sum_{k=1}^{99999999} k^k", "\\prod_{k=1}^{9999999} k",
    "\\lim_{x\\to 0} \\frac{\\sin x}{x^{99}}",
]  # fmt: skip
_FRAMES = ["{}", "x+{}", "\\frac{{1}}{{{}}}", "({},2)", "\\sqrt{{{}}}", "\\sin({})", "x={}", "[0,{})", "{}i"]
_FUNCTIONS = ["\\sin", "\\exp", "\\Gamma", "\\zeta", "\\binom{10^9}", "\\log_{0}", "\\tan", "\\gcd", "\\sqrt[0]"]
_OPENERS = ["{", "(", "[", "\\frac{", "\\sqrt{", "\\left(", "x^{", "|", "\\text{", "\\boxed{", "\\{", "-", "\\sin "]
_CLOSERS = {"{": "}", "(": ")", "[": "]", "\\{": "\\}", "|": "|"}
_ODD = ["\0", "\ud800", "\udfff", "\u202e", "\ufeff", "\u0305", "\x1b[2J", "\U0010ffff", "٣", "½", "ﬃ", "\r", "\u2028"]
_ATOMS = ["7", "x", "\\pi", "1.5", "\\frac12", "i", "e", "\\infty", "yes", "5 cm", "50\\%", "n!", "\\sqrt2", "a_1"]
_SIGNS = ["+", "-", "*", "/", "^", "=", "<", ",", ";", ":", "!", "\\pm ", "\\cup ", "_", "&", "\\\\", " ", "\\in ", "'"]
_SOUP = _ATOMS + _SIGNS + _OPENERS + ["}", ")", "]"] + _ODD[:4] + _TOWERS


def written(kind: str) -> list[str]:
    """The hostile answers of hostile.jsonl: "cheap" ones, and those for the "worker" of the answer checker."""
    texts = []
    for row in read_table("verify/hostile", kind=kind):
        times = row.get("times", 1)
        piece, close = row.get("piece", row.get("answer")), row.get("close", "")
        texts.append(row.get("before", "") + piece * times + row.get("after", "") + close * times)
    return texts


def _nested(dice: random.Random) -> str:
    opener, count = dice.choice(_OPENERS), dice.choice((3, 50, 190, 210, 2_000, 100_000))
    close = _CLOSERS.get(opener[-1] if opener[-1] in "{([" else opener, "")
    return opener * count + dice.choice(_ATOMS) + close * (count if dice.random() < 0.7 else count // 2)


def _long(dice: random.Random) -> str:
    piece = dice.choice(_ATOMS + _SIGNS + ["1+", "1,2,", "x^", "((", "a b ", "9" * 50, "0.\\overline{3}", "\\pm1,"])
    size = dice.choice((300, 1_900, 2_000, 5_000, 60_000)) if dice.random() < 0.97 else 2_000_000
    return piece * max(1, size // len(piece))


def _broken(dice: random.Random) -> str:
    text = list(dice.choice(_ATOMS + _TOWERS + list(GOLDS)))
    for _ in range(dice.randint(1, 4)):
        text.insert(dice.randint(0, len(text)), dice.choice(_ODD))
    return "".join(text)


def _injected(dice: random.Random) -> str:
    before, after = dice.choice([("", ""), ("x+", ""), ("\\text{", "}"), ("f(", ")"), ("", "=1")])
    return before + dice.choice(_INJECTIONS) + after


def _function(dice: random.Random) -> str:
    exponent = dice.choice(["9999", "x^x", "-99999", "10^8", "0.5"])
    return f"{dice.choice(_FUNCTIONS)}({dice.choice(_ATOMS)}^{{{exponent}}})+{dice.choice(_ATOMS)}"


def _soup(dice: random.Random) -> str:
    return "".join(dice.choices(_SOUP, k=dice.randint(1, 80)))


def _tower(dice: random.Random) -> str:
    return dice.choice(_FRAMES).format(dice.choice(_TOWERS))


_FAMILIES: list[Callable[[random.Random], str]] = [_nested, _long, _soup, _soup, _tower, _broken, _injected, _function]


def hostile(count: int, seed: int = 1) -> Iterator[tuple[str, str]]:
    """Pairs of a sane ground_truth and a hostile answer; one in 200 is an integral or sum that SymPy may work on for
    long."""
    dice = random.Random(seed)
    for index in range(count):
        heavy = index % 200 == 199
        answer = f"{dice.choice(_CALCULUS)}+{index}" if heavy else _FAMILIES[index % len(_FAMILIES)](dice)
        yield dice.choice(GOLDS), answer
