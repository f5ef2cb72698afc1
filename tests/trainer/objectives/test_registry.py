"""Objectives by name: the values of their papers, what a departure drops, what nothing reads, what makes no sense."""

from __future__ import annotations

import re
import tomllib
from itertools import permutations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from shared.config import Config
from shared.errors import ConfigError
from shared.section import flat
from shared.settings_file import load, to_toml
from tests.trainer.objectives.named import NAMES, PUBLISHED
from trainer.objectives import registry
from trainer.objectives.advantage import LossAggregation, token_weights
from trainer.objectives.importance import Importance, importance_weights
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.kl import GRADIENTS, KlGradient
from trainer.objectives.loss import policy_loss
from trainer.objectives.objective import Need
from trainer.objectives.page import describe_settings
from trainer.objectives.registry import (
    OBJECTIVES,
    complaints,
    needs,
    objective_of,
    read_objective,
)
from trainer.objectives.tables import kinds_of, nested, tables_of

PAGE = Path(__file__).parents[3] / "docs" / "objectives.md"
TEACHER = {"teacher": {"kind": "local", "path": "models/teacher"}}


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


def advantage(kind: str, **settings: Any) -> dict[str, Any]:
    return {"advantage": {"kind": kind, **settings}}


def truncated(high: float = 2.0) -> dict[str, Any]:
    return {"importance": {"kind": "token_truncated", "low": 0.0, "high": high}}


def old(kind: str, **bounds: float) -> dict[str, Any]:
    return {"ratio_reference": {"kind": "old", "importance": {"kind": kind, **bounds}}}


UNWEIGHTED = {"importance": {"kind": "none"}}
BY_VALUE = {"loss_aggregation": "completions", "filter_groups_by": "off"}
START = {"reference": {"kind": "start"}}
BY_HAND: dict[str, dict[str, Any]] = {
    "magistral": {"clip_low": 0.2, "clip_high": 0.28, **advantage("mean", scale="minibatch"),
                  "loss_aggregation": "group_tokens", "filter_groups_by": "total", "kl": None,
                  "ratio_reference": {"kind": "rollout"}},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, **advantage("mean", scale="group"), "loss_aggregation": "sequence",
             "filter_groups_by": "off"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, **advantage("mean", scale="group"),
             "loss_aggregation": "batch_tokens", "filter_groups_by": "correctness"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, **advantage("mean", scale="none"), "loss_aggregation": "constant"},
    "reinforce": {**UNWEIGHTED, **advantage("mean", scale="none"), **BY_VALUE},
    "rloo": {**UNWEIGHTED, **advantage("leave_one_out", scale="none"), **BY_VALUE},
    "aipo": {**truncated(), **advantage("mean", scale="none"), **BY_VALUE},
    "cispo": {**truncated(5.0), **advantage("mean", scale="group"), "loss_aggregation": "batch_tokens"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, **advantage("mean", scale="group"), "loss_aggregation": "sequence"},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4, **advantage("mean", scale="group"),
                   "loss_aggregation": "sequence"},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2, **old("token")},
    "tis": old("token_truncated", low=0.0, high=2.0),
    "icepop": old("token_masked", low=0.5, high=5.0),
    "dppo": {"importance": {"kind": "divergence_masked", "low": 0.2, "high": 0.2}},
    "maxrl": {**UNWEIGHTED, **advantage("maxrl"), **BY_VALUE},
    "pass_at_k": {**truncated(), **advantage("pass_at_k", k=0, centred=False, scale="none")},
    "f_dpg": {"divergence": "js", **truncated(), **advantage("reward"), **START, **BY_VALUE},
    "sharpening": {**truncated(), **advantage("none"), **START, "self_weight": 1.0},
    "pass_at_k_centred": {**truncated(), **advantage("pass_at_k", k=0, centred=True, scale="none")},
    "majority": {**truncated(), **advantage("majority", k=0, centred=False, scale="none")},
    "gdpo": {**advantage("each_reward", scale="minibatch"), "clip_high": 0.2, "filter_groups_by": "off"},
    "agro": {**advantage("reward"), "beta": 0.1, **START, "kl": None, **BY_VALUE, "value_samples": None,
             "clip_low": None, "importance": None},
    "spo": {**advantage("reward"), "beta": 0.1, **START, "value_samples": 8, "value_learning_rate": None, **BY_VALUE},
    "dro": {**advantage("reward"), "beta": 0.1, **START, "value_learning_rate": 1e-2, "value_samples": None,
            **BY_VALUE},
    "kto": {**advantage("reward"), "beta": 0.1, **START, "desirable_above": 0.5, "desirable_weight": 1.0,
            "undesirable_weight": 1.0, **BY_VALUE},
    "a_lol": {**advantage("reward"), **START, "clip_low": 0.9, "clip_high": 0.9, "value_learning_rate": 1e-2,
              **BY_VALUE},
    "c_rlft": {**advantage("reward"), "reference": None, "beta": 0.43, **BY_VALUE},
    "jepo": {"bound": "multi_sample", "bound_groups": "every", "answer_weight": 0.01, "missing_answer_penalty": 10.0,
             **truncated(), "loss_aggregation": "completions"},
    "distill": {**advantage("none"), "teacher": {**TEACHER["teacher"], "weight": 1.0},
                "loss_aggregation": "batch_tokens", **truncated(), "filter_groups_by": "off"},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_values_of_each_paper(name: str) -> None:
    full = read_objective(chosen(name)).in_force
    assert {setting: full.get(setting) for setting in BY_HAND[name]} == BY_HAND[name]


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
    with_divergence = read_objective(chosen(name, kl={"weight": 0.1}))
    assert with_divergence.needs == wanted | {Need.REFERENCE}
    assert with_divergence.kl is not None and with_divergence.kl.gradient == "return"
    imitating = {"mode": "sft", "sft": {"steps": 1, "demonstrations": "some.jsonl"}}
    assert needs(Config.model_validate({"objective": chosen(name)})) == wanted
    assert needs(Config.model_validate({"objective": chosen(name), **imitating})) == set(), "imitation needs nothing"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": "icepop", **old("token_truncated")}, old("token_truncated", low=0.0, high=2.0)),
        ({"name": "icepop", "ratio_reference": {"importance": {"high": 3.0}}}, old("token_masked", low=0.5, high=3.0)),
        ({"name": "cispo", "importance": {"kind": "sequence_truncated"}},
         {"importance": {"kind": "sequence_truncated", "high": 5.0}}),
        ({"name": "cispo", "importance": {"kind": "divergence_masked", "low": 0.1}},
         {"importance": {"kind": "divergence_masked", "low": 0.1, "high": 0.2}}),
        ({"name": "tis", "ratio_reference": {"kind": "rollout"}}, {"ratio_reference": {"kind": "rollout"}}),
        ({"name": "magistral", "ratio_reference": {"kind": "old"}}, old("token")),
        ({"name": "dapo", **advantage("leave_one_out")},
         {**advantage("leave_one_out", scale="none"), "loss_aggregation": "batch_tokens"}),
        ({"name": "rloo", **advantage("mean")}, advantage("mean", scale="minibatch")),
        ({"name": "maxrl", **advantage("pass_at_k")}, advantage("pass_at_k", k=0, centred=False, scale="none")),
        ({"name": "pass_at_k", "advantage": {"k": 4}}, advantage("pass_at_k", k=4, centred=False, scale="none")),
        ({"name": "grpo", "kl": {"weight": 0.1, "reference": {"kind": "average"}}},
         {"kl": {"weight": 0.1, "gradient": "return", "reference": {"kind": "average", "every": 1, "share": 0.01}}}),
        ({"entropy_target": {"nats": 0.4}}, {"entropy_target": {"nats": 0.4, "clip_high_bounds": [0.2, 0.4]}}),
        # the paper's own choice given again changes nothing
        ({"name": "cispo", "importance": {"kind": "token_truncated"}}, truncated(5.0)),
        # what is set stays, whatever else is
        ({"name": "gspo", "clip_high": 0.5}, {"clip_low": 3e-4, "clip_high": 0.5}),
    ],
    ids=str,
)  # fmt: skip
def test_another_kind_drops_the_values_that_its_paper_gave_the_old_one(
    given: dict[str, Any], found: dict[str, Any]
) -> None:
    full = read_objective(given).in_force
    assert {setting: full[setting] for setting in found} == found


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        ({"name": "gspo", "dual_clip": 3.0}, ["dual_clip"]),
        ({"name": "reinforce", "clip_low": 0.1, "clip_high": 0.1, "ratio_reference": {"kind": "old"}},
         ["clip_high", "clip_low", "ratio_reference"]),
        ({"name": "grpo", "beta": 0.1}, ["beta"]),
        ({"name": "agro", "value_samples": 4, "value_learning_rate": 0.1}, ["value_learning_rate", "value_samples"]),
        ({"bound": "single_sample", "bound_groups": "every", "answer_weight": 1.0, "missing_answer_penalty": 1.0},
         ["answer_weight", "bound", "bound_groups", "missing_answer_penalty"]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)  # fmt: skip
def test_settings_that_nothing_reads_are_found_and_refused(given: dict[str, Any], unread: list[str]) -> None:
    rest = {name: value for name, value in given.items() if name not in unread}
    lines = sorted(mistakes(given))
    assert [line.split(" ")[0] for line in lines] == [f"objective.{name}" for name in unread]
    name = read_objective(rest).name
    assert all(line.endswith("remove it") and f'objective.name = "{name}"' in line for line in lines)
    assert mistakes(rest) == []


@pytest.mark.parametrize(
    ("table", "settings", "setting"),
    [
        ("importance", {"kind": "token", "high": 2.0}, "high"), ("importance", {"kind": "none", "low": 1.0}, "low"),
        ("importance", {"kind": "sequence_masked", "low": 0.5}, "low"),
        ("advantage", {"kind": "leave_one_out", "k": 4}, "k"), ("advantage", {"k": 4}, "k"),
        ("advantage", {"kind": "maxrl", "scale": "none"}, "scale"),
        ("advantage", {"kind": "mean", "centred": True}, "centred"),
        ("teacher", {"kind": "local", "path": "a", "model": "m"}, "model"),
        ("kl.reference", {"kind": "previous", "every": 2, "share": 0.5}, "share"),
        ("kl.reference", {"kind": "start", "every": 2}, "every"),
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_of_another_kind_is_refused(table: str, settings: dict[str, Any], setting: str) -> None:
    given = {"kl": {"weight": 0.1, "reference": settings}} if table == "kl.reference" else {table: settings}
    (line,) = mistakes({"name": "reinforce", **given})
    assert line.startswith(f"objective.{table}.{setting} has no effect with this objective.{table}.kind: remove it")
    assert 'kind = "' in line, "every kind with its settings"


OLD = {
    "k": "advantage.k", "scale": "advantage.scale", "centred": "advantage.centred",
    "importance_low": "ratio_reference.importance.low", "importance": "ratio_reference.importance",
    "kl_gradient": "kl.gradient", "reference": "kl.reference", "reference_every": "kl.reference.every",
    "reference_share": "kl.reference.share", "clip_high_bounds": "entropy_target.clip_high_bounds",
    "teacher_model": "teacher.model", "teacher_key_variable": "teacher.key_variable",
    "teacher_weight": "teacher.weight",
}  # fmt: skip


@pytest.mark.parametrize("setting", OLD)
def test_a_setting_that_is_in_a_table_now_is_named(setting: str) -> None:
    (line,) = mistakes({setting: 1})
    table = OLD[setting].rpartition(".")[0]
    assert line.startswith(f"objective.{setting} is objective.{OLD[setting]} now: [objective.{table}] has ")


@pytest.mark.parametrize(
    ("given", "write"),
    [
        ({"advantage": "pass_at_k"}, 'objective.advantage.kind = "pass_at_k"'), ({"kl": 0.1}, "[objective.kl]"),
        ({"name": "aipo", "importance": "token"}, 'objective.importance.kind = "token"'),
        ({"ratio_reference": "old"}, 'objective.ratio_reference.kind = "old"'),
        ({"name": "agro", "reference": "average"}, 'objective.reference.kind = "average"'),
        ({"teacher": "runs/a/latest"}, "[objective.teacher]"), ({"entropy_target": 0.4}, "[objective.entropy_target]"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_in_the_place_of_a_table_is_told_what_to_write(given: dict[str, Any], write: str) -> None:
    (line,) = mistakes(given)
    assert line.startswith(f"objective.{[*given][-1]} is a table, not a value: write {write}") and line.endswith(")")


def test_options_choose_a_kind_and_its_settings(tmp_path: Path) -> None:
    """Another kind than the file's takes nothing of the file's table with it, in whatever order options come."""
    file = tmp_path / "run.toml"
    file.write_text('[objective]\nadvantage = { kind = "pass_at_k", k = 4 }\n')

    def read(*options: str) -> dict[str, Any]:
        return objective_of(load(file, options, complaints)).in_force["advantage"]  # type: ignore[no-any-return]

    assert read() == {"kind": "pass_at_k", "k": 4, "centred": False, "scale": "none"}
    assert read("--objective.advantage.k=8")["k"] == 8
    assert read("--objective.advantage.kind=mean") == {"kind": "mean", "scale": "minibatch"}
    for options in permutations(("--objective.advantage.scale=group", "--objective.advantage.kind=mean")):
        assert read(*options) == {"kind": "mean", "scale": "group"}
    assert read("--objective.advantage.kind=pass_at_k")["k"] == 4, "the file's own kind"
    other = tmp_path / "other.toml"
    other.write_text('[prepare]\nscript = "a.py"\noptions = { kind = "a", count = 3 }\n')
    assert load(other, ["--prepare.options.kind=b"]).prepare.options == {"kind": "b", "count": 3}, "not of [objective]"
    for option, message in (
        ("--objective.advantage.kind=pass_at_j", "did you mean pass_at_k?"),
        ("--objective.advantage.kin=mean", "did you mean objective.advantage.kind?"),
        ("--objective.advantge.kind=mean", "did you mean objective.advantage?"),
        ("--objective.advantage=mean", 'write objective.advantage.kind = "mean"'),
        ("--objective.k=4", "objective.k is objective.advantage.k now"),
    ):
        with pytest.raises(ConfigError) as refused:
            read(option)
        assert message in str(refused.value), option


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "grpoo"}, 'objective.name = "grpoo": did you mean grpo? It must be one of agro, aipo'),
        ({"name": "kto"}, 'objective.name = "kto": it is an example, write "examples/objectives/kto.py:kto"'),
        ({"clip_lo": 0.1}, "unknown setting objective.clip_lo; did you mean objective.clip_low?"),
        ({"clip_low": -1}, "objective.clip_low = -1: must be a finite number, more than 0"),
        ({"advantage": {"scale": "both"}}, 'objective.advantage.scale = "both": must be one of "minibatch", "group"'),
        ({"name": "reinforce", "importance": ["token"]}, "objective.importance is a table, not a value"),
        ({"kl": {"gradient": "return"}}, "objective.kl.weight is missing: it must be a finite number, at least 0"),
        ({"kl": {"weight": 1, "gradient": "wrong_k1"}}, 'objective.kl.gradient = "wrong_k1": must be one of "return"'),
        ({"kl": {"weight": 1, "reference": {"every": 2}}}, 'objective.kl.reference.kind is missing: it must be one of'),
        ({"advantage": {"kind": "best"}}, 'objective.advantage.kind = "best": it must be one of "mean"'),
        ({"teacher": {"path": "a"}}, 'objective.teacher.kind is missing: it must be one of "local" (path, weight)'),
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
API = {"teacher": {"kind": "served", "url": "http://127.0.0.1:8000/v1", "model": "m"}, "filter_groups_by": "off"}
PREVIOUS = {"kl": {"weight": 0.1, "reference": {"kind": "previous"}}}
WARM = {"rollout": {"temperature": 0.7}}
CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    # [objective], other sections, what the line names, and the nearest that is allowed
    ({"name": "agro", "kl": {"weight": 0.1}}, {}, ("objective.kl", "objective.beta", "remove kl"),
     {"name": "agro"}, {}),
    ({"name": "dro", **advantage("mean")}, {}, ('objective.advantage.kind = "mean"', '"dro"', 'use "reward"'),
     {"name": "dro", **advantage("reward")}, {}),
    ({"name": "grpo", **advantage("reward")}, {}, ('objective.advantage.kind = "reward"', '"grpo"', 'use "mean"'),
     {"name": "grpo", **advantage("mean")}, {}),
    ({"name": "spo", "reference": {"kind": "average"}}, {}, ('objective.reference.kind = "average"', '"spo"', 'use '
      '"start"'), {"name": "spo", **START}, {}),
    ({"name": "agro", "filter_groups_by": "total"}, {}, ('objective.filter_groups_by = "total"', '"agro"', 'use "off"'),
     {"name": "agro", "filter_groups_by": "off"}, {}),
    ({"name": "jepo", "filter_groups_by": "total"}, {}, ('objective.filter_groups_by = "total"', '"jepo"', 'use "off"'),
     {"name": "jepo", "filter_groups_by": "off"}, {}),
    (TEACHER, {}, ('objective.filter_groups_by = "total"', "a teacher", 'use "off"'),
     {**TEACHER, "filter_groups_by": "off"}, {}),
    ({"name": "pass_at_k", "advantage": {"k": 17}}, {}, ("objective.advantage.k = 17", "rollout.group_size = 16"),
     {"name": "pass_at_k", "advantage": {"k": 16}}, {}),
    ({"name": "majority", "advantage": {"k": 1}}, {}, ("objective.advantage.k = 1", "at least 2"),
     {"name": "majority", "advantage": {"k": 2}}, {}),
    *(({"name": name}, NO_CORRECTNESS, (f'objective.advantage.kind = "{name}"', "reward.correctness = 0", 'use kind = '
        '"mean"'), {"name": name, **advantage("mean")}, NO_CORRECTNESS) for name in ("maxrl", "pass_at_k", "majority")),
    ({"name": "dapo"}, NO_CORRECTNESS, ('objective.filter_groups_by = "correctness"', "reward.correctness = 0",
      '"total"'), {"name": "dapo", "filter_groups_by": "total"}, NO_CORRECTNESS),
    (advantage("none"), {}, ('objective.advantage.kind = "none"', "set objective.teacher", 'use "mean"'),
     {**advantage("none"), "filter_groups_by": "off", **TEACHER}, {}),
    ({"name": "dro", "reference": {"kind": "previous"}}, {}, ('objective.reference.kind = "previous"', "raise "
      "objective.reference.every or optimiser.minibatches"),
     {"name": "dro", "reference": {"kind": "previous", "every": 2}}, {}),
    (PREVIOUS, {}, ('objective.kl.reference.kind = "previous"', "one optimiser step", "objective.kl.reference.every"),
     PREVIOUS, {"optimiser": {"minibatches": 2}}),
    ({"name": "sharpening", "kl": {"weight": 1.0, "reference": {"kind": "average"}}}, {}, ("objective.kl.reference",
      "one reference model"), {"name": "sharpening", "kl": {"weight": 1.0}}, {}),
    ({"name": "distill"}, {}, ('objective.name = "distill"', "set objective.teacher"), {"name": "distill", **TEACHER},
     {}),
    ({"name": "gspo", **TEACHER}, {}, ("objective.teacher", 'objective.name = "gspo"', 'use "reinforce"'),
     {"name": "reinforce", **TEACHER}, {}),
    ({"teacher": {"kind": "served", "url": "a"}}, {}, ("objective.teacher.model is missing",), API, {}),
    (API, WARM, ("rollout.temperature = 0.7", "set it to 1"), {"filter_groups_by": "off", **TEACHER}, WARM),
    ({"name": "distill", "teacher": {"kind": "served", "url": "folder", "model": "m"}}, {}, (
      'objective.teacher.kind = "local"', 'objective.teacher.url = "folder"'), {"name": "distill", **TEACHER}, {}),
    ({"name": "distill", "teacher": {"kind": "local", "path": "http://a/v1"}}, {}, ('objective.teacher.kind = '
      '"served"',), {"name": "distill", **API}, {}),
    ({"dual_clip": 1.0}, {}, ("objective.dual_clip = 1.0", "above 1, or 0"), {"dual_clip": 1.5}, {}),
    ({"name": "aipo", "importance": {"low": 2.0}}, {}, ("objective.importance.low = 2.0", "below objective.importance."
      "high"), {"name": "aipo", "importance": {"low": 1.9}}, {}),
    ({"name": "icepop", "ratio_reference": {"importance": {"high": 0.4}}}, {}, ("ratio_reference.importance.low = 0.5",
      "importance.high = 0.4"), {"name": "icepop", "ratio_reference": {"importance": {"high": 0.6}}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "others", "names", "allowed", "allowed_others"), CONTRADICTIONS,
    ids=[" ".join(map(str, one[0].values())) + str(number) for number, one in enumerate(CONTRADICTIONS)],
)  # fmt: skip
def test_a_contradiction_is_one_line_with_names_and_repair(
    objective: dict[str, Any], others: dict[str, Any], names: tuple[str, ...], allowed: dict[str, Any],
    allowed_others: dict[str, Any],
) -> None:  # fmt: skip
    objective, allowed = (
        given | {"name": NAMES.get(given.get("name", ""), "magistral")} for given in (objective, allowed)
    )
    lines = mistakes(objective, **others)
    assert len(lines) == 1 and all(name in lines[0] for name in names), lines
    assert mistakes(allowed, **allowed_others) == []


def test_help_tells_every_setting_of_every_objective() -> None:
    text = describe_settings()
    for published in OBJECTIVES.values():
        for name, field in nested(published.kind).items():
            line = f"  [objective.{name}]\n" if tables_of(field.annotation) else f"  --objective.{name}=\n"
            assert field.description, f"{published.kind.__name__}.{name}"
            assert line in text


def test_a_difference_of_probabilities_has_bounds_in_any_order() -> None:
    """Of "divergence_masked" both bounds are distances from 0."""
    assert mistakes({"name": "dppo", "importance": {"low": 0.3, "high": 0.1}}) == []


def test_the_values_of_a_paper_all_have_an_effect() -> None:
    for name, published in PUBLISHED.items():
        missing = flat(published.values).items() - flat(read_objective(chosen(name)).in_force).items()
        assert not missing, f"{name}: {missing} of its paper have no effect"


def test_every_choice_of_a_setting_is_known_to_the_formulas() -> None:
    one = torch.zeros(1)
    inputs = LossInputs(one, one, one, one, completions_of([1]))
    assert set(get_args(KlGradient)) == GRADIENTS.keys()
    for name in get_args(LossAggregation):
        assert sum(token_weights([[2]], name, 4)[0]) > 0
    for table in tables_of(Importance):
        for name in set(kinds_of(table)) - {"none"}:
            weight = importance_weights(inputs, table(kind=name)).weight  # type: ignore[arg-type, call-arg]
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
