"""The numbers of a run's metrics.jsonl as columns, read once and added to while the run goes on."""

from __future__ import annotations

import math
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dashboard.growing_file import GrowingFile
from shared.json_reader import decode_json

MOST_NAMES = 500
"""Most columns of a file; a run has about 90."""
MOST_ROWS = 300_000
AXES = ("step", "tokens", "time")
"""Axes that charts may be drawn over."""
NAN, LARGEST = float("nan"), sys.float_info.max
Numbers = NDArray[np.float64]


class Table:
    """The rows of one kind ("train", "sft", "evaluation") as columns of numbers, NaN where a row has none."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {"step": array("d"), "time": array("d")}
        self.rows: dict[int, int] = {}
        """step -> its row"""

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, or replace the one of its step."""
        step, count = row["step"], len(self.rows)
        index = self.rows.get(step, count)
        if index == MOST_ROWS:
            return
        self.rows[step] = index
        for name, value in row.items():
            if type(value) is not float and type(value) is not int:
                continue
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= MOST_NAMES or len(name) > 120:
                    continue
                column = self.columns[name] = array("d", [NAN]) * count
            if abs(value) > LARGEST:
                value = math.inf if value > 0 else -math.inf  # an integer may be larger than any float
            if index == count:
                column.append(value)
            else:
                column[index] = value
        if index == count:
            for column in self.columns.values():
                if len(column) == count:
                    column.append(NAN)

    def numbers(self, name: str) -> Numbers:
        """[rows] the values of a column, in the order of the steps; NaN where there is none."""
        order = self.order
        return np.array(self.columns[name])[order] if name in self.columns else np.full(len(order), NAN)

    @property
    def order(self) -> NDArray[np.intp]:
        """[rows] the places of the rows by step."""
        return np.argsort(np.array(self.columns["step"]), kind="stable")

    @property
    def names(self) -> list[str]:
        """Names of the columns that hold a number."""
        return [name for name, column in self.columns.items() if np.isfinite(np.array(column)).any()]


class MetricColumns:
    """The tables of one metrics.jsonl. Lines that are no rows are left out and counted."""

    def __init__(self, path: Path):
        self._file = GrowingFile(path)
        self.tables: dict[str, Table] = {}
        self.damaged = 0

    def look(self) -> None:
        """Read what is new."""
        void, lines = self._file.look()
        if void:
            self.tables, self.damaged = {}, 0
        for _, line in lines:
            try:
                row = decode_json(line or b"", dict[str, Any])
                step, kind = row["step"], row.get("kind", "train")
                if not isinstance(step, int) or not isinstance(kind, str) or abs(step) > 1 << 53:
                    raise TypeError
            except (ValueError, TypeError, LookupError, AttributeError):
                self.damaged += 1
                continue
            if kind in self.tables or len(self.tables) < 8:
                self.tables.setdefault(kind, Table()).add(row)

    @property
    def cells(self) -> int:
        """Numbers that are held in memory."""
        return sum(len(table.columns) * len(table.rows) for table in self.tables.values())

    def table(self, kind: str) -> Table:
        """The rows of a kind; empty if there are none."""
        return self.tables.get(kind) or Table()

    def over(self, kind: str, axis: str) -> Numbers:
        """[rows] where the rows of a kind are on an axis: "step", "tokens" that were trained so far, or "time", hours
        of training (of wall time where a run does not say)."""
        table = self.table(kind)
        if axis == "tokens":
            speed = "sft/tokens_per_s" if kind == "sft" else "tokens/trained_per_s"
            seconds = table.numbers("time/step_s")
            if kind == "sft":
                seconds = np.diff(table.numbers("time"), prepend=NAN)
            return np.cumsum(np.nan_to_num(table.numbers(speed) * seconds))
        if axis == "time":
            total = table.numbers("time/total_s")
            wall = table.numbers("time")
            return (total if np.isfinite(total).any() else wall - wall[:1]) / 3600
        return table.numbers("step")


def thin(x: Numbers, columns: list[Numbers], points: int) -> tuple[Numbers, list[Numbers]]:
    """Reduce [rows] to at most `points`: of each run of neighbours the smallest and the largest value, in their order,
    so that no spike is lost. x: the first and the middle one of each run."""
    each = -(-len(x) // max(points // 2, 1))
    if each <= 2:
        return x, columns
    runs = -(-len(x) // each)
    padding = runs * each - len(x)
    shaped = np.concatenate([x, np.full(padding, x[-1])]).reshape(runs, each)
    thinned = []
    for values in columns:
        parts = np.concatenate([values, np.full(padding, NAN)]).reshape(runs, each)
        low = np.where(np.isfinite(parts), parts, np.inf)
        high = np.where(np.isfinite(parts), parts, -np.inf)
        first = low.argmin(1) <= high.argmax(1)
        least, most = low.min(1), high.max(1)
        pair = np.stack([np.where(first, least, most), np.where(first, most, least)], 1).ravel()
        thinned.append(np.where(np.isfinite(pair), pair, NAN))
    return np.stack([shaped[:, 0], shaped[:, each // 2]], 1).ravel(), thinned
