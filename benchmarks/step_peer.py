"""The same optimiser step as a plain loop over transformers: padded batches, autograd's log-softmax, AdamW.

Its settings are `Variant`s: the type of weights and products, and how many padded tokens a batch may hold. All of
them are measured and the fastest is the peer. Sequences are sorted by length, so that batches hold little padding; the
language-model head runs on the completions only; attention is torch's scaled_dot_product_attention.
"autocast" keeps float32 weights and moments, as ours does; "bfloat16" keeps everything in bfloat16: less memory and
time, but an update below 1/256 of a weight is lost, so it would not train at the rates of reinforcement learning.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.llama import Shape
from benchmarks.peak import wait
from shared.types import TrainSequence

Precision = Literal["float32", "autocast", "bfloat16"]
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""bounds of the importance ratio, as ours has them"""


class Variant(NamedTuple):
    """Settings of the loop."""

    precision: Precision
    batch_tokens: int
    """largest number of rows times the longest row of a batch"""

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.precision}, batches of {self.batch_tokens:,} padded tokens"


def padded_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return the sequences of each batch by index: longest first, as many as fit when padded to the longest."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


class PeerBatch(NamedTuple):
    """One padded batch."""

    ids: Tensor
    """[rows, longest] int64"""
    mask: Tensor
    """[rows, longest] int64, 0 for padding"""
    weights: Tensor
    """[rows, longest - prompt] float32 weight times advantage of each completion token, 0 for padding"""
    behaviour: Tensor
    """[rows, longest - prompt] float32"""


def pad(sequences: Sequence[TrainSequence], place: torch.device) -> PeerBatch:
    """Pad sequences whose prompts have one length, on the right to the longest."""
    longest, prompt = max(len(sequence.token_ids) for sequence in sequences), sequences[0].prompt_tokens
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask, weights = torch.zeros_like(ids), torch.zeros(len(sequences), longest - prompt)
    behaviour = torch.zeros_like(weights)
    for row, sequence in enumerate(sequences):
        length = len(sequence.token_ids)
        ids[row, :length] = torch.tensor(sequence.token_ids)
        mask[row, :length] = 1
        weights[row, : length - prompt] = sequence.weight * sequence.advantages[0]
        behaviour[row, : length - prompt] = torch.tensor(sequence.columns["behaviour"])
    return PeerBatch(*(column.to(place) for column in (ids, mask, weights, behaviour)))


class Peer:
    """A transformers model with AdamW."""

    def __init__(self, shape: Shape, precision: Precision, place: torch.device):
        """Random weights. Raises ModuleNotFoundError without transformers."""
        from transformers import LlamaConfig, LlamaForCausalLM

        self.precision, self.device = precision, place
        gc.collect()  # sharded models hold themselves in circles
        left_out = ("model_type", "pad_token_id")  # an id for padding would have no gradient
        config = LlamaConfig(**{key: value for key, value in shape.config().items() if key not in left_out})
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.model = LlamaForCausalLM(config).to(place, dtype).train()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def step(self, sequences: Sequence[TrainSequence], batch_tokens: int) -> float:
        """Forward and backward of all batches, clipping, AdamW; the seconds it took."""
        wait(self.device)
        start = time.perf_counter()
        for chosen in padded_batches([len(sequence.token_ids) for sequence in sequences], batch_tokens):
            self.loss(pad([sequences[index] for index in chosen], self.device)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        wait(self.device)
        return time.perf_counter() - start

    def loss(self, batch: PeerBatch) -> Tensor:
        """Return -sum of weight * min(ratio * advantage, clipped ratio * advantage)."""
        completion = batch.weights.shape[1]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "autocast"):
            found = self.model(
                input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, logits_to_keep=completion + 1
            )
        logits, targets = found.logits[:, :-1].float(), batch.ids[:, -completion:]
        logprobs = logits.gather(-1, targets[..., None]).squeeze(-1) - logits.logsumexp(-1)
        ratio = (logprobs - batch.behaviour).exp()
        return -torch.minimum(ratio * batch.weights, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * batch.weights).sum()
