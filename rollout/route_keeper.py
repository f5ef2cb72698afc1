"""Keeps the routes of an engine's completions until they are in files (shared/route_files.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shared import route_files
from shared.types import Completion, RouteFile


@dataclass
class _Rows:
    """Routes of one completion that no file holds yet."""

    tokens: int = 0
    content: bytearray = field(default_factory=bytearray)
    cut: list[tuple[str, bytes, int]] = field(default_factory=list)
    """files that are to be written: name, content, tokens"""


class RouteKeeper:
    """The routes of the completions of one engine, by group and index."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._rows: dict[tuple[int, int], _Rows] = {}
        self._writing = asyncio.Lock()

    def add(self, completion: Completion, routed: np.ndarray) -> None:
        """Keep the routes of the next tokens, [tokens, layers, experts of a token]."""
        rows = self._rows.setdefault((completion.group, completion.index), _Rows())
        rows.content += routed.tobytes()
        rows.tokens += len(routed)

    def known(self, completion: Completion) -> int:
        """Tokens whose routes are here or in files."""
        rows = self._rows.get((completion.group, completion.index), _Rows())
        return _tokens(completion.routes) + sum(tokens for *_, tokens in rows.cut) + rows.tokens

    async def put_away(self, completions: Sequence[Completion]) -> list[list[RouteFile]]:
        """Write what is kept of these completions, and add the files to their `routes`; returns the files that each has
        for the tokens of now, also where more come meanwhile. What could not be written is kept. Raises DiskError."""
        counts = [self._cut(completion) for completion in completions]
        if any((one.group, one.index) in self._rows for one in completions):
            async with self._writing:
                for completion in completions:
                    await self._write(completion)
        return [one.routes[:count] for one, count in zip(completions, counts, strict=True)]

    def _cut(self, completion: Completion) -> int:
        """Make a file's content of what has come since the last one; returns the number of files with it."""
        if (rows := self._rows.get((completion.group, completion.index))) is None:
            return len(completion.routes)
        if rows.tokens:
            first = self.known(completion) - rows.tokens
            name = f"{completion.group}/{completion.index}.{completion.anew}.{first}"
            rows.cut.append((name, bytes(rows.content), rows.tokens))
            rows.tokens, rows.content = 0, bytearray()
        return len(completion.routes) + len(rows.cut)

    async def _write(self, completion: Completion) -> None:
        key = completion.group, completion.index
        while (rows := self._rows.get(key)) and rows.cut:
            file = await asyncio.to_thread(route_files.write, self.run_dir, *rows.cut[0])
            completion.routes = [*completion.routes, file]
            del rows.cut[0]
        if rows and not rows.tokens:
            del self._rows[key]


def _tokens(files: Iterable[RouteFile]) -> int:
    return sum(file.tokens for file in files)
