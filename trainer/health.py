"""Detects after a batch that the weights are ruined, from figures that every step has.

    gradient exactly 0 with a signal     tokens that had an advantage, and no bound or mask that took it from them, have
                                         no gradient: the model's output does not depend on its weights any more
    trainer and engine far apart         mean |log-prob of the trainer - log-prob of the engine| over the tokens trained

Old data differ for a good reason: a policy moves between sampling and training, and one that learns far too fast moves
far (0.003 nats in the quickstart; up to 3.7 in a run with async level 4, held back, at a learning rate of 3e-3, which
came back to 0.1). Such a run goes on. It is ruined when the trainer finds the tokens that its own policy sampled a few
versions ago no likelier than a blind guess over the vocabulary: mean -log-prob BLIND of log(vocabulary) or more, and
FAR from what the engine reported (a policy that never was better than a guess is not).
Tokens of the very weights that are trained differ by rounding alone: ROUNDINGS times what the proof of a weight update
allows (LOGPROB_LIMITS). Bounds of an objective that act on more than ROUNDED of such tokens act on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollout.weights.proof import LOGPROB_LIMITS
from shared.config import Config
from shared.errors import TrainingDied
from shared.types import SAMPLED, TrainSequence
from trainer.objectives.registry import objective_of
from trainer.step.batching import Learned

BLIND = 0.95
FAR = 3.0
"""nats"""
MOVED = 0.5
"""nats; more is worth a warning"""
ROUNDINGS = 10.0
ROUNDED = 0.01
REPAIR = (
    "the weights are ruined. This step is not saved, and the same command goes on from the checkpoint before it; if it "
    "ends here again, move the newest folders out of checkpoints/, and lower optimiser.learning_rate"
)


def check_alive(learned: Learned, config: Config, vocabulary: int, step: int, age: int) -> None:
    """Raise TrainingDied if batch `step` shows that the weights are ruined. age: of its oldest token."""
    sums, tokens = learned.sums.sums, max(learned.sums.sums["tokens"], 1.0)
    if learned.stepped.grad_norm == 0 and objective_of(config).gradient_follows_advantages:
        free = signal_tokens(learned) - sums["clipped_low"] - sums["clipped_high"] - sums["masked"]
        if free > 0:
            raise TrainingDied(
                f"step {step}: grad_norm is exactly 0, though {free:.0f} of {tokens:.0f} tokens have an advantage that "
                f"pulls at them: {REPAIR}"
            )
    difference = sums["abs_logprob_difference"] / max(sums["compared"], 1.0)
    rounding = ROUNDINGS * LOGPROB_LIMITS[config.model.dtype]
    if age == 0 and config.optimiser.minibatches == 1 and difference > rounding:
        raise TrainingDied(
            f"step {step}: logprob_difference/mean is {difference:.3g} nats, though the very weights that are trained "
            f"sampled these tokens (rounding is below {rounding:.3g}): trainer and engines compute different models, "
            f"or {REPAIR}"
        )
    if difference <= FAR:
        return
    surprise, blind = difference + engine_surprise(learned), BLIND * math.log(vocabulary)
    if surprise > blind:
        raise TrainingDied(
            f"step {step}: logprob_difference/mean is {difference:.3g} nats: to the trainer, tokens that were sampled "
            f"{age} versions ago are no likelier than a blind guess ({surprise:.3g} nats a token, the limit is "
            f"{blind:.3g}): {REPAIR}"
        )


def doubt(difference: float, step: int) -> str:
    """A line about a policy that moved far from its samples in a step that goes on, else "". difference: in nats."""
    moved = f"step {step}: logprob_difference/mean is {difference:.2g} nats: the policy has moved far since it sampled"
    return (
        f"{moved} these tokens. Where it goes on like this, lower optimiser.learning_rate" if difference > MOVED else ""
    )


def clipped_rounding(learned: Learned, config: Config, age: int) -> str:
    """A warning where bounds of the objective change the gradient of more than ROUNDED of the tokens of a batch, though
    the very weights that are trained sampled them; "" elsewhere. age: of its oldest token, in versions."""
    sums = learned.sums.sums
    share = (sums["clipped_low"] + sums["clipped_high"]) / max(sums["tokens"], 1.0)
    fresh = age == 0 and config.optimiser.minibatches == 1 and not any(each.offline for each in sequences_of(learned))
    if not fresh or share <= ROUNDED:
        return ""
    return (
        f"the bounds of the objective change the gradient of {share:.0%} of the tokens, though the very weights that "
        f"are trained sampled them: what they cut is the rounding of {config.model.dtype}. Widen the bounds, set "
        'objective.ratio_reference.kind = "old" where the objective has it, or model.dtype = "float32"'
    )


def engine_surprise(learned: Learned) -> float:
    """Mean -log-prob that the engine gave the tokens of a batch when it sampled them."""
    own = [sequence for sequence in sequences_of(learned) if not sequence.offline]
    logprobs = [value for sequence in own for value in sequence.columns["behaviour"]]
    sampled = sum(sequence.mask.count(SAMPLED) for sequence in own)
    return -math.fsum(logprobs) / max(sampled, 1)


def signal_tokens(learned: Learned) -> int:
    """Completion tokens whose sequence has an advantage and a weight."""
    return sum(
        sequence.mask.count(SAMPLED)
        for sequence in sequences_of(learned)
        if any(sequence.advantages) and sequence.weight
    )


def sequences_of(learned: Learned) -> Iterator[TrainSequence]:
    """Every sequence of a batch."""
    for share in learned.plan.micro_batches:
        for batch in share:
            yield from batch.sequences
