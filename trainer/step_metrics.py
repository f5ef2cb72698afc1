"""Computes the metrics of one optimiser step, from what was sampled and what the trainers returned. Pure functions.

Their names and meanings are in shared/metrics.py.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from shared.types import Group, Reward, Verdict
from trainer.step.batching import BatchPlan
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped
from verify.verifiers import verifier_for

CALLS = "tool_calls", "failed_calls"
"""numbers that environments with tools give for each turn: its calls of tools, and how many of them failed"""


def filtered_text(groups: list[Group]) -> str:
    """How many groups taught nothing, and why, e.g. "3 groups thrown away (3 all wrong)"; "" for none."""
    kinds = {Verdict.CORRECT: "all right", Verdict.WRONG: "all wrong", Verdict.NO_ANSWER: "all wrong"}
    why = Counter[str]()
    for group in groups:
        verdicts = {kinds.get(reward.verdict, "") for reward in group.rewards if reward is not None}
        cut = any(completion.finish_reason == "abort" for completion in group.completions)
        why["cut off" if cut else (verdicts.pop() if len(verdicts) == 1 else "") or "all the same reward"] += 1
    reasons = ", ".join(f"{count} {reason}" for reason, count in why.most_common())
    return f"{len(groups)} groups thrown away ({reasons})" if groups else ""


def rollout_metrics(groups: list[Group], staleness: list[int], filtered: list[Group]) -> dict[str, float]:
    """Means over completions of the step.

    Rewards, accuracy and language consistency are over ALL groups that ended since the last step, filtered ones
    included (else an improving policy would look flat); lengths and staleness are over the trained ones. "accuracy" is
    over verified problems, and absent where there are none.
    """
    pairs = [
        (group.prompt.problem, reward)
        for group in (*groups, *filtered)
        for reward in group.rewards
        if reward is not None and reward.verdict.graded
    ]
    graded = [reward for _, reward in pairs]
    right = [float(reward.verdict is Verdict.CORRECT) for problem, reward in pairs if problem.verified]
    tested = ((verifier_for(problem).needs == "sandbox", reward.share) for problem, reward in pairs)
    programs = [share for in_sandbox, share in tested if in_sandbox and share is not None]
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([completion.sampled_tokens for completion in completions])

    def component(name: str) -> float:
        return mean([getattr(reward, name) for reward in graded])

    formed = [reward for reward in graded if reward.format is not None]
    ages = _token_ages(groups, staleness)
    row = {
        "reward/mean": component("total"),
        "reward/correctness": component("correctness"),
        "reward/length": component("length"),
        "reward/extra": mean([sum(reward.extra.values()) for reward in graded]),
        "reward/std": float(np.std([reward.total for reward in graded])) if graded else 0.0,
        "length/mean": float(lengths.mean()),
        "length/p50": float(np.percentile(lengths, 50)),
        "length/p99": float(np.percentile(lengths, 99)),
        "length/max": float(lengths.max()),
        "truncated": mean([float(completion.finish_reason == "length") for completion in completions]),
        "staleness/mean": float(ages),
        "staleness/max": float(max(staleness)),
        "spans/multi_version_share": mean(
            [float(len({span.version for span in completion.spans}) > 1) for completion in completions]
        ),
        "groups/trained": float(len(groups)),
        "groups/filtered": float(len(filtered)),
        "completions/aborted": float(
            sum(one.finish_reason == "abort" for group in (*groups, *filtered) for one in group.completions)
        ),
        "completions/continued": float(sum(completion.restarts > 0 for completion in completions)),
    }
    if formed or not graded:  # an environment that grades looks at neither
        row |= form_metrics(formed)
    row |= episode_metrics(groups, filtered)
    return row | ({"accuracy": mean(right)} if right else {}) | ({"tests_passed": mean(programs)} if programs else {})


def offline_metrics(groups: list[Group]) -> dict[str, float]:
    """Number of the offline groups of a step, and their mean reward."""
    rewards = [reward.total for group in groups for reward in group.rewards if reward and reward.verdict.graded]
    return {"groups/offline": float(len(groups)), "reward/offline": mean(rewards)}


def mean(values: list[float]) -> float:
    """The mean; 0 of none."""
    return float(np.mean(values)) if values else 0.0


def form_metrics(rewards: list[Reward]) -> dict[str, float]:
    """Means over completions whose form and language were looked at."""
    return {
        "reward/format": mean([reward.format or 0.0 for reward in rewards]),
        "reward/language": mean([reward.language for reward in rewards]),
        "consistency": mean([float(bool(reward.consistent)) for reward in rewards]),
        "format": mean([float((reward.format or 0.0) > 0) for reward in rewards]),
    }


def episode_metrics(groups: list[Group], filtered: list[Group]) -> dict[str, float]:
    """Means over the trained episodes, and the share of all that failed; nothing without environments."""
    episodes = [one for group in groups for one in group.completions if one.turns]
    turns = [turn for one in episodes for turn in one.turns]
    every = [one for group in (*groups, *filtered) for one in group.completions if one.turns]
    if not turns:
        return {}
    row = {
        "environment/turns": len(turns) / len(episodes), "environment/wait_s": mean([turn.seconds for turn in turns]),
        "environment/started_anew": mean([float(one.anew > 0) for one in every]),
        "environment/failed": mean([float(bool(one.turns[-1].failure)) for one in every]),
    }  # fmt: skip
    calls, failures = (sum(turn.info.get(name, 0.0) for turn in turns) for name in CALLS)
    if any(CALLS[0] in turn.info for turn in turns):
        row["environment/tool_calls"] = calls / len(episodes)
        row["environment/failed_calls"] = failures / calls if calls else 0.0
    for name in sorted({name for turn in turns for name in turn.info} - {*CALLS}):
        row[f"environment/info/{name}"] = mean([turn.info[name] for turn in turns if name in turn.info])
    return row


def _token_ages(groups: list[Group], staleness: list[int]) -> float:
    """Mean age in versions over the trained tokens. The trained version follows from a group's oldest token."""
    total = weighted = 0
    for group, age in zip(groups, staleness, strict=True):
        trained_at = age + min(completion.oldest_version for completion in group.completions)
        for completion in group.completions:
            for span in completion.spans:
                weighted += (span.end - span.start) * (trained_at - span.version)
                total += span.end - span.start
    return weighted / max(total, 1)


def training_metrics(sums: StepSums, stepped: Stepped, plan: BatchPlan) -> dict[str, float]:
    """Means over the trained completion tokens, from sums over all trainer ranks."""
    tokens = max(sums.sums["tokens"], 1.0)
    row = {
        "loss": sums.sums["loss"],
        "clip/low": sums.sums["clipped_low"] / tokens,
        "clip/high": sums.sums["clipped_high"] / tokens,
        "clip/masked": sums.sums["masked"] / tokens,
        "entropy": sums.sums["entropy"] / tokens,
        "grad_norm": stepped.grad_norm,
        "padding_share": plan.padding_share,
        "micro_batches": float(len(plan.micro_batches[0])),
    }
    if compared := sums.sums["compared"]:  # none of a batch of offline rows alone
        row |= {
            "ratio/mean": sums.sums["ratio"] / compared,
            "ratio/max": sums.maxima["ratio"],
            "logprob_difference/mean": sums.sums["abs_logprob_difference"] / compared,
            "logprob_difference/max": sums.maxima["abs_logprob_difference"],
            "kl/k3": sums.sums["kl_k3"] / compared,
        }
    row |= {name: value for name, value in sums.maxima.items() if name.startswith("experts/")}
    for name, metric in (("reference_log_ratio", "kl/reference"), ("teacher_log_ratio", "kl/teacher")):
        if name in sums.sums:  # only where the objective has one
            row[metric] = sums.sums[name] / tokens
    return row


def speed_metrics(sums: StepSums, stepped: Stepped, trainers: int, peak_flops: float) -> dict[str, float]:
    """Operations a second of a trainer, of the slowest rank's time; and what share of `peak_flops` that is, unless the
    peak is not known (0)."""
    reached = sums.flops / (trainers * max(sums.seconds + stepped.seconds, 1e-9))
    return {"tflops_per_device": reached / 1e12} | ({"mfu": reached / peak_flops} if peak_flops else {})
