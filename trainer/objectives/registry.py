"""The objectives by name, and how `[objective]` of a settings file becomes one.

`publish` registers a name with its class and the values of its paper. All files of this folder are read; a file of a
user's own is named by its path: `[objective] name = "my_loss.py:mine"`. It runs as a module of the trainer does.
examples/objectives/ has such files.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from shared.config import Config
from shared.errors import ConfigError
from shared.settings_file import literal, type_name
from shared.user_file import run_file
from trainer import objectives
from trainer.objectives.objective import CHOICES, Need, Objective


class PublishedObjective(NamedTuple):
    """An objective as it was published."""

    kind: type[Objective]
    source: str
    values: dict[str, Any]
    """where it differs from the defaults of its class and of CHOICES"""


OBJECTIVES: dict[str, PublishedObjective] = {}
"""by name; `load_all` fills it"""
EXAMPLES = Path("examples", "objectives")
"""folder of the repository with objectives that are chosen by their path"""
CONDITIONAL = {name for kinds in CHOICES.values() for own in kinds.values() for name in own}
"""settings that only have an effect with certain values of others"""
FIXED = (
    "reference", "reference_every", "reference_share", "teacher", "teacher_model", "teacher_key_variable",
    "value_learning_rate", "value_samples",
)  # fmt: skip
"""settings of the models beside the policy, which are loaded at the start: the same in all stages"""
RENAMED = {
    "normaliser": "loss_aggregation",
    "diverse_by": "filter_groups_by",
    "denominator": "ratio_reference",
    "correction": "importance",
    "correction_low": "importance_low",
    "correction_high": "importance_high",
    "bound_for": "bound_groups",
    "cue_penalty": "missing_answer_penalty",
}
"""former name of a setting -> its name"""


def publish(name: str, kind: type[Objective], source: str, **values: Any) -> None:
    """Register an objective. source: paper or place. values: settings of the paper. Raises ConfigError for a name that
    is taken, and for settings that its class does not have."""
    if (known := OBJECTIVES.get(name)) is not None:
        raise ConfigError(f"there are two objectives named '{name}', of {known.source} and of {source}: rename one")
    if unknown := values.keys() - kind.model_fields.keys():
        raise ConfigError(f"objective '{name}': {kind.__name__} has no setting {', '.join(sorted(unknown))}")
    OBJECTIVES[name] = PublishedObjective(kind, source, values)


@functools.cache
def load_all() -> None:
    """Import every module of this folder, so that all its objectives are published."""
    for module in pkgutil.iter_modules(objectives.__path__):
        importlib.import_module(f"{objectives.__name__}.{module.name}")
    for name in sorted(OBJECTIVES):  # the same order whichever was imported first
        OBJECTIVES[name] = OBJECTIVES.pop(name)


@functools.cache
def _run_once(path: Path) -> dict[str, PublishedObjective]:
    """The objectives that a file publishes, by name. They are those of the file: OBJECTIVES stays as it was."""
    before = dict(OBJECTIVES)
    try:
        run_file(path, "objective.name")
        return {name: published for name, published in OBJECTIVES.items() if name not in before}
    finally:
        OBJECTIVES.clear()
        OBJECTIVES.update(before)


def find(name: str) -> PublishedObjective:
    """What was published under a name. Raises ConfigError for an unknown name or a file that fails."""
    load_all()
    file, _, short = name.rpartition(":") if ".py:" in name else ("", "", name)
    if not file and name.endswith(".py"):
        raise ConfigError(f'objective.name = "{name}": write FILE.py:NAME, the name being one that the file publishes')
    known = OBJECTIVES
    if file:
        path = Path(file).resolve()
        if not path.is_file():
            raise ConfigError(
                f'objective.name = "{name}": there is no file {path} (paths start at the working directory)'
            )
        known = _run_once(path)
    if short in known:
        return known[short]
    if not file and (Path(__file__).parents[2] / EXAMPLES / f"{short}.py").is_file():
        raise ConfigError(f'objective.name = "{name}": it is an example, write "{EXAMPLES / short}.py:{short}"')
    near = difflib.get_close_matches(short, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f'objective.name = "{name}": {hint}It must be one of {", ".join(OBJECTIVES)}, or FILE.py:NAME with a name that '
        "the file publishes"
    )


# ---- settings ------------------------------------------------------------------------------------------------------


def read_objective(given: Mapping[str, Any]) -> Objective:
    """The objective of [objective]: what is given, else what its paper says, else the default of the choice that reads
    it; None where nothing does.

    A paper's values count for what its own choices read: with another advantage, `scale` is that one's. Raises
    ConfigError that lists all mistakes, one line each.
    """
    name = str(given.get("name", "magistral"))
    kind, _, paper = find(name)
    given = {**given, "name": given.get("name", "magistral")}
    paper = {field: info.default for field, info in kind.model_fields.items()} | paper
    values, read = {**paper, **given}, set(kind.own)
    for choice, kinds in CHOICES.items():
        if choice in CONDITIONAL and choice not in read or choice not in kind.model_fields:
            continue
        value = values[choice]
        key = value if isinstance(value, str) and value in kinds else bool(value)
        for setting, default in kinds.get(key, {}).items():
            read.add(setting)
            if setting not in given:
                of_paper = paper[setting] if value == paper[choice] else None
                values[setting] = default if of_paper is None else of_paper
    unread = [one for one in given if one in CONDITIONAL - read or one not in kind.model_fields and _somewhere(one)]
    values = {one: None if one in CONDITIONAL - read else value for one, value in values.items() if one not in unread}
    values |= {one: None for one in unread if one in kind.model_fields}
    try:
        objective = kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(kind, dict(found)) for found in error.errors())) from error
    if unread:
        raise ConfigError("\n".join(
            f'objective.{one} = {given[one]} has no effect with objective.name = "{name}" as set '
            f"({_choices(objective)}): remove it" for one in sorted(unread)
        ))  # fmt: skip
    return objective


def _somewhere(setting: str) -> bool:
    return any(setting in published.kind.model_fields for published in OBJECTIVES.values())


def _choices(objective: Objective) -> str:
    names = ("ratio_reference", "importance", "advantage", "kl", "reference", "teacher")
    found = objective.in_force
    return ", ".join(f"{name} {found[name]}" for name in names if found.get(name) not in (None, "", 0))


def _explain(kind: type[Objective], found: dict[str, Any]) -> str:
    setting = str(found["loc"][0]) if found["loc"] else ""
    if found["type"] == "extra_forbidden":
        if setting in RENAMED:
            return f"unknown setting objective.{setting}; it is called objective.{RENAMED[setting]} now"
        if setting == "loss":
            return "unknown setting objective.loss: objective.name chooses the loss, with the settings of its paper"
        near = difflib.get_close_matches(setting, kind.model_fields, n=1)
        return f"unknown setting objective.{setting}" + (f"; did you mean objective.{near[0]}?" if near else "")
    return f"objective.{setting} = {literal(found['input'])}: must be {type_name(kind.model_fields[setting])}"


@functools.lru_cache(maxsize=256)
def _read(table: str) -> Objective:
    return read_objective(json.loads(table))


def objective_of(config: Config) -> Objective:
    """The objective of a run's settings. Raises ConfigError that lists all mistakes in [objective]."""
    return _read(json.dumps(config.objective, sort_keys=True))


def needs(config: Config) -> set[Need]:
    """What the objectives of a run, of all its stages, ask of it; nothing where it only imitates."""
    return set[Need]().union(*(objective_of(one).needs for one in config.every_stage)) if config.mode == "rl" else set()


def complaints(config: Config) -> Iterator[str]:
    """Yield every mistake in [objective] and in that of the stages, and what contradicts other settings, one line
    each."""
    try:
        objective = objective_of(config)
    except ConfigError as error:
        yield from str(error).splitlines()
        return
    told = list(objective.contradictions(config))
    yield from told
    for stage, now in zip(config.stages, config.every_stage, strict=False):
        found = list(complaints(now))
        yield from (f"stages.{stage.name}: {line}" for line in found if line not in told)
        if not found and (changed := [one for one in FIXED if _value(now, one) != getattr(objective, one, None)]):
            yield (
                f"stages.{stage.name} changes objective.{changed[0]} to {_value(now, changed[0])}, and what stands "
                "beside the policy is there for the whole run: give all stages and [objective] the same"
            )


def _value(config: Config, setting: str) -> Any:
    return getattr(objective_of(config), setting, None)


def describe_settings() -> str:
    """Every setting of every objective with its type and meaning, for --help."""
    load_all()
    lines: list[str] = []
    told: set[str] = set()
    kinds: list[type[Objective]] = [Objective, *(published.kind for published in OBJECTIVES.values())]
    for kind in dict.fromkeys(kinds):
        names = [name for name, published in OBJECTIVES.items() if published.kind is kind]
        own = [setting for setting in kind.model_fields if setting not in told]
        if own and names:
            lines.append(f"\n  of {', '.join(names)} also")
        for setting in own:
            field = kind.model_fields[setting]
            lines.append(f"  --objective.{setting}=")
            lines.append(f"        {' '.join((field.description or '').split())} ({type_name(field)})")
        told |= set(own)
    return "\n".join(lines) + "\n"
