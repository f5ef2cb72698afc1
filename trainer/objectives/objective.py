"""What every objective is: its settings with Magistral's values, its advantages, its loss, and what it asks of a run.

An objective is one file: a class derived from `Objective` with settings of its own and a `loss`, and a line for each
paper that publishes values for it:

    class Clip(Objective):
        clip_low: float = Field(0.2, gt=0)
        def loss(self, inputs): ...

    publish("grpo", Clip, "DeepSeekMath, arXiv 2402.03300", clip_high=0.2, advantage={"scale": "group"})

`[objective] name = "grpo"` chooses it; a file of a user's own is chosen by its path (registry.py). A choice that has
settings is a table with a `kind`, whose class has the settings that this kind reads: `advantage = { kind = "pass_at_k",
k = 4 }`. Building blocks that several share are plain functions: advantage.py, baselines.py, importance.py, kl.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.config import JsonDict

from shared.chat import Chat
from shared.config import Config
from shared.model.folder import ModelPath
from shared.named_secrets import complain_of_url
from shared.section import Section, flat
from shared.types import SAMPLED, Group, TrainSequence
from trainer.objectives.advantage import (
    Advantage,
    AmongSeveral,
    GroupFilter,
    LossAggregation,
    Mean,
    advantages,
    token_weights,
    turn_advantages,
)
from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.kl import FirstPolicy, Kl, Reference
from trainer.objectives.sequences import sequence_of


class Need(StrEnum):
    """What an objective asks of the run."""

    REFERENCE = "log-probs under a reference policy"
    OLD_LOGPROBS = "log-probs under the policy at the start of the batch"
    TEACHER = "log-probs under a teacher"
    VALUE = "a value head"
    START_VALUES = "soft values of the prompts under the policy at the start"
    GROUPS = "whole groups in a micro-batch"
    GROUND_TRUTH = "the tokens of the ground truth"


class LocalTeacher(Section):
    """A teacher whose model is loaded into the trainers."""

    kind: Literal["local"] = "local"
    """where the teacher is: in the trainers, or at an address"""
    path: ModelPath = Field(min_length=1)
    """a Hugging Face folder, folder of a run, or Hub id, with the same tokenizer"""
    weight: float = Field(1.0, gt=0)
    """weight of log teacher - log policy in addition to the advantage"""


class ServedTeacher(Section):
    """A teacher that is asked over HTTP."""

    kind: Literal["served"] = "served"
    url: str = Field(min_length=1)
    """address of an OpenAI-compatible API up to its version, e.g. "http://127.0.0.1:8000/v1\""""
    model: str = Field(min_length=1)
    """model name as that API knows it"""
    key_variable: str = ""
    """environment variable that holds the API key; "" for none (the key itself is never in a settings file)"""
    weight: float = Field(1.0, gt=0)
    """weight of log teacher - log policy in addition to the advantage"""


FIXED: JsonDict = {"fixed": True}
"""marks a setting that all stages of a run share (`json_schema_extra` of its field)"""


class Objective(Section):
    """Settings of an objective."""

    reference_setting: ClassVar[str] = "objective.kl.reference"
    """the table that says which reference"""

    gradient_follows_advantages: ClassVar[bool] = False
    """whether the gradient is a sum over tokens of the advantage times something that is not 0"""
    compares_rewards: ClassVar[bool] = True
    """whether a group of equal rewards has no signal"""
    rewards_itself: ClassVar[bool] = False
    """whether the loss has a reward of its own, in addition to the verifiers' or instead of them"""
    reads_plain_rewards: ClassVar[bool] = False
    """whether the loss takes a baseline off itself"""
    advantages_by_token: ClassVar[bool] = False
    """whether the tokens of a completion may have advantages of their own, as a teacher gives them"""
    least_completions: ClassVar[int] = 2
    """an offline group with fewer has no signal"""
    several_turns: ClassVar[str] = ""
    """why it cannot be trained on episodes of several turns; "" if it can"""

    name: str = "magistral"
    """the objective, as published, or FILE.py:NAME for one of your own; docs/objectives.md has formula, source and when
    to use it. All settings below have the value of its paper unless set"""
    advantage: Advantage = Mean()
    """how rewards become advantages"""
    loss_aggregation: LossAggregation = "group_tokens"
    """how a token's loss is weighed in the step"""
    filter_groups_by: GroupFilter = "total"
    """a group whose values of this are all equal has no signal and is not trained; "off" trains every group"""
    mask_truncated: bool = False
    """leave completions that were cut at their greatest length out of the loss (DAPO's overlong filter); their rewards
    stay in what the others are compared with"""
    kl: Kl | None = None
    """the KL divergence from a reference; without this table (Magistral) there is none, and no reference model"""
    entropy_bonus: float = Field(0.0, ge=0)
    """weight of the entropy of token distributions, summed with the weights of `loss_aggregation`; 0 (Magistral)
    leaves it out"""
    teacher: Annotated[LocalTeacher | ServedTeacher, Field(discriminator="kind")] | None = None
    """model to learn from token by token; without this table there is none"""

    # ---- what an objective defines ------------------------------------------------------------------------------

    def loss(self, inputs: LossInputs) -> LossTerm:
        """The policy's part of the loss of one packed micro-batch: -sum_t weight_t objective_t."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    @property
    def needs(self) -> set[Need]:
        """What it asks of the run in addition to rewards and the log-probs of sampling."""
        reference = {Need.REFERENCE} if self.compared_with is not None else set()
        return reference | {Need.TEACHER} if self.teacher is not None else reference

    @property
    def compared_with(self) -> Reference | None:
        """The reference that the policy is compared with, if any."""
        return self.kl.reference if self.kl is not None else None

    @property
    def fixed(self) -> dict[str, Any]:
        """The settings that all stages of a run share: they are about models that are loaded at the start."""
        teacher = self.teacher and self.teacher.model_copy(update={"weight": 1.0})
        marked = [name for name, field in type(self).model_fields.items() if field.json_schema_extra == FIXED]
        return {name: getattr(self, name) for name in marked} | {"reference": self.compared_with, "teacher": teacher}

    @property
    def unweighted(self) -> str:
        """The setting that would weigh tokens of older policies, where the loss takes them for the policy's own; else
        ""."""
        return ""

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
            by_turn = turn_advantages(groups, self.advantage, config.environment.discount)
        else:
            by_turn = []
            scored = advantages([group.rewards for group in groups], self.advantage, config.reward)
            for group, row in zip(groups, scored, strict=True):
                value = values[group.prompt.problem.id] if values is not None else 0.0
                by_turn.append([None if one is None else [one - value] for one in row])
        return [
            [
                None if turns is None else sequence_of(group, completion, turns)
                for completion, turns in zip(group.completions, row, strict=True)
            ]
            for group, row in zip(groups, by_turn, strict=True)
        ]

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
        if self.advantage.kind == "majority":
            return (
                'objective.advantage.kind = "majority" compares answers, and episodes in the environment '
                f'"{environment}" have none of one form: use "mean" or "pass_at_k"'
            )
        return ""

    @property
    def served_teacher(self) -> str:
        """The model's name, if the teacher is at an address; else ""."""
        return self.teacher.model if isinstance(self.teacher, ServedTeacher) else ""

    @property
    def in_force(self) -> dict[str, Any]:
        """Every setting with its value, as a settings file has them."""
        return self.model_dump(mode="json", exclude_none=True)

    def describe(self) -> str:
        """Every setting that has an effect, on one line, for people."""
        settings = [
            f"{name.removesuffix('.kind')} {value}"
            for name, value in flat(self.in_force).items()
            if name != "name" and value not in (0, "", "none")
        ]
        return f"{self.name} ({', '.join(settings)})"

    def _reference_contradictions(self, config: Config) -> Iterator[str]:
        reference = self.compared_with
        if reference is None:
            return
        if reference.kind == "average" and config.lora.rank:
            yield (
                f'{self.reference_setting}.kind = "average" needs all weights, but lora.rank = {config.lora.rank} '
                'trains adapters, whose mean is not the adapter of the mean policy: use "start" or "previous"'
            )
        if reference.kind == "previous" and reference.every == 1 and config.optimiser.minibatches == 1:
            yield (
                f'{self.reference_setting}.kind = "previous" is the policy itself while a batch is one optimiser step: '
                f"raise {self.reference_setting}.every or optimiser.minibatches"
            )

    def _teacher_contradictions(self, config: Config) -> Iterator[str]:
        if self.teacher is None:
            return
        if not self.advantages_by_token:
            yield (
                f'objective.teacher gives every token an advantage of its own, but objective.name = "{self.name}" has '
                'one for a completion: use "reinforce", "magistral" or "distill", or remove the teacher'
            )
        if isinstance(self.teacher, ServedTeacher):
            url = self.teacher.url
            secret = list(complain_of_url("objective.teacher.url", url, "objective.teacher.key_variable"))
            yield from secret
            if not secret and not url.startswith(("http://", "https://")):
                yield (
                    f'objective.teacher.url = "{url}" must be an address such as "http://127.0.0.1:8000/v1"; for a '
                    'folder set objective.teacher.kind = "local" and objective.teacher.path'
                )
            elif not secret and config.rollout.temperature != 1:
                yield (
                    f'objective.teacher.url = "{url}" gives log-probs at temperature 1, but rollout.temperature = '
                    f"{config.rollout.temperature}: set it to 1, or give the teacher's folder"
                )
        elif self.teacher.path.startswith(("http://", "https://")):
            yield 'objective.teacher.path is an address: set objective.teacher.kind = "served" with url and model'

    def _offline_contradictions(self, config: Config) -> Iterator[str]:
        if config.data.offline and not self.learns_from:
            yield (
                f'data.offline: objective.name = "{self.name}" as set learns only from what its own policy samples: '
                "use agro, spo or dro, one of examples/objectives, or one with importance weights, such as aipo"
            )
        elif config.data.offline and self.served_teacher:
            yield "data.offline: a teacher at an address is not asked about offline rows: give the teacher's folder"

    def _advantage_contradictions(self, config: Config) -> Iterator[str]:
        size, rights = config.rollout.group_size, config.reward.correctness
        if config.environment.credit == "episode" and config.environment.discount != 1:
            yield (
                f"environment.discount = {config.environment.discount} has no effect while all turns have the "
                'advantage of the episode: set environment.credit = "turn", or remove it'
            )
        kind = self.advantage.kind
        if config.environment.credit == "turn" and kind not in ("mean", "leave_one_out"):
            yield (
                f'environment.credit = "turn" compares the rewards from a turn on with their mean over the group, but '
                f'objective.advantage.kind = "{kind}": use "mean" or "leave_one_out", or credit = "episode"'
            )
        if kind == "reward" and not self.reads_plain_rewards:
            yield (
                f'objective.advantage.kind = "reward" takes no baseline off, and objective.name = "{self.name}" would '
                'only be noisy: use "mean" or "leave_one_out"'
            )
        if self.filter_groups_by != "off" and (not self.compares_rewards or self.teacher):
            what = "a teacher" if self.teacher else f'objective.name = "{self.name}"'
            yield (
                f'objective.filter_groups_by = "{self.filter_groups_by}" leaves out groups of equal rewards, which '
                f'have a signal with {what}: use "off"'
            )
        if isinstance(self.advantage, AmongSeveral) and not (self.advantage.k == 0 or 2 <= self.advantage.k <= size):
            yield (
                f"objective.advantage.k = {self.advantage.k} must be at least 2 and at most rollout.group_size = "
                f'{size}, or 0 for all of them; the best of 1 is kind = "leave_one_out"'
            )
        if kind in ("maxrl", "pass_at_k", "majority") and rights == 0:
            yield (
                f'objective.advantage.kind = "{kind}" is about right answers, but reward.correctness = 0: set it, or '
                'use kind = "mean"'
            )
        if self.filter_groups_by == "correctness" and rights == 0:
            yield (
                'objective.filter_groups_by = "correctness" trains no group with reward.correctness = 0, where all '
                'are equal: set it, or use filter_groups_by = "total"'
            )
        if kind == "none" and not self.teacher and not self.rewards_itself:
            yield 'objective.advantage.kind = "none" leaves nothing to learn from: set objective.teacher, or use "mean"'


class Compared(Objective):
    """Settings of an objective whose loss itself compares the policy with a reference."""

    reference_setting: ClassVar[str] = "objective.reference"

    reference: Reference = FirstPolicy()
    """the policy that is compared with"""

    @property
    def compared_with(self) -> Reference:
        """The reference of the loss, which is that of `kl` too."""
        return self.reference

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yield that kl has another reference, and the contradictions of every objective."""
        yield from super().contradictions(config)
        if self.kl is not None and self.kl.reference != self.reference:
            yield (
                f'objective.kl.reference: objective.name = "{self.name}" has one reference model: give '
                "objective.kl.reference the settings of objective.reference"
            )


def moves(objective: Objective) -> bool:
    """Whether the objective compares with a reference that moves."""
    return objective.compared_with is not None and objective.compared_with.every > 0


def train_sequences(
    groups: Sequence[Group], objective: Objective, config: Config, chat: Chat | None = None,
    values: Mapping[str, float] | None = None,
) -> list[TrainSequence]:  # fmt: skip
    """The sequences of one optimiser step, in the order of groups and samples; masked and empty completions left out.

    groups: complete groups of one minibatch, [group_size] completions each. chat: encodes ground truths, for jepo.
    values: problem id -> soft value of its prompt, for spo. Raises NonFinite for a reward that is not a finite number.
    """
    rows = objective.sequences(groups, config, chat, values)
    if objective.mask_truncated:
        rows = [
            [None if c.finish_reason == "length" else one for c, one in zip(group.completions, row, strict=True)]
            for group, row in zip(groups, rows, strict=True)
        ]
    lengths = [[0 if one is None else one.mask.count(SAMPLED) for one in row] for row in rows]
    weights = token_weights(lengths, objective.loss_aggregation, config.rollout.max_completion_tokens)
    trained = []
    for row, shares in zip(rows, weights, strict=True):
        for sequence, weight in zip(row, shares, strict=True):
            if sequence is not None and weight:
                sequence.weight = weight
                trained.append(sequence)
    return trained
