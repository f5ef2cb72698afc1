"""Estimates the bytes that a run needs, by pure functions of a decoder's shape and the placement. No torch.

Per trainer rank: master weights, gradients and moments (float32, sharded), what FSDP2 gathers, frozen models, the
buffers of the weight transfer, activations. Per engine GPU: weights, and keys and values of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shared.model.config import ALL_LINEAR, EXPERTS, DecoderConfig, MeasuredConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER_BYTES = 4 + 4 + 8
"""bytes for each parameter: float32 weight, gradient, two moments of AdamW"""
FROZEN_BYTES = 4
"""bytes for each parameter of a frozen model: reference and teacher"""
BUFFERS = 2
"""buffers of the weight transfer: one is read while the other is written"""
CONTEXT_BYTES = 500 << 20
"""assumed of a process that uses a GPU in addition to its owner: its CUDA context, and NCCL's buffers"""
KEEP_WHOLE_BYTES = 4 << 30
"""gathered weights and unreduced gradients below this stay between micro-batches: one gather and one reduction a
step"""


class Recomputation(NamedTuple):
    """What is computed again in the backward pass of a micro-batch."""

    layers: int = 0
    """the first so many: they keep their inputs alone"""
    inputs_on_host: bool = False
    """these inputs wait in the host's memory"""


WHOLE = Recomputation()


@dataclass(frozen=True)
class TrainerMemory:
    """Memory of one trainer rank, bytes."""

    states: float
    """master weights, gradients, moments"""
    gathered: float
    frozen: float
    """reference and other models without gradient"""
    buffers: float
    """bytes of the weight transfer's buffers, and of the contexts of engines that read them"""
    activations: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.states + self.gathered + self.frozen + self.buffers + self.activations


def adapter_parameters(decoder: DecoderConfig, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
    """Parameters of adapters of this rank (0: none) on the layers that lora.targets chooses."""
    names = [targets] if isinstance(targets, str) else targets
    chosen = [
        (name, inputs, outputs)
        for name, inputs, outputs in decoder.linears
        if ALL_LINEAR in names or any(f".{name}".endswith(f".{target}") for target in names)
    ]
    chosen += decoder.expert_linears if EXPERTS in names else []
    return rank * sum(inputs + outputs for _, inputs, outputs in chosen)


def part_of(decoder: DecoderConfig, tensor: int = 1, experts: int = 1) -> DecoderConfig:
    """The shape of a rank's part of a model whose layers are split over `tensor` ranks, or its experts over
    `experts`."""
    if isinstance(decoder, MeasuredConfig) and experts > 1:
        elsewhere = sum(inputs * outputs // decoder.experts for _, inputs, outputs in decoder.counted_experts)
        elsewhere -= elsewhere // experts
        layer = decoder.counted_layer - elsewhere // decoder.layers
        return replace(decoder, counted=decoder.counted - elsewhere, counted_layer=layer)
    if tensor == 1:
        return decoder
    return replace(
        decoder, heads=decoder.heads // tensor, key_heads=max(1, decoder.key_heads // tensor),
        intermediate_size=-(-decoder.intermediate_size // tensor), vocab_size=-(-decoder.vocab_size // tensor),
    )  # fmt: skip


def joined_bytes(decoder: DecoderConfig, trainers: int) -> float:
    """Bytes of a rank's whole rows of what tensor peers have by columns, while it writes them for the engines."""
    names = ("self_attn.o_proj", "mlp.down_proj")
    return 4 * decoder.layers * sum(i * o for name, i, o in decoder.layer_linears if name in names) / trainers


def states_bytes(parameters: int, trainers: int, adapters: int = 0, width: int = 0) -> float:
    """Bytes of master weights, gradients and moments of one trainer rank. With `adapters` (their parameters) of those
    only, and of the frozen weights in the compute type (`width` bytes each)."""
    return (MASTER_BYTES * adapters + width * parameters if adapters else MASTER_BYTES * parameters) / trainers


def works_in_place(trainers: int, compute_dtype: str, on_gpu: bool) -> bool:
    """Whether FSDP is left out: one rank has nothing to share, FSDP would only copy weights and gradients. Not on a GPU
    that computes in another type than float32, where FSDP casts a layer's weights ahead of their use."""
    return trainers == 1 and (compute_dtype == "float32" or not on_gpu)


def whole_bytes(parameters: int, in_place: bool = False) -> int:
    """Bytes of the whole model's weights and gradients (float32) where they are few enough to stay gathered, else 0; 0
    also where the rank `works_in_place`."""
    return 8 * parameters if 8 * parameters <= KEEP_WHOLE_BYTES and not in_place else 0


def frozen_bytes(parameters: int, trainers: int, in_place: bool = False) -> float:
    """Bytes of a rank's part of a frozen model, and of all of it if small enough to stay gathered (`fits_whole`)."""
    whole = FROZEN_BYTES * parameters if whole_bytes(parameters, in_place) else 0
    return FROZEN_BYTES * parameters / trainers + whole


def buffer_bytes(parameters: int, trainers: int, width: int) -> float:
    """Bytes of a rank's part of the buffers of the weight transfer; `width` bytes a parameter."""
    return BUFFERS * width * parameters / trainers


def reader_bytes(engine_gpus: int) -> float:
    """Bytes on a trainer's GPU of the contexts of engines on the same node, each of whose GPUs reads its buffers."""
    return CONTEXT_BYTES * engine_gpus


def arriving_bytes(decoder: DecoderConfig, width: int, streamed: bool, rank: int = 0) -> float:
    """Bytes on an engine's GPU of weights on their way, at most: a whole tensor, joined from the trainers' rows; over
    the network two slots (rollout/weights/slots.py), and the context of the rollout rank that fills them (on the
    engine's first GPU). rank: of adapters, which come alone then."""
    tensor = width * largest_tensor(decoder, rank)
    return 2 * tensor + CONTEXT_BYTES if streamed else tensor


def largest_tensor(decoder: DecoderConfig, rank: int = 0) -> int:
    """Parameters of the largest tensor of an update; of adapters of this rank, those of the widest layer."""
    return rank * max(side for _, *sides in decoder.linears for side in sides) if rank else decoder.largest_tensor


def gathered_bytes(decoder: DecoderConfig, width: int, adapters: int = 0) -> float:
    """Bytes that FSDP2 holds with the shards during a micro-batch: everything where `whole_bytes` says so, else the
    module at work and the next one, each in the compute type (`width` bytes) with a float32 gradient on its way to the
    reduction: two layers, or a layer and the head. An embedding that is the head stays beside two layers. With
    `adapters` (their parameters) only these have gradients."""
    layer, table = decoder.layer_parameters, decoder.hidden_size * decoder.vocab_size
    parts = table + 2 * layer if decoder.tied else layer + max(layer, table)
    if adapters:
        gathered = decoder.parameters if whole_bytes(decoder.parameters) else parts
        return width * gathered + (width + 4) * adapters
    return whole_bytes(decoder.parameters) or (width + 4) * parts


def layer_activation_bytes(decoder: DecoderConfig, width: int) -> int:
    """Bytes one layer keeps of one token for the backward pass: its input, the attention's, the second norm's in- and
    output (4 hidden), rotated queries, keys, values and the mixture (2 queries + 2 keys), gate and up (2 intermediate).
    Modules of transformers keep silu(gate) and its product with up as well (2 intermediate). Adapters add next to
    nothing: rank numbers for each. An estimate: kernels differ (a CPU does not keep what norms return)."""
    queries, keys = decoder.heads * decoder.head_dim, decoder.key_heads * decoder.head_dim
    inner = (4 if isinstance(decoder, MeasuredConfig) else 2) * decoder.intermediate_size
    return width * (4 * decoder.hidden_size + 2 * queries + 2 * keys + inner)


def input_bytes(decoder: DecoderConfig, tokens: int, width: int, recomputed: int) -> int:
    """Bytes of the inputs of so many layers."""
    return tokens * recomputed * width * decoder.hidden_size


def activation_bytes(decoder: DecoderConfig, tokens: int, width: int, again: Recomputation = WHOLE) -> int:
    """Bytes kept of a micro-batch of `tokens` on its device: the inputs of the layers that are computed again, unless
    they are on the host, and all that the others keep: at least one, while it is computed again, with its input."""
    whole = max(decoder.layers - again.layers, 1)
    inputs = input_bytes(decoder, tokens, width, min(again.layers, 1) if again.inputs_on_host else again.layers)
    return tokens * whole * layer_activation_bytes(decoder, width) + inputs


def merged_bytes(decoder: DecoderConfig, width: int) -> int:
    """Bytes of a layer's weights with its adapters merged: in float32, then in the compute type."""
    return (4 + width) * decoder.layer_parameters


def trainer_rank(
    decoder: DecoderConfig, trainers: int, shards: int, tokens: int, again: Recomputation, width: int, sent_width: int,
    frozen: float = 0.0, adapters: int = 0, sends_adapters: bool = True, in_place: bool = False, readers: int = 0,
    tensor: int = 1, experts: int = 1,
) -> TrainerMemory:  # fmt: skip
    """Memory of one trainer rank at the peak of a step: `shards` ranks share a replica of the model; the rank has
    `tokens` of a micro-batch, and `part_of` the layers for `tensor` and `experts`. width, sent_width: bytes of a
    parameter in the compute type, and as engines receive it. frozen: bytes of frozen models. adapters: their
    parameters, 0 where all weights are trained. readers: `reader_bytes`."""
    merged = merged_bytes(decoder, width) if adapters and not sends_adapters else 0
    sent = adapters if adapters and sends_adapters else decoder.parameters
    part, joined = part_of(decoder, tensor, experts), joined_bytes(decoder, trainers) * (tensor > 1 and not adapters)
    return TrainerMemory(
        states=states_bytes(decoder.parameters, shards, adapters, width),
        gathered=0.0 if in_place else gathered_bytes(part, width, adapters // tensor),
        frozen=frozen,
        buffers=buffer_bytes(sent, trainers, sent_width) + reader_bytes(readers) + joined,
        activations=activation_bytes(part, tokens, width, again) + merged,
    )


def recomputation_within(
    decoder: DecoderConfig, tokens: int, width: int, budget_bytes: int | None, on_gpu: bool
) -> Recomputation:
    """The fewest layers to compute twice so that a micro-batch of `tokens` keeps no more than the budget. Where even
    all of them are too few, a GPU leaves their inputs on the host. None are computed twice without a budget."""
    if budget_bytes is None:
        return WHOLE
    ways = [Recomputation(layers) for layers in range(decoder.layers)]
    fitting = (again for again in ways if activation_bytes(decoder, tokens, width, again) <= budget_bytes)
    return next(fitting, Recomputation(decoder.layers, on_gpu))


def weight_bytes(parameters: int, width: int, tensor_parallel: int) -> float:
    """Bytes of the weights on one GPU of an engine."""
    return width * parameters / tensor_parallel


def cache_bytes_per_token(decoder: DecoderConfig, width: int, tensor_parallel: int) -> float:
    """Bytes of a token's keys and values on each GPU of an engine: split by key heads, or copied."""
    return decoder.cached_values * width / min(tensor_parallel, decoder.key_heads)


def cache_tokens(decoder: DecoderConfig, width: int, tensor_parallel: int, cache_bytes: float) -> int:
    """Tokens that an engine's cache holds, `cache_bytes` on each of its GPUs."""
    return int(cache_bytes // cache_bytes_per_token(decoder, width, tensor_parallel))


def size(count: float) -> str:
    """Format a number of bytes for people: 1.5 GiB, 340 MiB."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}" if count < 100 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count / 1024:.0f} KiB"
