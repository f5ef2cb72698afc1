r"""The outer form of an answer (set, tuple, interval, list, union, ratio, matrix) and comparison by form.

Two answers are equal only when their forms are equal and their items are: in order for tuples, intervals, ratios and
matrices, in any order for sets, unions and bare lists, with the same count in each. Items go to a comparison that the
caller gives, which may answer True, False or None ("I cannot tell"); None wins over True, False over both. What it
does not do: compare single values. Who calls this: `plain.py` (cheap items) and `algebra.py` (items with algebra).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from verify.math.number import TooLarge, exact_value
from verify.math.quantity import COMPOUND, without_text

ItemComparison = Callable[[str, str], bool | None]

MAX_ITEMS = 64
MAX_DEPTH = 12
MAX_DETERMINANT = 4


class Form(NamedTuple):
    """Kind and items of an answer; kind "scalar" has the text itself as its only item."""

    kind: str
    items: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        """False for sets, unions and bare lists."""
        return self.kind not in ("{}", "list", "or", "union", "intersection")


_THOUSANDS = re.compile(r"^[-+]?[^\d,()\[\]{}]{0,6}\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,]).{0,40}$")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MATRIX = re.compile(r"^\\begin\{([pbBvV]?matrix|array|smallmatrix)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}$", re.DOTALL)
_FRAMED_MATRIX = re.compile(r"^[\[(]\s*(\\begin\{(matrix|array|smallmatrix)\}.*\\end\{\2\})\s*[\])]$", re.DOTALL)
_SCALED_MATRIX = re.compile(r"^([^=]+?)\s*(?:\\cdot|\\times)?\s*(\\begin\{([pb]matrix)\}.*\\end\{\3\})$", re.DOTALL)
_TUPLE_NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w\}?)?"
_NAMED_TUPLE = re.compile(rf"^\(\s*{_TUPLE_NAME}(?:\s*,\s*{_TUPLE_NAME})+\s*\)\s*=\s*(?=\()")
_NUMBER_FACTOR = r"-|-?\s*(?:\d+(?:\.\d+)?(?:/\d+)?|\\frac\s*\{\d+\}\s*\{\d+\})"
_SCALED_TUPLE = re.compile(rf"^({_NUMBER_FACTOR})\s*(?:\\cdot|\\times|\*)?\s*(\(.*,.*\))$", re.DOTALL)
_TRANSPOSED = re.compile(r"^(.*(?:\\end\{[pbBvV]?(?:small)?matrix\}|[\])]))\s*\^\s*\{?\s*T\s*\}?$", re.DOTALL)
_MATRIX_NAME = re.compile(r"^[A-Z](?:\^\{?\w+\}?)?\s*=\s*(?=[^=]*\\begin\{)")
_UNIT_VECTOR = re.compile(r"([+-]?)([^+-]*?)(?:\\(?:hat|vec)\s*\{?\s*)?([ijk])\s*\}?\s*(?=[+-]|$)")
_SQUARE = re.compile(r"^matrix v(\d+)(?:x\1)*$")
_POINT = re.compile(r"^[A-Z]\s*(\([^()]*,[^()]*\))$")
_QUOTED = re.compile(r"'([^'\\{}]*)'")
_ASSIGNED = re.compile(r"^((?:\\?[A-Za-z]+(?:_\{?\w+\}?)?'?))\s*(?:=|\\in(?![A-Za-z]))\s*(.+)$", re.DOTALL)
_ORDER = re.compile(r"[<>]|\\[lg]eq|\\neq")
_CLOSERS = {"(": ")]", "[": ")]", "\\{": ("\\}",)}


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split where `separator` matches outside of all brackets."""
    level, start, position, parts = 0, 0, 0, []
    while position < len(text):
        if level == 0:
            found = separator.match(text, position)
            if found and found.end() > position:
                parts.append(text[start:position])
                start = position = found.end()
                continue
        character = text[position]
        if character == "\\" and position + 1 < len(text):
            position += 1
            character = text[position]
            if character not in "{}":
                position += 1
                continue
        if character in "([{":
            level += 1
        elif character in ")]}":
            level = max(0, level - 1)
        position += 1
    parts.append(text[start:])
    return [part.strip() for part in parts]


_COMMA = re.compile(r"[,;]")
_SPACED_COMMA = re.compile(r";|,(?=\s)|,(?!\d{3}(?!\d))")
_CONNECTIVE = re.compile(
    r"(?<![A-Za-z\\])(?:and|or|и|или|et|ou|und|oder)(?![A-Za-z])(?=[\s\d])|(?<=\d )[yo](?= \d)|或|和|与|及"
)
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_CAP = re.compile(r"\\cap(?![A-Za-z])")
_COLON = re.compile(r":(?!=)")
_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])")
_CELL = re.compile(r"&")
_PM = re.compile(r"\\(pm|mp)(?![A-Za-z])")


def _bracketed(text: str) -> tuple[str, str] | None:
    """(kind, inside) when one pair of brackets spans the whole text."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    if opening not in _CLOSERS:
        return None
    closing = next((closer for closer in _CLOSERS[opening] if text.endswith(closer)), None)
    inside = text[len(opening) : len(text) - len(closing)] if closing else ""
    if closing is None or len(text) < len(opening) + len(closing):
        return None
    level = 0
    for token in re.finditer(r"\\[^{}]|\\?[{}]|[()\[\]]", inside):
        sign = token.group()[-1]
        level += 1 if sign in "([{" else -1 if sign in ")]}" else 0
        if level < 0:
            return None
    kind = opening[-1] + closing[-1]
    return (kind, inside.strip()) if level == 0 else None


_FRENCH = re.compile(r"(?<![\w)\]}])\](?=[^\[\]]*[,;][^\[\]]*[\[\]])|(?<=[\w)}])\[(?=\s*(?:$|\\cup|\\cap))")


def french_brackets(text: str) -> str:
    """]0,1[ -> (0,1): intervals as written in France and Germany."""
    if not (text.startswith("]") or text.endswith("[")):
        return text
    return _FRENCH.sub(lambda match: "(" if match.group() == "]" else ")", text)


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


def _without_names(items: list[str]) -> list[str]:
    """x = 1, x = 2 -> 1, 2 (only when every item that has a name has the same one)."""
    matches = [_ASSIGNED.match(item) for item in items]
    names = {match.group(1) for match in matches if match}
    if len(names) != 1 or any("=" in match.group(2) for match in matches if match):
        return items
    return [match.group(2).strip() if match else item for match, item in zip(matches, items, strict=True)]


@lru_cache(maxsize=8192)
def form(text: str) -> Form:
    """Return the outer form of normalised text."""
    text = _NAMED_TUPLE.sub("", french_brackets(text))
    if text.startswith("['"):
        text = _QUOTED.sub(r"\1", text)
    text = _FRAMED_MATRIX.sub(r"\1", _MATRIX_NAME.sub("", text))
    matrix = _MATRIX.match(text)
    if matrix:
        rows = [split_top(row, _CELL) for row in split_top(matrix.group(2).strip(), _ROW) if row.strip()]
        return _of_rows(rows, matrix.group(1)[0] if matrix.group(1)[0] in "vV" else "")
    scaled = _SCALED_MATRIX.match(text)
    if scaled and scaled.group(2).count("\\begin") == 1:
        return _scaled(scaled.group(1), form(scaled.group(2)))
    scaled = _SCALED_TUPLE.match(text)
    if scaled and _bracketed(scaled.group(2)) and form(scaled.group(2)).kind == "()":
        return _scaled(scaled.group(1), form(scaled.group(2)))
    transposed = _TRANSPOSED.match(text)
    if transposed and form(transposed.group(1)).kind.startswith(("matrix", "()")):
        return _transpose(form(transposed.group(1)))
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return Form("{}", ())
    for separator, kind in ((_CUP, "union"), (_CAP, "intersection")):
        operands = split_top(text, separator)
        if len(operands) > 1:
            return Form(kind, tuple(operands))
    pair = _bracketed(text)
    if pair:
        kind, inside = pair
        items = split_top(inside, _COMMA)
        if kind == "()" and len(items) == 1:
            return form(inside) if inside and not _PM.search(inside) else Form("scalar", (text,))
        if kind == "()" and len(items) > 1 and len(_PM.findall(inside)) == 1:
            return Form("list", tuple(f"({_PM.sub(sign, inside)})".replace("(+", "(") for sign in "+-"))
        if kind == "[]" and len(items) > 1 and all(item.startswith("[") and item.endswith("]") for item in items):
            return _of_rows([split_top(item[1:-1], _COMMA) for item in items])
        if kind == "{}" and (_ORDER.search(inside) or "|" in inside or "\\mid" in inside or ":" in inside):
            return Form("scalar", (text,))
        return Form(kind, tuple(_expand_signs(items) if kind == "{}" else items))
    return _bare(text)


def _scaled(factor: str, inner: Form) -> Form:
    """Every entry times a number."""
    factor = "-1" if factor.strip() == "-" else factor
    return Form(inner.kind, tuple(f"({factor})({item})" for item in inner.items))


def _of_rows(rows: list[list[str]], bars: str = "") -> Form:
    shape = "x".join(str(len(row)) for row in rows)
    return Form(f"matrix {bars}{shape}", tuple(cell for row in rows for cell in row))


def _transpose(inner: Form) -> Form:
    """Rows for columns; a tuple is a row."""
    widths = [int(width) for width in inner.kind.removeprefix("matrix ").split("x")] if inner.kind != "()" else []
    width = widths[0] if widths else len(inner.items)
    if len(set(widths)) > 1:
        return Form("scalar", (f"({', '.join(inner.items)})^T",))
    return _of_rows([list(inner.items[column::width]) for column in range(width)])


def _bare(text: str) -> Form:
    """Form of text without outer brackets: list, ratio or scalar."""
    if COMPOUND.match(without_text(text)):
        return Form("scalar", (text,))
    if _THOUSANDS.match(text) and len(_COMMA.findall(_GROUPED.sub("", text))) == 0:
        return Form("scalar", (text,))
    separator = _SPACED_COMMA if re.search(r"[,;]\s", text) else _COMMA
    items = [item for part in split_top(text, separator) for item in split_top(part, _CONNECTIVE)]
    items = [item for item in items if item]
    if len(items) > 1 and not (len(items) == 2 and not any(re.search(r"\d|\\|=|^\(?.\)?$", item) for item in items)):
        if any(_ORDER.search(item) for item in items):
            kind = "or" if re.search(r"(?<![a-z])or(?![a-z])|或", text) else "and"
            return Form(kind if kind == "or" else "list", tuple(items))
        return Form("list", tuple(_expand_signs(_without_names(items))))
    named = _ASSIGNED.match(text)
    if named and "=" not in named.group(2) and form(named.group(2).strip()).kind != "scalar":
        return form(named.group(2).strip())
    if _PM.search(text):
        expanded = _expand_signs(_without_names([text]))
        return Form("list", tuple(expanded)) if len(expanded) > 1 else Form("scalar", (text,))
    ratio = split_top(text, _COLON)
    if len(ratio) > 1 and all(re.search(r"\d|^[a-z]$", item) for item in ratio):
        return Form("ratio", tuple(ratio))
    return Form("scalar", (text,))


def _match_any_order(gold: tuple[str, ...], answer: tuple[str, ...], same: ItemComparison) -> bool | None:
    """Perfect matching of items; None when only undecided items could complete it."""
    table = [[same(left, right) for right in answer] for left in gold]
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

        if all(place(row, set()) for row in range(len(gold))):
            return result
    return False


def _cover(gold: tuple[str, ...], answer: tuple[str, ...], same: ItemComparison) -> bool | None:
    """Sets with repeated members: everything on one side is on the other."""
    if max(len(gold), len(answer)) > MAX_ITEMS or not gold or not answer:
        return False
    table = [[same(left, right) for right in answer] for left in gold]
    lines = [*table, *(list(column) for column in zip(*table, strict=True))]
    if all(True in line for line in lines):
        return True
    return None if all(True in line or None in line for line in lines) else False


def _in_order(found: Form) -> Form:
    """A bare list as a tuple: "1, 2" as it stands, "x=1, y=2" when the names are in the order of the alphabet."""
    matches = [_ASSIGNED.match(item) for item in found.items]
    names = [match.group(1) for match in matches if match]
    if found.kind != "list" or not names:
        return Form("()", found.items)
    if len(names) != len(found.items) or names != sorted(set(names)):
        return found
    return Form("()", tuple(match.group(2).strip() for match in matches if match))


def _same_ratio(left: Form, right: Form, same: ItemComparison) -> bool | None:
    """2:4 is 1:2; a ratio of two is a fraction; ratios of other than numbers are compared item by item."""
    items = [form.items for form in (left, right)]
    if {left.kind, right.kind} == {"ratio", "scalar"}:
        gold, answer = (item[0] if len(item) == 1 else rf"\frac{{{item[0]}}}{{{item[1]}}}" for item in items)
        return same(gold, answer) if max(map(len, items)) == 2 else False
    if left.kind != right.kind or len(left.items) != len(right.items):
        return False
    try:
        one, other = ([exact_value(item) for item in part] for part in items)
    except TooLarge:
        return False
    if all(one) and all(other):
        return all(a * other[0] == b * one[0] for a, b in zip(one, other, strict=True))  # type: ignore[operator]
    found = [same(a, b) for a, b in zip(*items, strict=True)]
    return False if False in found else None if None in found else True


def _of_unit_vectors(found: Form, length: int) -> Form:
    """2i - j + 3k as (2, -1, 3); anything else as it is."""
    text = found.items[0].replace(" ", "")
    terms = list(_UNIT_VECTOR.finditer(text))
    names = [term.group(3) for term in terms]
    whole = "".join(term.group() for term in terms) == text
    if not whole or not {"j", "k"} & set(names) or names != sorted(set(names)) or length not in (2, 3):
        return found
    parts = {term.group(3): term.group(1) + (term.group(2) or "1") for term in terms}
    return Form("()", tuple(parts.get(name, "0").removeprefix("+") for name in "ijk"[:length]))


def _determinant(rows: list[tuple[str, ...]]) -> str:
    """|a b; c d| written out, by its first row."""
    if len(rows) == 1:
        return f"({rows[0][0]})"
    terms = []
    for column, entry in enumerate(rows[0]):
        minor = _determinant([row[:column] + row[column + 1 :] for row in rows[1:]])
        terms.append(f"{'-' if column % 2 else '+'}({entry}){minor}")
    return f"({''.join(terms).removeprefix('+')})"


def _as_value(found: Form, other: Form) -> Form:
    """A determinant is a value where the other side is one."""
    match = _SQUARE.match(found.kind)
    size = int(match.group(1)) if match else 0
    if other.kind != "scalar" or not 1 <= size <= MAX_DETERMINANT or len(found.items) != size * size:
        return found
    return Form("scalar", (_determinant([found.items[row * size : (row + 1) * size] for row in range(size)]),))


def _as_vector(found: Form, other: Form) -> Form:
    """A tuple where the other side is one: a matrix of one column (or row), 2i - j + 3k, a named point P(1, 2)."""
    point = _POINT.match(found.items[0]) if found.kind == "scalar" and other.kind == "()" else None
    if point:
        return form(point.group(1))
    if found.kind == "scalar" and (other.kind == "()" or other.kind == "matrix 1x1x1"):
        return _of_unit_vectors(found, len(other.items))
    count = len(found.items)
    if other.kind == "()" and found.kind in (f"matrix {'x'.join('1' * count)}", f"matrix {count}"):
        return Form("()", found.items)
    return found


def same_form(gold: str, answer: str, same: ItemComparison, depth: int = 0) -> bool | None:
    """Compare two normalised answers by form, their items with `same`; None when an item cannot be decided."""
    left, right = form(gold), form(answer)
    left, right = _as_value(left, right), _as_value(right, left)
    if left.kind == "scalar" and right.kind == "scalar":
        return same(left.items[0], right.items[0])
    kinds = {left.kind, right.kind}
    if "ratio" in kinds:
        return _same_ratio(left, right, same)
    if kinds == {"()", "list"}:
        left, right = _in_order(left), _in_order(right)
    for _ in range(2):  # twice: a column beside unit vectors becomes a tuple only then
        left, right = _as_vector(left, right), _as_vector(right, left)
    if kinds == {"{}", "scalar"} and len(left.items) == len(right.items) == 1 and depth == 0:
        return same_form(left.items[0], right.items[0], same, depth + 1)
    loose = kinds == {"{}", "list"}
    if kinds == {"{}"} and len(left.items) != len(right.items) and depth < MAX_DEPTH:
        return _cover(left.items, right.items, lambda one, other: same_form(one, other, same, depth + 1))
    if (left.kind != right.kind and not loose) or len(left.items) != len(right.items):
        return False
    if depth >= MAX_DEPTH or len(left.items) > MAX_ITEMS:
        return False

    def same_item(one: str, other: str) -> bool | None:
        return same_form(one, other, same, depth + 1)

    if not left.ordered:
        return _match_any_order(left.items, right.items, same_item)
    verdict: bool | None = True
    for one, other in zip(left.items, right.items, strict=True):
        found = same_item(one, other)
        if found is False:
            return False
        verdict = None if found is None else verdict
    return verdict
