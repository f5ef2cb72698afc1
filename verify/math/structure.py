r"""Reads the outer form of an answer (set, tuple, interval, list, union, ratio, matrix) and compares by form.

Two answers are equal only when their forms are equal and their items are: in order for tuples, intervals, ratios and
matrices, in any order for sets, unions and bare lists, with the same count in each. Items are compared by a function of
the caller, which may return True, False or None (undecided); None wins over True, False over both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from verify.math.brackets import COMMA, Form, bracketed, split_top
from verify.math.matrix import PLAIN_MATRIX, as_value, of_rows, of_unit_vectors, times_number, transpose
from verify.math.number import TooLarge, exact_value
from verify.math.quantity import read_compound

ItemComparison = Callable[[str, str], bool | None]

MAX_ITEMS = 64
MAX_DEPTH = 12
_THOUSANDS = re.compile(r"^[-+]?[^\d,()\[\]{}]{0,6}[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,]).{0,40}$")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MATRIX = re.compile(r"^\\begin\{([pbBvV]?matrix|array|smallmatrix)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}$", re.DOTALL)
_FRAMED_MATRIX = re.compile(r"^[\[(]\s*(\\begin\{(matrix|array|smallmatrix)\}.*\\end\{\2\})\s*[\])]$", re.DOTALL)
_CASES = re.compile(r"^\\begin\{d?cases\}(.*)\\end\{d?cases\}$", re.DOTALL)
_IF = re.compile(r"^\s*(?:\\text\s*\{\s*,?\s*(?:if|for|when)?\s*\}|if|for|when)\s*|[,.;]$")
_SCALED_MATRIX = re.compile(r"^([^=]+?)\s*(?:\\cdot|\\times)?\s*(\\begin\{([pb]matrix)\}.*\\end\{\3\})$", re.DOTALL)
_TUPLE_NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w\}?)?"
_NAMED_TUPLE = re.compile(rf"^\(\s*({_TUPLE_NAME}(?:\s*,\s*{_TUPLE_NAME})+)\s*\)\s*=\s*(?=\()")
_NUMBER_FACTOR = r"-|-?\s*(?:\d+(?:\.\d+)?(?:/\d+)?|\\frac\s*\{\d+\}\s*\{\d+\})"
_SCALED_TUPLE = re.compile(rf"^({_NUMBER_FACTOR})\s*(?:\\cdot|\\times|\*)?\s*(\(.*,.*\))$", re.DOTALL)
_TRANSPOSED = re.compile(r"^(.*(?:\\end\{[pbBvV]?(?:small)?matrix\}|[\])]))\s*\^\s*\{?\s*T\s*\}?$", re.DOTALL)
_RATIO_NAMES = re.compile(r"^[A-Za-z](?:\s*:\s*[A-Za-z])+\s*=\s*(?=\d)")
_OR = re.compile(r"(?<![A-Za-z\\])(?:or|oder|ou|или)(?![A-Za-z])|或|\\(?:lor|vee)(?![A-Za-z])")
_MATRIX_NAME = re.compile(r"^([A-Z](?:\^\{?-?\w+\}?)?)\s*=\s*(?=[^=]*\\begin\{)")
_POINT = re.compile(r"^[A-Z]\s*(\([^()]*,[^()]*\))$")
_QUOTED = re.compile(r"'([^'\\{}]*)'")
_ASSIGNED = re.compile(
    r"^((?:[A-Za-z]|\\(?!neg|not|log|sin|cos|tan|max|min|ln)[a-z]+|[A-Z]{2,3})(?:_\{?\w+\}?)?'?(?:\([a-z]\))?)"
    r"\s*(?:=|\\in(?![A-Za-z]))\s*(.+)$",
    re.DOTALL,
)
_ORDER = re.compile(r"[<>]|\\[lg]eq|\\neq")
_SEMICOLON = re.compile(";")
_SPACED_COMMA = re.compile(r";|,(?=\s)|,(?!\d{3}(?!\d))")
_CONNECTIVE = re.compile(
    r"(?<![A-Za-z\\])(?:and|or|и|или|et|ou|und|oder)(?![A-Za-z])(?=[\s\d])|(?<=\d )[yo&](?= \d)|或|和|与|及"
)
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_CAP = re.compile(r"\\cap(?![A-Za-z])")
_THING = re.compile(r"\d\s*(\\text\s*\{[^{}]+\}|[^\W\d_]{3,}[^\d\\]*)$")
_COLON = re.compile(r":(?!=)")
_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])")
_CELL = re.compile(r"&")
_PM = re.compile(r"\\(pm|mp)(?![A-Za-z])")


def _expand_signs(items: list[str]) -> list[str]:
    r"""Write a \pm b as two items."""
    expanded: list[str] = []
    for item in items:
        signs = _PM.findall(item)
        if len(signs) == 1:
            expanded += [_PM.sub(sign, item, count=1).strip().removeprefix("+").strip() for sign in "+-"]
        else:
            expanded.append(item)
    return expanded


def _one_sign(text: str, upper: bool) -> str:
    r"""Replace all \pm and \mp of a text together, by their upper signs or by their lower ones."""
    return _PM.sub(lambda match: "+" if (match.group(1) == "pm") is upper else "-", text)


def _by_name(named: re.Match[str], inner: Form) -> Form:
    """Order the values of (y, x) = (2, 1) by the alphabet; with Greek names they stay as they are."""
    names = [name.strip() for name in named.group(1).split(",")]
    if inner.kind != "()" or len(names) != len(inner.items) or any("\\" in name for name in names):
        return inner
    return Form("()", tuple(item for _, item in sorted(zip(names, inner.items, strict=True))))


def _without_names(items: list[str]) -> tuple[list[str], str]:
    """Cut off names: x = 1, x = 2 -> 1, 2 and "x" (only when every item that has a name has the same one)."""
    matches = [_ASSIGNED.match(item) for item in items]
    names = {match.group(1) for match in matches if match}
    if len(names) != 1 or any("=" in match.group(2) for match in matches if match):
        return items, ""
    return [match.group(2).strip() if match else item for match, item in zip(matches, items, strict=True)], names.pop()


@lru_cache(maxsize=8192)
def form(text: str) -> Form:
    """Return the outer form of normalised text."""
    named = _NAMED_TUPLE.match(text)
    if named:
        return _by_name(named, form(text[named.end() :]))
    if text.startswith("['"):
        text = _QUOTED.sub(r"\1", text)
    named = _MATRIX_NAME.match(text)
    if named:
        return form(text[named.end() :])._replace(name=named.group(1))
    text = _FRAMED_MATRIX.sub(r"\1", text)
    matrix = _MATRIX.match(text)
    if matrix:
        rows = [split_top(row, _CELL) for row in split_top(matrix.group(2).strip(), _ROW) if row.strip()]
        return of_rows(rows, matrix.group(1)[0] if matrix.group(1)[0] in "vV" else "")
    cases = _CASES.match(text)
    if cases:
        rows = [split_top(row, _CELL) for row in split_top(cases.group(1).strip(), _ROW) if row.strip()]
        return Form("cases", tuple(f"({'; '.join(_IF.sub('', cell) for cell in row)})" for row in rows))
    scaled = _SCALED_MATRIX.match(text)
    if scaled and scaled.group(2).count("\\begin") == 1:
        return times_number(scaled.group(1), form(scaled.group(2)))
    scaled = _SCALED_TUPLE.match(text)
    if scaled and bracketed(scaled.group(2)) and form(scaled.group(2)).kind == "()":
        return times_number(scaled.group(1), form(scaled.group(2)))
    transposed = _TRANSPOSED.match(text)
    if transposed and PLAIN_MATRIX.match(form(transposed.group(1)).kind):
        return transpose(form(transposed.group(1)))
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return Form("{}", ())
    for separator, kind in ((_CUP, "union"), (_CAP, "intersection")):
        operands = split_top(text, separator)
        if len(operands) > 1:
            return Form(kind, tuple(operands))
    pair = bracketed(text)
    if pair:
        kind, inside = pair
        items = split_top(inside, COMMA)
        if len(items) > 2 and len(split_top(inside, _SEMICOLON)) not in (1, len(items)):
            return Form("scalar", (text,))  # (1, 2; 3): two separators for one list mean something else
        if kind == "()" and len(items) == 1:
            return form(inside) if inside and not _PM.search(inside) else Form("scalar", (text,))
        if kind == "()" and len(items) > 1 and _PM.search(inside):
            return Form("either", tuple(f"({_one_sign(inside, upper)})".replace("(+", "(") for upper in (True, False)))
        if kind == "[]" and len(items) > 1 and all(item.startswith("[") and item.endswith("]") for item in items):
            return of_rows([split_top(item[1:-1], COMMA) for item in items])
        if kind == "{}" and (_ORDER.search(inside) or "|" in inside or "\\mid" in inside or ":" in inside):
            return Form("scalar", (text,))
        return Form(kind, tuple(_expand_signs(items) if kind == "{}" else items))
    return _bare(text)


def _bare(text: str) -> Form:
    """Return the form of text without outer brackets: list, ratio or scalar."""
    if read_compound(text) is not None:
        return Form("scalar", (text,))
    if _THOUSANDS.match(text) and len(COMMA.findall(_GROUPED.sub("", text))) == 0:
        return Form("scalar", (text,))
    separator = _SPACED_COMMA if re.search(r"[,;]\s", text) else COMMA
    items = [item for part in split_top(text, separator) for item in split_top(part, _CONNECTIVE)]
    items = [item for item in items if item]
    if len(items) > 1 and not (len(items) == 2 and not any(re.search(r"\d|\\|=|^\(?.\)?$", item) for item in items)):
        if any(_ORDER.search(item) for item in items):
            kind = "or" if re.search(r"(?<![a-z])or(?![a-z])|或", text) else "and"
            return Form(kind if kind == "or" else "list", tuple(items))
        plain, name = _without_names(items)
        expanded = tuple(_expand_signs(plain))
        either = bool(name) or len(expanded) > len(plain) or _OR.search(text) is not None
        return Form("either" if either else "list", expanded, name)
    named = _ASSIGNED.match(text)
    if named and "=" not in named.group(2) and form(named.group(2).strip()).kind != "scalar":
        return form(named.group(2).strip())._replace(name=named.group(1))
    if _PM.search(text):
        plain, name = _without_names([text])
        expanded = tuple(_expand_signs(plain))
        return Form("either", expanded, name) if len(expanded) > 1 else Form("scalar", (text,))
    ratio = split_top(_RATIO_NAMES.sub("", text), _COLON)
    if len(ratio) > 1 and all(re.search(r"\d|^[a-z]$|\\pi", item) for item in ratio):
        return Form("ratio", tuple(ratio))
    return Form("scalar", (text,))


def _match_any_order(ground_truth: tuple[str, ...], answer: tuple[str, ...], same: ItemComparison) -> bool | None:
    """Return whether the items match one to one in any order; None when only undecided items could complete that."""
    table = [[same(left, right) for right in answer] for left in ground_truth]
    for accept_undecided, result in ((False, True), (True, None)):
        partner: dict[int, int] = {}

        def place(row: int, seen: set[int], loose: bool = accept_undecided, taken: dict[int, int] = partner) -> bool:
            for column, verdict in enumerate(table[row]):
                if (verdict or (loose and verdict is None)) and column not in seen:
                    seen.add(column)
                    if column not in taken or place(taken[column], seen):
                        taken[column] = row
                        return True
            return False

        if all(place(row, set()) for row in range(len(ground_truth))):
            return result
    return False


def _cover(ground_truth: tuple[str, ...], answer: tuple[str, ...], same: ItemComparison) -> bool | None:
    """Compare sets with repeated members: return whether everything on each side is on the other."""
    if max(len(ground_truth), len(answer)) > MAX_ITEMS or not ground_truth or not answer:
        return False
    table = [[same(left, right) for right in answer] for left in ground_truth]
    lines = [*table, *(list(column) for column in zip(*table, strict=True))]
    if all(True in line for line in lines):
        return True
    return None if all(True in line or None in line for line in lines) else False


def _in_order(given: Form) -> Form:
    """Return a bare list as a tuple: "1, 2" as it stands, "y=2, x=1" in the order of its names."""
    if given.kind != "list" or any("\\infty" in item for item in given.items):
        return given
    named = _named_items(given)
    return Form("()", named if named else given.items)


def _named_items(given: Form) -> tuple[str, ...]:
    """Return the values of "y = 2, x = 1" in the order of their different names; () when they have none."""
    matches = [_ASSIGNED.match(item) for item in given.items]
    pairs = sorted((match.group(1), match.group(2).strip()) for match in matches if match)
    different = len({name for name, _ in pairs}) == len(given.items) == len(pairs)
    return tuple(value for _, value in pairs) if different else ()


def _counts_things(given: Form) -> bool:
    """Return whether every item is a number of a different thing: 6 red and 4 blue."""
    things: set[str] = set()
    for item in given.items:
        match = _THING.search(item)
        if match is None or match.group(1) in things:
            return False
        things.add(match.group(1))
    return True


def _same_ratio(left: Form, right: Form, same: ItemComparison) -> bool | None:
    """Compare ratios: 2:4 is 1:2, a ratio of two is a fraction, ratios of non-numbers are compared by items."""
    items = [form.items for form in (left, right)]
    if {left.kind, right.kind} == {"ratio", "scalar"}:
        ground_truth, answer = (item[0] if len(item) == 1 else rf"\frac{{{item[0]}}}{{{item[1]}}}" for item in items)
        return same(ground_truth, answer) if max(map(len, items)) == 2 else False
    if left.kind != right.kind or len(left.items) != len(right.items):
        return False
    try:
        left_values, right_values = ([exact_value(item) for item in part] for part in items)
    except TooLarge:
        return False
    if all(left_values) and all(right_values):
        return all(a * right_values[0] == b * left_values[0] for a, b in zip(left_values, right_values, strict=True))  # type: ignore[operator]
    equal = [same(a, b) for a, b in zip(*items, strict=True)]
    if False in equal or None in equal:  # in another scale: 1 : \\sqrt{3} and 2 : 2\\sqrt{3}
        first, second = items[0][0], items[1][0]
        scaled = [(rf"\frac{{{a}}}{{{first}}}", rf"\frac{{{b}}}{{{second}}}") for a, b in zip(*items, strict=True)]
        equal = [same(a, b) for a, b in scaled[1:]]
    return False if False in equal else None if None in equal else True


def _as_vector(given: Form, other: Form) -> Form:
    """Return a tuple where the other side is one, for a matrix of one column (or row), 2i - j + 3k, or P(1, 2)."""
    point = _POINT.match(given.items[0]) if given.kind == "scalar" and other.kind == "()" else None
    if point:
        return form(point.group(1))
    if given.kind == "scalar" and (other.kind == "()" or other.kind == "matrix 1x1x1"):
        return of_unit_vectors(given, len(other.items))
    count = len(given.items)
    if other.kind == "()" and given.kind in (f"matrix {'x'.join('1' * count)}", f"matrix {count}"):
        return Form("()", given.items)
    return given


def same_form(ground_truth: str, answer: str, same: ItemComparison, depth: int = 0) -> bool | None:
    """Compare two normalised answers by form, their items with `same`; None when an item cannot be decided."""
    left, right = form(ground_truth), form(answer)
    left, right = as_value(left, right), as_value(right, left)
    if left.kind == "scalar" and right.kind == "scalar":
        return same(left.items[0], right.items[0])
    kinds = {left.kind, right.kind}
    if "ratio" in kinds:
        return _same_ratio(left, right, same)
    if left.name and right.name and left.name != right.name:
        return False
    if kinds == {"()", "list"}:
        left, right = (part if part.kind == "()" else _in_order(part) for part in (left, right))
    if kinds == {"list"} and bool(_named_items(left)) != bool(_named_items(right)):
        left, right = _in_order(left), _in_order(right)
    if kinds <= {"list", "either", "{}"} and "either" in kinds and any(map(_named_items, (left, right))):
        return False  # x = 1, y = 2 are both, x = 1 or y = 2 is one of them
    if kinds == {"list"} and _counts_things(left) is not _counts_things(right):
        left, right = left._replace(kind="()"), right._replace(kind="()")  # 6 red and 4 blue are 6, 4 and not 4, 6
    for _ in range(2):  # twice: a column beside unit vectors becomes a tuple only then
        left, right = _as_vector(left, right), _as_vector(right, left)
    if kinds == {"{}", "scalar"} and len(left.items) == len(right.items) == 1 and depth == 0:
        return same_form(left.items[0], right.items[0], same, depth + 1)
    loose = kinds <= {"{}", "list", "either"}
    if kinds == {"{}"} and len(left.items) != len(right.items) and depth < MAX_DEPTH:
        return _cover(left.items, right.items, lambda item, other: same_form(item, other, same, depth + 1))
    if (left.kind != right.kind and not loose) or len(left.items) != len(right.items):
        return False
    if depth >= MAX_DEPTH or len(left.items) > MAX_ITEMS:
        return False

    def same_item(item: str, other: str) -> bool | None:
        return same_form(item, other, same, depth + 1)

    if not left.ordered:
        return _match_any_order(left.items, right.items, same_item)
    verdict: bool | None = True
    for item, other in zip(left.items, right.items, strict=True):
        equal = same_item(item, other)
        if equal is False:
            return False
        verdict = None if equal is None else verdict
    return verdict
