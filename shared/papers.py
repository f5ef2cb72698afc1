"""The objectives by name, each with the settings that its paper gives it, and which settings a choice reads.

    [objective]
    name = "gspo"           # all that is needed; every other setting of [objective] departs from the paper

What a choice does not read has no effect, and is refused (contradictions.py). Formulas: trainer/objectives. For people:
docs/objectives.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Paper:
    """An objective as it was published."""

    source: str
    values: Values = field(default_factory=dict)
    """where it differs from EVERY and OWN"""


EVERY: dict[str, Any] = {
    "loss": "clip", "advantage": "mean", "loss_aggregation": "group_tokens", "filter_groups_by": "total", "kl": 0.0,
    "entropy_bonus": 0.0, "teacher": "",
}  # fmt: skip
"""settings that every objective has, with Magistral's values"""

REGULARISED: dict[str, Any] = {"beta": 0.1, "reference": "start"}
CLIPPED: dict[str, Any] = {"denominator": "behaviour"}

OWN: dict[str, dict[Any, dict[str, Any]]] = {
    "loss": {
        "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0, **CLIPPED},
        "sequence_clip": {"clip_low": 3e-4, "clip_high": 4e-4, **CLIPPED},
        "sequence_token_clip": {"clip_low": 3e-4, "clip_high": 4e-4, **CLIPPED},
        "weighted": {"correction": "none"},
        "agro": REGULARISED,
        "spo": REGULARISED | {"value_samples": 8},
        "dro": REGULARISED | {"value_learning_rate": 1e-2},
        "jepo": {
            "correction": "token_truncated",
            "bound": "multi_sample",
            "bound_for": "every",
            "answer_weight": 0.01,
            "cue_penalty": 10.0,
        },  # fmt: skip
    },
    "denominator": {"behaviour": {}, "proximal": {"correction": "token"}},
    "correction": {
        "none": {},
        "token": {},
        "token_truncated": {"correction_low": 0.0, "correction_high": 2.0},
        "token_masked": {"correction_low": 0.5, "correction_high": 5.0},
        "divergence_masked": {"correction_low": 0.2, "correction_high": 0.2},
        "sequence": {},
        "sequence_truncated": {"correction_high": 5.0},
        "sequence_masked": {"correction_high": 5.0},
        "geometric_masked": {"correction_low": 0.999, "correction_high": 1.001},
    },
    "advantage": {
        "mean": {"scale": "minibatch"},
        "leave_one_out": {"scale": "none"},
        "each_reward": {"scale": "minibatch"},
        "pass_at_k": {"scale": "none", "k": 0},
        "majority": {"scale": "none", "k": 0},
    },
    "kl": {True: {"kl_gradient": "return", "reference": "start"}},
    "reference": {"previous": {"reference_every": 1}, "average": {"reference_every": 1, "reference_share": 0.01}},
    "teacher": {True: {"teacher_model": "", "teacher_key_variable": "", "teacher_weight": 1.0}},
}
"""choice -> its value -> the settings that only it reads, with their defaults; for a number or a text, True: any but 0
and \"\""""

_SUMS = {"scale": "none", "loss_aggregation": "completions"}
"""sums over the tokens of a completion, means over completions"""
_HELD = {"advantage": "reward", "loss_aggregation": "completions", "filter_groups_by": "off"}
"""methods whose reward is regularised: groups of equal rewards have a signal too"""

PAPERS: dict[str, Paper] = {
    "magistral": Paper("Magistral, arXiv 2506.10910"),
    "grpo": Paper("DeepSeekMath, arXiv 2402.03300", {
        "clip_high": 0.2, "scale": "group", "loss_aggregation": "sequence", "filter_groups_by": "off"}),
    "dapo": Paper("arXiv 2503.14476", {
        "scale": "group", "loss_aggregation": "batch_tokens", "filter_groups_by": "correctness"}),
    "dr_grpo": Paper("arXiv 2503.20783", {
        "clip_high": 0.2, "scale": "none", "loss_aggregation": "constant", "filter_groups_by": "off"}),
    "reinforce": Paper("Williams 1992", {"loss": "weighted", "filter_groups_by": "off", **_SUMS}),
    "rloo": Paper("arXiv 2402.14740", {
        "loss": "weighted", "advantage": "leave_one_out", "filter_groups_by": "off", **_SUMS}),
    "aipo": Paper("LlamaRL, arXiv 2505.24034", {
        "loss": "weighted", "correction": "token_truncated", "filter_groups_by": "off", **_SUMS}),
    "cispo": Paper("MiniMax-M1, arXiv 2506.13585", {
        "loss": "weighted", "correction": "token_truncated", "correction_high": 5.0, "scale": "group",
        "loss_aggregation": "batch_tokens"}),
    "gspo": Paper("arXiv 2507.18071", {
        "loss": "sequence_clip", "scale": "group", "loss_aggregation": "sequence", "filter_groups_by": "off"}),
    "gspo_token": Paper("arXiv 2507.18071", {
        "loss": "sequence_token_clip", "scale": "group", "loss_aggregation": "sequence", "filter_groups_by": "off"}),
    "decoupled_ppo": Paper("arXiv 2110.00641; AReaL, arXiv 2505.24298", {
        "denominator": "proximal", "clip_high": 0.2, "filter_groups_by": "off"}),
    "tis": Paper("truncated importance sampling, as in verl and TRL", {
        "denominator": "proximal", "correction": "token_truncated"}),
    "icepop": Paper("arXiv 2510.18855", {"denominator": "proximal", "correction": "token_masked"}),
    "dppo": Paper("arXiv 2602.04879", {"loss": "weighted", "correction": "divergence_masked"}),
    "maxrl": Paper("arXiv 2602.02710", {
        "loss": "weighted", "advantage": "maxrl", "filter_groups_by": "off", "loss_aggregation": "completions"}),
    "pass_at_k": Paper("arXiv 2503.19595", {
        "loss": "weighted", "correction": "token_truncated", "advantage": "pass_at_k", **_SUMS}),
    "majority": Paper("arXiv 2503.19595", {
        "loss": "weighted", "correction": "token_truncated", "advantage": "majority", **_SUMS}),
    "gdpo": Paper("arXiv 2601.05242", {"clip_high": 0.2, "advantage": "each_reward", "filter_groups_by": "off"}),
    "agro": Paper("arXiv 2503.19612", {"loss": "agro", **_HELD}),
    "spo": Paper("arXiv 2503.05453", {"loss": "spo", **_HELD}),
    "dro": Paper("arXiv 2405.19107", {"loss": "dro", **_HELD}),
    "jepo": Paper("arXiv 2503.19618", {"loss": "jepo", "filter_groups_by": "off", **_SUMS}),
    "distill": Paper("on-policy distillation: arXiv 2306.13649 with the reverse KL", {
        "loss": "weighted", "correction": "token_truncated", "advantage": "none", "loss_aggregation": "batch_tokens",
        "filter_groups_by": "off"}),
}  # fmt: skip


def resolve(given: Values) -> dict[str, Any]:
    """Every setting that has an effect, with its value: given, else the paper's, else the default of the choice that
    reads it.

    given: settings of [objective] that are not None, `name` among them. A paper's values count for what its own
    choices read: with another loss, clip_low is that loss's.
    """
    published = _fill(PAPERS[given["name"]].values, {})
    return {"name": given["name"], **_fill(given, published)}


def _fill(given: Values, published: Values) -> dict[str, Any]:
    found = {name: given.get(name, published.get(name, value)) for name, value in EVERY.items()}
    for choice, own in OWN.items():  # in this order: a denominator may bring a correction
        if choice in found:
            value = found[choice]
            same = published.get(choice) == value
            for name, default in own.get(value if value in own else bool(value), {}).items():
                found[name] = given.get(name, published.get(name, default) if same else default)
    return found
