"""Forward and backward of a trainer rank's micro-batches: gradients and metrics add up until the optimiser step.

What it does not: choose micro-batches (collate.py) or step (optimiser.py). Who calls this: worker.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.config import Objective
from shared.errors import NonFinite, RunError
from shared.messages import Accumulated
from shared.model import Decoder
from shared.packing import PackedBatch, pack
from shared.types import MicroBatch, TrainSequence
from trainer.kl import Reference, last_tokens
from trainer.loss import LossInputs, token_loss
from trainer.parallel import fits_whole, hold, reshard


def check(sequence: TrainSequence, supervised: bool) -> None:
    """Refuse a sequence that would spoil the step, naming the first bad position.

    Raises NonFinite for a log-prob, advantage or weight that is no finite number, RunError for a wrong count of
    log-probs.
    """
    completion_tokens = len(sequence.token_ids) - sequence.prompt_tokens
    if completion_tokens < 1 or sequence.prompt_tokens < 1:
        raise RunError(f"a sequence of {len(sequence.token_ids)} tokens, {sequence.prompt_tokens} of them prompt: both "
                       "prompt and completion need at least one token")
    if not (math.isfinite(sequence.advantage) and math.isfinite(sequence.weight)):
        raise NonFinite(f"a sequence has advantage {sequence.advantage} and weight {sequence.weight}")
    if supervised:
        return
    if len(sequence.logprobs) != completion_tokens:
        raise RunError(f"{len(sequence.logprobs)} log-probs came with a completion of {completion_tokens} tokens")
    if not math.isfinite(math.fsum(sequence.logprobs)):
        position = next(i for i, value in enumerate(sequence.logprobs) if not math.isfinite(value))
        raise NonFinite(
            f"the engine's log-prob at completion position {position} (token id "
            f"{sequence.token_ids[sequence.prompt_tokens + position]}) is {sequence.logprobs[position]}"
        )


def loss_tensors(sequences: Sequence[TrainSequence], supervised: bool, device: torch.device) -> dict[str, Tensor]:
    """behaviour_logprobs, advantages, weights of the packed sequences' targets: each [loss_tokens] float32."""
    counts = [len(sequence.token_ids) - sequence.prompt_tokens for sequence in sequences]

    def per_token(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(counts, dtype=torch.int64))

    if supervised:
        behaviour = torch.zeros(sum(counts))
    else:
        behaviour = torch.tensor([value for sequence in sequences for value in sequence.logprobs], dtype=torch.float32)
    columns = {
        "behaviour_logprobs": behaviour,
        "advantages": per_token([sequence.advantage for sequence in sequences]),
        "weights": per_token([sequence.weight for sequence in sequences]),
    }
    return {name: column.to(device, non_blocking=True) for name, column in columns.items()}


def pack_sequences(sequences: Sequence[TrainSequence], device: torch.device) -> PackedBatch:
    """Sequences end to end, the completion tokens as targets; no sequences give a stand-in without targets."""
    return pack(
        [sequence.token_ids for sequence in sequences], [sequence.prompt_tokens for sequence in sequences], device
    )


@torch.no_grad()
def consult(
    reference: Decoder, packed: PackedBatch, sequences: Sequence[TrainSequence], temperature: float, keep: bool
) -> Reference:
    """Log-probs of the packed targets under the reference, a collective as the policy's forward is.

    keep: leave its gathered weights for the next micro-batch; they never change.
    """
    logprobs = reference(packed, temperature)[0]
    if not keep:
        reshard(reference)
    last = last_tokens([len(sequence.token_ids) - sequence.prompt_tokens for sequence in sequences])
    return Reference(logprobs, last.to(logprobs.device, non_blocking=True))


def accumulate(
    decoder: Decoder,
    micro_batches: Sequence[MicroBatch],
    loss: str,
    temperature: float,
    settings: Objective,
    reference: Decoder | None = None,
) -> Accumulated:
    """Run all micro-batches; gradients add to what is there, and are sums over ranks when the last one is done.

    Every rank must be given the same number (empty ones included). reference: frozen and sharded as the decoder is;
    runs only for settings.kl > 0, before the decoder, whose activations need not wait for it.
    Raises what `check` raises and RunError for a missing reference, before the first forward, and NonFinite for a loss
    that is not finite, after the last backward.
    """
    start = time.perf_counter()
    supervised = loss == "supervised"
    regularised = settings.kl > 0 and not supervised
    if regularised and reference is None:
        raise RunError(f"objective.kl = {settings.kl} needs a reference model: LoadReference comes before Accumulate")
    for batch in micro_batches:
        for sequence in batch.sequences:
            check(sequence, supervised)
    device = next(decoder.parameters()).device
    keep = fits_whole(decoder)
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for number, batch in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        packed = pack_sequences(batch.sequences, device)
        against = None
        if regularised and reference is not None:
            against = consult(reference, packed, batch.sequences, temperature, keep and not last)
        if keep:
            hold(decoder, last)
        logprobs, entropy = decoder(packed, temperature)
        inputs = LossInputs(logprobs=logprobs, **loss_tensors(batch.sequences, supervised, device))
        found = token_loss(loss, inputs, entropy, settings, against)
        found.loss.backward()
        for name, value in found.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in found.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    numbers = read(sums)
    total = numbers.get("loss", 0.0) + numbers.get("regularisation", 0.0)
    if not math.isfinite(total):
        raise NonFinite(f"the loss is {total} over {numbers['tokens']:.0f} tokens of this rank")
    return Accumulated(
        sums=numbers,
        maxima=read(maxima),
        seconds=time.perf_counter() - start,
        tokens=sum(len(sequence.token_ids) for batch in micro_batches for sequence in batch.sequences),
    )


def read(values: dict[str, Tensor]) -> dict[str, float]:
    """0-dimensional tensors as numbers, with one wait for the device."""
    if not values:
        return {}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
