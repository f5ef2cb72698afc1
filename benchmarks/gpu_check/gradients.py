"""How far a step's gradients are from those of float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from benchmarks.figures import Figure
from benchmarks.gpu_check.place import Where
from benchmarks.step import Rank, make_sequences
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder
from shared.model.language_model import LanguageModel
from shared.types import MicroBatch
from trainer.objectives.inputs import loss_inputs
from trainer.objectives.loss import policy_loss
from trainer.objectives.objective import Objective
from trainer.objectives.registry import read_objective
from trainer.step import fsdp
from trainer.step.forward_backward import forward_backward, pack_sequences

GRADIENTS = DecoderConfig("qwen3", 512, 256, 512, layers=2, heads=8, key_heads=2, head_dim=64, norm_epsilon=1e-6,
                          max_positions=8192, qk_norm=True)  # fmt: skip
"""grouped heads, norms of queries and keys, a head of its own: all that the families have"""
FAR = {"bfloat16": 3e-2, "float32": 1e-4}
"""largest relative distance of a step's gradients from float64, by the type of the products"""


def distance(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Norm of the difference of all tensors over the norm of the exact ones."""
    pairs = zip(found, exact, strict=True)
    apart = sum(float((a.double().cpu() - b.double().cpu()).square().sum()) for a, b in pairs)
    return math.sqrt(apart / sum(float(b.double().square().sum()) for b in exact))


def gradients_of(model: Decoder) -> list[torch.Tensor]:
    """This rank's gradients, copied; then they are dropped."""
    held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = [fsdp.local(gradient).detach().clone() for gradient in held]
    model.zero_grad(set_to_none=True)
    return found


def backward_exactly(model: Decoder, batches: Sequence[MicroBatch], objective: Objective) -> None:
    """Backward of the same loss through a float64 decoder on the CPU; only the loss's own formula is float32."""
    for batch in batches:
        logprobs, entropy, _ = model(pack_sequences(batch.sequences, torch.device("cpu")), 1.0, "states")
        rounded = logprobs.detach().float().requires_grad_()
        policy_loss(loss_inputs(batch.sequences, rounded), entropy.detach().float(), objective).loss.backward()
        assert rounded.grad is not None
        logprobs.backward(rounded.grad.double())


def some_batches(where: Where, vocabulary: int) -> list[MicroBatch]:
    """Two micro-batches of long and short sequences, some of which share their prompt."""
    long = where.size(1500, 90)
    shared = make_sequences([long // 2] * 4, vocabulary, long // 4, 4, one_prompt=True)
    apart = make_sequences([long, 70, 33, 20], vocabulary, 16)
    return [MicroBatch([*shared, *apart]), MicroBatch(make_sequences([50, 41], vocabulary, 9))]


def exact_copy(rank: Rank, model: Decoder) -> Decoder:
    """Give a decoder on the CPU the rank's values, in float64."""
    exact = model.double()
    with torch.no_grad():
        for one, other in zip(exact.parameters(), rank.decoder.parameters(), strict=True):
            one.copy_(fsdp.local(other))
    return exact


@torch.no_grad()
def score_first(model: LanguageModel, batches: list[MicroBatch]) -> None:
    """Let the model have sampled the sequences: then no ratio is near a bound of the objective, where a rounding would
    take a token out of the loss or put it in."""
    for batch in batches:
        logprobs = model(pack_sequences(batch.sequences, torch.device("cpu")))[0]
        counts = [sequence.loss_tokens for sequence in batch.sequences]
        for sequence, own in zip(batch.sequences, logprobs.split(counts), strict=True):
            sequence.columns["behaviour"] = own.tolist()


def compare(name: str, rank: Rank, exact: Decoder, batches: list[MicroBatch], limit: float) -> Iterator[Figure]:
    """Yield how far a step's gradients are from those of float64."""
    objective = read_objective({})
    score_first(exact, batches)
    forward_backward(rank.decoder, batches, 1.0, objective)
    backward_exactly(exact, batches, objective)
    found, truth = gradients_of(rank.decoder), gradients_of(exact)
    fsdp.reshard(rank.decoder)
    far = max(distance([a], [b]) for a, b in zip(found, truth, strict=True))
    yield Figure(f"{name}: distance from float64", [distance(found, truth)], "", "their norm", "lower", limit)
    yield Figure(f"{name}: the farthest tensor", [far], "", "its norm", "lower", 4 * limit)
