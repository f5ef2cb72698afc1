"""The learning rate of every optimiser step. No torch."""

from __future__ import annotations

from shared.sections import Optimiser


def warm_and_decay(step: int, steps: int, peak: float, warmup_steps: int, min_lr_ratio: float) -> float:
    """Learning rate of step `step` (0-based) of `steps`: linear up to `peak`, then linear down to min_lr_ratio * peak.

        step < warmup_steps    peak * (step + 1) / warmup_steps
        else                   peak * (1 - (1 - min_lr_ratio) * (step - w) / (steps - 1 - w))      w = warmup_steps

    The last step has min_lr_ratio * peak, the first after the warm-up the peak; later steps keep the last rate.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = steps - 1 - warmup_steps
    done = min(1.0, (step - warmup_steps) / span) if span > 0 else float(step >= steps - 1 and steps > 1)
    return peak * (1.0 - (1.0 - min_lr_ratio) * done)


def learning_rate(step: int, steps: int, settings: Optimiser) -> float:
    """Learning rate of optimiser step `step` (0-based) of a run of `steps`."""
    return warm_and_decay(step, steps, settings.learning_rate, settings.warmup_steps, settings.min_lr_ratio)
