"""Forward and backward of a trainer rank's micro-batches; gradients and metrics are summed until the optimiser step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import NonFinite, RunError
from shared.messages import Accumulated
from shared.model.decoder import Decoder
from shared.model.packing import PackedBatch, pack
from shared.objective import Need, Objective, needs
from shared.types import MicroBatch, TrainSequence
from trainer.fsdp import fits_whole, hold, provide_gradients, reshard
from trainer.objectives.inputs import Completions, LossInputs, completions_of
from trainer.objectives.loss import policy_loss, supervised_loss
from trainer.value_head import ValueHead


@dataclass
class Beside:
    """The models that the objective needs beside the policy; None for those that it does not need."""

    reference: Decoder | None = None
    """frozen, sharded as the policy is"""
    teacher: Decoder | None = None
    """frozen and sharded likewise, of any architecture; None also where the teacher is asked over HTTP"""
    values: ValueHead | None = None


def check(sequence: TrainSequence, supervised: bool) -> None:
    """Check that a sequence can be trained on.

    Raises NonFinite for a log-prob (the message names the first bad position of the engine's), advantage or weight that
    is not finite, RunError for a wrong count of log-probs and for an empty prompt or completion.
    """
    completion_tokens = len(sequence.token_ids) - sequence.prompt_tokens
    if completion_tokens < 1 or sequence.prompt_tokens < 1:
        raise RunError(
            f"a sequence of {len(sequence.token_ids)} tokens, {sequence.prompt_tokens} of them prompt: both "
            "prompt and completion need at least one token"
        )
    if not (math.isfinite(sequence.advantage) and math.isfinite(sequence.weight)):
        raise NonFinite(f"a sequence has advantage {sequence.advantage} and weight {sequence.weight}")
    if supervised:
        return
    sampled = completion_tokens - sequence.truth_tokens
    for found, whose in (
        (sequence.logprobs, "log-probs"),
        (sequence.proximal, "log-probs of the start of the batch"),
        (sequence.teacher, "log-probs of the teacher"),
    ):
        if len(found) != sampled and (found or whose == "log-probs"):
            raise RunError(f"{len(found)} {whose} came with a completion of {sampled} tokens")
    if not all(map(math.isfinite, sequence.teacher)):
        raise NonFinite("a log-prob of the teacher is not a finite number: see objective.teacher")
    if not all(map(math.isfinite, sequence.logprobs)):
        position = next(i for i, value in enumerate(sequence.logprobs) if not math.isfinite(value))
        raise NonFinite(
            f"the engine's log-prob at completion position {position} (token id "
            f"{sequence.token_ids[sequence.prompt_tokens + position]}) is {sequence.logprobs[position]}"
        )


def counts_of(sequences: Sequence[TrainSequence]) -> list[int]:
    """[sequences] number of completion tokens of each, true answers included."""
    return [len(sequence.token_ids) - sequence.prompt_tokens for sequence in sequences]


def loss_tensors(
    sequences: Sequence[TrainSequence], supervised: bool, device: torch.device
) -> dict[str, Tensor | Completions]:
    """The fields of LossInputs that come with the sequences, in packed order; floats are [loss_tokens] float32."""
    counts = counts_of(sequences)

    def per_token(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(counts, dtype=torch.int64))

    def joined(lists: list[list[float]]) -> Tensor:
        """Values of sampled tokens; true answers were not sampled and have 0."""
        return torch.tensor(
            [v for one, s in zip(lists, sequences, strict=True) for v in (*one, *[0.0] * s.truth_tokens)],
            dtype=torch.float32,
        )

    columns: dict[str, Tensor] = {
        "behaviour_logprobs": torch.zeros(sum(counts)) if supervised else joined([s.logprobs for s in sequences]),
        "advantages": per_token([sequence.advantage for sequence in sequences]),
        "weights": per_token([sequence.weight for sequence in sequences]),
    }
    if any(sequence.proximal for sequence in sequences):
        columns["proximal"] = joined([sequence.proximal for sequence in sequences])
    if any(sequence.teacher for sequence in sequences):
        columns["teacher"] = joined([sequence.teacher for sequence in sequences])
    if any(sequence.bounded for sequence in sequences):
        put = [i >= n - s.truth_tokens for n, s in zip(counts, sequences, strict=True) for i in range(n)]
        columns["truth"] = torch.tensor(put, dtype=torch.bool)
        columns["bounded"] = torch.tensor([sequence.bounded for sequence in sequences], dtype=torch.bool)
    completions = completions_of(counts, [sequence.group for sequence in sequences], device)
    return {"completions": completions, **{k: column.to(device, non_blocking=True) for k, column in columns.items()}}


def pack_sequences(sequences: Sequence[TrainSequence], device: torch.device) -> PackedBatch:
    """Pack sequences end to end with their completion tokens as targets; none give a stand-in without targets."""
    return pack(
        [sequence.token_ids for sequence in sequences], [sequence.prompt_tokens for sequence in sequences], device
    )


@torch.no_grad()
def consult(model: Decoder, packed: PackedBatch, temperature: float, last: bool) -> Tensor:
    """Return [loss_tokens] log-probs of the packed targets under a model. A collective, as the policy's forward is.

    Weights of a model that is small enough stay gathered until the `last` micro-batch: meanwhile they do not change.
    """
    logprobs: Tensor = model(packed, temperature)[0]
    if last or not fits_whole(model):
        reshard(model)
    return logprobs


def recall(decoder: Decoder, micro_batches: Sequence[MicroBatch], temperature: float) -> list[list[float]]:
    """Return [sequences, in order][completion_tokens] log-probs under the current policy. A collective."""
    found: list[list[float]] = []
    device = next(decoder.parameters()).device
    for number, batch in enumerate(micro_batches, 1):
        packed, last = pack_sequences(batch.sequences, device), number == len(micro_batches)
        logprobs = consult(decoder, packed, temperature, last)
        found += [part.tolist() for part in logprobs.cpu().split(counts_of(batch.sequences))] if batch.sequences else []
    return found


def check_needs(settings: Objective, beside: Beside, micro_batches: Sequence[MicroBatch]) -> None:
    """Raise RunError if a model, or log-probs, that the objective needs are missing."""
    wanted = needs(settings)
    if Need.REFERENCE in wanted and beside.reference is None:
        raise RunError("the objective needs a reference model: LoadBeside comes before Accumulate")
    if Need.VALUE in wanted and beside.values is None:
        raise RunError("the objective needs a value head, and this rank has none")
    told = all(sequence.teacher for batch in micro_batches for sequence in batch.sequences)
    if Need.TEACHER in wanted and beside.teacher is None and not told:
        raise RunError(
            "the objective needs a teacher, and there is neither its model nor its log-probs (completions that were "
            "sampled before objective.teacher was set have none)"
        )


def accumulate(
    decoder: Decoder,
    micro_batches: Sequence[MicroBatch],
    temperature: float,
    settings: Objective | None,
    beside: Beside | None = None,
) -> Accumulated:
    """Run all micro-batches; gradients add to those that exist, and are sums over ranks when the last one is done.

    settings: the resolved objective, None to imitate. Every rank must be given the same number of micro-batches (empty
    ones included). Models beside the policy run before it, so that its activations need not wait for them.
    Raises what `check` raises and RunError for something missing, before the first forward, and NonFinite for a loss
    that is not finite, after the last backward.
    """
    start = time.perf_counter()
    beside = beside or Beside()
    for batch in micro_batches:
        for sequence in batch.sequences:
            check(sequence, settings is None)
    if settings is not None:
        check_needs(settings, beside, micro_batches)
    device = next(decoder.parameters()).device
    keep = fits_whole(decoder)
    provide_gradients(decoder)
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for number, batch in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        packed = pack_sequences(batch.sequences, device)
        columns: dict[str, Tensor | Completions] = loss_tensors(batch.sequences, settings is None, device)
        if settings is not None:
            for name, model in (("reference", beside.reference), ("teacher", beside.teacher)):
                if model is not None:
                    columns[name] = consult(model, packed, temperature, last)
        if keep:
            hold(decoder, last)
        logprobs, entropy, states = decoder(packed, temperature, "states")
        if settings is None:
            found = supervised_loss(LossInputs(logprobs=logprobs, **columns), entropy)  # type: ignore[arg-type]
        else:
            if beside.values is not None:
                columns["values"] = beside.values(states[columns["completions"].first])  # type: ignore[union-attr]
            found = policy_loss(LossInputs(logprobs=logprobs, **columns), entropy, settings)  # type: ignore[arg-type]
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
    """Convert 0-dimensional tensors to numbers, with one wait for the device."""
    if not values:
        return {}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
