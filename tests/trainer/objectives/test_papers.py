"""Objectives by name: the values of their papers, what a departure drops, what nothing reads, what makes no sense."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from shared.config import Config
from shared.objective import Need, Objective, needs
from shared.papers import CLIPPED, EVERY, OWN, PAPERS, REGULARISED, resolve
from shared.settings_file import to_toml
from trainer.objectives.advantage import token_weights
from trainer.objectives.corrections import correct
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.kl import GRADIENTS
from trainer.objectives.loss import LOSSES

TEACHER = {"teacher": "models/teacher"}


def chosen(name: str, **settings: Any) -> dict[str, Any]:
    """[objective] of a name, with the teacher that distill cannot do without."""
    return {"name": name, **(TEACHER if name == "distill" else {}), **settings}


def complaints(objective: dict[str, Any], **others: Any) -> list[str]:
    """The contradictions of a run with these settings, one line each; none if it is allowed."""
    try:
        Config.model_validate({"objective": objective, **others})
    except ValidationError as error:
        (found,) = error.errors()
        return str(found["ctx"]["error"]).splitlines()
    return []


@pytest.mark.parametrize("name", PAPERS)
def test_every_name_is_a_run_and_is_read_back_as_written(name: str) -> None:
    config = Config.model_validate({"objective": chosen(name)})
    assert PAPERS[name].source
    again = Config.model_validate(tomllib.loads(to_toml(config)))
    assert again == config and again.objective.resolved() == config.objective.resolved()
    assert config.objective.without_effect() == []


@pytest.mark.parametrize("name", PAPERS)
def test_a_resolved_objective_written_out_in_full_is_the_same(name: str) -> None:
    """All that has an effect may also be set: nothing of it is without effect, and nothing changes."""
    full = Objective(**chosen(name)).resolved()
    again = Objective.model_validate(full.given)
    assert again.without_effect() == [] and again.resolved() == full
    assert complaints(full.given) == []


def test_only_distill_needs_another_setting() -> None:
    assert {name for name in PAPERS if complaints({"name": name})} == {"distill"}
    assert len(complaints({"name": "distill"})) == 1


BY_HAND: dict[str, dict[str, Any]] = {
    "magistral": {"clip_low": 0.2, "clip_high": 0.28, "scale": "minibatch", "loss_aggregation": "group_tokens",
                  "filter_groups_by": "total", "kl": 0.0, "advantage": "mean", "denominator": "behaviour"},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "scale": "group", "loss_aggregation": "sequence",
             "filter_groups_by": "off"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "scale": "group", "loss_aggregation": "batch_tokens",
             "filter_groups_by": "correctness"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "scale": "none", "loss_aggregation": "constant",
                "advantage": "mean"},
    "reinforce": {"loss": "weighted", "correction": "none", "scale": "none", "loss_aggregation": "completions"},
    "rloo": {"loss": "weighted", "correction": "none", "advantage": "leave_one_out", "scale": "none",
             "loss_aggregation": "completions"},
    "aipo": {"loss": "weighted", "correction": "token_truncated", "correction_low": 0.0, "correction_high": 2.0,
             "advantage": "mean", "scale": "none"},
    "cispo": {"loss": "weighted", "correction": "token_truncated", "correction_low": 0.0, "correction_high": 5.0,
              "scale": "group", "loss_aggregation": "batch_tokens"},
    "gspo": {"loss": "sequence_clip", "clip_low": 3e-4, "clip_high": 4e-4, "scale": "group",
             "loss_aggregation": "sequence"},
    "gspo_token": {"loss": "sequence_token_clip", "clip_low": 3e-4, "clip_high": 4e-4, "scale": "group",
                   "loss_aggregation": "sequence"},
    "decoupled_ppo": {"loss": "clip", "clip_low": 0.2, "clip_high": 0.2, "denominator": "proximal",
                      "correction": "token", "correction_high": None},
    "tis": {"loss": "clip", "denominator": "proximal", "correction": "token_truncated", "correction_low": 0.0,
            "correction_high": 2.0},
    "icepop": {"loss": "clip", "denominator": "proximal", "correction": "token_masked", "correction_low": 0.5,
               "correction_high": 5.0},
    "dppo": {"loss": "weighted", "correction": "divergence_masked", "correction_low": 0.2, "correction_high": 0.2},
    "maxrl": {"loss": "weighted", "correction": "none", "advantage": "maxrl", "scale": None, "filter_groups_by": "off"},
    "pass_at_k": {"loss": "weighted", "advantage": "pass_at_k", "k": 0, "scale": "none"},
    "majority": {"loss": "weighted", "advantage": "majority", "k": 0, "scale": "none"},
    "gdpo": {"loss": "clip", "advantage": "each_reward", "scale": "minibatch", "clip_high": 0.2},
    "agro": {"loss": "agro", "advantage": "reward", "scale": None, "beta": 0.1, "reference": "start", "kl": 0.0,
             "filter_groups_by": "off", "value_samples": None, "clip_low": None, "correction": None},
    "spo": {"loss": "spo", "advantage": "reward", "beta": 0.1, "reference": "start", "value_samples": 8,
            "value_learning_rate": None, "filter_groups_by": "off"},
    "dro": {"loss": "dro", "advantage": "reward", "beta": 0.1, "reference": "start", "value_learning_rate": 1e-2,
            "value_samples": None, "filter_groups_by": "off"},
    "jepo": {"loss": "jepo", "bound": "multi_sample", "bound_for": "every", "answer_weight": 0.01, "cue_penalty": 10.0,
             "correction": "token_truncated", "correction_high": 2.0, "loss_aggregation": "completions"},
    "distill": {"loss": "weighted", "advantage": "none", "scale": None, "teacher_weight": 1.0,
                "loss_aggregation": "batch_tokens", "correction": "token_truncated", "filter_groups_by": "off"},
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_the_values_of_each_paper(name: str) -> None:
    full = Objective(**chosen(name)).resolved()
    assert {setting: getattr(full, setting) for setting in BY_HAND[name]} == BY_HAND[name]


NEEDS = {
    "decoupled_ppo": {Need.PROXIMAL}, "tis": {Need.PROXIMAL}, "icepop": {Need.PROXIMAL},
    "agro": {Need.REFERENCE, Need.GROUPS}, "spo": {Need.REFERENCE, Need.START_VALUES},
    "dro": {Need.REFERENCE, Need.VALUE}, "jepo": {Need.GROUPS, Need.TRUTH}, "distill": {Need.TEACHER},
}  # fmt: skip
"""of the others: nothing"""


@pytest.mark.parametrize("name", PAPERS)
def test_what_each_asks_of_the_run(name: str) -> None:
    wanted = NEEDS.get(name, set())
    assert needs(Objective(**chosen(name)).resolved()) == wanted
    with_divergence = Objective(**chosen(name, kl=0.1)).resolved()
    assert needs(with_divergence) == wanted | {Need.REFERENCE} and with_divergence.kl_gradient == "return"
    imitating = {"mode": "sft", "cold_start": {"steps": 1, "demonstrations": "some.jsonl"}}
    assert Config.model_validate({"objective": chosen(name)}).needs == wanted
    assert Config.model_validate({"objective": chosen(name), **imitating}).needs == set(), "imitation needs nothing"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": "gspo", "loss": "clip"}, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}),
        ({"name": "grpo", "loss": "sequence_clip"}, {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}),
        ({"name": "gspo", "loss": "weighted"}, {"clip_low": None, "correction": "none", "scale": "group"}),
        ({"name": "icepop", "correction": "token_truncated"}, {"correction_low": 0.0, "correction_high": 2.0}),
        ({"name": "cispo", "correction": "sequence_truncated"}, {"correction_low": None, "correction_high": 5.0}),
        ({"name": "cispo", "correction": "divergence_masked"}, {"correction_high": 0.2}),
        ({"name": "tis", "denominator": "behaviour"}, {"correction": None, "correction_high": None}),
        ({"name": "decoupled_ppo", "denominator": "proximal", "clip_low": 0.1}, {"correction": "token",
                                                                                  "clip_high": 0.2}),
        ({"name": "dapo", "advantage": "leave_one_out"}, {"scale": "none", "loss_aggregation": "batch_tokens"}),
        ({"name": "rloo", "advantage": "mean"}, {"scale": "minibatch"}),
        ({"name": "maxrl", "advantage": "pass_at_k"}, {"scale": "none", "k": 0}),
        ({"name": "spo", "loss": "agro"}, {"beta": 0.1, "value_samples": None, "advantage": "reward"}),
        ({"name": "jepo", "loss": "weighted"}, {"correction": "none", "bound": None, "cue_penalty": None}),
        ({"name": "grpo", "kl": 0.1, "reference": "average"}, {"reference_every": 1, "reference_share": 0.01}),
        # the paper's own choice given again changes nothing
        ({"name": "cispo", "correction": "token_truncated"}, {"correction_high": 5.0}),
        ({"name": "gspo", "loss": "sequence_clip"}, {"clip_low": 3e-4, "clip_high": 4e-4}),
        # what is set stays, whatever else is
        ({"name": "gspo", "loss": "clip", "clip_high": 0.5}, {"clip_low": 0.2, "clip_high": 0.5}),
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)  # fmt: skip
def test_another_choice_drops_the_values_that_its_paper_gave_the_old_one(
    given: dict[str, Any], found: dict[str, Any]
) -> None:
    full = Objective(**given).resolved()
    assert {setting: getattr(full, setting) for setting in found} == found


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        ({"correction": "token"}, ["correction"]),
        ({"name": "gspo", "dual_clip": 3.0}, ["dual_clip"]),
        ({"name": "reinforce", "clip_low": 0.1, "clip_high": 0.1, "denominator": "proximal"},
         ["clip_high", "clip_low", "denominator"]),
        ({"name": "reinforce", "correction_high": 2.0}, ["correction_high"]),
        ({"name": "reinforce", "correction": "sequence", "correction_low": 0.5}, ["correction_low"]),
        ({"name": "reinforce", "correction": "sequence_masked", "correction_low": 0.5}, ["correction_low"]),
        ({"kl_gradient": "return"}, ["kl_gradient"]),
        ({"kl": 0.0, "reference": "previous", "reference_every": 2}, ["reference", "reference_every"]),
        ({"kl": 0.1, "reference_every": 2}, ["reference_every"]),
        ({"kl": 0.1, "reference": "previous", "reference_every": 2, "reference_share": 0.5}, ["reference_share"]),
        ({"name": "grpo", "beta": 0.1}, ["beta"]),
        ({"name": "agro", "value_samples": 4, "value_learning_rate": 0.1}, ["value_learning_rate", "value_samples"]),
        ({"name": "dro", "scale": "group"}, ["scale"]),
        ({"name": "maxrl", "scale": "none"}, ["scale"]),
        ({"name": "rloo", "k": 4}, ["k"]),
        ({"bound": "single_sample", "bound_for": "open", "answer_weight": 1.0, "cue_penalty": 1.0},
         ["answer_weight", "bound", "bound_for", "cue_penalty"]),
        ({"teacher_weight": 0.5, "teacher_model": "m", "teacher_key_variable": "KEY"},
         ["teacher_key_variable", "teacher_model", "teacher_weight"]),
        ({"teacher": "", "teacher_weight": 0.5}, ["teacher_weight"]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)  # fmt: skip
def test_settings_that_nothing_reads_are_found_and_refused(given: dict[str, Any], unread: list[str]) -> None:
    objective = Objective(**given)
    assert objective.without_effect() == unread
    assert all(getattr(objective.resolved(), name) is None for name in unread)
    lines = complaints(given)
    assert [line.split(" ")[0] for line in lines] == [f"objective.{name}" for name in unread]
    assert all(line.endswith("remove it") and f'objective.name = "{objective.name}"' in line for line in lines)
    assert complaints({name: value for name, value in given.items() if name not in unread}) == []


NO_CORRECTNESS = {"reward": {"correctness": 0.0}}
HELD = {"loss_aggregation": "completions", "filter_groups_by": "off"}
API = {"teacher": "http://127.0.0.1:8000/v1", "filter_groups_by": "off"}
WARM = {"rollout": {"temperature": 0.7}}
CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    # [objective], other sections, what the line names, and the nearest that is allowed
    ({"name": "agro", "kl": 0.1}, {}, ("objective.kl = 0.1", "objective.beta", "remove kl"), {"name": "agro"}, {}),
    ({"name": "dro", "advantage": "mean"}, {}, ('objective.advantage = "mean"', '"dro"', 'use "reward"'),
     {"name": "dro", "advantage": "reward"}, {}),
    ({"name": "grpo", "advantage": "reward"}, {}, ('objective.advantage = "reward"', '"clip"', 'use "mean"'),
     {"name": "grpo", "advantage": "mean"}, {}),
    ({"name": "spo", "reference": "average"}, {}, ('objective.reference = "average"', '"spo"', 'use "start"'),
     {"name": "spo", "reference": "start"}, {}),
    ({"name": "agro", "filter_groups_by": "total"}, {}, ('objective.filter_groups_by = "total"', '"agro"', 'use "off"'),
     {"name": "agro", "filter_groups_by": "off"}, {}),
    ({"name": "magistral", "loss": "jepo"}, {}, ('objective.filter_groups_by = "total"', '"jepo"', 'use "off"'),
     {"name": "magistral", "loss": "jepo", "filter_groups_by": "off"}, {}),
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
    ({"name": "gspo", **TEACHER}, {}, ("objective.teacher", 'objective.loss = "sequence_clip"', 'use "weighted" or'),
     {"name": "gspo", **TEACHER, "loss": "weighted"}, {}),
    (API, {}, ("objective.teacher_model", API["teacher"]), {**API, "teacher_model": "m"}, {}),
    ({**API, "teacher_model": "m"}, WARM, ("rollout.temperature = 0.7", "set it to 1"),
     {"filter_groups_by": "off", **TEACHER}, WARM),
    ({"name": "distill", **TEACHER, "teacher_key_variable": "KEY"}, {}, ("objective.teacher_key_variable",
      "address: remove them"), {"name": "distill", **API, "teacher_model": "m", "teacher_key_variable": "KEY"}, {}),
    ({"dual_clip": 1.0}, {}, ("objective.dual_clip = 1.0", "above 1, or 0"), {"dual_clip": 1.5}, {}),
    ({"name": "aipo", "correction_low": 2.0}, {}, ("objective.correction_low = 2.0", "below objective.correction_high"),
     {"name": "aipo", "correction_low": 1.9}, {}),
    ({"name": "icepop", "correction_high": 0.4}, {}, ("objective.correction_low = 0.5", "correction_high = 0.4"),
     {"name": "icepop", "correction_high": 0.6}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "others", "names", "allowed", "allowed_others"), CONTRADICTIONS,
    ids=[" ".join(map(str, one[0].values())) + str(number) for number, one in enumerate(CONTRADICTIONS)],
)  # fmt: skip
def test_a_contradiction_is_one_line_with_names_and_repair(
    objective: dict[str, Any], others: dict[str, Any], names: tuple[str, ...], allowed: dict[str, Any],
    allowed_others: dict[str, Any],
) -> None:  # fmt: skip
    lines = complaints(objective, **others)
    assert len(lines) == 1 and all(name in lines[0] for name in names), lines
    assert complaints(allowed, **allowed_others) == []


def test_a_difference_of_probabilities_has_bounds_in_any_order() -> None:
    """Of "divergence_masked" both bounds are distances from 0."""
    assert complaints({"name": "dppo", "correction_low": 0.3, "correction_high": 0.1}) == []


def test_every_setting_of_the_tables_is_one_of_objective_and_every_choice_a_value_of_it() -> None:
    fields = Objective.model_fields.keys() - {"name"}
    tables = [EVERY, REGULARISED, CLIPPED, *(paper.values for paper in PAPERS.values())]
    read: set[str] = set(EVERY)
    for choice, own in OWN.items():
        assert choice in fields
        for value, settings in own.items():
            tables.append(settings)
            read |= settings.keys()
            if value is not True:
                assert getattr(Objective(**{choice: value}), choice) == value
    for table in tables:
        assert table.keys() <= fields
        Objective.model_validate(table)  # each value is one that the setting may have
    assert read == fields, "some settings are read by no choice"
    for name, paper in PAPERS.items():
        unread = paper.values.keys() - resolve({"name": name}).keys()
        assert not unread, f"{name}: {unread} of its paper have no effect"


def test_every_choice_of_a_setting_is_known_to_the_formulas() -> None:
    def choices(name: str) -> set[str]:
        found = Objective.model_json_schema()["properties"][name]["anyOf"][0]["enum"]
        return set(found)

    one = torch.zeros(1)
    inputs = LossInputs(one, one, one, one, completions_of([1]))
    assert choices("loss") == LOSSES.keys() == OWN["loss"].keys()
    assert choices("kl_gradient") == GRADIENTS.keys()
    assert choices("correction") == OWN["correction"].keys()
    for name in choices("loss_aggregation"):
        assert sum(token_weights([[2]], name, 4)[0]) > 0  # type: ignore[arg-type]
    assert all(
        correct(inputs, Objective(loss="weighted", correction=name).resolved())[0].tolist() == [1.0]
        for name in choices("correction") - {"none"}
    )
