"""Makes masks of tokens out of a mask of letters: one row of bits for each place that a completion may be in.

A token that holds a part of a character may come where a character that begins so may come, and goes on only so.
"""

from __future__ import annotations

import codecs
import threading
from typing import Any

import numpy as np
import torch

from serve.letter_mask import ASCII, DONE, START, Kind, LetterMask, MaskRequest, MaskState

_PARTIAL = ASCII + len(Kind)
"""symbols from here on are bytes of incomplete characters"""
_UNKNOWN, _DEAD = -2, -1
Place = tuple[MaskState, bytes]
"""where a completion is, with the bytes of an incomplete character"""


class Vocabulary:
    """The tokens of a tokenizer as symbols of one language."""

    def __init__(self, tokens: list[bytes], mask: LetterMask):
        """tokens: bytes by id; b"" for none."""
        self.mask, self.partials = mask, dict[bytes, int]()
        rows = [self._symbols(token) for token in tokens]
        self.order = np.array(sorted((i for i, row in enumerate(rows) if row), key=lambda i: -len(rows[i])), np.int64)
        lengths = np.array([len(rows[i]) for i in self.order])
        self.columns = [
            np.array([rows[i][place] for i in self.order[: int((lengths > place).sum())]], np.int32)
            for place in range(int(lengths[0]) if len(lengths) else 0)
        ]
        """by place in the token: the symbols there, of the tokens in `order` that are longer"""
        self.rows = rows

    def _symbols(self, token: bytes) -> list[int]:
        """[] for a token that is no text."""
        size = next((place for place, byte in enumerate(token) if not 0x80 <= byte < 0xC0), len(token))
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(token[size:])
        except UnicodeDecodeError:
            return []
        begin, end = token[:size], decoder.getstate()[0]
        return [*self._partial(begin), *map(self.mask.symbol, text), *self._partial(end)]

    def _partial(self, piece: bytes) -> list[int]:
        return [self.partials.setdefault(piece, _PARTIAL + len(self.partials))] if piece else []


class TokenMask:
    """Which tokens may follow, in each place of a completion; computed once for each."""

    def __init__(self, request: MaskRequest, tokens: list[bytes]):
        self.request, self.mask = request, LetterMask(request)
        self._begin = dict(request.begin)
        self.words = (len(tokens) + 31) // 32
        self.vocabulary = Vocabulary(tokens, self.mask)
        self.bytes_of = {symbol: part for part, symbol in self.vocabulary.partials.items()}
        self.places: list[Place] = []
        self._numbers: dict[Place, int] = {}
        self._table = np.zeros((0, _PARTIAL + len(self.bytes_of)), np.int32)
        self._rows: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        """vLLM fills the rows of a large batch in several threads"""
        self.start = self._number((self.mask.start, b""))

    def _number(self, position: Place | None) -> int:
        if position is None:
            return _DEAD
        if position not in self._numbers:
            self._numbers[position] = len(self.places)
            self.places.append(position)
            if len(self.places) > len(self._table):
                more = np.full((64, self._table.shape[1]), _UNKNOWN, np.int32)
                self._table = np.concatenate([self._table, more])
        return self._numbers[position]

    def _step(self, position: Place, symbol: int) -> Place | None:
        state, pending = position
        if state == DONE:
            return position
        if symbol < _PARTIAL:
            after = None if pending else self.mask.step(state, symbol)
            return None if after is None else (after, b"")
        piece = self.bytes_of[symbol]
        if bool(pending) is (piece[0] >= 0xC0):
            return None
        whole = pending + piece
        try:
            character = whole.decode()
        except UnicodeDecodeError:
            return (state, whole) if self._completable(state, whole) else None
        after = self.mask.step(state, self.mask.symbol(character))
        return None if after is None else (after, b"")

    def _completable(self, state: MaskState, piece: bytes) -> bool:
        """Whether an allowed character begins with these bytes."""
        if self.request.spelled and self.request.tags.close[state.tag].encode().startswith(piece):
            return True
        size = 2 if piece[0] < 0xE0 else 3 if piece[0] < 0xF0 else 4
        if len(piece) >= size:
            return False
        value = piece[0] & (0x7F >> size)
        for byte in piece[1:]:
            value = value << 6 | byte & 0x3F
        bits = 6 * (size - len(piece))
        least = max(value << bits, (0, 0, 0x80, 0x800, 0x10000)[size])
        kinds = np.unique(self.mask.kinds[least : (value + 1) << bits])
        return any(self.mask.step(state, ASCII + int(kind)) is not None for kind in kinds)

    def follow(self, numbers: np.ndarray[Any, Any], symbols: np.ndarray[Any, Any]) -> Any:
        """Return the numbers of the places after one more symbol each: [places], [places] -> [places]."""
        after = self._table[numbers, symbols]
        unknown = np.unique(np.stack((numbers, symbols))[:, after == _UNKNOWN], axis=1)
        if not unknown.size:
            return after
        for begin, symbol in unknown.T.tolist():
            reached = self._number(self._step(self.places[begin], symbol))
            self._table[begin, symbol] = reached
        return self._table[numbers, symbols]

    def advance(self, number: int, token: int) -> int:
        """Return the place after one more token."""
        request, (state, _) = self.request, self.places[number]
        if state == DONE or token in request.end_ids:
            return number
        if token in request.close_ids and state.mode != "before":
            return self._number((DONE, b""))
        if state.mode == "before" and (letters := self._begin.get(token)):
            begun = letters == len(request.tags.open)
            return self._number((START if begun else state._replace(tag=letters), b""))
        for symbol in self.vocabulary.rows[token] or [ASCII + Kind.SIGN]:
            after = int(self.follow(np.array([number]), np.array([symbol]))[0])
            number = after if after != _DEAD else self._number((START, b""))
        return number

    def row(self, number: int) -> torch.Tensor:
        """Return the bits of the tokens that may follow, int32 [words]."""
        with self._lock:
            if number not in self._rows:
                self._rows[number] = self._compute(number)
            return self._rows[number]

    def _compute(self, number: int) -> torch.Tensor:
        if self.places[number][0] == DONE:
            return torch.full((self.words,), -1, dtype=torch.int32)
        before = self.places[number][0].mode == "before"
        allowed = np.full(self.words * 32, before, bool)
        order, places = self.vocabulary.order, np.full(len(self.vocabulary.order), number, np.int32)
        for symbols in self.vocabulary.columns:
            alive = np.flatnonzero(places[: len(symbols)] >= 0)
            places[alive] = self.follow(places[alive], symbols[alive])
        allowed[order] = places >= 0
        allowed[[*self.request.end_ids, *self.request.close_ids]] = True
        return torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32).copy())
