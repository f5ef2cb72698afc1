"""Objectives by name: the values of their papers, what a departure drops, what nothing reads, what makes no sense, and
what docs/objectives.md says of them. The tables lie beside this file, a line a case."""

import ast
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
from tests.tables import read_table
from tests.trainer.objectives.named import EXAMPLES, NAMES, PUBLISHED
from trainer.__main__ import main
from trainer.objectives import registry
from trainer.objectives.advantage import Advantage, GroupFilter, LossAggregation, Scale, token_weights
from trainer.objectives.importance import Importance, importance_weights
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.kl import GRADIENTS, KlGradient, Reference
from trainer.objectives.loss import policy_loss
from trainer.objectives.objective import Need, Objective
from trainer.objectives.page import describe, describe_all, describe_settings, described, table
from trainer.objectives.registry import OBJECTIVES, complaints, needs, objective_of, read_objective
from trainer.objectives.tables import kinds_of, nested, tables_of

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
TEACHER = {"teacher": {"kind": "local", "path": "models/teacher"}}


def rows(name: str) -> list[dict[str, Any]]:
    return read_table(f"trainer/objectives/{name}")


PAPERS = {row["name"]: row for row in rows("papers")}


def chosen(name: str, **settings: Any) -> dict[str, Any]:
    """[objective] of a name, with the teacher that distill cannot do without."""
    return {"name": NAMES.get(name, name), **(TEACHER if name == "distill" else {}), **settings}


def mistakes(objective: dict[str, Any], **others: Any) -> list[str]:
    """The mistakes and contradictions of a run with these settings, one line each; none if it is allowed."""
    return list(complaints(Config.model_validate({"objective": objective, **others})))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_run_with_the_values_and_needs_of_its_paper(name):
    """It is read back as written, and all that has an effect may also be set: nothing changes."""
    config = Config.model_validate({"objective": chosen(name)})
    again = Config.model_validate(tomllib.loads(to_toml(config)))
    full = read_objective(chosen(name))
    assert again == config and objective_of(again) == objective_of(config) == full == read_objective(full.in_force)
    assert mistakes(chosen(name)) == mistakes(full.in_force) == []
    assert len(mistakes({"name": NAMES[name]})) == (name == "distill"), "only it needs another setting"
    published, paper = PUBLISHED[name], PAPERS[name]
    assert published.source and flat(published.values).items() <= flat(full.in_force).items()
    assert {setting: full.in_force.get(setting) for setting in paper["values"]} == paper["values"]
    expected = {Need[need.upper()] for need in paper["needs"]}
    with_divergence = read_objective(chosen(name, kl={"weight": 0.1}))
    assert full.needs == needs(config) == expected and with_divergence.needs == expected | {Need.REFERENCE}
    assert with_divergence.kl is not None and with_divergence.kl.gradient == "return"
    imitating = {"mode": "sft", "sft": {"steps": 1, "demonstrations": "some.jsonl"}}
    assert needs(Config.model_validate({"objective": chosen(name), **imitating})) == set(), "imitation needs nothing"


@pytest.mark.parametrize("row", rows("departures"), ids=lambda row: str(row["given"]))
def test_another_kind_drops_the_values_that_its_paper_gave_the_old_one(row):
    full = read_objective(row["given"]).in_force
    assert {setting: full[setting] for setting in row["in_force"]} == row["in_force"]
    assert mistakes(row["given"]) == []


@pytest.mark.parametrize("row", rows("unread"), ids=lambda row: "-".join(row["unread"]))
def test_settings_that_nothing_reads_are_found_and_refused(row):
    given, unread = row["given"], row["unread"]
    rest = {name: value for name, value in given.items() if name not in unread}
    lines, name = sorted(mistakes(given)), read_objective(rest).name
    assert [line.split(" ")[0] for line in lines] == [f"objective.{setting}" for setting in unread]
    assert all(line.endswith("remove it") and f'objective.name = "{name}"' in line for line in lines)
    assert mistakes(rest) == []


@pytest.mark.parametrize("row", rows("mistakes"), ids=lambda row: str(row["given"]))
def test_a_mistake_is_one_line_that_says_what_to_write(row):
    (line,) = mistakes(row["given"])
    assert line.startswith(row["says"][0]) and all(words in line for words in row["says"]), line


@pytest.mark.parametrize("row", rows("contradictions"), ids=lambda row: f"{row['given']} {row['others']}")
def test_a_contradiction_is_one_line_with_names_and_repair(row):
    given, allowed = (row[key] | {"name": NAMES[row[key].get("name", "magistral")]} for key in ("given", "allowed"))
    lines = mistakes(given, **row["others"])
    assert len(lines) == 1 and all(name in lines[0] for name in row["says"]), lines
    assert mistakes(allowed, **row["allowed_others"]) == []


def test_options_choose_a_kind_and_its_settings(tmp_path):
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


def test_an_objective_of_ones_own_is_a_file(tmp_path, monkeypatch):
    """The example of docs/objectives.md, word for word, through the loss of a micro-batch."""
    (example,) = re.findall(r"```python objective\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "OBJECTIVES", dict(OBJECTIVES))
    Path("my_loss.py").write_text(example)
    Path("bad.py").write_text("x = 1\ny = x / 0\n")
    Path("ends.py").write_text("raise SystemExit(3)\n")
    config = Config.model_validate({"objective": {"name": "my_loss.py:leaky", "leak": 0.5}})
    assert list(complaints(config)) == []
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), torch.ones(2), completions_of([1, 1]))
    policy_loss(inputs, torch.zeros(2), objective_of(config)).loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 0.5]
    for objective, message in (
        ({"name": "my_loss.py:leaky", "clip_low": 0.1}, "objective.clip_low = 0.1 has no effect"),
        ({"name": "my_los.py:leaky"}, "there is no such file"),
        ({"name": "my_loss.py:leaki"}, f"{tmp_path / 'my_loss.py'} was read, and publishes leaky"),
        ({"name": "bad.py:mine"}, f"{tmp_path / 'bad.py'} fails with ZeroDivisionError: division by zero in line 2"),
        ({"name": "ends.py:mine"}, "ends.py fails with SystemExit: 3 in line 1"),
    ):
        (line,) = mistakes(objective)
        assert message in line


def test_help_tells_every_setting_of_every_objective():
    text = describe_settings()
    for published in OBJECTIVES.values():
        for name, field in nested(published.kind).items():
            line = f"  [objective.{name}]\n" if tables_of(field.annotation) else f"  --objective.{name}=\n"
            assert field.description, f"{published.kind.__name__}.{name}"
            assert line in text


def test_every_choice_of_a_setting_is_known_to_the_formulas():
    ones = torch.zeros(1)
    inputs = LossInputs(ones, ones, ones, ones, completions_of([1]))
    assert set(get_args(KlGradient)) == GRADIENTS.keys()
    assert all(sum(token_weights([[2]], name, 4)[0]) > 0 for name in get_args(LossAggregation))
    for settings in tables_of(Importance):
        for name in set(kinds_of(settings)) - {"none"}:
            assert importance_weights(inputs, settings(kind=name)).weight.tolist() == [1.0]
    # both bounds of "divergence_masked" are distances from 0
    assert mistakes({"name": "dppo", "importance": {"low": 0.3, "high": 0.1}}) == []


@pytest.mark.parametrize(
    ("objective", "reward", "refused"),
    [("magistral", {}, True), ("magistral", {"extra": {"argued": 1.0}}, False), ("jepo", {}, False)],
)
def test_hidden_answers_need_an_objective_or_a_reward_that_does_not_see_them(objective, reward, refused):
    config = Config()
    half = config.data.model_copy(update={"open_share": 0.5})
    config = config.model_copy(update={"data": half, "reward": config.reward.model_copy(update=reward)})
    lines = read_objective({"name": objective}).contradictions(config)
    assert any("data.open_share" in line for line in lines) is refused


WORDS = {
    Need.REFERENCE: "reference", Need.OLD_LOGPROBS: "old log-probs", Need.TEACHER: "teacher", Need.VALUE: "value head",
    Need.START_VALUES: "soft values", Need.GROUPS: "whole groups", Need.GROUND_TRUTH: "ground-truth answers",
}  # fmt: skip
"""of the column `needs`"""
NUMBERS = (
    "clip_low", "clip_high", "importance.low", "importance.high", "ratio_reference.importance.low",
    "ratio_reference.importance.high", "beta", "value_samples", "value_learning_rate", "answer_weight",
    "missing_answer_penalty", "desirable_above",
)  # fmt: skip
ROWS = {**described("name"), **described("example")}


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_page_has_source_needs_numbers_and_tests_and_one_screen_shows_it(name):
    row, full, published = ROWS[name], read_objective(chosen(name)), PUBLISHED[name]
    assert all(row.values()) and row.keys() > {"when to take it", "formula", "needs", "bias and variance", "test"}
    papers = [re.findall(r"\d{4}\.\d{5}", source) for source in (row["source"], published.source)]
    assert papers[0] == papers[1]
    assert set(row["needs"].split(", ")) == ({WORDS[need] for need in full.needs} or {"nothing"})
    written = set(map(float, re.findall(r"\d+(?:\.\d+)?", row["formula"])))
    assert {value for number in NUMBERS if (value := flat(full.in_force).get(number))} <= written
    named = [test.split("::") for test in re.findall(r"`([^`]+)`", row["test"])]
    trees = {file: ast.parse((HERE / file).read_text(encoding="utf-8")) for file, _ in named}
    tests = {(file, node.name) for file in trees for node in trees[file].body if isinstance(node, ast.FunctionDef)}
    assert named and {(file, function) for file, function in named} <= tests
    lines = list(describe(NAMES[name]))
    assert len(lines) <= 40 and all(len(line) <= 120 for line in lines)
    assert " ".join(row["formula"].replace("`", "").split()) in " ".join(" ".join(lines).split())
    values = {line.split()[0]: line for line in lines[lines.index("") + 1 :]}
    shown = flat(read_objective({"name": NAMES[name]}).in_force).keys() - {"name"}
    assert shown <= values.keys()
    assert all((published.source in values[setting]) == (setting in flat(published.values)) for setting in shown)


def test_every_objective_value_and_need_has_a_row():
    """The names of a row of losses share a class, and the settings that only its loss reads."""
    assert sorted(ROWS) == sorted(NAMES) and len(table("name")) == len(OBJECTIVES)
    assert [*described("example")] == EXAMPLES
    unions = {"importance.kind": Importance, "advantage.kind": Advantage, "reference.kind": Reference}
    choices = {setting: [kind for each in tables_of(union) for kind in kinds_of(each)]
               for setting, union in unions.items()}  # fmt: skip
    literals = {"advantage.scale": Scale, "loss_aggregation": LossAggregation, "filter_groups_by": GroupFilter,
                "kl.gradient": KlGradient}  # fmt: skip
    choices |= {setting: list(get_args(literal)) for setting, literal in literals.items()}
    for setting, kinds in choices.items():
        assert sorted(row[f"`{setting}`"].strip("`") for row in table(f"`{setting}`")) == sorted(kinds)
    bounds = {
        kind: [field.default for name, field in settings.model_fields.items() if name in ("low", "high")]
        for settings in tables_of(Importance)
        for kind in kinds_of(settings)
    }
    for row in table("`importance.kind`"):
        written = [float(number) for number in row["bounds unless set"].split(", ") if number]
        assert written == bounds[row["`importance.kind`"].strip("`")]
    losses = {name: row for row in table("names") for name in re.findall(r"`(\w+)`", row["names"])}
    assert sorted(losses) == sorted(NAMES)
    for name, row in losses.items():
        reads = PUBLISHED[name].kind.model_fields.keys() - Objective.model_fields.keys()
        assert set(re.findall(r"`(\w+)`", row["reads"])) == reads, name
    assert sorted(row["need"] for row in table("need")) == sorted(WORDS.values()) and WORDS.keys() == set(Need)


@pytest.mark.parametrize("example", re.findall(r"```toml example\n(.*?)```", PAGE, re.DOTALL))
def test_an_example_can_be_run(example):
    config = Config.model_validate(tomllib.loads(example))
    assert config.objective and not list(complaints(config))


def test_the_command_lists_shows_and_names_the_nearest_and_the_page_has_the_error_that_comes(
    capsys, tmp_path, monkeypatch
):
    text = "\n".join(describe_all())
    assert all(re.search(rf"^{re.escape(full)}\b", text, re.MULTILINE) for full in NAMES.values())
    assert main(["objectives", "grp"]) == 2 and "did you mean grpo?" in capsys.readouterr().err
    assert main(["objectives", "gspo"]) == 0 and "clip_low" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    Path("my_run.toml").write_text('[objective]\nname = "gspo"\nbeta = 0.2\n')
    with pytest.raises(ConfigError) as caught:
        load("my_run.toml", complaints=complaints)
    assert f"\nerror: {caught.value}\n" in PAGE
