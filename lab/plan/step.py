"""Models the time of one step on a given placement, synchronous and asynchronous, and the age of the tokens.

    synchronous (lead 0)   sample_s + train_s + update_s, sampling the whole batch down to its longest completion
    asynchronous (lead > 0) the longest of
        engines    full_s + stall_s                               engines whose seats are always taken
        trainers   train_s + write_s                              a batch is always ready
        update     update_s                                       the next optimiser step waits for it
        straggler  (longest_s + train_s + update_s) / (lead + 2)  a group may take lead + 2 steps from its start to the
                                                                  release of its slot: lead + 1 with its slot, one more
                                                                  by being overtaken (window of one batch, ledger.py)

The straggler bound with lead 0 and nothing overtaken is the synchronous time, so the asynchronous step is the
synchronous one with more freedom: it is never longer (the constraint-optimisation argument of LlamaRL, 2505.24034,
section on theory: what may be done synchronously may be done asynchronously too).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lab.plan import generation, training
from lab.plan.generation import Engine
from lab.plan.lengths import Lengths
from lab.plan.machine import Machine
from shared.model.config import DecoderConfig


@dataclass(frozen=True)
class Workload:
    """The work of one step: prompts, completions, their lengths, and the passes over them."""

    prompts_per_step: int
    group_size: int
    prompt_tokens: int
    lengths: Lengths
    max_completion_tokens: int
    micro_batch_tokens: int = 8192
    optimiser_steps: int = 1
    """optimiser steps on each batch (optimiser.minibatches)"""
    extra_forwards: int = 0
    """forward passes over the batch without gradient, e.g. of a reference model"""
    kept: float = 1.0
    """share of the sampled groups that have a signal and are trained"""

    @property
    def completions(self) -> int:
        """Completions trained in a step."""
        return self.prompts_per_step * self.group_size

    @property
    def sampled(self) -> float:
        """Completions sampled for a step: more than are trained if groups without signal are left out."""
        return self.completions / self.kept

    @property
    def max_tokens(self) -> int:
        """Longest prompt and completion together, tokens."""
        return self.prompt_tokens + self.max_completion_tokens

    @property
    def tokens(self) -> float:
        """Trained tokens of a step, prompts included."""
        return self.completions * (self.prompt_tokens + self.lengths.mean)

    @property
    def square_tokens(self) -> float:
        """Sum over the sequences of a step of their length squared: E[(p + L)^2] = p^2 + 2 p E[L] + E[L^2]."""
        prompt, lengths = self.prompt_tokens, self.lengths
        return self.completions * (prompt**2 + 2 * prompt * lengths.mean + lengths.mean_square)

    @cached_property
    def longest(self) -> float:
        """Expected longest completion of a step, tokens."""
        return self.lengths.longest(math.ceil(self.sampled))

    @property
    def context(self) -> float:
        """Mean tokens of a running completion, prompt included."""
        return self.prompt_tokens + self.lengths.position


@dataclass(frozen=True)
class Sampling:
    """Times of sampling one batch, in seconds."""

    together_s: float
    """time of a batch started together, until the longest completion is done (synchronous)"""
    full_s: float
    """time of a batch at the rate of engines whose seats are always taken"""
    longest_s: float
    """time of the longest completion of a batch, at the load of the asynchronous engines"""
    decode_s: float
    """time of a decode step of those engines"""
    seats: float
    """number of completions that an engine runs at once if it has enough"""


def train_s(decoder: DecoderConfig, machine: Machine, work: Workload, trainers: int, recompute: bool) -> float:
    """Return the time of forward, backward and optimiser steps of one batch, seconds."""
    flops = training.training_flops(decoder, work.tokens, work.square_tokens, recompute, work.extra_forwards)
    budget = max(work.micro_batch_tokens, work.max_tokens)
    each = training.micro_batches_of(work.tokens / work.optimiser_steps, trainers, budget) * work.optimiser_steps
    rest = each * work.extra_forwards
    moved = training.traffic_s(decoder, machine, trainers, each, rest)
    steps = work.optimiser_steps * training.optimiser_s(decoder, machine, trainers)
    return max(machine.compute_s(flops, trainers), moved) + steps


def sampling(engine: Engine, work: Workload, engines: int, seats: float, lead: int = 1) -> Sampling:
    """Return the times of one batch on `engines` engines of `seats` seats each (at least 1); `lead` at least 1.

    The slots of one batch let completions / engines be open at once; sampled / engines are due.
    """
    mean, longest, context = work.lengths.mean, work.longest, work.context
    share, due = work.completions / engines, work.sampled / engines
    prefill = math.ceil(due) * engine.prefill_s(work.prompt_tokens)
    at_once = min(seats, share)  # synchronous: waves while more are due than may be open, then the last ones run out
    waves = generation.full_s(due - at_once, mean, at_once, engine.decode_s(at_once, context))
    left = generation.running_on_average(at_once, mean, longest, at_once)
    together = waves + longest * engine.decode_s(left, context) + prefill
    ahead = min(seats, lead * share)
    full = generation.full_s(due, mean, ahead, engine.decode_s(ahead, context)) + prefill
    running = generation.running_on_average((lead + 2) * due, mean, longest, ahead)
    decode = engine.decode_s(running, context)
    return Sampling(together, full, longest * decode + engine.prefill_s(work.prompt_tokens), decode, ahead)


def straggler_s(longest_s: float, train: float, update: float, lead: int, overtaken: int = 1) -> float:
    """Return the step time at which the longest completion of a batch is just in time, seconds."""
    return (longest_s + train + update) / (lead + 1 + overtaken)


def mean_age(
    lengths: Lengths, lead: int, step_s: float, decode_s: float, queue_s: float = 0.0, kept: float = 1.0
) -> float:
    """Return the mean age of a trained token, versions.

    (lead + 1) batches of slots are taken, and a step releases one batch and the groups without signal, so a group
    holds its slot for T = (lead + 1) kept step_s (Little's law), up to the release of the version trained on it. The
    age of a token sampled d = queue_s + position x decode_s after the start is the number of versions released from
    then on, without that last one: ceil((T - d) / step_s) - 1. With tail(y) the share of tokens behind position y, the
    mean is

        sum over j >= 1 of  1 - tail((T - j step_s - queue_s) / decode_s)
    """
    held_s = (lead + 1) * kept * step_s
    passed = (held_s - j * step_s - queue_s for j in range(1, lead + 1))
    return sum(1 - lengths.tail(rest / decode_s) for rest in passed)


def queue_s(work: Workload, engines: int, lead: int, seats: float, busy: float, step_s: float) -> float:
    """Return the time that a started completion waits for a seat if the engines are the bottleneck, seconds.

    (lead + 1) batches are open, less the one that is trained or sent for a share `busy` of the step; completions beyond
    the seats wait, and are served at the rate at which the completions of a step finish.
    """
    waiting = max((lead + 1 - busy) * work.completions / engines - seats, 0.0)
    return waiting * step_s * engines / work.sampled
