"""The rollouts of a run: an index of byte offsets for each step's file, filters and search over many steps.

A file is indexed when somebody looks at its step. Filters ask the index, search reads the lines again that pass them,
and both go back step by step for a second at most, so that a gigabyte is never read to answer one question.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from dashboard.growing_file import MOST_BYTES_OF_A_LINE, lines_of, open_plain
from shared.json_reader import decode_json
from shared.types import GRADED

MARKS = {"correct": 1, "wrong": 2, "cut": 4, "mixed language": 8, "masked": 16, "no answer": 32}
"""Mark of a completion -> its bit."""
SEARCH_S = 1.0
MOST_HITS = 40
MOST_LISTED = 500
"""groups of one answer"""
HEAD = 160
"""characters of a problem that the index keeps"""
NAME = re.compile(r"step_(\d{1,9})\.jsonl")


class _Problem(msgspec.Struct):
    id: str = ""
    text: str = ""
    language: str = ""
    domain: str = ""
    environment: str = ""


class _Prompt(msgspec.Struct):
    problem: _Problem


class _Completion(msgspec.Struct):
    token_ids: msgspec.Raw = msgspec.Raw(b"[]")
    finish_reason: str | None = None


class _Reward(msgspec.Struct):
    total: float | None = None
    verdict: str = ""
    consistent: bool | None = None


class _Group(msgspec.Struct):
    """What the index reads of a line; the rest is skipped."""

    prompt: _Prompt
    completions: list[_Completion] = []
    rewards: list[_Reward | None] = []


class GroupLine(msgspec.Struct, gc=False):
    """A line of a file of rollouts: where it begins, and what is in it."""

    offset: int
    problem: str
    """its id"""
    head: str
    """the beginning of its text, or why the line cannot be read"""
    language: str
    domain: str
    environment: str
    marks: bytes
    """[completions] bits of MARKS"""
    totals: list[float | None]
    tokens: list[int]


def _unread(offset: int, why: str) -> GroupLine:
    return GroupLine(offset, "", f"({why})", "", "", "", b"", [], [])


def _line(offset: int, line: bytes | None) -> GroupLine:
    if line is None:
        return _unread(offset, f"a line of more than {MOST_BYTES_OF_A_LINE >> 20} MB")
    try:
        group = decode_json(line, _Group)
    except ValueError as error:
        return _unread(offset, f"it cannot be read: {str(error)[:100]}")
    rewards = [*group.rewards, *[None] * (len(group.completions) - len(group.rewards))]
    problem = group.prompt.problem
    tokens = [bytes(one.token_ids).count(b",") + (len(one.token_ids) > 2) for one in group.completions]
    return GroupLine(
        offset, problem.id[:HEAD], problem.text[:HEAD], problem.language[:20], problem.domain[:40],
        problem.environment[:40], bytes(map(_marks, group.completions, rewards)),
        [None if one is None else one.total for one in rewards], tokens,
    )  # fmt: skip


def _marks(completion: _Completion, reward: _Reward | None) -> int:
    verdict = reward.verdict if reward else ""
    return (
        MARKS.get(verdict, 0) & (MARKS["correct"] | MARKS["wrong"] | MARKS["no answer"])
        | MARKS["cut"] * (completion.finish_reason == "length")
        | MARKS["mixed language"] * (reward is not None and reward.consistent is False)
        | MARKS["masked"] * (verdict not in GRADED or completion.finish_reason in ("abort", "crash", "timeout"))
    )


class Rollouts:
    """The folder rollouts/ of a run."""

    MOST_COMPLETIONS = 400_000
    """Most completions of a run in the indexes that are kept; a line without any counts as one."""
    MOST_OF_A_STEP = 100_000
    """Most completions and lines read of one file; the rest is left out."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._indexes: OrderedDict[int, tuple[tuple[int, ...], list[GroupLine]]] = OrderedDict()
        self._lock = threading.Lock()

    def steps(self) -> list[int]:
        """Steps that have a file, in order."""
        try:
            names = [] if self.folder.is_symlink() else os.listdir(self.folder)
        except OSError:
            return []
        return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step}.jsonl"

    def index(self, step: int) -> list[GroupLine]:
        """The groups of a step. Raises LookupError where there is no such file."""
        try:
            stream = open_plain(self._path(step))
        except OSError as error:
            raise LookupError(f"there are no rollouts of step {step}") from error
        with stream:
            status = os.fstat(stream.fileno())
            now = status.st_ino, status.st_size, status.st_mtime_ns
            with self._lock:
                if step in self._indexes and self._indexes[step][0] == now:
                    self._indexes.move_to_end(step)
                    return self._indexes[step][1]
            groups, size = list[GroupLine](), 0
            for offset, line in lines_of(stream):
                groups.append(_line(offset, line))
                size += 1 + len(groups[-1].marks)
                if size >= self.MOST_OF_A_STEP:
                    groups.append(_unread(stream.tell(), "what follows in this file is left out"))
                    break
        with self._lock:
            self._indexes[step] = now, groups
            kept = sum(max(1, len(one.marks)) for _, lines in self._indexes.values() for one in lines)
            while kept > self.MOST_COMPLETIONS and len(self._indexes) > 1:
                _, (_, dropped) = self._indexes.popitem(last=False)
                kept -= sum(max(1, len(one.marks)) for one in dropped)
        return groups

    def raw(self, step: int, line: int) -> bytes:
        """One line of a step's file. Raises LookupError where there is none, or it is too long."""
        index = self.index(step)
        if not 0 <= line < len(index):
            raise LookupError(f"step {step} has {len(index)} groups")
        try:
            with open_plain(self._path(step)) as stream:
                stream.seek(index[line].offset)
                data = stream.readline(MOST_BYTES_OF_A_LINE)
        except OSError as error:
            raise LookupError(f"there are no rollouts of step {step}") from error
        if not data.endswith(b"\n"):
            raise LookupError(f"group {line + 1} of step {step} is too large to be shown")
        return data

    def listed(self, step: int, start: int = 0) -> list[dict[str, Any]]:
        """The groups of a step from number `start` on, MOST_LISTED at most, as the page lists them."""
        groups = self.index(step)[start : start + MOST_LISTED]
        return [shown(step, place, group) for place, group in enumerate(groups, start)]

    def search(self, mark: str, text: str, before: int | None) -> dict[str, Any]:
        """Groups with a completion of this mark ("" for any) and, in its line, this text ("" for any; capitals do not
        matter), newest first: {"hits", "next": step to go on before, or None at the end, "looked": steps looked at}."""
        steps = [step for step in reversed(self.steps()) if before is None or step < before]
        texts, bit = needles(text), MARKS.get(mark, 0)
        hits: list[dict[str, Any]] = []
        end, looked = time.monotonic() + SEARCH_S, 0
        for step in steps:
            if looked and (time.monotonic() > end or len(hits) >= MOST_HITS):
                return {"hits": hits, "next": step + 1, "looked": looked}
            looked += 1
            try:
                hits += [shown(step, line, group) for line, group in islice(self._hits(step, bit, texts), MOST_LISTED)]
            except LookupError:
                continue  # it went away
        return {"hits": hits, "next": None, "looked": looked}

    def _hits(self, step: int, bit: int, texts: list[str]) -> Iterator[tuple[int, GroupLine]]:
        for line, group in enumerate(self.index(step)):
            if bit and not any(mark & bit for mark in group.marks):
                continue
            if not texts or holds(self.raw(step, line), texts):
                yield line, group


def needles(text: str) -> list[str]:
    """Ways to write a text in a file of JSON, without regard to capitals: as it is, or with escapes for what is not
    ASCII, of which each letter has another for its capital."""
    if not text.strip():
        return []
    escaped = (json.dumps(one) for one in (text, text.lower(), text.upper(), text.title(), text.capitalize()))
    return list({way[1:-1].casefold() for way in (msgspec.json.encode(text).decode(), *escaped)})


def holds(line: bytes, texts: list[str]) -> bool:
    """Whether one of the texts is in a line."""
    if all(one.isascii() for one in texts):
        small = line.lower()
        return any(one.encode() in small for one in texts)
    folded = line.decode("utf-8", "replace").casefold()
    return any(one in folded for one in texts)


def shown(step: int, line: int, group: GroupLine) -> dict[str, Any]:
    """A group of the index as the page gets it."""
    totals = [total for total in group.totals if total is not None]
    return {
        "step": step, "line": line, "problem": group.problem, "head": group.head, "language": group.language,
        "domain": group.domain, "environment": group.environment, "completions": len(group.marks),
        "reward": sum(totals) / len(totals) if totals else None, "totals": group.totals,
        "marks": {name: count for name, bit in MARKS.items() if (count := sum(bool(m & bit) for m in group.marks))},
        "tokens": sum(group.tokens) / len(group.tokens) if group.tokens else 0,
    }  # fmt: skip
