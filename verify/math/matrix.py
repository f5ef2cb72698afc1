r"""Handles matrices and vectors as forms: rows, transposes, factors, determinants, 2i - j + 3k."""

from __future__ import annotations

import re

from verify.math.brackets import Form

MAX_DETERMINANT = 4
_SQUARE = re.compile(r"^matrix v(\d+)(?:x\1)*$")
PLAIN_MATRIX = re.compile(r"^(?:matrix \d+(?:x\d+)*|\(\))$")
_UNIT_VECTOR = re.compile(r"([+-]?)([^+-]*?)(?:\\(?:hat|vec)\s*\{?\s*)?([ijk])\s*\}?\s*(?=[+-]|$)")


def times_number(factor: str, inner: Form) -> Form:
    """Multiply every entry by a number."""
    factor = "-1" if factor.strip() == "-" else factor
    return Form(inner.kind, tuple(f"({factor})({item})" for item in inner.items))


def of_rows(rows: list[list[str]], bars: str = "") -> Form:
    shape = "x".join(str(len(row)) for row in rows)
    return Form(f"matrix {bars}{shape}", tuple(cell for row in rows for cell in row))


def transpose(inner: Form) -> Form:
    """Exchange rows and columns; a tuple is a row."""
    widths = [int(width) for width in inner.kind.removeprefix("matrix ").split("x")] if inner.kind != "()" else []
    width = widths[0] if widths else len(inner.items)
    if len(set(widths)) > 1:
        return Form("scalar", (f"({', '.join(inner.items)})^T",))
    return of_rows([list(inner.items[column::width]) for column in range(width)])


def _determinant(rows: list[tuple[str, ...]]) -> str:
    """Write a determinant |a b; c d| out, expanded by its first row."""
    if len(rows) == 1:
        return f"({rows[0][0]})"
    terms = []
    for column, entry in enumerate(rows[0]):
        minor = _determinant([row[:column] + row[column + 1 :] for row in rows[1:]])
        terms.append(f"{'-' if column % 2 else '+'}({entry}){minor}")
    return f"({''.join(terms).removeprefix('+')})"


def as_value(form: Form, other: Form) -> Form:
    """Return a determinant as a scalar where the other side is one, and other forms as they are."""
    match = _SQUARE.match(form.kind)
    size = int(match.group(1)) if match else 0
    if other.kind != "scalar" or not 1 <= size <= MAX_DETERMINANT or len(form.items) != size * size:
        return form
    return Form("scalar", (_determinant([form.items[row * size : (row + 1) * size] for row in range(size)]),))


def of_unit_vectors(form: Form, length: int) -> Form:
    """Return 2i - j + 3k as (2, -1, 3), and anything else as it is."""
    text = form.items[0].replace(" ", "")
    if len(text) > 200:
        return form
    terms = list(_UNIT_VECTOR.finditer(text))
    names = [term.group(3) for term in terms]
    whole = "".join(term.group() for term in terms) == text
    if not whole or not {"j", "k"} & set(names) or names != sorted(set(names)) or set(names) - set("ijk"[:length]):
        return form
    parts = {term.group(3): term.group(1) + (term.group(2) or "1") for term in terms}
    return Form("()", tuple(parts.get(name, "0").removeprefix("+") for name in "ijk"[:length]))
