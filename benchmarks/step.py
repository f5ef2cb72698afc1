"""One trainer rank, alone: model, optimiser, micro-batches and step as trainer/step/rank.py puts them together.

    with alone(device) as mesh:
        rank = Rank(SMOLLM2_135M.decoder, "bfloat16", mesh, device)
        seconds = rank.step(micro_batches(draw(4096, seed=0, vocabulary=49_152), 4096))

The weights are random: speed does not depend on them.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.peak import wait
from shared.model import lora
from shared.model.config import DecoderConfig
from shared.model.implementation import make_model, read_shape
from shared.sections import Optimiser
from shared.types import CONTEXT, SAMPLED, MicroBatch, TrainSequence
from trainer.objectives.registry import read_objective
from trainer.step import fsdp, optimiser
from trainer.step.batching import plan_batch
from trainer.step.flops import packed_flops
from trainer.step.forward_backward import forward_backward, pack_sequences

PROMPT_TOKENS = 48
MEDIAN_TOKENS, SIGMA, LONGEST_TOKENS = 256, 0.7, 1024
"""of the lognormal lengths, prompt included"""
TIMEOUT_S = 3600.0


def device() -> torch.device:
    """Return a GPU where there is one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def alone(place: torch.device) -> Iterator[DeviceMesh]:
    """A process group of one trainer."""
    mesh = fsdp.join(dist.HashStore(), 0, 1, place, TIMEOUT_S)
    try:
        yield mesh
    finally:
        fsdp.leave()


def draw_lengths(tokens: int, seed: int) -> list[int]:
    """Draw lognormal lengths from PROMPT_TOKENS + 16 to LONGEST_TOKENS that add up to `tokens`: the last is cut, and
    one too short for a sequence of its own is added to the one before."""
    rng, least = random.Random(f"lengths {seed}"), PROMPT_TOKENS + 16
    lengths: list[int] = []
    left = tokens
    while left > 0:
        drawn = min(max(int(MEDIAN_TOKENS * math.exp(rng.gauss(0.0, SIGMA))), least), LONGEST_TOKENS, left)
        if drawn < least and lengths:
            lengths[-1] += drawn
        else:
            lengths.append(drawn)
        left -= drawn
    return lengths


def make_sequences(
    lengths: Sequence[int], vocabulary: int, prompt_tokens: int = PROMPT_TOKENS, group_size: int = 1,
    one_prompt: bool = False,
) -> list[TrainSequence]:  # fmt: skip
    """Make sequences of random tokens with the log-probs of a uniform policy, advantages of 1 and -1 in turn.

    group_size: so many in turn are of one group; one_prompt: these begin with the same prompt.
    """
    rng = random.Random("tokens")
    completion_tokens = sum(lengths) - prompt_tokens * len(lengths)
    sequences: list[TrainSequence] = []
    for number, length in enumerate(lengths):
        tokens = rng.choices(range(vocabulary), k=length)
        if one_prompt and number % group_size:
            tokens[:prompt_tokens] = sequences[-1].token_ids[:prompt_tokens]
        logprobs = [-math.log(vocabulary)] * (length - prompt_tokens)
        sequences.append(
            TrainSequence(tokens, bytes([CONTEXT] * prompt_tokens + [SAMPLED] * (length - prompt_tokens)),
                          1.0 / completion_tokens, [1.0 - 2.0 * (number % 2)], number // group_size,
                          {"behaviour": logprobs})
        )  # fmt: skip
    return sequences


def draw(tokens: int, seed: int, vocabulary: int) -> list[TrainSequence]:
    """Draw sequences of heavy-tailed lengths, `tokens` in all, no two with the same prompt."""
    return make_sequences(draw_lengths(tokens, seed), vocabulary)


def micro_batches(sequences: list[TrainSequence], budget: int) -> list[MicroBatch]:
    """Cut sequences as the controller does for one rank."""
    return plan_batch(sequences, 1, budget).micro_batches[0]


def token_count(batches: Sequence[MicroBatch]) -> int:
    """Count prompt and completion tokens of all sequences."""
    return sum(len(sequence.token_ids) for batch in batches for sequence in batch.sequences)


def work(config: DecoderConfig, batches: Sequence[MicroBatch]) -> float:
    """Return the FLOP of forward and backward; a prompt that is stored once is computed once."""
    found = 0.0
    for batch in batches:
        packed = pack_sequences(batch.sequences, torch.device("cpu"))
        found += 3 * packed_flops(config, packed.lengths, packed.prefixes, len(packed.targets))
    return found


class Rank:
    """Model and optimiser of a trainer rank, with what it needs to step."""

    def __init__(
        self, config: DecoderConfig, compute_dtype: str, mesh: DeviceMesh, place: torch.device, recompute: int = 0,
        described: Mapping[str, Any] | None = None, adapters: int = 0,
    ):  # fmt: skip
        """compute_dtype: "float32" or "bfloat16". recompute: layers that are computed twice. described: content of
        config.json, of a model that the module of transformers is to train. adapters: their rank, 0 for all weights."""
        gc.collect()  # an earlier one: sharded models hold themselves in circles
        settings = Optimiser.model_validate({"compute_dtype": compute_dtype})
        self.mesh, self.device = mesh, place
        self.objective = read_objective({})
        with torch.device("meta"):
            shape = config if described is None else read_shape(described, "transformers")
            self.decoder = make_model(shape, described or {}, recompute)
            if adapters:
                lora.attach(self.decoder, adapters, 2.0 * adapters)
        fsdp.shard(self.decoder, mesh, getattr(torch, compute_dtype))
        fsdp.materialise(self.decoder, place)
        self.fill()
        self.optimiser = optimiser.make_optimiser(self.decoder, settings)
        self.settings = settings

    @torch.no_grad()
    def fill(self) -> None:
        """Random matrices, norms of 1."""
        torch.manual_seed(0)
        for parameter in self.decoder.parameters():
            rows = fsdp.local(parameter)
            rows.normal_(0.0, 0.02) if rows.dim() > 1 else rows.fill_(1.0)
        fsdp.reshard(self.decoder)

    def step(self, batches: Sequence[MicroBatch]) -> float:
        """Forward and backward of all micro-batches, clipping, AdamW; the seconds it took."""
        wait(self.device)
        start = time.perf_counter()
        forward_backward(self.decoder, batches, 1.0, self.objective)
        optimiser.clip(self.decoder, self.settings.max_grad_norm, self.mesh.get_group())
        fsdp.reshard(self.decoder)
        optimiser.update(self.decoder, self.optimiser, self.settings.learning_rate)
        wait(self.device)
        return time.perf_counter() - start
