"""One trainer rank's step beside matrix products and a transformers loop; scaling; memory of the head.

SmolLM2-135M's shape with random weights, heavy-tailed sequences packed into micro-batches of 4,096 tokens; a step is
forward and backward (accumulate.py), clipping and AdamW over float32 master weights (optimiser.py). All of it, the peak
and the peer in the same process, with all cores (or one GPU).

- MFU: operations of the step (trainer/step/flops.py) over its time and the peak of large matrix products, measured
  before each step.
  Products are in the type that is faster here: bfloat16 on GPUs and some CPUs, and there float32 comes last; float32
  alone on other CPUs, where bfloat16 only costs time.
- Peer: the fastest of the settings of a transformers + AdamW loop (step_peer.py), tried in this run, same sequences.
- Scaling: time of a token from 4k to 64k tokens a step; time of an operation as sequences get longer at equal tokens,
  and as the vocabulary grows. 1 is linear.
- Shared prompts: completions of one prompt in one micro-batch, beside the same with prompts that differ.
- Memory of the log-prob head (head_memory.py): what grows with tokens x vocabulary.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import head_memory
from benchmarks.figures import Figure, benchmark
from benchmarks.llama import SMOLLM2_135M, Shape
from benchmarks.peak import Peak
from benchmarks.step import Rank, alone, device, draw, make_sequences, micro_batches, token_count, work
from benchmarks.step_peer import Peer, Variant
from shared.model.cpu.processor import keep_freed_memory, multiplies_bfloat16_fast
from shared.types import MicroBatch, TrainSequence

MFU_TARGET, LINEAR_TARGET, HEAD_TARGET = 0.6, 1.1, 0.02
SEED = 0


class Load(NamedTuple):
    """How much is measured."""

    shape: Shape
    tokens: int
    """of the standard step, and of a micro-batch"""
    repeats: int
    growth: tuple[int, ...]
    """tokens of larger steps"""
    lengths: tuple[int, ...]
    """of equal sequences, at `tokens` in all"""
    vocabularies: tuple[int, ...]
    variants: dict[str, tuple[Variant, ...]]
    """type of the products -> settings of the peer that train alike"""
    slower: bool
    """measure the slower type too"""
    head: tuple[int, int]
    """(tokens, vocabulary) of the head's memory"""


FULL = Load(
    SMOLLM2_135M, 4096, 2, (16_384, 65_536), (256, 1024, 4096), (12_288, 49_152, 196_608),
    {"bfloat16": tuple(Variant(p, tokens) for p in ("autocast", "bfloat16") for tokens in (2048, 4096)),
     "float32": tuple(Variant("float32", tokens) for tokens in (2048, 4096))}, True, (8192, 98_304),
)  # fmt: skip
QUICK = Load(
    SMOLLM2_135M._replace(layers=4), 1024, 2, (4096,), (128, 512), (12_288, 49_152),
    {"bfloat16": (Variant("autocast", 1024), Variant("bfloat16", 1024)), "float32": (Variant("float32", 1024),)}, False,
    (2048, 24_576),
)  # fmt: skip


@benchmark()
def training(quick: bool) -> Iterator[Figure]:
    """Measure steps, scaling, then the head."""
    load = QUICK if quick else FULL
    if not torch.cuda.is_available():
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        keep_freed_memory()  # as a trainer does; the peer has it too
    place = device()
    faster = "bfloat16" if multiplies_bfloat16_fast(place.type) else "float32"
    with alone(place) as mesh:
        yield from standard(load, mesh, place, faster, whole=True)
        yield from scaling(load, mesh, place, faster)
        if load.slower and faster == "bfloat16":
            yield from standard(load, mesh, place, "float32", whole=False)
    yield from head(load)


def timed(rank: Rank, batches: Sequence[MicroBatch], repeats: int) -> list[float]:
    """Return [repeats] seconds of steps after a first one."""
    rank.step(batches)
    return [rank.step(batches) for _ in range(repeats)]


def standard(load: Load, mesh: DeviceMesh, place: torch.device, dtype: str, whole: bool) -> Iterator[Figure]:
    """Yield speed, MFU and peer with products in `dtype`; whole: also growth and shared prompts."""
    sequences = draw(load.tokens, SEED, load.shape.vocabulary)
    batches = micro_batches(sequences, load.tokens)
    peak, rank = Peak(getattr(torch, dtype), place), Rank(load.shape.decoder, dtype, mesh, place)
    rank.step(batches)
    peaks, seconds = [], []
    for _ in range(load.repeats):
        peaks.append(peak.measure())
        seconds.append(rank.step(batches))
    flops, name = work(load.shape.decoder, batches), f"{load.tokens:,} tokens, {dtype}"
    yield Figure(f"step, {name}", [load.tokens / s for s in seconds], "tokens/s", better="higher")
    shares = [flops / s / p for s, p in zip(seconds, peaks, strict=True)]
    yield Figure(f"MFU, {name}", shares, "", f"peak of {dtype} matrix products, same threads", "higher",
                 MFU_TARGET if whole else None)  # fmt: skip
    yield Figure(f"peak of matrix products, {dtype}", [1e-9 * p for p in peaks], "GFLOP/s")
    if whole:
        yield from growth(load, rank, batches, seconds)
        yield shared_prompts(load, rank)
    del rank
    yield from peers(load, place, sequences, load.variants[dtype], seconds, name)


def peers(load: Load, place: torch.device, sequences: Sequence[TrainSequence], variants: Sequence[Variant],
          ours: Sequence[float], name: str) -> Iterator[Figure]:  # fmt: skip
    """Yield every setting of the loop, and ours beside the fastest."""
    times: dict[Variant, list[float]] = {}
    for variant in variants:
        peer = Peer(load.shape, variant.precision, place)
        peer.step(sequences, variant.batch_tokens)
        times[variant] = [peer.step(sequences, variant.batch_tokens) for _ in range(load.repeats)]
        del peer
        rates = [load.tokens / s for s in times[variant]]
        yield Figure(f"transformers + AdamW, {variant.words}", rates, "tokens/s")
    rate = load.tokens / statistics.median(times[fastest(times)])
    yield Figure(f"step, {name}, beside transformers", [load.tokens / s / rate for s in ours], "",
                 "the fastest of these settings of transformers + AdamW", "higher")  # fmt: skip


def fastest(times: Mapping[Variant, Sequence[float]]) -> Variant:
    """Return the setting with the smallest median."""
    return min(times, key=lambda variant: statistics.median(times[variant]))


def growth(load: Load, rank: Rank, batches: Sequence[MicroBatch], seconds: Sequence[float]) -> Iterator[Figure]:
    """Yield the time of a token in larger steps, beside the standard one."""
    alone_s = statistics.median(seconds) / token_count(batches)
    for tokens in load.growth:
        larger = micro_batches(draw(tokens, SEED + 1, load.shape.vocabulary), load.tokens)
        yield Figure(f"time of a token, {tokens:,} tokens a step", [rank.step(larger) / tokens / alone_s], "",
                     f"that with {load.tokens:,}", "lower", LINEAR_TARGET)  # fmt: skip


def shared_prompts(load: Load, rank: Rank) -> Figure:
    """Measure eight completions of one long prompt, beside eight of different prompts."""
    length = load.tokens // 8
    prompt = length // 2
    together, apart = (
        timed(rank, micro_batches(make_sequences([length] * 8, load.shape.vocabulary, prompt, 8, one_prompt),
                                  load.tokens), load.repeats)
        for one_prompt in (True, False)
    )  # fmt: skip
    beside = [seconds / statistics.median(apart) for seconds in together]
    return Figure(f"step, 8 completions of one prompt, {prompt} tokens each", beside, "", "that of 8 prompts", "lower")


def compared(costs: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Return size -> cost beside the median of the first size, without that one."""
    first, *others = costs
    unit = statistics.median(costs[first])
    return {size: [cost / unit for cost in costs[size]] for size in others}


def scaling(load: Load, mesh: DeviceMesh, place: torch.device, dtype: str) -> Iterator[Figure]:
    """Yield the time of an operation: equal tokens in longer sequences, and equal sequences with more words to choose
    from."""
    shape, words = load.shape, draw(load.tokens, SEED, min(load.vocabularies))
    looks = {
        "sequences of {:,} tokens": {
            length: (shape, make_sequences([length] * (load.tokens // length), shape.vocabulary))
            for length in load.lengths
        },
        "vocabulary of {:,}": {size: (shape._replace(vocabulary=size), words) for size in load.vocabularies},
    }
    for name, sizes in looks.items():
        costs = {}
        for size, (of, sequences) in sizes.items():
            batches = micro_batches(sequences, load.tokens)
            flops = work(of.decoder, batches)
            costs[size] = [s / flops for s in timed(Rank(of.decoder, dtype, mesh, place), batches, load.repeats)]
        for size, values in compared(costs).items():
            of_first = f"that with {min(sizes):,}"
            yield Figure(f"time of an operation, {name.format(size)}", values, "", of_first, "lower")


def head(load: Load) -> Iterator[Figure]:
    """Yield the memory of the log-prob head."""
    tokens, vocabulary = load.head
    whole, growing = head_memory.beside_logits(tokens, vocabulary)
    name = f"head, {tokens:,} tokens, vocabulary of {vocabulary:,}"
    yield Figure(f"{name}: extra memory", [whole], "", "its float32 logits", "lower")
    yield Figure(f"{name}: extra memory that grows with tokens x vocabulary", [growing], "",
                 "the same part of the float32 logits", "lower", HEAD_TARGET)  # fmt: skip
