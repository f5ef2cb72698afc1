"""How fast one trainer rank makes an optimiser step, beside the machine's matrix products and beside transformers.

SmolLM2-135M's shape with random weights, heavy-tailed sequences packed into micro-batches of 4,096 tokens; a step is
forward and backward, clipping and AdamW over float32 master weights. All of it, the peak and the peer in the same
process, with all cores (or one GPU).

- MFU: operations of the step (flops.py) over its time and the peak of large matrix products, measured before each step.
  Products are in the type that is faster here (cpu.py): bfloat16 on GPUs and some CPUs, and there float32 comes
  last; float32 alone on other CPUs, where bfloat16 only costs time.
- Peer: the fastest of the settings of a transformers + AdamW loop (step_peer.py), tried in this run, same sequences.
- Scaling: time of a token from 4k to 64k tokens a step; time of an operation as sequences get longer at equal tokens,
  and as the vocabulary grows. 1 is linear.
- Shared prompts: completions of one prompt in one micro-batch, beside the same with prompts that differ.
- Profile: where the time of a step goes, by kind of operation (torch.profiler; it slows small operations down).
- Memory of the log-prob head (head_memory.py): what grows with tokens x vocabulary.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed import head_memory
from benchmarks.speed.flops import Peak
from benchmarks.speed.rows import Row, Task
from benchmarks.speed.step import SMOLLM2, Rank, alone, device, draw, make_sequences, micro_batches, token_count, work
from benchmarks.speed.step_peer import Peer, Variant
from shared.model.cpu import keep_freed_memory, multiplies_bfloat16_fast
from shared.types import MicroBatch, TrainSequence

MFU_TARGET, LINEAR_TARGET, HEAD_TARGET = 0.6, 1.1, 0.02
SEED = 0
KINDS = {
    "matrix products": ("*::mm", "*::addmm*", "*::*linear*", "*::bmm", "*::baddbmm*"),
    "attention kernels": ("*::_scaled_dot_product*", "*::_flash_attention*", "*varlen*"),
    "optimiser": ("*::_fused_adamw_", "*::_foreach_*"),
    "copies, casts, gathers": ("*::copy_", "*::_to_copy", "*::cat", "*::index*", "*::clone", "*::fill_", "*::zero*"),
}
"""kind -> patterns of operators"""
OTHER = "other element-wise work"


class Load(NamedTuple):
    """How much is measured."""

    shape: dict[str, Any]
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
    other_repeats: int
    """with the slower type; 0 leaves it out"""
    head: tuple[int, int]
    """(tokens, vocabulary) of the head's memory"""


FULL = Load(
    SMOLLM2, 4096, 2, (16_384, 65_536), (256, 1024, 4096), (12_288, 49_152, 196_608),
    {"bfloat16": tuple(Variant(p, tokens) for p in ("autocast", "bfloat16") for tokens in (2048, 4096)),
     "float32": tuple(Variant("float32", tokens) for tokens in (2048, 4096))}, 2, (8192, 98_304),
)  # fmt: skip
QUICK = Load(
    {**SMOLLM2, "num_hidden_layers": 4}, 1024, 2, (4096,), (128, 512), (12_288, 49_152),
    {"bfloat16": (Variant("autocast", 1024), Variant("bfloat16", 1024)), "float32": (Variant("float32", 1024),)}, 0,
    (2048, 24_576),
)  # fmt: skip


def rows(task: Task) -> list[Row]:
    """All figures."""
    load = QUICK if task.quick else FULL
    if not torch.cuda.is_available():
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        keep_freed_memory()  # as a trainer does; the peer has it too
    place = device()
    faster, other = ("bfloat16", "float32") if multiplies_bfloat16_fast(place.type) else ("float32", "bfloat16")
    other_repeats = load.other_repeats if other == "float32" else 0
    of_other = 1 + len(load.variants[other]) if other_repeats else 0
    task.parts(4 + len(load.growth) + len(load.vocabularies) + len(load.variants[faster]) + of_other)
    with alone(place) as mesh:
        found = standard(task, load, mesh, place, faster, whole=True)
        found += sequence_lengths(task, load, mesh, place, faster) + vocabularies(task, load, mesh, place, faster)
        if other_repeats:
            found += standard(task, load._replace(repeats=other_repeats), mesh, place, other, whole=False)
    found += head(load)
    task.part_done()
    return found


def standard(task: Task, load: Load, mesh: DeviceMesh, place: torch.device, dtype: str, whole: bool) -> list[Row]:
    """Speed, MFU, peer with products in `dtype`; whole: also growth, shared prompts and profile."""
    sequences = draw(load.tokens, SEED, load.shape["vocab_size"])
    batches = micro_batches(sequences, load.tokens)
    peak = Peak(getattr(torch, dtype), place)
    rank = Rank(load.shape, dtype, mesh, place)
    rank.step(batches)
    peaks, seconds = [], []
    for _ in range(load.repeats):
        peaks.append(peak.measure())
        seconds.append(rank.step(batches))
    task.part_done()
    flops, name = work(load.shape, batches), f"{load.tokens:,} tokens, {dtype}"
    found = [
        Row(f"step, {name}", [load.tokens / s for s in seconds], "tokens/s", better="higher"),
        Row(f"MFU, {name}", [flops / s / p for s, p in zip(seconds, peaks, strict=True)], "",
            f"peak of {dtype} matrix products, same threads", "higher", MFU_TARGET if whole else None),
        Row(f"peak of matrix products, {dtype}", [1e-9 * p for p in peaks], "GFLOP/s"),
    ]  # fmt: skip
    if whole:
        found += growth(task, load, rank, batches, seconds)
        found += shared_prompts(load, rank)
        found += profiled(rank, batches)
        task.part_done()
    del rank
    return found + peers(task, load, place, sequences, load.variants[dtype], seconds, name)


def peers(task: Task, load: Load, place: torch.device, sequences: Sequence[TrainSequence], variants: Sequence[Variant],
          ours: Sequence[float], name: str) -> list[Row]:  # fmt: skip
    """Every setting of the loop, and ours beside the fastest."""
    times: dict[Variant, list[float]] = {}
    for variant in variants:
        peer = Peer(load.shape, variant.precision, place)
        peer.step(sequences, variant.batch_tokens)
        times[variant] = [peer.step(sequences, variant.batch_tokens) for _ in range(load.repeats)]
        del peer
        task.part_done()
    best = fastest(times)
    rate = load.tokens / statistics.median(times[best])
    return [
        *(Row(f"transformers + AdamW, {variant.words}", [load.tokens / s for s in found], "tokens/s")
          for variant, found in times.items()),
        Row(f"step, {name}, beside transformers", [load.tokens / s / rate for s in ours], "",
            "the fastest of these settings of transformers + AdamW", "higher"),
    ]  # fmt: skip


def fastest(times: Mapping[Variant, Sequence[float]]) -> Variant:
    """By the median."""
    return min(times, key=lambda variant: statistics.median(times[variant]))


def growth(task: Task, load: Load, rank: Rank, batches: Sequence[MicroBatch], seconds: Sequence[float]) -> list[Row]:
    """Time of a token in larger steps, beside the standard one."""
    alone_s = statistics.median(seconds) / token_count(batches)
    found = []
    for tokens in load.growth:
        larger = micro_batches(draw(tokens, SEED + 1, load.shape["vocab_size"]), load.tokens)
        times = [rank.step(larger) / tokens / alone_s]
        found.append(Row(f"time of a token, {tokens:,} tokens a step", times, "", f"that with {load.tokens:,}",
                         "lower", LINEAR_TARGET))  # fmt: skip
        task.part_done()
    return found


def shared_prompts(load: Load, rank: Rank) -> list[Row]:
    """Eight completions of one long prompt, beside eight of different prompts."""
    length = load.tokens // 8
    prompt = length // 2
    times = []
    for one_prompt in (True, False):
        batches = micro_batches(
            make_sequences([length] * 8, load.shape["vocab_size"], prompt, 8, one_prompt), load.tokens
        )
        rank.step(batches)
        times.append([rank.step(batches) for _ in range(load.repeats)])
    apart = statistics.median(times[1])
    return [Row(f"step, 8 completions of one prompt, {prompt} tokens each", [s / apart for s in times[0]], "",
                "that of 8 prompts", "lower")]  # fmt: skip


def compared(times: Mapping[int, Sequence[float]], flops: Mapping[int, float]) -> dict[int, list[float]]:
    """size -> time of an operation beside that of the smallest size."""
    least = min(times)
    unit = statistics.median(times[least]) / flops[least]
    return {size: [s / flops[size] / unit for s in found] for size, found in times.items()}


def measured(rank: Rank, batches: Sequence[MicroBatch], repeats: int) -> list[float]:
    """Seconds of steps after a first one."""
    rank.step(batches)
    return [rank.step(batches) for _ in range(repeats)]


def sequence_lengths(task: Task, load: Load, mesh: DeviceMesh, place: torch.device, dtype: str) -> list[Row]:
    """Equal tokens in longer sequences."""
    rank = Rank(load.shape, dtype, mesh, place)
    times, flops = {}, {}
    for length in load.lengths:
        batches = micro_batches(
            make_sequences([length] * (load.tokens // length), load.shape["vocab_size"]), load.tokens
        )
        times[length], flops[length] = measured(rank, batches, load.repeats), work(load.shape, batches)
    task.part_done()
    return [
        Row(f"time of an operation, sequences of {length:,} tokens", values, "", f"that with {min(times):,}", "lower")
        for length, values in compared(times, flops).items()
        if length != min(times)
    ]


def vocabularies(task: Task, load: Load, mesh: DeviceMesh, place: torch.device, dtype: str) -> list[Row]:
    """The same sequences with more words to choose from."""
    times, flops = {}, {}
    batches = micro_batches(draw(load.tokens, SEED, min(load.vocabularies)), load.tokens)
    for vocabulary in load.vocabularies:
        shape = {**load.shape, "vocab_size": vocabulary}
        rank = Rank(shape, dtype, mesh, place)
        times[vocabulary], flops[vocabulary] = measured(rank, batches, load.repeats), work(shape, batches)
        del rank
        task.part_done()
    return [
        Row(f"time of an operation, vocabulary of {vocabulary:,}", values, "", f"that with {min(times):,}", "lower")
        for vocabulary, values in compared(times, flops).items()
        if vocabulary != min(times)
    ]


def kind_of(operator: str) -> str:
    """The kind of an operator, e.g. "aten::mm" is "matrix products"."""
    for kind, patterns in KINDS.items():
        if any(fnmatchcase(operator, pattern) for pattern in patterns):
            return kind
    return OTHER


def shares(times: Mapping[str, float]) -> dict[str, float]:
    """operator -> own time  to  kind -> share of all time."""
    total = sum(times.values())
    found = dict.fromkeys((*KINDS, OTHER), 0.0)
    for operator, own in times.items():
        found[kind_of(operator)] += own / total
    return found


def profiled(rank: Rank, batches: Sequence[MicroBatch]) -> list[Row]:
    """Share of each kind of operation in one step."""
    gpu = rank.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as told:
        rank.step(batches)
    own = "self_device_time_total" if gpu else "self_cpu_time_total"
    times = {event.key: float(getattr(event, own)) for event in told.key_averages()}
    return [Row(f"profile: {kind}", [share], "%") for kind, share in shares(times).items()]


def head(load: Load) -> list[Row]:
    """Memory of the log-prob head."""
    tokens, vocabulary = load.head
    sizes = [(n, v) for n in (tokens, tokens // 4) for v in (vocabulary, vocabulary // 4)]
    found = [head_memory.measured(n, v) for n, v in sizes]
    logits = head_memory.logits_bytes(tokens, vocabulary)
    whole = head_memory.interaction(*(head_memory.logits_bytes(n, v) for n, v in sizes))
    name = f"head, {tokens:,} tokens, vocabulary of {vocabulary:,}"
    return [
        Row(f"{name}: extra memory", [found[0] / logits], "", "its float32 logits", "lower"),
        Row(f"{name}: extra memory that grows with tokens x vocabulary", [head_memory.interaction(*found) / whole], "",
            "the same part of the float32 logits", "lower", HEAD_TARGET),
    ]  # fmt: skip
