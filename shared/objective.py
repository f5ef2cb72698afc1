"""The settings of [objective]: one name, and what departs from its paper.

Objective(name="gspo").resolved()      every setting that has an effect, with its value
needs(resolved)                        what the objective asks of the run beside rewards and log-probs
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, get_args

from pydantic import Field

from shared.papers import PAPERS, resolve
from shared.section import Section

Name = Literal[
    "magistral", "grpo", "dapo", "dr_grpo", "reinforce", "rloo", "aipo", "cispo", "gspo", "gspo_token",
    "decoupled_ppo", "tis", "icepop", "dppo", "maxrl", "pass_at_k", "majority", "gdpo", "agro", "spo", "dro", "jepo",
    "distill",
]  # fmt: skip
assert set(get_args(Name)) == PAPERS.keys()
Loss = Literal["clip", "sequence_clip", "sequence_token_clip", "weighted", "agro", "spo", "dro", "jepo"]
Correction = Literal[
    "none", "token", "token_truncated", "token_masked", "divergence_masked", "sequence", "sequence_truncated",
    "sequence_masked", "geometric_masked",
]  # fmt: skip
Advantage = Literal["mean", "leave_one_out", "each_reward", "pass_at_k", "majority", "maxrl", "reward", "none"]
Scale = Literal["minibatch", "group", "none"]
LossAggregation = Literal["group_tokens", "batch_tokens", "sequence", "completions", "constant"]
GroupFilter = Literal["total", "correctness", "off"]
KlGradient = Literal[
    "return", "sequence_k2", "sequence_k3", "weighted_k3", "wrong_k1", "wrong_k3", "wrong_token_k2"
]  # fmt: skip


class Need(StrEnum):
    """What an objective asks of the run."""

    REFERENCE = "log-probs under a reference policy"
    PROXIMAL = "log-probs under the policy at the start of the batch"
    TEACHER = "log-probs under a teacher"
    VALUE = "a value head"
    START_VALUES = "soft values of the prompts under the policy at the start"
    GROUPS = "whole groups in a micro-batch"
    TRUTH = "the tokens of the true answer"


class Objective(Section):
    """Settings of an objective: those left out (None) are as in the paper that `name` names, others depart from it."""

    name: Name = "magistral"
    """the objective, as published; docs/objectives.md has formula, source and when to use it. All settings below have
    the value of its paper unless set"""
    loss: Loss | None = None
    """"clip" (ratio of a token), "sequence_clip" and "sequence_token_clip" (GSPO), "weighted" (policy gradient times
    `correction`), or "agro", "spo", "dro", "jepo\""""
    clip_low: float | None = Field(None, gt=0)
    """importance ratio is clipped below 1 - clip_low"""
    clip_high: float | None = Field(None, gt=0)
    """importance ratio is clipped above 1 + clip_high"""
    dual_clip: float | None = Field(None, ge=0)
    """with a negative advantage the objective is at least dual_clip times it (above 1, mostly 3); 0 for no bound"""
    denominator: Literal["behaviour", "proximal"] | None = None
    """what the clipped ratio divides by: the policy that sampled, or the one at the start of the batch; `correction`
    then weighs the second against the first"""
    correction: Correction | None = None
    """weight of a token, as another policy sampled it: its importance ratio, the product or the geometric mean of its
    completion's, truncated (kept within bounds) or masked (0 beyond them)"""
    correction_low: float | None = Field(None, ge=0)
    """lower bound of the correction"""
    correction_high: float | None = Field(None, gt=0)
    """upper bound of the correction; of "divergence_masked", as correction_low, a difference of probabilities"""
    advantage: Advantage | None = None
    """what is taken off a reward: the mean of the group, of the others, of each reward by itself; or how much a
    completion adds to the best or the majority of k; "reward" (nothing is), "none" (rewards do not count)"""
    k: int | None = Field(None, ge=0)
    """completions of which the best or the majority counts; 0 for the whole group"""
    scale: Scale | None = None
    """advantages are divided by the standard deviation over the minibatch, the group, or not"""
    loss_aggregation: LossAggregation | None = None
    """what a token's loss is divided by"""
    filter_groups_by: GroupFilter | None = None
    """a group whose values of this are all equal has no signal and is not trained; "off" trains every group"""
    kl: float | None = Field(None, ge=0)
    """weight of the KL divergence from the reference; 0 (Magistral) keeps no reference model"""
    kl_gradient: KlGradient | None = None
    """how its gradient is taken: "return" (summed log-ratios as reward), "sequence_k2" or "sequence_k3" (of whole
    completions: exact, for short ones), "weighted_k3" (token by token, as DeepSeek-V3.2); the wrong ones of
    2506.09477 are there to compare"""
    reference: Literal["start", "previous", "average"] | None = None
    """the policy that reinforcement learning starts with, an earlier iterate, or a moving average"""
    reference_every: int | None = Field(None, ge=1)
    """batches after which the reference moves"""
    reference_share: float | None = Field(None, gt=0, le=1)
    """share of the policy that the moving average takes in each time"""
    entropy_bonus: float | None = Field(None, ge=0)
    """weight of the entropy of token distributions, summed with the weights of `loss_aggregation`; 0 (Magistral)
    leaves it out"""
    beta: float | None = Field(None, gt=0)
    """strength of the regularisation that is part of agro, spo and dro, in units of reward"""
    value_samples: int | None = Field(None, ge=1)
    """completions of each prompt, sampled before training, from which spo estimates its soft value"""
    value_learning_rate: float | None = Field(None, gt=0)
    """of the value head of dro"""
    teacher: str | None = None
    """model to learn from token by token: a Hugging Face folder or Hub id with the same tokenizer, or the address of an
    OpenAI-compatible API up to its version, e.g. "http://127.0.0.1:8000/v1"; "" for none"""
    teacher_model: str | None = None
    """model name as that API knows it"""
    teacher_key_variable: str | None = None
    """environment variable that holds the API key; "" for none (the key itself never stands in a settings file)"""
    teacher_weight: float | None = Field(None, gt=0)
    """weight of log teacher - log policy beside the advantage"""
    bound: Literal["multi_sample", "single_sample"] | None = None
    """Jensen bound of jepo: of the mean over a group's thoughts (tighter), or of each alone"""
    bound_for: Literal["every", "unsolved", "open"] | None = None
    """groups that jepo trains by its bound: every one, those without a right completion, or those of open problems; the
    others by their rewards"""
    answer_weight: float | None = Field(None, ge=0)
    """weight of imitating the true answer after the thoughts: 1 for long answers, 0 to 0.01 for short ones"""
    cue_penalty: float | None = Field(None, ge=0)
    """what a completion loses that never gives an answer (no box after its thoughts)"""

    @property
    def given(self) -> dict[str, Any]:
        """The settings that were set."""
        return {name: value for name, value in self if value is not None}

    def resolved(self) -> Objective:
        """Every setting that has an effect, filled in; None where it has none."""
        values: dict[str, Any] = dict.fromkeys(Objective.model_fields) | resolve(self.given)
        return Objective.model_construct(**values)

    def describe(self) -> str:
        """Every setting that has an effect, on one line, for people."""
        values = resolve(self.given)
        told = [f"{name} {value}" for name, value in values.items() if name != "name" and value not in (0, "", "none")]
        return f"{self.name} ({', '.join(told)})"

    def without_effect(self) -> list[str]:
        """Settings that were set and that nothing reads."""
        return sorted(self.given.keys() - resolve(self.given).keys())

    @property
    def served_teacher(self) -> str:
        """Of a resolved objective: the model's name, if its teacher is behind an address; else ""."""
        return (self.teacher_model or "") if (self.teacher or "").startswith("http") else ""

    @property
    def refers(self) -> bool:
        """Of a resolved objective: whether it compares the policy with a reference."""
        return self.reference is not None


def needs(objective: Objective) -> set[Need]:
    """What a resolved objective asks of the run."""
    found: set[Need] = set()
    if objective.refers:
        found.add(Need.REFERENCE)
    if objective.denominator == "proximal":
        found.add(Need.PROXIMAL)
    if objective.teacher:
        found.add(Need.TEACHER)
    found |= {
        "agro": {Need.GROUPS},
        "spo": {Need.START_VALUES},
        "dro": {Need.VALUE},
        "jepo": {Need.GROUPS, Need.TRUTH},
    }.get(objective.loss or "", set())
    return found
