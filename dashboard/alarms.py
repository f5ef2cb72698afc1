"""What may be wrong with a run, in words, each with what to try; found from the numbers of its last steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from dashboard.columns import Numbers

WINDOW = 20
"""steps that are looked at"""


class Alarm(NamedTuple):
    """A finding: its name, what was seen, what to try."""

    name: str
    seen: str
    advice: str


Look = Callable[[str], Numbers]
"""name of a metric -> [steps] its values, NaN where there is none"""


def find(look: Look, bound: int | None = None) -> list[Alarm]:
    """The alarms of a run. bound: of its staleness, where known."""
    with np.errstate(all="ignore"):
        return [alarm for found in (_learning, _numerics, _speed, _grading) for alarm in found(look)] + list(
            _staleness(look, bound)
        )


def _whole(values: Numbers) -> Numbers:
    whole: Numbers = values[np.isfinite(values)]
    return whole


def _recent(values: Numbers) -> float:
    """Mean over the last steps; NaN without a value there."""
    last = _whole(values[-WINDOW:])
    return float(last.mean()) if len(last) else float("nan")


def _learning(look: Look) -> Iterator[Alarm]:
    reward = _whole(look("reward/mean"))
    if len(reward) >= 2 * WINDOW:
        before, now = reward[-2 * WINDOW : -WINDOW], reward[-WINDOW:]
        noise = 2 * np.sqrt((before.var(ddof=1) + now.var(ddof=1)) / WINDOW)
        if abs(now.mean() - before.mean()) < max(noise, 1e-3) and _recent(look("accuracy")) < 0.95:
            yield Alarm(
                "The reward is flat",
                f"mean reward {before.mean():.3f}, then {now.mean():.3f} over the last {WINDOW} steps: no more than "
                "noise",
                "Look at a few groups: if all completions are wrong, take easier problems (data.pass_rate) or SFT "
                "first; if they differ, raise optimiser.learning_rate or rollout.group_size.",
            )
    filtered, trained = look("groups/filtered")[-WINDOW:], look("groups/trained")[-WINDOW:]
    share = np.nansum(filtered) / max(np.nansum(filtered) + np.nansum(trained), 1)
    if share > 0.8:
        yield Alarm(
            "Nearly all groups are filtered",
            f"{share:.0%} of the groups of the last steps had equal rewards, so they taught nothing",
            "Problems are too easy or too hard for this model: choose some of middling pass rate (data.pass_rate), or "
            "raise rollout.group_size or rollout.temperature.",
        )
    cut = _recent(look("truncated"))
    if cut > 0.3:
        yield Alarm(
            "Many completions are cut",
            f"{cut:.0%} reach rollout.max_completion_tokens",
            "Raise rollout.max_completion_tokens and model.max_tokens, or add the length penalty (reward.length).",
        )
    entropy = _whole(look("entropy"))
    if len(entropy) >= WINDOW and _recent(entropy) < 0.1 * entropy[:5].mean():
        yield Alarm(
            "The entropy has collapsed",
            f"{entropy[:5].mean():.3f} nats at first, {_recent(entropy):.3f} now: completions hardly differ",
            "Raise the upper clip (objective), or lower optimiser.learning_rate, and go on from an earlier checkpoint.",
        )


def _numerics(look: Look) -> Iterator[Alarm]:
    difference = _whole(look("logprob_difference/mean"))
    if len(difference) >= WINDOW:
        first, now = float(np.median(difference[:10])), _recent(difference)
        if now > 0.01 and now > 3 * first:
            yield Alarm(
                "Trainer and engine drift apart",
                f"mean difference of their log-probs {first:.4f} at first, {now:.4f} now",
                'Set model.dtype = "float16" or "float32" for the engines, lower rollout.max_async_level, and look at '
                "sync/logprob_diff_max: if it grows too, the weights do not arrive as they are.",
            )
    norm = _whole(look("grad_norm"))
    if len(norm) > WINDOW and norm[-1] > 20 * np.median(norm[-WINDOW - 1 : -1]):
        yield Alarm(
            "The gradient jumped",
            f"norm {norm[-1]:.3g}, against {np.median(norm[-WINDOW - 1 : -1]):.3g} in the steps before",
            "One step does no harm, since it is clipped. If it comes again: lower optimiser.learning_rate.",
        )


def _speed(look: Look) -> Iterator[Alarm]:
    step = _recent(look("time/step_s"))
    waits, syncs = _recent(look("time/wait_batch_s")) / step, _recent(look("time/wait_sync_s")) / step
    if waits > 0.6:
        yield Alarm(
            "Trainers wait for completions",
            f"{waits:.0%} of a step they have no batch",
            "Give more devices to engines (placement.engines), raise rollout.max_sequences, or shorten completions.",
        )
    if waits < 0.02 and _recent(look("time/train_s")) / step > 0.8:
        yield Alarm(
            "Engines are idle",
            f"training takes {_recent(look('time/train_s')) / step:.0%} of a step, and the next batch is always there",
            "Give more devices to trainers (placement.trainers) and fewer to engines, or raise "
            "optimiser.micro_batch_tokens where memory is left.",
        )
    if syncs > 0.25:
        yield Alarm(
            "Weight updates hold the run up",
            f"{syncs:.0%} of a step waits for them",
            "Raise rollout.max_async_level to 1 or more, so that updates overlap with training.",
        )
    idle = _recent(look("environment/idle_seats"))
    if idle > 0.3:
        yield Alarm(
            "Engines are idle while environments work",
            f"{idle:.0%} of their seats are free only because episodes wait",
            "Make the environment faster, or open more episodes: raise rollout.prompts_per_step or max_async_level.",
        )


def _grading(look: Look) -> Iterator[Alarm]:
    verdicts = ("correct", "wrong", "open", "no_answer", "timeout", "crash", "unverifiable", "sandbox_refused")
    counts = {name: np.nan_to_num(look(f"verify/{name}")[-1:]).sum() for name in verdicts}
    failed = {name: count for name, count in list(counts.items())[4:] if count}
    if failed and sum(failed.values()) > 0.01 * sum(counts.values()):
        counted = ", ".join(f"{count:.0f} {name.replace('_', ' ')}" for name, count in failed.items())
        yield Alarm(
            "Verifications fail",
            f"{counted}: {sum(failed.values()) / sum(counts.values()):.1%} of the completions have no grade",
            "Read the reasons of some (Rollouts, filter masked). Timeouts: raise reward.deadline_s. Unverifiable: "
            "repair the answers of the data.",
        )
    restarts = _whole(look("engine/restarts"))
    if len(restarts) and restarts[-1] > 0:
        yield Alarm(
            "Engines died",
            f"{restarts[-1]:.0f} were started again",
            "The run goes on. Look at memory/engine_peak_bytes and into the run's folder stacks/; lower "
            "rollout.max_sequences or rollout.cache_bytes if memory was short.",
        )


def _staleness(look: Look, bound: int | None) -> Iterator[Alarm]:
    oldest = _whole(look("staleness/max"))
    if bound is not None and len(oldest) and oldest.max() > bound:
        yield Alarm(
            "Tokens are older than the bound",
            f"{oldest.max():.0f} versions, the settings allow {bound}",
            "This should not happen: please report it with the run's folder.",
        )
