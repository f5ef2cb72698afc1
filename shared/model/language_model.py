"""What both implementations of the trained model share: from hidden states at the kept positions to log-probs.

`Decoder` (decoder.py) is our own; `TransformersDecoder` (transformers_decoder.py) takes the module of transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.model.config import DecoderConfig
from shared.model.cpu import cpu_decoder
from shared.model.logprobs import PLAIN, HeadScale, chunked_logprobs
from shared.model.packing import PackedBatch
from shared.model.parallel import ALONE, Cut, Parallel, TokenShare
from shared.model.routing import ExpertCounts

EVERY = slice(None)


class LanguageModel(nn.Module, ABC):
    """A causal language model over packed sequences. `attention` names a backend; the first `recompute` layers keep
    only their inputs, and are computed again in the backward pass. Both may change from one forward to the next."""

    words = range(0)
    """those of which this rank has the rows of embedding and head, where tensor peers have the others"""

    def __init__(
        self, config: DecoderConfig, attention: str = "auto", recompute: int = 0, parallel: Parallel = ALONE
    ) -> None:
        super().__init__()
        self.config, self.attention, self.recompute, self.parallel = config, attention, recompute, parallel
        self.local = config
        """the shape of this rank's part of the model"""
        self.inputs_on_host = False
        """whether the inputs of layers that are computed again wait in the host's memory"""
        self.in_place = False
        """True: the head's gradient is added to its weight's `grad` at once where there is one, past autograd"""
        self.compute_dtype: torch.dtype | None = None
        """set: what the layers compute in; weights are rounded to it at each use, gradients add up in theirs"""
        self.rounds_weights = False
        """whether it knows `compute_dtype`: else FSDP casts the weights"""
        self.head_scale: HeadScale = PLAIN
        self.expert_counts: ExpertCounts | None = None
        """of a mixture"""

    @property
    @abstractmethod
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order: what FSDP shards one by one."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Module:
        """The module of the token embedding."""

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The module whose weight [vocab, hidden] is the head's: the embedding where the two are tied."""

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face's name, tensor) of a model folder: parameters, tied ones once, and a few buffers."""
        yield from self.named_parameters()
        names = set(self.state_dict())
        yield from ((name, buffer) for name, buffer in self.named_buffers() if name in names)

    def cut(self, name: str) -> Cut | None:
        """How the parameter of this name is cut, where peers have the rest; None: it is not."""
        return None

    def settle_buffers(self) -> None:
        """Compute what a module keeps in addition to its parameters, after memory was given to it without contents."""

    @abstractmethod
    def states(self, batch: PackedBatch, keep: Tensor | None, span: slice = EVERY) -> Tensor:
        """The last norm's output [kept, hidden] at the positions `keep` [kept] int64, or [tokens, hidden] at all. span:
        the tokens of this rank, from whose first one `keep` counts, where context peers have the others."""

    def run_layer(self, number: int, run: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """The output of layer `number`: `run` of its inputs, again in the backward pass where it is recomputed."""
        if number >= self.recompute or not torch.is_grad_enabled():
            return run(*inputs, **named)
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if self.inputs_on_host else nullcontext():
            return checkpoint(run, *inputs, use_reentrant=False, **named)

    def forward(self, batch: PackedBatch, temperature: float = 1.0, output: str = "logprobs") -> Any:
        """Score a packed batch.

        output = "logprobs": (log-probabilities of the targets [loss_tokens], entropy [loss_tokens]), float32, the
        temperature applied; "states": these and the hidden states they come from [loss_tokens, hidden].
        output = "logits": [tokens, vocab] float32, no temperature (small uses only; a rank's own part of them).
        """
        tokens, targets, context = batch.tokens, len(batch.targets), self.parallel.context
        rows = cpu_decoder.ROWS if batch.token_ids.device.type == "cpu" else 1
        if rows > 1 or context is not None:
            batch = cpu_decoder.round_up(batch, rows * (1 if context is None else context.size))
        keep, aims, span, share = batch.loss_positions, batch.targets, EVERY, None
        if context is not None:
            share = TokenShare(batch.tokens, keep, context)
            keep, aims, span = keep[share.mine] - share.span.start, aims[share.mine], share.span
        hidden = self.states(batch, None if output == "logits" else keep, span)
        if output == "logits":
            return self.score(hidden[:tokens], None)
        scored = (*self.score(hidden, aims, temperature), hidden)
        returned = scored if output == "states" else scored[:2]
        returned = returned if share is None else tuple(share.gather(one) for one in returned)
        # a copy: FSDP hooks into what is returned, and a view would hide it
        return tuple(one if len(one) == targets else one[:targets].clone() for one in returned)

    def score(self, hidden: Tensor, targets: Tensor | None, temperature: float = 1.0) -> Any:
        """What the head makes of hidden states [n, hidden]: log-probs of the targets and entropy, both [n] float32;
        without targets, logits [n, vocab] float32, no temperature. To FSDP it is the head's forward."""
        weight: Tensor = self.head.weight  # type: ignore[assignment]
        if targets is None:
            return self.head_scale.apply(F.linear(hidden.float(), weight.to(hidden.dtype).float()))
        d_weight = weight.grad if self.in_place else None
        peers = self.parallel.tensor
        targets = targets if peers is None else targets - self.words.start
        return chunked_logprobs(hidden, weight, targets, temperature, None, d_weight, self.head_scale, peers)
