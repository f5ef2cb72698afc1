"""The objectives by name, and how `[objective]` of a settings file becomes one.

`publish` registers a name with its class and the values of its paper. All files of this folder are read; a user's is
named by its path, `[objective] name = "my_loss.py:mine"`, and runs as a module of the trainer (examples/objectives/).
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
from shared.section import Section, merged
from shared.settings_file import peer_settings
from shared.user_file import missing, run_file
from trainer import objectives
from trainer.objectives.objective import Need, Objective
from trainer.objectives.tables import explain


class PublishedObjective(NamedTuple):
    """An objective as it was published."""

    kind: type[Objective]
    source: str
    values: dict[str, Any]
    """where it differs from the defaults of its class, as a settings file has it"""


OBJECTIVES: dict[str, PublishedObjective] = {}
"""the objectives of this folder by name; `load_all` fills it"""
EXAMPLES = Path("examples", "objectives")
"""folder of the repository with objectives that are chosen by their path"""


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
                f'objective.name = "{name}": {missing(Path(file))} (paths start at the working directory)'
            )
        known = _run_once(path)
    if short in known:
        return known[short]
    if not file and (Path(__file__).parents[2] / EXAMPLES / f"{short}.py").is_file():
        raise ConfigError(f'objective.name = "{name}": it is an example, write "{EXAMPLES / short}.py:{short}"')
    if file:
        raise ConfigError(f'objective.name = "{name}": {path} was read, and publishes {", ".join(known) or "nothing"}')
    near = difflib.get_close_matches(short, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    hint = f"{peer}. " if (peer := peer_settings()["objectives"].get(short)) else hint
    raise ConfigError(
        f'objective.name = "{name}": {hint}It must be one of {", ".join(OBJECTIVES)}, or FILE.py:NAME with a name that '
        "the file publishes"
    )


# ---- settings ------------------------------------------------------------------------------------------------------


def read_objective(given: Mapping[str, Any]) -> Objective:
    """The objective of [objective]: the defaults of its class, changed by its paper's values, changed by what is given.

    A table with another `kind` replaces that of the paper. Raises ConfigError that lists all mistakes, one line each.
    """
    name = str(given.get("name", "magistral"))
    kind, _, paper = find(name)
    table = merged(merged(defaults(kind), paper), {**given, "name": name})
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        others = {published.kind for published in OBJECTIVES.values()}
        raise ConfigError("\n".join(explain(kind, name, details, others) for details in error.errors())) from error


def defaults(kind: type[Objective]) -> dict[str, Any]:
    """The defaults of a class, as a settings file has them."""
    values = {name: field.get_default() for name, field in kind.model_fields.items()}
    return {name: value.model_dump() if isinstance(value, Section) else value for name, value in values.items()}


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
    lines = list(objective.contradictions(config))
    yield from lines
    for stage, now in zip(config.stages, config.every_stage, strict=False):
        new = list(complaints(now))
        yield from (f"stages.{stage.name}: {line}" for line in new if line not in lines)
        before, after = objective.fixed, objective.fixed if new else objective_of(now).fixed
        if changed := [name for name in before.keys() | after if before.get(name) != after.get(name)]:
            yield (
                f"stages.{stage.name} changes objective.{min(changed)}, and a model that is loaded at the start serves "
                "the whole run: give all stages and [objective] the same"
            )
