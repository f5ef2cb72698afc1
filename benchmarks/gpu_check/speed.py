"""How fast a step is: of models by size and tokens, and with and without compiled kernels."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.figures import Figure, NotMeasured
from benchmarks.gpu_check.gradients import GRADIENTS
from benchmarks.gpu_check.place import MATMUL, Where
from benchmarks.step import Rank, alone, make_sequences, micro_batches, token_count, work
from lab.plan.scenario import MODELS
from shared.model.config import DecoderConfig
from shared.model.cpu import fused_layers
from shared.types import TrainSequence
from trainer import memory
from trainer.step import fsdp
from trainer.step.flops import peak_of

SHARE_OF_MEMORY = 0.6
"""of the card, for the states of the model of `step_large`"""


def fitting_layers(config: DecoderConfig, total_bytes: float) -> int:
    """Return how many layers have states that fit into a share of the card, at least one."""

    def needed(layers: int) -> float:
        held = replace(config, layers=layers)
        return memory.states_bytes(held.parameters, 1) + memory.gathered_bytes(held, 2)

    counts = range(config.layers, 0, -1)
    return next((layers for layers in counts if needed(layers) <= SHARE_OF_MEMORY * total_bytes), 1)


def step_of(where: Where, name: str) -> Iterator[Figure]:
    """Yield speed, MFU and memory of steps of a model: one micro-batch of packed sequences of 4,096 tokens, and at last
    of a single sequence; without and with recomputation of all layers."""
    config, label = MODELS[name], name
    if where.tiny:
        config = replace(GRADIENTS, layers=2)
    elif where.on_card:
        layers = fitting_layers(config, torch.cuda.get_device_properties(where.device).total_memory)
        label = name if layers == config.layers else f"{name}, {layers} of {config.layers} layers"
        config = replace(config, layers=layers)
    one = where.size(4096, 64)
    sheet = peak_of(torch.cuda.get_device_name(where.device)) if where.on_card else 0.0
    with alone(where.device) as mesh:
        for recompute in (0, config.layers):
            rank = Rank(config, "bfloat16", mesh, where.device, recompute)
            way = "all layers recomputed" if recompute else "nothing recomputed"
            for tokens, length in where.size(((4096, one), (8192, one), (16_384, one), (32_768, one), (32_768, 32_768)),
                                             ((64, one), (128, one), (128, 128))):  # fmt: skip
                sequences = make_sequences([length] * (tokens // length), config.vocab_size, where.size(256, 8))
                title = f"{label}, {tokens:,} tokens, " + ("one sequence, " if length == tokens > one else "") + way
                try:
                    yield from one_step(where, rank, config, sequences, title, sheet)
                except torch.OutOfMemoryError:
                    yield Figure(title, [], "", not_measured="out of memory")
                    rank.decoder.zero_grad(set_to_none=True)
                    fsdp.reshard(rank.decoder)
                    gc.collect()
                    torch.cuda.empty_cache()
                    break
            del rank


def one_step(
    where: Where, rank: Rank, config: DecoderConfig, sequences: list[TrainSequence], title: str, sheet: float
) -> Iterator[Figure]:
    """Yield the figures of one size of a step."""
    batches = micro_batches(sequences, sum(len(one.token_ids) for one in sequences))
    if where.on_card:
        torch.cuda.reset_peak_memory_stats()
    rank.step(batches)
    seconds = statistics.median(rank.step(batches) for _ in range(where.size(2, 1)))
    flops = work(config, batches)
    yield Figure(title, [token_count(batches) / seconds], "tokens/s")
    if sheet:
        yield Figure(f"{title}: MFU", [flops / seconds / sheet], "%", "the data sheet's peak")
    if where.peak:
        yield Figure(f"{title}: MFU of this run", [flops / seconds / where.peak], "%", MATMUL)
    if where.on_card:
        yield Figure(f"{title}: memory", [torch.cuda.max_memory_allocated() / 2**30], "GiB")


def fusion(where: Where) -> Iterator[Figure]:
    """A step of Qwen3 1.7B with and without compiled kernels: 16,384 packed tokens."""
    if not where.on_card:
        raise NotMeasured("kernels are compiled for cards only")
    config, length, count = where.size(MODELS["1.7b"], GRADIENTS), 1024, 16
    together = micro_batches(make_sequences([length] * count, config.vocab_size, length // 4), length * count)
    seconds = []
    with alone(where.device) as mesh:
        rank = Rank(config, "bfloat16", mesh, where.device)
        for places in ({"cuda"}, set[str]()):
            kept = fused_layers.FUSED_ON
            fused_layers.FUSED_ON = places
            try:
                yield Figure(f"first step, {'compiled' if places else 'eager'}", [rank.step(together)], "s")
                rank.step(together)
                seconds.append(statistics.median(rank.step(together) for _ in range(3)))
            finally:
                fused_layers.FUSED_ON = kept
    yield Figure(f"step of {length * count:,} tokens with compiled kernels: speed", [seconds[1] / seconds[0]], "",
                 "each operation by itself", "higher", 1.2)  # fmt: skip


def step_small(where: Where) -> Iterator[Figure]:
    """Qwen3 0.6B."""
    yield from step_of(where, "0.6b")


def step_middle(where: Where) -> Iterator[Figure]:
    """Qwen3 1.7B."""
    yield from step_of(where, "1.7b")


def step_large(where: Where) -> Iterator[Figure]:
    """Llama 3.1 8B."""
    yield from step_of(where, "8b")
