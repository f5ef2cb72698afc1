"""Ranks that share the work of one batch: who has which part of a model and of a stream, and what they exchange.

tensor     a rank has heads / t, and a t-th of the feed-forward and of the vocabulary (Megatron-LM, 1909.08053)
context    a rank has a c-th of the stream's tokens; around attention it has all tokens of heads / c (Ulysses,
           2309.14509), so that packed sequences and shared prompts are attended as on one rank
experts    a rank has an e-th of a mixture's experts, to which the tokens of all travel (GShard, 2006.16668)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import ConfigError
from shared.model.config import DecoderConfig, MeasuredConfig


class Peers(NamedTuple):
    """The ranks that share something, as one of them sees them."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Parallel:
    """With whom a rank shares the work of its batches; None: with nobody."""

    tensor: Peers | None = None
    context: Peers | None = None
    experts: Peers | None = None
    """these have batches of their own"""
    same_experts: Any = None
    """mesh over the ranks with the same experts"""


ALONE = Parallel()


@dataclass(frozen=True)
class Cut:
    """Where the values of a parameter are in the whole tensor, of which `peers` have the rest."""

    peers: Peers
    dim: int = 0
    """the dimension that is cut"""
    first: int = 0
    """number of the parameter's first row, or column, in the whole"""
    size: int | None = None
    """rows, or columns, of the whole; None: the parameter is whole"""
    copy: int = 0
    copies: int = 1
    """so many of the peers have the same values; this is number `copy` of them"""


def cut_of(tensor: Tensor) -> Cut | None:
    """How a parameter is cut; None: it is whole, and no peer has it."""
    return getattr(tensor, "cut", None)


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor of which a parameter is a part."""
    cut, shape = cut_of(tensor), list(tensor.shape)
    if cut is not None and cut.size is not None:
        shape[cut.dim] = cut.size
    return torch.Size(shape)


def check_split(shape: DecoderConfig, tensor: int, context: int, experts: int) -> None:
    """Raise ConfigError, in one line, if a model cannot be split over so many ranks."""
    why = ""
    if tensor > 1 and isinstance(shape, MeasuredConfig):
        why = f"only our own decoder is split, and transformers trains {shape.family} here"
    elif shape.heads % tensor:
        why = f"{shape.heads} attention heads do not divide by it"
    elif shape.key_heads % tensor and tensor % shape.key_heads:
        why = f"{shape.key_heads} key heads neither divide by it nor have whole numbers of copies"
    elif tensor > 1 and (shape.output_bias or shape.mlp_bias):
        why = "the model has biases on sums of its parts"
    if why:
        raise ConfigError(f"placement.tensor = {tensor}: {why}; take another number, or placement.tensor = 1")
    check_heads(shape.heads // tensor, max(1, shape.key_heads // tensor), context)
    if experts > 1 and (shape.experts % experts or not shape.experts):
        raise ConfigError(
            f"placement.experts = {experts}: the model has {shape.experts or 'no'} experts in a layer, which do not "
            "divide by it; take another number, or placement.experts = 1"
        )


COLUMNS = ("o_proj", "down_proj")
"""layers whose inputs are split, and whose outputs are added up"""


def part(size: int, number: int, parts: int, unit: int = 0) -> range:
    """Part `number` of `size` things, in whole units; unit 0: the largest of 4, 2 and 1 that divides the size, so that
    checksums read parts of a row in the words of the whole row."""
    unit = unit or math.gcd(size, 4)
    return range(size // unit * number // parts * unit, size // unit * (number + 1) // parts * unit)


def tensor_part(kind: str, shape: DecoderConfig, peers: Peers) -> tuple[int, range]:
    """(size of the whole, this rank's part) of the dimension along which a layer of this name is split."""
    head = shape.head_dim
    if kind in ("k_proj", "v_proj"):  # more ranks than key heads: neighbours have the same one
        parts = min(peers.size, shape.key_heads)
        return shape.key_heads * head, part(shape.key_heads * head, peers.rank * parts // peers.size, parts, head)
    if kind in ("q_proj", "o_proj"):
        return shape.heads * head, part(shape.heads * head, peers.rank, peers.size, head)
    size = shape.vocab_size if kind in ("embed_tokens", "lm_head") else shape.intermediate_size
    return size, part(size, peers.rank, peers.size)


def tensor_cut(name: str, shape: DecoderConfig, peers: Peers) -> Cut:
    """How our decoder's parameter of this name is cut, or a matrix of an adapter."""
    layer, _, last = name.rpartition(".")
    adapter = layer[-1] if layer.endswith(("lora_A", "lora_B")) else ""
    kind = (layer.rpartition(".")[0] if adapter else layer).rpartition(".")[2]
    if kind.endswith("norm") or adapter == ("B" if kind in COLUMNS else "A"):
        return Cut(peers, copy=peers.rank, copies=peers.size)
    size, own = tensor_part(kind, shape, peers)
    copies = max(1, peers.size // shape.key_heads) if kind in ("k_proj", "v_proj") else 1
    return Cut(peers, int(kind in COLUMNS), own.start, size, peers.rank % copies, copies)


def local_shape(shape: DecoderConfig, peers: Peers | None) -> DecoderConfig:
    """The shape of this rank's part of our decoder."""
    if peers is None:
        return shape
    words, inner = (len(tensor_part(kind, shape, peers)[1]) for kind in ("embed_tokens", "gate_proj"))
    return replace(
        shape, heads=shape.heads // peers.size, key_heads=max(1, shape.key_heads // peers.size), vocab_size=words,
        intermediate_size=inner,
    )  # fmt: skip


class _Sum(torch.autograd.Function):
    """Of what the peers have: on the way forward, or of gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, back: bool) -> Tensor:
        ctx.group = group if back else None
        return x.view_as(x) if back else _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient if ctx.group is None else _summed(gradient, ctx.group), None, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def copy_to(x: Tensor, peers: Peers | None) -> Tensor:
    """x, the same on all peers, each of which computes a part from it: its gradient is the sum of theirs."""
    return x if peers is None else _Sum.apply(x, peers.group, True)


def add_up(x: Tensor, peers: Peers | None) -> Tensor:
    """The sum of what the peers have."""
    return x if peers is None else _Sum.apply(x, peers.group, False)


def look_up(table: Callable[[Tensor], Tensor], ids: Tensor, own: range, peers: Peers) -> Tensor:
    """Rows of an embedding of which this rank has those of the words `own`."""
    inside = (ids >= own.start) & (ids < own.stop)
    return add_up(table((ids - own.start).where(inside, 0)) * inside[:, None], peers)


def merge_sums(
    top: Tensor, total: Tensor, moment: Tensor, chosen: Tensor, peers: Peers
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The running sums of logprobs.py over the words of all peers, from those over this rank's."""
    highest, known = top.clone(), ~chosen.isnan()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=peers.group)
    drop = top - highest
    shrink = drop.exp()
    sums = torch.cat([total * shrink, (moment + drop * total) * shrink, chosen.where(known, 0), known.to(top.dtype)], 1)
    dist.all_reduce(sums, group=peers.group)
    total, moment, chosen, count = sums.split(1, 1)
    return highest, total, moment, chosen / count  # 0 / 0 for a target that is no word


class _Travel(torch.autograd.Function):
    """Rows go to peers, `sent` to each, in order, and `received` come from each; None: the same number everywhere."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: Any = None, received: Any = None) -> Tensor:
        ctx.group, ctx.counts = group, (received, sent)
        arrived = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Travel.apply(gradient, ctx.group, *ctx.counts), None, None, None


def check_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise ConfigError, in one line, if attention cannot be split over so many ranks."""
    if heads % size or (key_heads % size and size % key_heads):
        raise ConfigError(
            f"placement.context = {size}: {heads} attention heads and {key_heads} key heads on a rank do not divide by "
            "it (of key heads there may also be copies); take another number, or placement.context = 1"
        )


class HeadExchange:
    """Around attention: from a part of the tokens with all heads to all tokens with a part of the heads, and back."""

    def __init__(self, heads: int, key_heads: int, device: torch.device, peers: Peers):
        """heads, key_heads: of this rank outside of attention. Raises ConfigError where they cannot be split."""
        check_heads(heads, key_heads, peers.size)
        self.peers, self.heads, self.key_heads = peers, heads // peers.size, max(1, key_heads // peers.size)
        order = []
        for rank in range(peers.size):
            first = rank * key_heads // peers.size
            keys = range(heads + first, heads + first + self.key_heads)
            order += [*range(rank * self.heads, (rank + 1) * self.heads), *keys, *(key + key_heads for key in keys)]
        self.order = torch.tensor(order, device=device)
        """of the heads, key heads and value heads of `joined`, those that each peer takes, peer after peer"""

    def attend(self, joined: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        """joined [own tokens, heads + 2 key_heads, head_dim] -> [own tokens, heads, head_dim], by an attention over
        all tokens of this rank's share of the heads."""
        tokens, _, width = joined.shape
        parts = joined.index_select(1, self.order).view(tokens, self.peers.size, -1, width).transpose(0, 1)
        mixed = attention(_Travel.apply(parts, self.peers.group).flatten(0, 1))
        returned: Tensor = _Travel.apply(mixed.view(self.peers.size, tokens, -1, width), self.peers.group)
        return returned.transpose(0, 1).flatten(1, 2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, share: TokenShare) -> Tensor:
        ctx.share = share
        padded = own.new_zeros(max(1, *share.counts), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in share.counts]
        dist.all_gather(parts, padded, group=share.group)
        joined = torch.cat([part[:count] for part, count in zip(parts, share.counts, strict=True)])
        return torch.empty_like(joined).index_copy_(0, share.order, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.share.mine], None


class TokenShare:
    """Which tokens of a stream, and which targets, are this rank's."""

    def __init__(self, tokens: int, loss_positions: Tensor, peers: Peers):
        """tokens: of the stream, a multiple of the peers."""
        count = tokens // peers.size
        owners, self.group = loss_positions // count, peers.group
        self.span = slice(peers.rank * count, (peers.rank + 1) * count)
        self.mine = owners == peers.rank
        """[loss_tokens] bool"""
        self.order = owners.argsort(stable=True)
        self.counts: list[int] = owners.bincount(minlength=peers.size).tolist()

    def gather(self, own: Tensor) -> Tensor:
        """What the ranks have for their targets [own targets, ...] -> that of all, in the order of the batch. All peers
        compute the same from it, so that the gradient of a rank's own is whole."""
        return _Gather.apply(own, self)  # type: ignore[no-any-return]


class SplitExperts(nn.Module):
    """Base of a mixture's experts of which this rank has some, added to the class that they had: tokens travel to their
    experts, which compute with them as that class does, and what they give travels back."""

    peers: Peers
    num_experts: int
    """here"""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, chosen] -> [tokens, hidden]."""
        group, chosen, own = self.peers.group, top_k_index.flatten(), self.num_experts
        order = chosen.argsort(stable=True)  # by expert, and so by the rank that has it
        tokens, counts = order // top_k_index.shape[1], (chosen // own).bincount(minlength=self.peers.size)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = counts.tolist(), arriving.tolist()
        leaving = hidden_states.index_select(0, tokens), top_k_weights.flatten()[order], chosen[order] % own
        rows, gates, experts = (_Travel.apply(values, group, sent, received) for values in leaving)
        # one row more, of weight 0: where nothing came, tensors are reached all the same
        more, rows = (0, 1), F.pad(rows, (0, 0, 0, 1))
        mixed = super().forward(rows, F.pad(experts, more)[:, None], F.pad(gates, more)[:, None])[:-1]
        returned = _Travel.apply(mixed, group, received, sent)
        return torch.zeros_like(hidden_states).index_add(0, tokens, returned)


def split_experts(modules: Iterable[nn.Module], peers: Peers) -> None:
    """Leave modules that hold all experts of a layer this rank's part of them. Raises ConfigError where there are
    none."""
    if not (holders := list(modules)):
        raise ConfigError(
            f"placement.experts = {peers.size}: transformers keeps the experts of this family in another way than by "
            "matrices [experts, out, in], which alone are split; set placement.experts = 1"
        )
    for module in holders:
        parameters = dict(module.named_parameters(recurse=False))
        count = len(next(iter(parameters.values())))
        for name, one in parameters.items():
            setattr(module, name, nn.Parameter(one.new_empty(count // peers.size, *one.shape[1:])))
        module.__class__ = type(f"Split{type(module).__name__}", (SplitExperts, type(module)), {})
        assert isinstance(module, SplitExperts)
        module.peers, module.num_experts = peers, count // peers.size
