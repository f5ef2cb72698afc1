"""Objectives by name: the values of their papers, what a departure drops, what nothing reads, what makes no sense.

The tables lie beside this file, a line a case: papers.jsonl, departures.jsonl, unread.jsonl, mistakes.jsonl,
contradictions.jsonl.
"""

from __future__ import annotations

import json
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
from trainer.objectives.registry import OBJECTIVES, complaints, needs, objective_of, read_objective
from trainer.objectives.tables import kinds_of, nested, tables_of

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "objectives.md"
TEACHER = {"teacher": {"kind": "local", "path": "models/teacher"}}


def rows(name: str) -> list[dict[str, Any]]:
    """The cases of a table beside this file."""
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


PAPERS = {row["name"]: row for row in rows("papers")}


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
    missing = flat(PUBLISHED[name].values).items() - flat(full.in_force).items()
    assert not missing, "values of its paper have no effect"


def test_only_distill_needs_another_setting() -> None:
    assert {name for name in NAMES if mistakes({"name": NAMES[name]})} == {"distill"}
    assert len(mistakes({"name": "distill"})) == 1


@pytest.mark.parametrize("name", NAMES)
def test_values_and_needs_of_each_paper(name: str) -> None:
    paper, full = PAPERS[name], read_objective(chosen(name))
    assert {setting: full.in_force.get(setting) for setting in paper["values"]} == paper["values"]
    wanted = {Need[need.upper()] for need in paper["needs"]}
    assert full.needs == wanted
    with_divergence = read_objective(chosen(name, kl={"weight": 0.1}))
    assert with_divergence.needs == wanted | {Need.REFERENCE}
    assert with_divergence.kl is not None and with_divergence.kl.gradient == "return"
    imitating = {"mode": "sft", "sft": {"steps": 1, "demonstrations": "some.jsonl"}}
    assert needs(Config.model_validate({"objective": chosen(name)})) == wanted
    assert needs(Config.model_validate({"objective": chosen(name), **imitating})) == set(), "imitation needs nothing"


@pytest.mark.parametrize("row", rows("departures"), ids=lambda row: str(row["given"]))
def test_another_kind_drops_the_values_that_its_paper_gave_the_old_one(row: dict[str, Any]) -> None:
    full = read_objective(row["given"]).in_force
    assert {setting: full[setting] for setting in row["in_force"]} == row["in_force"]
    assert mistakes(row["given"]) == []


@pytest.mark.parametrize("row", rows("unread"), ids=lambda row: "-".join(row["unread"]))
def test_settings_that_nothing_reads_are_found_and_refused(row: dict[str, Any]) -> None:
    given, unread = row["given"], row["unread"]
    rest = {name: value for name, value in given.items() if name not in unread}
    lines, name = sorted(mistakes(given)), read_objective(rest).name
    assert [line.split(" ")[0] for line in lines] == [f"objective.{setting}" for setting in unread]
    assert all(line.endswith("remove it") and f'objective.name = "{name}"' in line for line in lines)
    assert mistakes(rest) == []


@pytest.mark.parametrize("row", rows("mistakes"), ids=lambda row: str(row["given"]))
def test_a_mistake_is_one_line_that_says_what_to_write(row: dict[str, Any]) -> None:
    (line,) = mistakes(row["given"])
    assert line.startswith(row["says"][0]) and all(words in line for words in row["says"]), line


@pytest.mark.parametrize("row", rows("contradictions"), ids=lambda row: f"{row['given']} {row['others']}")
def test_a_contradiction_is_one_line_with_names_and_repair(row: dict[str, Any]) -> None:
    given, allowed = (row[key] | {"name": NAMES[row[key].get("name", "magistral")]} for key in ("given", "allowed"))
    lines = mistakes(given, **row["others"])
    assert len(lines) == 1 and all(name in lines[0] for name in row["says"]), lines
    assert mistakes(allowed, **row["allowed_others"]) == []


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
