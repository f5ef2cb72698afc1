r"""Brings two answers to one way of naming before they are compared: left sides, bound letters, constants, choices.

    \vec a = (3,-4)  and  (3,-4)        the left side is a name of what was asked for
    f(x) = 2x        and  f(t) = 2t     the letter of an argument or an index is free to choose
    x^2 + C          and  x^2 + c       so is the constant of integration
    2\pi n           and  2k\pi         so is an integer parameter
    (C) 12           and  12            the content of a choice is its value

Texts are normalised. A left side with a number in it (2x = 6, x^2 = 9) is a condition on a name, not a name, and two
different left sides stay as they are.
"""

from __future__ import annotations

import re

from verify.math.brackets import TEXT, split_top, without_text
from verify.math.normal import spelling_key
from verify.math.quantity import read_compound

_LETTER = r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|phi|varphi|omega|lambda|mu|rho|sigma|tau|Delta|Omega))"
_INDEX = r"(?:_(?:\w|\{[A-Za-z0-9, ]{1,8}\}))?'?"
_MARKED = r"\\(?:vec|overline|hat|widehat|overrightarrow)\s*(?:\{[A-Za-z_0-9]{1,4}\}|[A-Za-z])"
_TRIGONOMETRIC = r"\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?(?:2|-1)\}?)?\s*"
_SIMPLE = (
    r"(?:\\complement(?:_\{?\w\}?)?\s*[A-Z]|[A-Z]\^\{?(?:c|C|\\complement|T|-1|\\perp)\}?"
    rf"|(?:\\angle|\\triangle)\s*[A-Z]{{1,4}}|{_MARKED}|[A-Z]{{2,4}}|\[[A-Z]{{3,5}}\]|{_LETTER}{_INDEX})"
)
_SPAN = r"\((?:[^()]|\([^()]*\)){1,60}\)|\[[^\[\]]{1,60}\]"
_CALL = (
    rf"(?:(?:[A-Z]|[a-z]|[A-Z][a-z]{{1,3}}|\\(?:det|dim|ker|Re|Im|arg|gcd|max|min|deg)){_INDEX}"
    rf"(?:\^\{{-1\}}|\^\{{?\\prime\}}?|'+)?\s*(?:{_SPAN})|\\(?:det|dim|ker)\s*[A-Z]"
    rf"|(?:rank|tr|Area|area|lcm|gcd|det|dim|deg|Cov|Corr|cov|Vol)\s*(?:{_SPAN}))"
)
_ATOM = (
    rf"(?:{_TRIGONOMETRIC}\d?\s*(?:{_SIMPLE}|{_SPAN})|{_CALL}"
    rf"|\({_SIMPLE}\s*\\circ\s*{_SIMPLE}\)(?:\([a-z]\))?|{_SIMPLE})"
)
_SIZE = rf"\|(?:{_SIMPLE}\s*[-+]?\s*|\\c[au]p\s*){{1,3}}\|"
_OPERATION = r"\s*(?:\\(?:cdot|times|c[au]p|setminus|circ)(?![A-Za-z])|[-+/:])?\s*"
_TERM = rf"(?:{_SIZE}|{_ATOM})"
_HEAD = re.compile(
    rf"(?:{_TERM}(?:{_OPERATION}{_TERM}){{0,4}}|\\frac\s*\{{{_TERM}(?:{_OPERATION}{_TERM})?\}}\s*\{{{_TERM}"
    rf"(?:{_OPERATION}{_TERM})?\}}|\\(?:lim|sum|prod|int)(?![A-Za-z]).{{1,80}}"
    r"|\\frac\s*\{\s*d\s*\w?\s*\}\s*\{\s*d\s*\w\s*\}"
    r"|\\text\s*\{[A-Za-z ]{2,40}\}\s*(?:_\w|(?:\\triangle\s*)?[A-Z]{1,4})?)"
)
_SUM = re.compile(r"\d{0,2}(?:[a-w](?:_\w)?(?:\^\d)?){1,2}(?:\s*[-+]\s*\d{0,2}(?:[a-w](?:_\w)?(?:\^\d)?){1,2}){1,3}")
_NUMBER = re.compile(
    r"(?:[-+\d./(){}\s^!]|\\(?:frac|sqrt|pi)(?![A-Za-z]))*[1-9](?:[-+\d./(){}\s^!]|\\(?:frac|sqrt|pi)(?![A-Za-z]))*"
)
_DENIES = re.compile(r"(?i)\b(?:not|no|never|or|and|wrong|answer|if|than|except|false|least|most)\b")
_CONDITION = re.compile(r"\|\s*[xyt]\s*\||^\s*\(?[xyzt](?:\s*[-+]\s*[xyzt])+\)?\s*$|^\s*[xyzr]\s*$")
_EQUAL = re.compile("=")
_TUPLE = re.compile(r"^\(\s*([a-z](?:\s*,\s*[a-z])+)\s*\)\s*(?:=|\\in(?![A-Za-z]))\s*(?=\\\{|\()")
_ONE_TUPLE = re.compile(r"^\\\{\s*(\([^()]*\))\s*\\\}$")
_PART = re.compile(
    r"(?:^|(?<=[\s,;.}])|(?=\\text\s*\{))(?:\\text\s*\{\s*[,;]?\s*)?(?:[Pp]art\s*)?"
    r"\(?([a-h]|i{1,3}|iv|[1-6])\)\s*:?(?:\s*\})?\s*"
)
_IN_ORDER = (tuple("abcdefgh"), ("i", "ii", "iii", "iv"), tuple("123456"))
_OPERATOR = re.compile(r"^[-+*/^=]\s*[(\\A-Za-z]|[-+*/^=]$|^$|^[_^*/]")
_THING = r"(\d+(?:\.\d+)?) ?([a-z]{3,}(?: (?!and )[a-z]{3,})?)"
_THINGS = re.compile(rf"{_THING}(?:(?: ?, ?(?:and )?| and ){_THING}){{1,7}}")
_BOUND = re.compile(r"^([A-Za-z]'*(?:\^\{-1\})?)(?:\(([a-z](?:, ?[a-z])*)\)|_\{?([a-z])\}?)\s*=(?!.*=)(.*)$", re.DOTALL)
_MAPS = re.compile(
    r"^(?:([A-Za-z])\s*:\s*)?([a-z])\s*\\(?:mapsto|longmapsto)(?![A-Za-z])\s*(.+)$"
    r"|^([A-Za-z])\s*:\s*([a-z])\s*\\to\s*(.+)$",
    re.DOTALL,
)
_DOMAIN = re.compile(r"^[A-Za-z]\s*:\s*[^,;:=]*?\\to(?![A-Za-z])[^,;:=]*[,;]\s*(?=[A-Za-z]\()")
"""the sets that f is said to map"""
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]+")
_CONSTANT = re.compile(r"\+\s*(?:([A-Za-z])(?:_\{?[01]\}?)?|\\text\s*\{\s*(?:constant|const\.?|C)\s*\})\s*$")
_TEXTUAL = re.compile(r"\\text\s*\{[^{}]*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])")
_ANGLE = re.compile(r"\\pi(?![A-Za-z])|(?:180|360|90)\s*\^\s*\{?\s*\\circ")
_MEMBER = re.compile(r",\s*n\s*\\in\s*Z$")
_LABEL = re.compile(
    r"^(?:\(([A-J]|[a-h](?=\)\s*(?:-?\d|\\frac|\\sqrt)))\)|([A-J])[).])\s*(?=\S)"
    r"(?:(?<=\s)(?=-(?:\d|\\frac|\\sqrt))|(?![-+*/^_=,;&]|\\c?dot|\\times))"
    r"(?!.*(?:\b(?:or|and|not|wrong|false|incorrect)\b|(?<![A-Za-z\\])[A-J](?![A-Za-z])))(.+)$",
    re.DOTALL,
)
_ONE_LETTER = re.compile(r"^\(?([A-Ja-j])\)?$")


def paired(ground_truth: str, answer: str) -> tuple[str, str]:
    """Return both answers, named alike where the names are free to choose. Texts as of `plain.prepared`."""
    if ground_truth.isdigit() and answer.isdigit():
        return ground_truth, answer
    left, right = _choices(*(_mapped(_listed(text)) for text in (ground_truth, answer)))
    left, right = _bound(*_heads(left, right))
    return _parameters(*_constants(left, right))


def _listed(text: str) -> str:
    """Write labelled parts as a tuple, "(a) 3 (b) 7" as "(3, 7)", and counted things as a list."""
    if not text[:1].isdigit() and "\\text" not in text[:5]:
        return _parts(text)
    plain = " ".join(without_text(text).split()) if "," in text or "and" in text else ""
    if not _THINGS.fullmatch(plain) or read_compound(text) is not None:
        return _parts(text)
    return ", ".join(rf"{thing.group(1)}\text{{ {thing.group(2)}}}" for thing in re.finditer(_THING, plain))


def _parts(text: str) -> str:
    labels = list(_PART.finditer(text)) if ")" in text else []
    names = tuple(label.group(1) for label in labels)
    if (
        len(names) < 2
        or labels[0].start()
        or not any(sorted(names) == sorted(order[: len(names)]) for order in _IN_ORDER)
    ):
        return text
    ends = [label.start() for label in labels[1:]] + [len(text)]
    values = [text[label.end() : end].strip(" ,;.") for label, end in zip(labels, ends, strict=True)]
    if any(_OPERATOR.search(value) for value in values):
        return text
    values = [value for _, value in sorted(zip(names, values, strict=True))]
    return f"({', '.join(f'({value})' if ',' in value else value for value in values)})"


def _mapped(text: str) -> str:
    """Write f: x -> 2x as f(x) = 2x."""
    text = _DOMAIN.sub("", text) if "\\to" in text else text
    match = _MAPS.match(text) if "to" in text else None
    if match is None:
        return text
    name, letter, value = (match.group(at) or match.group(at + 3) for at in (1, 2, 3))
    return f"{name or 'f'}({letter})={value}"


def _choices(left: str, right: str) -> tuple[str, str]:
    """Cut the letter of a choice off its value, where the other side is a value without a letter, or has the same."""
    plain = [TEXT.sub(r" \1 ", text).strip() if "\\text" in text[:8] else text for text in (left, right)]
    left_match, right_match = (_LABEL.match(text) for text in plain)
    if left_match and right_match:
        same = (left_match.group(1) or left_match.group(2)) == (right_match.group(1) or right_match.group(2))
        return (left_match.group(3).strip(), right_match.group(3).strip()) if same else (left, right)
    if left_match and not _ONE_LETTER.match(plain[1]):
        return left_match.group(3).strip(), right
    if right_match and not _ONE_LETTER.match(plain[0]):
        return left, right_match.group(3).strip()
    return left, right


def _cut(text: str) -> tuple[str, str]:
    """Return (left side, value) of text that begins with a name of what was asked for; ("", text) for others."""
    members = _TUPLE.match(text)
    if members:
        names = [name.strip() for name in members.group(1).split(",")]
        value = _ONE_TUPLE.sub(r"\1", text[members.end() :].strip())
        return (f"({','.join(names)})", value) if names == sorted(names) else ("", text)
    if "=" not in text:
        return "", text
    sides = split_top(text.replace("\\{", "\\lbrace{").replace("\\}", "}\\rbrace "), _EQUAL)
    sides = [
        side.replace("\\lbrace{", "\\{").replace("}\\rbrace", "\\}").replace("\\} ", "\\}").strip() for side in sides
    ]
    if len(sides) != 2 or not sides[1] or _CONDITION.search(sides[0]) or _DENIES.search(sides[0]):
        return "", text
    if _SUM.fullmatch(sides[0]) and _NUMBER.fullmatch(sides[1]):
        return sides[0], sides[1]
    return (sides[0], sides[1]) if len(sides[0]) <= 120 and _HEAD.fullmatch(sides[0]) else ("", text)


def _heads(left: str, right: str) -> tuple[str, str]:
    """Cut off the left side that only one answer has, or that both have."""
    (left_head, value), (right_head, given) = _cut(left), _cut(right)
    if left_head and right_head:
        same = spelling_key(left_head) == spelling_key(right_head) and len(left_head) > 1
        return (value, given) if same else (left, right)
    if left_head and "=" not in right and not _is_word(value, right):
        return value, right
    if right_head and "=" not in left and not _is_word(given, left):
        return left, given
    return left, right


def _is_word(value: str, other: str) -> bool:
    """Return whether a name is set equal to a letter or to words: A = B is no choice of B, and yes = no no answer."""
    return any(
        re.fullmatch(r"\(?[A-Z]\)?|\\text\s*\{.*\}|[^\W\d_]{2,}(?: [^\W\d_]+)*", text) for text in (value, other)
    )


def _letters(text: str) -> list[str]:
    """Return the letters of an expression that stand for numbers; commands are left out."""
    runs = _TOKEN.findall(_TEXTUAL.sub(" ", text))
    return [letter for run in runs if not run.startswith("\\") for letter in run]


def _renamed(text: str, old: str, new: str) -> str:
    return _TOKEN.sub(lambda run: run.group() if run.group()[0] == "\\" else run.group().replace(old, new), text)


def _bound(left: str, right: str) -> tuple[str, str]:
    """Write the argument or index of the ground truth for that of the answer: f(t) = 2t as f(x) = 2x."""
    head, other = _BOUND.match(left), _BOUND.match(right)
    if not head or not other or head.group(1) != other.group(1) or bool(head.group(2)) != bool(other.group(2)):
        return left, right
    old, new = ((found.group(2) or found.group(3)).replace(" ", "").split(",") for found in (other, head))
    value, given = head.group(4), other.group(4)
    if {*old} & {*new} or len(old) != len(new) or len({*old}) < len(old) or len({*new}) < len(new):
        return left, right
    if {*new} & {*_letters(given)} or {*old} & {*_letters(value)}:
        return left, right
    for before, after in zip(old, new, strict=True):
        given = _renamed(given, before, after)
    return value.strip(), given.strip()


def _constants(left: str, right: str) -> tuple[str, str]:
    """Write the constant of integration alike: one letter after a plus sign, which stands nowhere else."""
    left_match, right_match = _CONSTANT.search(left), _CONSTANT.search(right)
    if not left_match or not right_match or "C" not in (left_match.group(1) or "C", right_match.group(1) or "C"):
        return left, right
    bodies = (left[: left_match.start()], right[: right_match.start()])
    used = [set(_letters(body)) for body in bodies]
    names = {left_match.group(1) or "C", right_match.group(1) or "C"}
    plain = any(letter in used[0] for letter in "xtus") and used[0] == used[1] and not any(map(str.isupper, used[0]))
    if not plain or names & used[0] or not names <= {"C", "c", "K", "k", "D"}:
        return left, right
    return f"{bodies[0]}+C", f"{bodies[1]}+C"


def _parameters(left: str, right: str) -> tuple[str, str]:
    """Write an integer parameter of angles as n, and say that it is one on both sides where one side says so."""
    if left == right or not _ANGLE.search(left) or not _ANGLE.search(right):
        return left, right
    members = [_MEMBER.search(text) for text in (left, right)]
    bodies = [_MEMBER.sub("", text) for text in (left, right)]
    heads = [re.match(r"^[a-z]\s*=\s*", body) for body in bodies]
    values = [body[head.end() :] if head else body for body, head in zip(bodies, heads, strict=True)]
    names = [set(_letters(value)) for value in values]
    if any(
        "=" in value or "\\in" in value or len(of) != 1 or not of <= set("nkml")
        for value, of in zip(values, names, strict=True)
    ):
        return left, right
    if names[0] == names[1] and bool(members[0]) == bool(members[1]):
        return left, right
    (old,), (new,) = names[1], names[0]
    tail = ", n \\in Z" if any(members) and new == "n" else ""
    lead = [head.group() if head else "" for head in heads]
    return f"{lead[0]}{values[0]}{tail}", f"{lead[1]}{_renamed(values[1], old, new)}{tail}"
