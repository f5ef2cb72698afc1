"""What every objective is: its settings with Magistral's values, its advantages, its loss, and what it asks of a run.

An objective is one file: a class derived from `Objective` with settings of its own and a `loss`, and a line for each
paper that publishes values for it:

    class Clip(Objective):
        clip_low: float = Field(0.2, gt=0)
        def loss(self, inputs): ...

    publish("grpo", Clip, "DeepSeekMath, arXiv 2402.03300", clip_high=0.2, scale="group")

`[objective] name = "grpo"` chooses it; a file of a user's own is chosen by its path (registry.py). Building blocks that
several share are plain functions: advantage.py, baselines.py, importance.py, kl.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Literal

from pydantic import Field

from shared.chat import Chat
from shared.config import Config
from shared.named_secrets import complain_of_url
from shared.section import Section
from shared.types import Group, TrainSequence
from trainer.objectives import advantage
from trainer.objectives.advantage import GroupFilter, LossAggregation, Scale
from trainer.objectives.importance import BOUNDS
from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.kl import KlGradient
from trainer.objectives.sequences import sequence_of

Advantage = Literal["mean", "leave_one_out", "each_reward", "pass_at_k", "majority", "maxrl", "reward", "none"]


class Need(StrEnum):
    """What an objective asks of the run."""

    REFERENCE = "log-probs under a reference policy"
    OLD_LOGPROBS = "log-probs under the policy at the start of the batch"
    TEACHER = "log-probs under a teacher"
    VALUE = "a value head"
    START_VALUES = "soft values of the prompts under the policy at the start"
    GROUPS = "whole groups in a micro-batch"
    GROUND_TRUTH = "the tokens of the ground truth"


CHOICES: dict[str, dict[Any, dict[str, Any]]] = {
    "ratio_reference": {"rollout": {}, "old": {"importance": "token"}},
    "importance": BOUNDS,
    "entropy_target": {True: {"clip_high_bounds": (0.2, 0.4)}},
    "advantage": {
        "mean": {"scale": "minibatch"},
        "leave_one_out": {"scale": "none"},
        "each_reward": {"scale": "minibatch"},
        "pass_at_k": {"scale": "none", "k": 0, "centred": False},
        "majority": {"scale": "none", "k": 0, "centred": False},
    },
    "kl": {True: {"kl_gradient": "return", "reference": "start"}},
    "reference": {"previous": {"reference_every": 1}, "average": {"reference_every": 1, "reference_share": 0.01}},
    "teacher": {True: {"teacher_model": "", "teacher_key_variable": "", "teacher_weight": 1.0}},
}
"""setting -> its value -> the settings that only this value reads, with their defaults; for a number or a text, True:
any but 0 and "". In this order: one may bring another"""


class Objective(Section):
    """Settings of an objective. One that nothing reads, as another setting is chosen, is None."""

    own: ClassVar[frozenset[str]] = frozenset()
    """settings of CHOICES that the loss itself reads, whatever is chosen"""
    gradient_follows_advantages: ClassVar[bool] = False
    """whether the gradient is a sum over tokens of the advantage times something that is not 0"""
    compares_rewards: ClassVar[bool] = True
    """whether a group of equal rewards has no signal"""
    rewards_itself: ClassVar[bool] = False
    """whether the loss has a reward of its own, beside or instead of the verifiers'"""
    reads_plain_rewards: ClassVar[bool] = False
    """whether the loss takes a baseline off itself"""
    advantages_by_token: ClassVar[bool] = False
    """whether the tokens of a completion may have advantages of their own, as a teacher gives them"""
    least_completions: ClassVar[int] = 2
    """of an offline group: with fewer there is no signal"""
    several_turns: ClassVar[str] = ""
    """why it cannot be trained on episodes of several turns; "" if it can"""

    name: str = "magistral"
    """the objective, as published, or FILE.py:NAME for one of your own; docs/objectives.md has formula, source and when
    to use it. All settings below have the value of its paper unless set"""
    advantage: Advantage = "mean"
    """what is taken off a reward: the mean of the group, of the others, of each reward by itself; or how much a
    completion adds to the best or the majority of k; "reward" (nothing is), "none" (rewards do not count)"""
    k: int | None = Field(None, ge=0)
    """completions of which the best or the majority counts; 0 for the whole group"""
    centred: bool | None = None
    """take their mean over the group off what completions add to the best or the majority of k"""
    scale: Scale | None = None
    """advantages are divided by the standard deviation over the minibatch, the group, or not"""
    loss_aggregation: LossAggregation = "group_tokens"
    """what a token's loss is divided by"""
    filter_groups_by: GroupFilter = "total"
    """a group whose values of this are all equal has no signal and is not trained; "off" trains every group"""
    mask_truncated: bool = False
    """leave completions that were cut at their greatest length out of the loss (DAPO's overlong filter); their rewards
    stay in what the others are compared with"""
    kl: float = Field(0.0, ge=0)
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
    entropy_bonus: float = Field(0.0, ge=0)
    """weight of the entropy of token distributions, summed with the weights of `loss_aggregation`; 0 (Magistral)
    leaves it out"""
    teacher: str = ""
    """model to learn from token by token: a Hugging Face folder or Hub id with the same tokenizer, or the address of an
    OpenAI-compatible API up to its version, e.g. "http://127.0.0.1:8000/v1"; "" for none"""
    teacher_model: str | None = None
    """model name as that API knows it"""
    teacher_key_variable: str | None = None
    """environment variable that holds the API key; "" for none (the key itself never stands in a settings file)"""
    teacher_weight: float | None = Field(None, gt=0)
    """weight of log teacher - log policy beside the advantage"""

    # ---- what an objective defines ------------------------------------------------------------------------------

    def loss(self, inputs: LossInputs) -> LossTerm:
        """The policy's part of the loss of one packed micro-batch: -sum_t weight_t objective_t."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    @property
    def needs(self) -> set[Need]:
        """What it asks of the run beside rewards and the log-probs of sampling."""
        found = {Need.REFERENCE} if self.reference is not None else set()
        return found | {Need.TEACHER} if self.teacher else found

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """Which completions it may learn from that this run did not sample (data.offline): any, those that come with
        the log-probs of the policy that sampled them, or none."""
        return ""

    def sequences(
        self, groups: Sequence[Group], config: Config, chat: Chat | None, values: Mapping[str, float] | None
    ) -> list[list[TrainSequence | None]]:
        """[groups][samples] what is trained of each completion, weights still 0; None for one that is masked.

        groups: the complete groups of one minibatch. chat: encodes ground truths. values: problem id -> soft value of
        its prompt, which is taken off every advantage of its group. With environment.credit = "turn" the turns of a
        completion have advantages of their own. Raises NonFinite for a reward that is no finite number.
        """
        if config.environment.credit == "turn":
            by_turn = advantage.turn_advantages(groups, self, config.environment.discount)
            return [
                [
                    None if one is None else sequence_of(group, c, one)
                    for c, one in zip(group.completions, found, strict=True)
                ]
                for group, found in zip(groups, by_turn, strict=True)
            ]
        scored = advantage.advantages([group.rewards for group in groups], self, config.reward)
        rows = []
        for group, found in zip(groups, scored, strict=True):
            value = values[group.prompt.problem.id] if values is not None else 0.0
            pairs = zip(group.completions, found, strict=True)
            rows.append([None if one is None else sequence_of(group, c, [one - value]) for c, one in pairs])
        return rows

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield what makes no sense together, one line each, naming the settings, their values and the repair."""
        yield from self._reference_contradictions(config)
        yield from self._teacher_contradictions(config)
        yield from self._advantage_contradictions(config)
        yield from self._offline_contradictions(config)
        if config.environment.name and (refusal := self.refusal(config.environment.name)):
            yield refusal
        if config.data.open_share and Need.GROUND_TRUTH not in self.needs and not any(config.reward.extra.values()):
            yield (
                f"data.open_share = {config.data.open_share} hides answers from the verifier, so that right ones earn "
                'nothing: set objective.name = "jepo", a reward that needs none (reward.extra), or data.open_share = 0'
            )

    def after_step(self, entropy: float) -> dict[str, Any]:
        """The settings that a step moves, with their values for the next one. entropy: of the step, nats."""
        return {}

    # ---- what all have -------------------------------------------------------------------------------------------

    def refusal(self, environment: str) -> str:
        """Why episodes in this environment cannot be trained, and what can be done; "" if they can."""
        if self.several_turns:
            return (
                f'objective.name = "{self.name}" {self.several_turns}, but problems have the environment '
                f'"{environment}": use another objective, such as "magistral", or problems without an environment'
            )
        if self.advantage == "majority":
            return (
                f'objective.advantage = "majority" compares answers, and episodes in the environment "{environment}" '
                'have none of one form: use "mean" or "pass_at_k"'
            )
        return ""

    @property
    def served_teacher(self) -> str:
        """The model's name, if the teacher is behind an address; else ""."""
        return (self.teacher_model or "") if self.teacher.startswith("http") else ""

    @property
    def in_force(self) -> dict[str, Any]:
        """Every setting that something reads, with its value."""
        return {name: value for name, value in self if value is not None}

    def describe(self) -> str:
        """Every setting that has an effect, on one line, for people."""
        told = [
            f"{name} {value}"
            for name, value in self.in_force.items()
            if name != "name" and value not in (0, "", "none")
        ]
        return f"{self.name} ({', '.join(told)})"

    def _reference_contradictions(self, config: Config) -> Iterator[str]:
        if self.reference == "average" and config.lora.rank:
            yield (
                f'objective.reference = "average" needs all weights, but lora.rank = {config.lora.rank} trains '
                'adapters, whose mean is not the adapter of the mean policy: use "start" or "previous"'
            )
        if self.reference == "previous" and self.reference_every == 1 and config.optimiser.minibatches == 1:
            yield (
                'objective.reference = "previous" is the policy itself while a batch is one optimiser step: raise '
                "objective.reference_every or optimiser.minibatches"
            )

    def _teacher_contradictions(self, config: Config) -> Iterator[str]:
        if self.teacher and not self.advantages_by_token:
            yield (
                f'objective.teacher gives every token an advantage of its own, but objective.name = "{self.name}" has '
                'one for a completion: use "reinforce", "magistral" or "distill", or remove the teacher'
            )
        if secret := list(complain_of_url("objective.teacher", self.teacher, "objective.teacher_key_variable")):
            yield from secret
        elif self.teacher.startswith("http"):
            if not self.teacher_model:
                yield f'objective.teacher = "{self.teacher}" needs objective.teacher_model, its name in that API'
            if config.rollout.temperature != 1:
                yield (
                    f'objective.teacher = "{self.teacher}" tells log-probs at temperature 1, but rollout.temperature = '
                    f"{config.rollout.temperature}: set it to 1, or give the teacher's folder"
                )
        elif self.teacher and (self.teacher_model or self.teacher_key_variable):
            yield "objective.teacher_model and objective.teacher_key_variable are for a teacher's address: remove them"

    def _offline_contradictions(self, config: Config) -> Iterator[str]:
        if config.data.offline and not self.learns_from:
            yield (
                f'data.offline: objective.name = "{self.name}" as set learns only from what its own policy samples: '
                "use agro, spo or dro, one of examples/objectives, or one with importance weights, such as aipo"
            )
        elif config.data.offline and self.served_teacher:
            yield "data.offline: a teacher behind an address is not asked about offline rows: give the teacher's folder"

    def _advantage_contradictions(self, config: Config) -> Iterator[str]:
        size, rights = config.rollout.group_size, config.reward.correctness
        if config.environment.credit == "episode" and config.environment.discount != 1:
            yield (
                f"environment.discount = {config.environment.discount} has no effect while all turns have the "
                'advantage of the episode: set environment.credit = "turn", or remove it'
            )
        if config.environment.credit == "turn" and self.advantage not in ("mean", "leave_one_out"):
            yield (
                f'environment.credit = "turn" compares the rewards from a turn on with their mean over the group, but '
                f'objective.advantage = "{self.advantage}": use "mean" or "leave_one_out", or credit = "episode"'
            )
        if self.advantage == "reward" and not self.reads_plain_rewards:
            yield (
                f'objective.advantage = "reward" takes no baseline off, and objective.name = "{self.name}" would only '
                'be noisy: use "mean" or "leave_one_out"'
            )
        if self.filter_groups_by != "off" and (not self.compares_rewards or self.teacher):
            what = "a teacher" if self.teacher else f'objective.name = "{self.name}"'
            yield (
                f'objective.filter_groups_by = "{self.filter_groups_by}" leaves out groups of equal rewards, which '
                f'have a signal with {what}: use "off"'
            )
        if self.k is not None and not (self.k == 0 or 2 <= self.k <= size):
            yield (
                f"objective.k = {self.k} must be at least 2 and at most rollout.group_size = {size}, or 0 for all of "
                'them; the best of 1 is advantage = "leave_one_out"'
            )
        if self.advantage in ("maxrl", "pass_at_k", "majority") and rights == 0:
            yield (
                f'objective.advantage = "{self.advantage}" is about right answers, but reward.correctness = 0: set it, '
                'or use advantage = "mean"'
            )
        if self.filter_groups_by == "correctness" and rights == 0:
            yield (
                'objective.filter_groups_by = "correctness" trains no group with reward.correctness = 0, where all '
                'are equal: set it, or use filter_groups_by = "total"'
            )
        if self.advantage == "none" and not self.teacher and not self.rewards_itself:
            yield 'objective.advantage = "none" leaves nothing to learn from: set objective.teacher, or use "mean"'
