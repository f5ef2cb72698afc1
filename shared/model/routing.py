"""The experts that the routers of a mixture choose: replayed as an engine chose them, and counted.

A router scores a token's experts and takes the best by `torch.topk`; gates are computed from their scores. Where a
token has a route of its engine (`Completion.routes`), topk returns these experts instead, with the router's own scores:
gates and gradients are the trainer's, and the own choice, replayed, gives the same bits (R3, 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shared.errors import RunError

MISSING = 255
"""every byte of the row of a token without a route"""


class ExpertCounts:
    """How many tokens went where in forwards with a gradient. Layers that are recomputed count twice, and tokens that
    pad a batch count too: only shares within a layer are read."""

    def __init__(self, layers: int, experts: int, chosen: int):
        self.experts, self.chosen = experts, chosen
        self.load = torch.zeros(layers, experts, dtype=torch.float64)
        """[layers, experts] tokens that went to each"""
        self.replayed = torch.zeros(layers, 2, dtype=torch.float64)
        """[layers] choices that were replayed, and those of them that the router would not have made"""

    def to(self, device: torch.device) -> None:
        """Count on the device of the batches, from the first one on (the model may have been made on none)."""
        if self.load.device != device:
            self.load, self.replayed = (torch.zeros_like(one, device=device) for one in (self.load, self.replayed))

    def take(self) -> dict[str, float]:
        """The metrics experts/... (shared/metrics.py) over all ranks since the last call; none without a token. A
        collective where there is a process group."""
        counts = torch.cat([self.load, self.replayed], 1)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(counts)
        self.load.zero_()
        self.replayed.zero_()
        counts = counts.cpu()
        load = counts[:, :-2]
        load = load[load.sum(1) > 0]
        if not len(load):
            return {}
        replayed, differing = counts[:, -2:].sum(0).tolist()
        return {
            "experts/max_load": float((load.amax(1) / load.mean(1)).mean()),
            "experts/unused": float((load == 0).double().mean()),
        } | ({"experts/differing": differing / replayed} if replayed else {})


class Routing:
    """The routes of one packed batch, which a mixture's layers are given."""

    def __init__(self, counts: ExpertCounts, routes: Tensor | None):
        """routes: [tokens, bytes] uint8, `PackedBatch.routes`. Raises RunError where they are not of this model."""
        self.counts, self.routes = counts, None
        if routes is None:
            return
        layers, width = len(counts.load), routes.shape[1]
        given = (routes.view(torch.uint16) if width == 2 * layers * counts.chosen else routes).long()
        given = given.masked_fill((routes == MISSING).all(1, keepdim=True), -1)
        if given.shape[1] != layers * counts.chosen or int(given.max()) >= counts.experts:
            raise RunError(f"routes of {width} bytes a token are none of {layers} layers with {counts.experts} experts")
        self.routes = given.view(-1, layers, counts.chosen)
        """[tokens, layers, experts of a token] int64, -1 where the router chooses"""

    def choose(self, layer: int, scores: Tensor, best: Any) -> Any:
        """What topk returns. scores: [tokens, experts]; best: what it found, (values, indices) [tokens, chosen]."""
        own = chosen = best[1]
        if self.routes is not None:
            given = self.routes[:, layer].view_as(own)
            chosen = torch.where(given < 0, own, given)
            best = torch.return_types.topk((scores.gather(-1, chosen), chosen))
        if torch.is_grad_enabled():
            with torch.no_grad():
                places = chosen.flatten()
                self.counts.load[layer].index_add_(0, places, torch.ones_like(places, dtype=torch.float64))
                if self.routes is not None:
                    same = (chosen[..., :, None] == own[..., None, :]).any(-1)
                    known = given >= 0
                    self.counts.replayed[layer] += torch.stack([known.sum(), (known & ~same).sum()])
        return best


class _Choosing(TorchFunctionMode):
    """Gives topk over a layer's experts to `Routing.choose`."""

    def __init__(self, routing: Routing, layer: int):
        super().__init__()
        self.routing, self.layer = routing, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome, counts = func(*args, **(kwargs or {})), self.routing.counts
        if func not in (torch.topk, Tensor.topk):
            return outcome
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != counts.experts or outcome[1].shape[-1] != counts.chosen:
            return outcome
        return self.routing.choose(self.layer, scores, outcome)


def _routed(layer: int, forward: Callable[..., Any], *inputs: Any, routing: Routing | None = None, **named: Any) -> Any:
    """A layer's forward under the routing that its model was given."""
    if routing is None:
        return forward(*inputs, **named)
    with _Choosing(routing, layer):
        return forward(*inputs, **named)


def route_layers(layers: Iterable[nn.Module]) -> None:
    """Make the layers take a `routing` in addition to their inputs."""
    for number, layer in enumerate(layers):
        layer.forward = partial(_routed, number, layer.forward)
