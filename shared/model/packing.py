"""Sequences of different lengths laid end to end: one flat stream of tokens, no padding.

    sequences  [5 6 7] [8 9]        masks  0 1 1, 0 1
    token_ids  5 6 7 8 9            positions  0 1 2 0 1        lengths  3 2
    the hidden state at 0 predicts 6, at 1 predicts 7, at 3 predicts 9:
    loss_positions  0 1 3           targets  6 7 9

Sequences with the same prompt (a group's completions) store and compute it once:

    sequences  [5 6 7 8] [5 6 9]    masks  0 0 1 1, 0 0 1
    token_ids  5 6 | 7              positions  0 1 2            lengths  2 1        prefixes  -1 0
    loss_positions  1 2 1           targets  7 8 9

Last tokens predict nothing, so they are left out. Targets keep the order of the sequences either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch as the decoder takes it: segments of a stream, each a sequence of its own or the continuation of
    an earlier segment."""

    token_ids: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64 place in the own sequence: a segment counts from 0, or from its prefix's length"""
    lengths: tuple[int, ...]
    """[segments], all positive, their sum is tokens"""
    prefixes: tuple[int, ...]
    """[segments] number of the segment that this one continues (itself without prefix), -1 for none"""
    loss_positions: Tensor
    """[loss_tokens] int64 index into the stream: the hidden state there predicts the target"""
    targets: Tensor
    """[loss_tokens] int64"""
    routes: Tensor | None = None
    """[tokens, bytes] uint8, of `Completion.routes`; all 255 for a token that has none. None where none has one"""

    def __post_init__(self) -> None:
        tokens = sum(self.lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths = {self.lengths}: a packed batch needs segments of at least one token")
        if len(self.prefixes) != len(self.lengths):
            raise ValueError(f"{len(self.prefixes)} prefixes for {len(self.lengths)} segments")
        for segment, prefix in enumerate(self.prefixes):
            if prefix != -1 and not (0 <= prefix < segment and self.prefixes[prefix] == -1):
                raise ValueError(f"segment {segment} continues {prefix}, which is no earlier segment without prefix")
        for name in ("token_ids", "positions"):
            tensor = getattr(self, name)
            if tensor.shape != (tokens,) or tensor.dtype != torch.int64:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected int64 ({tokens},)")
        if self.routes is not None and len(self.routes) != tokens:
            raise ValueError(f"{len(self.routes)} routes for {tokens} tokens")
        if self.loss_positions.dim() != 1 or self.loss_positions.shape != self.targets.shape:
            raise ValueError(
                f"loss_positions {tuple(self.loss_positions.shape)} and targets {tuple(self.targets.shape)} "
                "must be two lists of one length"
            )

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return self.token_ids.shape[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its prefix included."""
        pairs = zip(self.lengths, self.prefixes, strict=True)
        return max(length + (self.lengths[prefix] if prefix >= 0 else 0) for length, prefix in pairs)


class _Stream:
    """The lists of a batch while it grows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.lengths: list[int] = []
        self.prefixes: list[int] = []
        self.routes: list[bytes] = []

    def add(self, tokens: Sequence[int], routes: Sequence[bytes], position: int = 0, prefix: int = -1) -> int:
        """Append a segment whose first token is at `position` of its sequence; returns its start. routes: of the
        whole sequence, as far as there are any."""
        start = len(self.token_ids)
        if tokens:
            self.token_ids.extend(tokens)
            self.positions.extend(range(position, position + len(tokens)))
            self.lengths.append(len(tokens))
            self.prefixes.append(prefix)
            known = routes[position : position + len(tokens)]
            self.routes += [*known, *[b""] * (len(tokens) - len(known))]
        return start


def pack(
    sequences: Sequence[Sequence[int]],
    masks: Sequence[bytes],
    device: torch.device | str = "cpu",
    share_prefixes: bool = True,
    routes: Sequence[Sequence[bytes]] = (),
) -> PackedBatch:
    """Lay `sequences` end to end; the targets are the tokens whose mask is not 0.

    masks: [sequences][tokens]; nothing predicts the first token, so its mask is 0. A sequence without a target is
    allowed. `share_prefixes` stores once what several sequences have before their first target (a group's prompt);
    without it the stream holds every token as given. routes: [sequences], `TrainSequence.routes` of each, all rows of
    one length; () for none; those of a shared prompt are its first sequence's. No sequences give a placeholder of
    one token without target: it runs through the model with gradients of zero, so that a rank without work stays in
    step with the others. Raises ValueError for what breaks the contract.
    """
    if len(sequences) != len(masks):
        raise ValueError(f"{len(sequences)} sequences but {len(masks)} masks")
    if not sequences:
        sequences, masks, routes = [[0]], [b"\0"], ()
    for number, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        if not mask or len(mask) != len(sequence):
            raise ValueError(f"sequence {number}: a mask of {len(mask)} for {len(sequence)} tokens")
        if mask[0]:
            raise ValueError(f"sequence {number}: its first token cannot be a target, since nothing predicts it")
    firsts = [len(mask) - len(mask.lstrip(b"\0")) for mask in masks]
    prompts = [tuple(sequence[:first]) for sequence, first in zip(sequences, firsts, strict=True)]
    uses = Counter(prompts) if share_prefixes else Counter()
    stream = _Stream()
    shared: dict[tuple[int, ...], tuple[int, int]] = {}
    loss_positions: list[int] = []
    targets: list[int] = []
    given = routes or [()] * len(sequences)
    for sequence, mask, prompt, chosen in zip(sequences, masks, prompts, given, strict=True):
        first = len(prompt)
        targets.extend(compress(sequence, mask))
        if uses[prompt] < 2:
            before = stream.add(sequence, chosen) - 1
            loss_positions.extend(compress(range(before, before + len(sequence)), mask))
            continue
        if prompt not in shared:
            segment = len(stream.lengths)
            shared[prompt] = (segment, stream.add(prompt, chosen))
        segment, start = shared[prompt]
        own = stream.add(sequence[first:-1], chosen, first, segment)
        if len(sequence) > first:
            predicting = range(own, own + len(sequence) - first - 1)
            loss_positions.extend([start + first - 1, *compress(predicting, mask[first + 1 :])])
    columns = (stream.token_ids, stream.positions, loss_positions, targets)
    token_ids, positions, loss, flat_targets = (torch.tensor(c, dtype=torch.int64).to(device) for c in columns)
    width = max(map(len, stream.routes))
    if any(len(row) not in (0, width) for row in stream.routes):
        raise ValueError("routes of tokens have several lengths")
    joined = bytearray().join(row or b"\xff" * width for row in stream.routes)
    rows = torch.frombuffer(joined, dtype=torch.uint8).view(-1, width).to(device) if width else None
    return PackedBatch(token_ids, positions, tuple(stream.lengths), tuple(stream.prefixes), loss, flat_targets, rows)
