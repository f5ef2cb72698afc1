"""The same optimiser step through our own decoder and through the module of transformers, in turn.

SmolLM2-135M's shape with random weights, heavy-tailed sequences packed into micro-batches; a step is forward and
backward, clipping and AdamW, as in training.py. Both ranks live in one process and step by turns, so that what else the
machine does meets both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from benchmarks.figures import Figure, benchmark
from benchmarks.llama import SMOLLM2_135M
from benchmarks.step import Rank, alone, device, draw, micro_batches
from shared.model.cpu.processor import keep_freed_memory, multiplies_bfloat16_fast

TARGET = 0.8
TOKENS, REPEATS = 4096, 5


@benchmark()
def implementations(quick: bool) -> Iterator[Figure]:
    """Measure both, in the faster type of products and in float32."""
    if not torch.cuda.is_available():
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        keep_freed_memory()  # as a trainer does
    place, shape = device(), SMOLLM2_135M._replace(layers=4) if quick else SMOLLM2_135M
    tokens, repeats = (1024, 2) if quick else (TOKENS, REPEATS)
    batches = micro_batches(draw(tokens, 0, shape.vocabulary), tokens)
    types = ("bfloat16", "float32") if multiplies_bfloat16_fast(place.type) else ("float32",)
    with alone(place) as mesh:
        for dtype in types:
            native = Rank(shape.decoder, dtype, mesh, place)
            other = Rank(shape.decoder, dtype, mesh, place, described=shape.config())
            native.step(batches), other.step(batches)
            pairs = [(native.step(batches), other.step(batches)) for _ in range(repeats)]
            for name, number in (("our own decoder", 0), ("module of transformers", 1)):
                yield Figure(f"{name}, {dtype}", [tokens / pair[number] for pair in pairs], "tokens/s")
            yield Figure(f"module of transformers, {dtype}, beside our own", [a / b for a, b in pairs], "",
                         "our own decoder", "higher", TARGET)  # fmt: skip
            del native, other
