"""Forward and backward of a trainer rank's micro-batches; gradients and metrics are summed until the optimiser step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import msgspec
import torch
from torch import Tensor

from shared.errors import NonFinite, RunError
from shared.model.language_model import LanguageModel
from shared.model.packing import PackedBatch, pack
from shared.types import MicroBatch, TrainSequence
from trainer.memory import Recomputation
from trainer.objectives.inputs import loss_inputs
from trainer.objectives.loss import policy_loss, sft_loss
from trainer.objectives.objective import Need, Objective
from trainer.step.flops import packed_flops
from trainer.step.fsdp import fits_whole, hold, provide_gradients, reshard
from trainer.step.reference import KeptAdapters
from trainer.step.value_head import ValueHead


class StepSums(msgspec.Struct):
    """Sums over a rank's tokens (not means), so that ranks can be added up; or over those of all ranks."""

    sums: dict[str, float]
    """loss, tokens, entropy, abs_logprob_difference, kl_k3, ratio, clipped_low, ... (trainer/objectives/loss.py)"""
    maxima: dict[str, float]
    seconds: float
    """time of the slowest rank"""
    tokens: int
    """prompt + completion tokens put through the model"""
    flops: float = 0.0
    """operations of the policy's forward and backward and of other models' forwards (trainer/step/flops.py)"""


@dataclass
class AuxiliaryModels:
    """The models that the objective needs in addition to the policy; None for those that it does not need."""

    reference: LanguageModel | KeptAdapters | None = None
    """frozen, sharded as the policy is; of a policy with adapters, other adapters"""
    teacher: LanguageModel | None = None
    """frozen and sharded likewise, of any architecture; None also where the teacher is asked over HTTP"""
    values: ValueHead | None = None


def check(sequence: TrainSequence, sft: bool) -> None:
    """Check that a sequence can be trained on.

    Raises NonFinite for a log-prob (the message names the first bad position of the engine's), advantage or weight that
    is not finite, RunError for a wrong count of log-probs or advantages and for an empty prompt or completion.
    """
    tokens, prompt, count = len(sequence.token_ids), sequence.prompt_tokens, sequence.loss_tokens
    if len(sequence.mask) != tokens or prompt < 1 or count < 1:
        raise RunError(
            f"a sequence of {tokens} tokens, {prompt} of them prompt and {count} with a loss: both prompt and "
            "completion need at least one token"
        )
    if not (all(map(math.isfinite, sequence.advantages)) and math.isfinite(sequence.weight)):
        raise NonFinite(f"a sequence has advantages {sequence.advantages} and weight {sequence.weight}")
    if sft:
        return
    if len(sequence.advantages) != len(sequence.segments):
        raise RunError(f"{len(sequence.advantages)} advantages came with {len(sequence.segments)} segments")
    needed: dict[str, list[float]] = {} if sequence.offline else {"behaviour": []}
    for name, column in (needed | sequence.columns).items():
        if len(column) != count:
            raise RunError(f"{len(column)} log-probs ({name}) came with a completion of {count} tokens")
    if len(sequence.routes) > tokens or len({len(row) for row in sequence.routes}) > 1:
        raise RunError(f"{len(sequence.routes)} routes, or some of several lengths, came with {tokens} tokens")
    if not all(map(math.isfinite, sequence.columns.get("teacher", ()))):
        raise NonFinite("a log-prob of the teacher is not a finite number: see objective.teacher")
    behaviour = sequence.columns.get("behaviour", [])
    if not all(map(math.isfinite, behaviour)):
        position = next(i for i, value in enumerate(behaviour) if not math.isfinite(value))
        ids = list(compress(sequence.token_ids, sequence.mask))
        raise NonFinite(
            f"the engine's log-prob at completion position {position} (token id {ids[position]}) is "
            f"{behaviour[position]}"
        )


def pack_sequences(sequences: Sequence[TrainSequence], device: torch.device) -> PackedBatch:
    """Pack sequences end to end with their loss tokens as targets; none give a placeholder without targets."""
    ids, masks, routes = ([getattr(one, name) for one in sequences] for name in ("token_ids", "mask", "routes"))
    return pack(ids, masks, device, routes=routes)


def work_of(model: LanguageModel, packed: PackedBatch) -> float:
    """Return the operations of one forward pass; none for a placeholder without targets."""
    targets = len(packed.targets)
    return packed_flops(model.config, packed.lengths, packed.prefixes, targets) if targets else 0.0


@torch.no_grad()
def score_with(model: LanguageModel, packed: PackedBatch, temperature: float, last: bool) -> Tensor:
    """Return [loss_tokens] log-probs of the packed targets under a model. A collective, as the policy's forward is.

    Weights of a model that is small enough stay gathered until the `last` micro-batch: meanwhile they do not change.
    """
    logprobs: Tensor = model(packed, temperature)[0]
    if last or not fits_whole(model):
        reshard(model)
    return logprobs


def score_each(decoder: LanguageModel, micro_batches: Sequence[MicroBatch], temperature: float) -> Iterator[Tensor]:
    """Yield [loss_tokens] log-probs of each micro-batch under the policy as it is. A collective."""
    device = next(decoder.parameters()).device
    for number, batch in enumerate(micro_batches, 1):
        packed, last = pack_sequences(batch.sequences, device), number == len(micro_batches)
        yield score_with(decoder, packed, temperature, last)


def compute_old_logprobs(
    decoder: LanguageModel, micro_batches: Sequence[MicroBatch], temperature: float
) -> list[list[float]]:
    """Return [sequences, in order][loss tokens] log-probs under the current policy. A collective."""
    columns: list[list[float]] = []
    for batch, logprobs in zip(micro_batches, score_each(decoder, micro_batches, temperature), strict=True):
        counts = [sequence.loss_tokens for sequence in batch.sequences]
        columns += [part.tolist() for part in logprobs.cpu().split(counts)] if counts else []
    return columns


def score_kept(
    decoder: LanguageModel, micro_batches: Sequence[MicroBatch], temperature: float, auxiliary: AuxiliaryModels
) -> list[Tensor]:
    """[micro-batches][loss_tokens] log-probs under a reference that is other adapters of the policy; [] where it is
    none. A collective, before the first forward that has a backward."""
    if not isinstance(auxiliary.reference, KeptAdapters):
        return []
    with auxiliary.reference.in_force():
        return list(score_each(decoder, micro_batches, temperature))


def score_frozen(auxiliary: AuxiliaryModels, packed: PackedBatch, temperature: float, last: bool) -> dict[str, Tensor]:
    """ "reference" and "teacher" -> [loss_tokens] log-probs under these, as far as they are models of their own."""
    models = {"reference": auxiliary.reference, "teacher": auxiliary.teacher}
    alone = replace(packed, routes=None)  # a teacher has routers of its own
    return {
        name: score_with(model, alone if name == "teacher" else packed, temperature, last)
        for name, model in models.items()
        if model is not None and not isinstance(model, KeptAdapters)
    }


def check_needs(objective: Objective, auxiliary: AuxiliaryModels, micro_batches: Sequence[MicroBatch]) -> None:
    """Raise RunError if a model, or log-probs, that the objective needs are missing."""
    needs = objective.needs
    if Need.REFERENCE in needs and auxiliary.reference is None:
        raise RunError("the objective needs a reference model: load_frozen comes before forward_backward")
    if Need.VALUE in needs and auxiliary.values is None:
        raise RunError("the objective needs a value head, and this rank has none")
    given = all("teacher" in sequence.columns for batch in micro_batches for sequence in batch.sequences)
    if Need.TEACHER in needs and auxiliary.teacher is None and not given:
        raise RunError(
            "the objective needs a teacher, and there is neither its model nor its log-probs (completions that were "
            "sampled before objective.teacher was set have none)"
        )


def forward_backward(
    decoder: LanguageModel, micro_batches: Sequence[MicroBatch], temperature: float, objective: Objective | None,
    auxiliary: AuxiliaryModels | None = None, recomputation: Callable[[int], Recomputation] | None = None,
) -> StepSums:  # fmt: skip
    """Run all micro-batches; gradients add to those that exist, and are sums over ranks when the last one is done.

    objective: None to imitate. recomputation: that of a micro-batch of so many tokens; None: as the model is. Every
    rank must be given the same number of micro-batches (empty ones included). Other models run before the policy, so
    that its activations need not wait for them. Raises what `check` raises and RunError for something missing, before
    anything runs, and NonFinite for an infinite loss, after the last backward.
    """
    start = time.perf_counter()
    auxiliary = auxiliary or AuxiliaryModels()
    for batch in micro_batches:
        for sequence in batch.sequences:
            check(sequence, objective is None)
    if objective is not None:
        check_needs(objective, auxiliary, micro_batches)
    device = next(decoder.parameters()).device
    keep, flops = fits_whole(decoder), 0.0
    passes = 3 if next(decoder.parameters()).requires_grad else 2  # frozen weights have no gradient of their own
    kept = score_kept(decoder, micro_batches, temperature, auxiliary) if objective is not None else []
    provide_gradients(decoder)
    sums, maxima = dict[str, Tensor](), dict[str, Tensor]()
    for number, batch in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        packed = pack_sequences(batch.sequences, device)
        frozen = dict[str, Tensor]() if objective is None else score_frozen(auxiliary, packed, temperature, last)
        flops += sum(work_of(getattr(auxiliary, name), packed) for name in frozen)
        if kept:
            frozen["reference"], flops = kept[number - 1], flops + work_of(decoder, packed)
        hold(decoder, last, keep)
        if recomputation is not None:
            decoder.recompute, decoder.inputs_on_host = recomputation(packed.tokens)
        head = auxiliary.values
        logprobs, entropy, *states = decoder(packed, temperature, "logprobs" if head is None else "states")
        flops += passes * work_of(decoder, packed)
        if objective is None:
            outcome = sft_loss(loss_inputs(batch.sequences, logprobs), entropy)
        else:
            values = None if head is None else (lambda first, head=head, states=states: head(states[0][first]))
            outcome = policy_loss(loss_inputs(batch.sequences, logprobs, **frozen, values=values), entropy, objective)
        outcome.loss.backward()
        for name, value in outcome.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in outcome.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    experts = {} if decoder.expert_counts is None else decoder.expert_counts.take()
    numbers = read(sums)
    total = numbers.get("loss", 0.0) + numbers.get("regularisation", 0.0)
    if not math.isfinite(total):
        raise NonFinite(f"the loss is {total} over {numbers['tokens']:.0f} tokens of this rank")
    tokens = sum(len(sequence.token_ids) for batch in micro_batches for sequence in batch.sequences)
    return StepSums(numbers, read(maxima) | experts, time.perf_counter() - start, tokens, flops)


def read(values: dict[str, Tensor]) -> dict[str, float]:
    """Convert 0-dimensional tensors to numbers, with one wait for the device."""
    if not values:
        return {}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
