"""Objectives by name: the values of their papers, what a departure drops, what nothing reads, what makes no sense."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from shared.config import Config
from shared.settings_file import to_toml
from tests.trainer.objectives.named import NAMES, PUBLISHED
from trainer.objectives import registry
from trainer.objectives.advantage import LossAggregation, token_weights
from trainer.objectives.importance import BOUNDS, Importance, importance_weights
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.kl import GRADIENTS, KlGradient
from trainer.objectives.loss import policy_loss
from trainer.objectives.objective import CHOICES, Need
from trainer.objectives.registry import (
    OBJECTIVES,
    complaints,
    describe_settings,
    needs,
    objective_of,
    read_objective,
)

PAGE = Path(__file__).parents[3] / "docs" / "objectives.md"
TEACHER = {"teacher": "models/teacher"}


def chosen(name: str, **settings: Any) -> dict[str, Any]:
    """[objective] of a name, with the teacher that distill cannot do without."""
    return {"name": NAMES.get(name, name), **(TEACHER if name == "distill" else {}), **settings}


def mistakes(objective: dict[str, Any], **others: Any) -> list[str]:
    """The mistakes and contradictions of a run with these settings, one line each; none if it is allowed."""
    return list(complaints(Config.model_validate({"objective": objective, **others})))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_run_and_is_read_back_as_written(name: str) -> None:
    config = Config.model_validate({"objective": chosen(name)})
    assert PUBLISHED[name].source
    again = Config.model_validate(tomllib.loads(to_toml(config)))
    assert again == config and objective_of(again) == objective_of(config)
    assert mistakes(chosen(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_an_objective_written_out_in_full_is_the_same(name: str) -> None:
    """All that has an effect may also be set: nothing of it is without effect, and nothing changes."""
    full = read_objective(chosen(name))
    assert read_objective(full.in_force) == full and mistakes(full.in_force) == []


def test_only_distill_needs_another_setting() -> None:
    assert {name for name in NAMES if mistakes({"name": NAMES[name]})} == {"distill"}
    assert len(mistakes({"name": "distill"})) == 1


BY_HAND: dict[str, dict[str, Any]] = {
    "magistral": {"clip_low": 0.2, "clip_high": 0.28, "scale": "minibatch", "loss_aggregation": "group_tokens",
                  "filter_groups_by": "total", "kl": 0.0, "advantage": "mean", "ratio_reference": "rollout"},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "scale": "group", "loss_aggregation": "sequence",
             "filter_groups_by": "off"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "scale": "group", "loss_aggregation": "batch_tokens",
             "filter_groups_by": "correctness"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "scale": "none", "loss_aggregation": "constant",
                "advantage": "mean"},
    "reinforce": {"importance": "none", "scale": "none", "loss_aggregation": "completions"},
    "rloo": {"importance": "none", "advantage": "leave_one_out", "scale": "none",
             "loss_aggregation": "completions"},
    "aipo": {"importance": "token_truncated", "importance_low": 0.0, "importance_high": 2.0,
             "advantage": "mean", "scale": "none"},
    "cispo": {"importance": "token_truncated", "importance_low": 0.0, "importance_high": 5.0,
              "scale": "group", "loss_aggregation": "batch_tokens"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "scale": "group",
             "loss_aggregation": "sequence"},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4, "scale": "group",
                   "loss_aggregation": "sequence"},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2, "ratio_reference": "old",
                      "importance": "token", "importance_high": None},
    "tis": {"ratio_reference": "old", "importance": "token_truncated", "importance_low": 0.0,
            "importance_high": 2.0},
    "icepop": {"ratio_reference": "old", "importance": "token_masked", "importance_low": 0.5,
               "importance_high": 5.0},
    "dppo": {"importance": "divergence_masked", "importance_low": 0.2, "importance_high": 0.2},
    "maxrl": {"importance": "none", "advantage": "maxrl", "scale": None, "filter_groups_by": "off"},
    "pass_at_k": {"advantage": "pass_at_k", "k": 0, "scale": "none"},
    "f_dpg": {"divergence": "js", "importance": "token_truncated", "advantage": "reward", "reference": "start"},
    "sharpening": {"importance": "token_truncated", "advantage": "none", "reference": "start", "self_weight": 1.0},
    "pass_at_k_centred": {"advantage": "pass_at_k", "k": 0, "scale": "none", "centred": True},
    "majority": {"advantage": "majority", "k": 0, "scale": "none"},
    "gdpo": {"advantage": "each_reward", "scale": "minibatch", "clip_high": 0.2},
    "agro": {"advantage": "reward", "scale": None, "beta": 0.1, "reference": "start", "kl": 0.0,
             "filter_groups_by": "off", "value_samples": None, "clip_low": None, "importance": None},
    "spo": {"advantage": "reward", "beta": 0.1, "reference": "start", "value_samples": 8,
            "value_learning_rate": None, "filter_groups_by": "off"},
    "dro": {"advantage": "reward", "beta": 0.1, "reference": "start", "value_learning_rate": 1e-2,
            "value_samples": None, "filter_groups_by": "off"},
    "kto": {"advantage": "reward", "beta": 0.1, "reference": "start", "desirable_above": 0.5, "desirable_weight": 1.0,
            "undesirable_weight": 1.0, "loss_aggregation": "completions", "filter_groups_by": "off"},
    "a_lol": {"advantage": "reward", "reference": "start", "clip_low": 0.9, "clip_high": 0.9,
              "value_learning_rate": 1e-2, "loss_aggregation": "completions", "filter_groups_by": "off"},
    "c_rlft": {"advantage": "reward", "reference": None, "beta": 0.43, "loss_aggregation": "completions",
               "filter_groups_by": "off"},
    "jepo": {"bound": "multi_sample", "bound_groups": "every", "answer_weight": 0.01,
             "missing_answer_penalty": 10.0,
             "importance": "token_truncated", "importance_high": 2.0, "loss_aggregation": "completions"},
    "distill": {"advantage": "none", "scale": None, "teacher_weight": 1.0,
                "loss_aggregation": "batch_tokens", "importance": "token_truncated", "filter_groups_by": "off"},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_values_of_each_paper(name: str) -> None:
    full = read_objective(chosen(name))
    assert {setting: getattr(full, setting, None) for setting in BY_HAND[name]} == BY_HAND[name]


NEEDS = {
    "decoupled_ppo": {Need.OLD_LOGPROBS}, "tis": {Need.OLD_LOGPROBS}, "icepop": {Need.OLD_LOGPROBS},
    "agro": {Need.REFERENCE, Need.GROUPS}, "spo": {Need.REFERENCE, Need.START_VALUES},
    "dro": {Need.REFERENCE, Need.VALUE}, "jepo": {Need.GROUPS, Need.GROUND_TRUTH}, "distill": {Need.TEACHER},
    "kto": {Need.REFERENCE, Need.GROUPS}, "a_lol": {Need.REFERENCE, Need.VALUE},
    "sharpening": {Need.REFERENCE, Need.GROUPS}, "f_dpg": {Need.REFERENCE, Need.GROUPS, Need.START_VALUES},
}  # fmt: skip
"""of the others: nothing"""


@pytest.mark.parametrize("name", NAMES)
def test_what_each_asks_of_the_run(name: str) -> None:
    wanted = NEEDS.get(name, set())
    assert read_objective(chosen(name)).needs == wanted
    with_divergence = read_objective(chosen(name, kl=0.1))
    assert with_divergence.needs == wanted | {Need.REFERENCE} and with_divergence.kl_gradient == "return"
    imitating = {"mode": "sft", "sft": {"steps": 1, "demonstrations": "some.jsonl"}}
    assert needs(Config.model_validate({"objective": chosen(name)})) == wanted
    assert needs(Config.model_validate({"objective": chosen(name), **imitating})) == set(), "imitation needs nothing"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": "icepop", "importance": "token_truncated"}, {"importance_low": 0.0, "importance_high": 2.0}),
        ({"name": "cispo", "importance": "sequence_truncated"}, {"importance_low": None, "importance_high": 5.0}),
        ({"name": "cispo", "importance": "divergence_masked"}, {"importance_high": 0.2}),
        ({"name": "tis", "ratio_reference": "rollout"}, {"importance": None, "importance_high": None}),
        ({"name": "decoupled_ppo", "ratio_reference": "old", "clip_low": 0.1}, {"importance": "token",
                                                                                  "clip_high": 0.2}),
        ({"name": "dapo", "advantage": "leave_one_out"}, {"scale": "none", "loss_aggregation": "batch_tokens"}),
        ({"name": "rloo", "advantage": "mean"}, {"scale": "minibatch"}),
        ({"name": "maxrl", "advantage": "pass_at_k"}, {"scale": "none", "k": 0}),
        ({"name": "grpo", "kl": 0.1, "reference": "average"}, {"reference_every": 1, "reference_share": 0.01}),
        # the paper's own choice given again changes nothing
        ({"name": "cispo", "importance": "token_truncated"}, {"importance_high": 5.0}),
        # what is set stays, whatever else is
        ({"name": "gspo", "clip_high": 0.5}, {"clip_low": 3e-4, "clip_high": 0.5}),
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)  # fmt: skip
def test_another_choice_drops_the_values_that_its_paper_gave_the_old_one(
    given: dict[str, Any], found: dict[str, Any]
) -> None:
    full = read_objective(given)
    assert {setting: getattr(full, setting) for setting in found} == found


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        ({"importance": "token"}, ["importance"]),
        ({"name": "gspo", "dual_clip": 3.0}, ["dual_clip"]),
        ({"name": "reinforce", "clip_low": 0.1, "clip_high": 0.1, "ratio_reference": "old"},
         ["clip_high", "clip_low", "ratio_reference"]),
        ({"name": "reinforce", "importance_high": 2.0}, ["importance_high"]),
        ({"name": "reinforce", "importance": "sequence", "importance_low": 0.5}, ["importance_low"]),
        ({"name": "reinforce", "importance": "sequence_masked", "importance_low": 0.5}, ["importance_low"]),
        ({"kl_gradient": "return"}, ["kl_gradient"]),
        ({"kl": 0.0, "reference": "previous", "reference_every": 2}, ["reference", "reference_every"]),
        ({"kl": 0.1, "reference_every": 2}, ["reference_every"]),
        ({"kl": 0.1, "reference": "previous", "reference_every": 2, "reference_share": 0.5}, ["reference_share"]),
        ({"name": "grpo", "beta": 0.1}, ["beta"]),
        ({"name": "agro", "value_samples": 4, "value_learning_rate": 0.1}, ["value_learning_rate", "value_samples"]),
        ({"name": "dro", "scale": "group"}, ["scale"]),
        ({"name": "maxrl", "scale": "none"}, ["scale"]),
        ({"name": "rloo", "k": 4}, ["k"]),
        ({"bound": "single_sample", "bound_groups": "every", "answer_weight": 1.0, "missing_answer_penalty": 1.0},
         ["answer_weight", "bound", "bound_groups", "missing_answer_penalty"]),
        ({"teacher_weight": 0.5, "teacher_model": "m", "teacher_key_variable": "KEY"},
         ["teacher_key_variable", "teacher_model", "teacher_weight"]),
        ({"teacher": "", "teacher_weight": 0.5}, ["teacher_weight"]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)  # fmt: skip
def test_settings_that_nothing_reads_are_found_and_refused(given: dict[str, Any], unread: list[str]) -> None:
    rest = {name: value for name, value in given.items() if name not in unread}
    objective = read_objective(rest)
    assert all(getattr(objective, name, None) is None for name in unread)
    lines = mistakes(given)
    assert [line.split(" ")[0] for line in lines] == [f"objective.{name}" for name in unread]
    assert all(line.endswith("remove it") and f'objective.name = "{objective.name}"' in line for line in lines)
    assert mistakes(rest) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "grpoo"}, 'objective.name = "grpoo": did you mean grpo? It must be one of agro, aipo'),
        ({"name": "kto"}, 'objective.name = "kto": it is an example, write "examples/objectives/kto.py:kto"'),
        ({"clip_lo": 0.1}, "unknown setting objective.clip_lo; did you mean objective.clip_low?"),
        ({"clip_low": -1}, "objective.clip_low = -1: must be a finite number, more than 0"),
        ({"scale": "both"}, 'objective.scale = "both": must be one of "minibatch", "group", "none"'),
        ({"name": "reinforce", "importance": ["token"]}, 'objective.importance = ["token"]: must be one of "none"'),
        ({"kl": {"weight": 1}}, "objective.kl = {"),
        ({"denominator": "proximal"}, "unknown setting objective.denominator; it is called objective.ratio_reference"),
        ({"loss": "weighted"}, "unknown setting objective.loss: objective.name chooses the loss"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_to_write(given: dict[str, Any], message: str) -> None:
    (line,) = mistakes(given)
    assert line.startswith(message), line


def test_an_objective_of_ones_own_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/objectives.md, word for word, through the loss of a micro-batch."""
    (example,) = re.findall(r"```python objective\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "OBJECTIVES", dict(OBJECTIVES))
    Path("my_loss.py").write_text(example)
    config = Config.model_validate({"objective": {"name": "my_loss.py:leaky", "leak": 0.5}})
    assert list(complaints(config)) == []
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), torch.ones(2), completions_of([1, 1]))
    policy_loss(inputs, torch.zeros(2), objective_of(config)).loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 0.5]
    (line,) = mistakes({"name": "my_loss.py:leaky", "clip_low": 0.1})
    assert "objective.clip_low = 0.1 has no effect" in line
    (line,) = mistakes({"name": "my_los.py:leaky"})
    assert "there is no file" in line and "paths start at the working directory" in line
    Path("bad.py").write_text("x = 1\ny = x / 0\n")
    (line,) = mistakes({"name": "bad.py:mine"})
    assert line == f"objective.name: {tmp_path / 'bad.py'} fails with ZeroDivisionError: division by zero in line 2"
    Path("ends.py").write_text("raise SystemExit(3)\n")
    (line,) = mistakes({"name": "ends.py:mine"})
    assert line.endswith("ends.py fails with SystemExit: 3 in line 1")


NO_CORRECTNESS = {"reward": {"correctness": 0.0}}
HELD = {"loss_aggregation": "completions", "filter_groups_by": "off"}
API = {"teacher": "http://127.0.0.1:8000/v1", "filter_groups_by": "off"}
WARM = {"rollout": {"temperature": 0.7}}
CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    # [objective], other sections, what the line names, and the nearest that is allowed
    ({"name": "agro", "kl": 0.1}, {}, ("objective.kl = 0.1", "objective.beta", "remove kl"), {"name": "agro"}, {}),
    ({"name": "dro", "advantage": "mean"}, {}, ('objective.advantage = "mean"', '"dro"', 'use "reward"'),
     {"name": "dro", "advantage": "reward"}, {}),
    ({"name": "grpo", "advantage": "reward"}, {}, ('objective.advantage = "reward"', '"grpo"', 'use "mean"'),
     {"name": "grpo", "advantage": "mean"}, {}),
    ({"name": "spo", "reference": "average"}, {}, ('objective.reference = "average"', '"spo"', 'use "start"'),
     {"name": "spo", "reference": "start"}, {}),
    ({"name": "agro", "filter_groups_by": "total"}, {}, ('objective.filter_groups_by = "total"', '"agro"', 'use "off"'),
     {"name": "agro", "filter_groups_by": "off"}, {}),
    ({"name": "jepo", "filter_groups_by": "total"}, {}, ('objective.filter_groups_by = "total"', '"jepo"', 'use "off"'),
     {"name": "jepo", "filter_groups_by": "off"}, {}),
    (TEACHER, {}, ('objective.filter_groups_by = "total"', "a teacher", 'use "off"'),
     {**TEACHER, "filter_groups_by": "off"}, {}),
    ({"name": "pass_at_k", "k": 17}, {}, ("objective.k = 17", "rollout.group_size = 16"),
     {"name": "pass_at_k", "k": 16}, {}),
    ({"name": "majority", "k": 1}, {}, ("objective.k = 1", "at least 2"), {"name": "majority", "k": 2}, {}),
    *(({"name": name}, NO_CORRECTNESS, (f'objective.advantage = "{name}"', "reward.correctness = 0", 'use advantage = '
        '"mean"'), {"name": name, "advantage": "mean"}, NO_CORRECTNESS) for name in ("maxrl", "pass_at_k", "majority")),
    ({"name": "dapo"}, NO_CORRECTNESS, ('objective.filter_groups_by = "correctness"', "reward.correctness = 0",
      '"total"'), {"name": "dapo", "filter_groups_by": "total"}, NO_CORRECTNESS),
    ({"advantage": "none"}, {}, ('objective.advantage = "none"', "set objective.teacher", 'use "mean"'),
     {"advantage": "none", "filter_groups_by": "off", **TEACHER}, {}),
    ({"name": "dro", "reference": "previous"}, {}, ('objective.reference = "previous"', "raise objective."
      "reference_every or optimiser.minibatches"), {"name": "dro", "reference": "previous", "reference_every": 2}, {}),
    ({"kl": 0.1, "reference": "previous"}, {}, ('objective.reference = "previous"', "one optimiser step"),
     {"kl": 0.1, "reference": "previous"}, {"optimiser": {"minibatches": 2}}),
    ({"name": "distill"}, {}, ('objective.name = "distill"', "set objective.teacher"), {"name": "distill", **TEACHER},
     {}),
    ({"name": "gspo", **TEACHER}, {}, ("objective.teacher", 'objective.name = "gspo"', 'use "reinforce"'),
     {"name": "reinforce", **TEACHER}, {}),
    (API, {}, ("objective.teacher_model", API["teacher"]), {**API, "teacher_model": "m"}, {}),
    ({**API, "teacher_model": "m"}, WARM, ("rollout.temperature = 0.7", "set it to 1"),
     {"filter_groups_by": "off", **TEACHER}, WARM),
    ({"name": "distill", **TEACHER, "teacher_key_variable": "KEY"}, {}, ("objective.teacher_key_variable",
      "address: remove them"), {"name": "distill", **API, "teacher_model": "m", "teacher_key_variable": "KEY"}, {}),
    ({"dual_clip": 1.0}, {}, ("objective.dual_clip = 1.0", "above 1, or 0"), {"dual_clip": 1.5}, {}),
    ({"name": "aipo", "importance_low": 2.0}, {}, ("objective.importance_low = 2.0", "below objective.importance_high"),
     {"name": "aipo", "importance_low": 1.9}, {}),
    ({"name": "icepop", "importance_high": 0.4}, {}, ("objective.importance_low = 0.5", "importance_high = 0.4"),
     {"name": "icepop", "importance_high": 0.6}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "others", "names", "allowed", "allowed_others"), CONTRADICTIONS,
    ids=[" ".join(map(str, one[0].values())) + str(number) for number, one in enumerate(CONTRADICTIONS)],
)  # fmt: skip
def test_a_contradiction_is_one_line_with_names_and_repair(
    objective: dict[str, Any], others: dict[str, Any], names: tuple[str, ...], allowed: dict[str, Any],
    allowed_others: dict[str, Any],
) -> None:  # fmt: skip
    lines = mistakes(objective, **others)
    assert len(lines) == 1 and all(name in lines[0] for name in names), lines
    assert mistakes(allowed, **allowed_others) == []


def test_help_tells_every_setting_of_every_objective() -> None:
    text = describe_settings()
    for published in PUBLISHED.values():
        for name, field in published.kind.model_fields.items():
            assert field.description, f"{published.kind.__name__}.{name}"
            assert f"--objective.{name}=" in text


def test_a_difference_of_probabilities_has_bounds_in_any_order() -> None:
    """Of "divergence_masked" both bounds are distances from 0."""
    assert mistakes({"name": "dppo", "importance_low": 0.3, "importance_high": 0.1}) == []


def test_every_value_of_a_choice_is_one_that_its_setting_may_have() -> None:
    for choice, kinds in CHOICES.items():
        for value, own in kinds.items():
            for kind in {one.kind for one in PUBLISHED.values() if choice in one.kind.model_fields}:
                assert own.keys() <= kind.model_fields.keys()
                if value is not True:
                    kind.model_validate({choice: value, **own})


def test_the_values_of_a_paper_all_have_an_effect() -> None:
    for name, published in PUBLISHED.items():
        unread = published.values.keys() - read_objective(chosen(name)).in_force.keys()
        assert not unread, f"{name}: {unread} of its paper have no effect"


def test_every_choice_of_a_setting_is_known_to_the_formulas() -> None:
    one = torch.zeros(1)
    inputs = LossInputs(one, one, one, one, completions_of([1]))
    assert set(get_args(KlGradient)) == GRADIENTS.keys()
    assert set(get_args(Importance)) == BOUNDS.keys()
    for name in get_args(LossAggregation):
        assert sum(token_weights([[2]], name, 4)[0]) > 0
    for name in set(get_args(Importance)) - {"none"}:
        weight = importance_weights(inputs, name, None, None).weight
        assert weight is not None and weight.tolist() == [1.0]


@pytest.mark.parametrize(
    ("objective", "reward", "refused"),
    [("magistral", {}, True), ("magistral", {"extra": {"argued": 1.0}}, False), ("jepo", {}, False)],
)
def test_hidden_answers_need_an_objective_or_a_reward_that_does_not_see_them(
    objective: str, reward: dict[str, Any], refused: bool
) -> None:
    config = Config()
    half = config.data.model_copy(update={"open_share": 0.5})
    config = config.model_copy(update={"data": half, "reward": config.reward.model_copy(update=reward)})
    said = [line for line in read_objective({"name": objective}).contradictions(config) if "data.open_share" in line]
    assert bool(said) is refused and all("hides answers from the verifier" in line for line in said)
