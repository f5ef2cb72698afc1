"""Reads settings from a TOML file, environment variables and options into a checked Config, and writes TOML.

The order is file < `MAESTRALE_TRAIN_SECTION__KEY=value` < `--section.key=value`: the last that sets a key counts.

Every mistake is one line that names the key, where it was set and what is allowed; an unknown key names the nearest
known one, in whatever section that is. Does not import torch.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.atomic_write import write_whole
from shared.config import Config
from shared.errors import ConfigError, command_of
from shared.json_reader import DEEP
from shared.section import merged
from shared.sections import Stage
from shared.user_file import missing

HOME = Path(__file__).resolve().parents[1]
"""folder of the checkout or installation; examples/ lies there"""
Table = dict[str, Any]
Complaints = Callable[[Config], Iterator[str]]
ACCEPT_CHANGES = "--accept-changes"
"""option to continue a run whose settings, data or model have changed (trainer/checkpoint/resume.py)"""
DASHBOARD = "--dashboard"
"""option to open the dashboard with a launch (trainer/dashboard.py)"""
VARIABLES = "MAESTRALE_TRAIN_"
"""beginning of the environment variables that set a training setting; two underscores mean a dot"""
Given = tuple[str, str, Any]
"""(the option or variable, the dotted key that it sets, the value)"""


def settings(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield all settings, dotted name and field, in the order of the file; the top level's own come first."""
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections.append((name, field.annotation))
        else:
            yield prefix + name, field
    for name, section in sections:
        yield from settings(section, f"{prefix}{name}.")


SETTINGS = dict(settings())
SECTIONS = {key.rpartition(".")[0] for key in SETTINGS} - {""} | {"objective"}


# ---- reading ---------------------------------------------------------------------------------------------------


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    complaints: Complaints | None = None,
    environment: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Config:
    """Read the file of `settings_path` (TOML), "" for none, apply overrides (["--steps=3", "--seed", "1"]), check
    everything.

    complaints: yields further mistakes, those of sections that others read. environment: variables of which those that
    begin with VARIABLES count too, before the overrides. given: settings of a program, which come after the file.

    Raises ConfigError that lists all mistakes, one line each.
    """
    file = settings_path(str(path))
    table = read_toml(file) if path else {}
    if file.is_relative_to(HOME / "examples"):
        table = from_home(table)
    table = merged(table, given or {})
    origin = put_all(table, [*read_environment(environment or {}), *read_overrides(overrides)])
    return check(table, str(file) if path else "the given settings", origin, complaints)


READY = sorted(path.parent.name for path in HOME.glob("examples/*/settings.toml"))
"""names of ready settings"""


def settings_path(name: str) -> Path:
    """The settings file of a name: a path, or where there is none one of examples/ ("quickstart")."""
    ready = HOME / "examples" / name / "settings.toml"
    return ready if re.fullmatch(r"\w+", name) and not Path(name).exists() and ready.is_file() else Path(name)


def from_home(value: Any) -> Any:
    """A table of a file of examples/, in which paths that begin with examples/ are those of the installation."""
    if isinstance(value, dict):
        return {key: from_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [from_home(inner) for inner in value]
    return str(HOME / value) if isinstance(value, str) and value.startswith("examples/") else value


def check(table: Table, path: str, origin: dict[str, str], complaints: Complaints | None = None) -> Config:
    """Return the Config of a table; `path` and `origin` (key -> option or variable) say where settings came from.

    Raises ConfigError that lists all mistakes, one line each.
    """
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        lines = [line for details in error.errors() for line in explain(details, path, origin)]
        raise ConfigError("\n".join(lines)) from error
    mistakes = [] if complaints is None else list(complaints(config))
    if mistakes:
        raise ConfigError("\n".join(f"{place_of(line, path, origin)}: {line}" for line in mistakes))
    return config


def load_run(run_dir: Path) -> Config:
    """The settings of a run, from its folder. Raises ConfigError for a folder that is none."""
    if (run_dir / "config.toml").is_file():
        return load(run_dir / "config.toml")
    known = (str(folder) for folder in Path("runs").glob("*/"))
    why = "it has no config.toml" if run_dir.is_dir() else missing(run_dir, "folder", "*/", known)
    raise ConfigError(f"{run_dir} is no run's folder: {why}")


def place_of(line: str, path: str, origin: dict[str, str]) -> str:
    """Return the option or variable that set the first setting of a message that one has set; else the file."""
    matches = ((re.search(rf"\b{re.escape(key)}\b", line), option) for key, option in origin.items())
    return min(((match.start(), option) for match, option in matches if match), default=(0, path))[1]


def read_toml(path: Path) -> Table:
    """Return the content of a TOML file. Raises ConfigError naming the file, and the line where it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: {missing(path, 'settings file', '*.toml', READY)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the settings file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the settings file is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        why = DEEP if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path}: not valid TOML: {why}") from error


def read_environment(environment: Mapping[str, str]) -> list[Given]:
    """Parse every variable that sets a training setting, e.g. MAESTRALE_TRAIN_ROLLOUT__GROUP_SIZE=8, by name."""
    names = [name for name in sorted(environment) if name.startswith(VARIABLES)]
    keys = [name.removeprefix(VARIABLES).lower().replace("__", ".") for name in names]
    return [(name, key, parse_value(key, environment[name])) for name, key in zip(names, keys, strict=True)]


def read_overrides(arguments: Sequence[str]) -> list[Given]:
    """Parse `--a.b=c` and `--a.b c`, in order. Raises ConfigError for anything else."""
    overrides: list[Given] = []
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith("--") or argument == "--":
            raise ConfigError(f"'{argument}': expected an option of the form --section.key=value")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            following = next(waiting, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"--{key}: a value is missing, as in --{key}=value")
            text = following
        overrides.append((f"--{key}", key, parse_value(key, text)))
    return overrides


def parse_value(key: str, text: str) -> Any:
    """Parse a value as TOML would; what is not TOML, or belongs to a setting that holds text, is text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"] if parsed.keys() == {"value"} else text
    field = SETTINGS.get(key)
    takes_text = field is not None and is_text(plain(field.annotation))
    return text if takes_text and not isinstance(value, str) else value


def plain(annotation: Any) -> Any:
    """The type of a setting that may also be left out (X of X | None)."""
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return kinds[0] if union and len(kinds) == 1 else annotation


def is_text(annotation: Any) -> bool:
    """Whether a setting holds a string (free, or one of a few)."""
    return annotation is str or typing.get_origin(annotation) is Literal  # all our choices are words


def put_all(table: Table, given: Sequence[Given]) -> dict[str, str]:
    """Set what was given in nested tables, in order; returns key -> the option or variable that set it last.

    A `kind` of [objective] comes first; another one drops the settings of the kind before.
    """
    for where, key, value in sorted(given, key=lambda setting: not setting[1].endswith(".kind")):
        put(table, key, value, where)
    return {key: where for where, key, _ in given}


def put(table: Table, key: str, value: Any, where: str) -> None:
    """Set a dotted key in nested tables. Raises ConfigError, which begins with `where`, if a part of the key is a
    value, not a section."""
    *sections, name = key.split(".")
    for depth, section in enumerate(sections):
        inner: Any = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}: {'.'.join(sections[: depth + 1])} is a setting, not a section")
        table = inner
    if name == "kind" and sections[:1] == ["objective"] and table.get(name, value) != value:
        table.clear()
    table[name] = value


# ---- mistakes --------------------------------------------------------------------------------------------------


def explain(error: ErrorDetails, path: str, origin: dict[str, str]) -> list[str]:
    """Explain one mistake that pydantic found in one line, or several for contradictions."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if not key:
        text = str(error["ctx"]["error"]) if "ctx" in error and "error" in error["ctx"] else error["msg"]
        return [f"{place_of(line, path, origin)}: {line}" for line in text.splitlines()]
    while key not in SETTINGS and key not in SECTIONS and error["type"] != "extra_forbidden" and len(location) > 1:
        location.pop()  # inside a list: name the setting itself
        key = ".".join(location)
    where = next((option for one, option in origin.items() if f"{one}.".startswith(f"{key}.")), path)
    if error["type"] == "extra_forbidden":
        return [f"{where}: unknown setting {key}{suggestion(key)}"]
    if error["type"] == "value_error":  # a setting's own check says what is wrong
        return [f"{where}: {error['ctx']['error']}"]
    given = literal(error["input"])
    if key in SECTIONS:
        return [f"{where}: {key} = {given}: this is a section, write [{key}] with its settings below"]
    relation = "=" if len(location) == len(error["loc"]) else "holds"
    return [f"{where}: {key} {relation} {given}: must be {type_name(SETTINGS[key])}"]


@functools.cache
def peer_settings() -> dict[str, dict[str, str]]:
    """What settings and objectives of other projects are here."""
    return tomllib.loads(Path(__file__).with_name("peer_settings.toml").read_text(encoding="utf-8"))


def suggestion(key: str) -> str:
    """Return "; did you mean ...?" with the nearest setting or section, or where to look when nothing is near."""
    peers, last = peer_settings(), key.rpartition(".")[2]
    if why := peers["refused"].get(key):
        return f": {why}. Remove it"
    if last in peers["settings"]:
        return f": that is {peers['settings'][last]} here"

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        named = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
        return max(whole, named) + 0.01 * whole  # the right name in the wrong section counts; the section breaks ties

    same = [candidate for candidate in SETTINGS if candidate.rpartition(".")[2] == last]
    near = same or [max([*SETTINGS, *sorted(SECTIONS)], key=likeness)]
    if likeness(near[0]) < 0.6:
        return f"; {command_of('trainer')} --help lists all settings"
    return f"; did you mean {' or '.join(near)}?"


# ---- showing ---------------------------------------------------------------------------------------------------


def type_name(field: FieldInfo) -> str:
    """The type and range of a setting, e.g. "a number, more than 0", "true or false", "one of auto, shm"."""
    annotation = plain(field.annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table of settings"
    if origin is dict:
        if arguments[1] is Any:
            return "a table of settings"
        if typing.get_origin(arguments[1]) is dict:
            return "a table of name = table"
        if arguments[1] is str:
            return "a table of name = text"
        return "a table of name = finite number" + (", at least 0" if typing.get_origin(arguments[1]) else "")
    if origin is list and typing.get_origin(arguments[0]) is Literal:
        return "a list of " + ", ".join(json.dumps(argument) for argument in typing.get_args(arguments[0]))
    if origin is list and issubclass(arguments[0], BaseModel):
        return f"a list of tables with {', '.join(arguments[0].model_fields)}"
    if origin in (list, tuple):
        inner = {str: "texts", int: "whole numbers", float: "numbers"}.get(arguments[0], "values")
        return f"a list of {inner}" if origin is list or ... in arguments else f"{len(arguments)} {inner}"
    words = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}
    kind = words.get(annotation, str(annotation))
    limits = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    ranges = [
        f"{limits[name]} {getattr(bound, name):g}"
        for bound in field.metadata
        for name in limits
        if hasattr(bound, name)
    ]
    return ", ".join([kind, *ranges])


def meaning(field: FieldInfo) -> str:
    """What a setting is, on one line."""
    return " ".join((field.description or "").split())


def describe() -> str:
    """Every setting with type, default and meaning, for --help."""
    lines: list[str] = []
    section = None
    for key, field in SETTINGS.items():
        if key in SECTIONS:  # whoever reads it describes it
            continue
        if (heading := key.rpartition(".")[0]) != section:
            section = heading
            lines.append(f"\n[{section}]" if section else "")
        default = field.get_default(call_default_factory=True)
        lines.append(f"  --{key}={'(not set)' if default is None else literal(default)}")
        lines.append(f"        {meaning(field)} ({type_name(field)})")
    lines.append("\n[[stages]], each with")
    for name, field in Stage.model_fields.items():
        default = "" if field.is_required() else f" = {literal(field.get_default())}"
        lines += [f"  {name}{default}", f"        {meaning(field)} ({type_name(field)})"]
    return "\n".join(lines).strip("\n") + "\n"


def literal(value: Any) -> str:
    """Return a value as TOML writes it; what TOML cannot write, as Python does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        return literal(value.model_dump(exclude_defaults=True))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(name)} = {literal(item)}" for name, item in value.items()) + "}"
    return repr(value)


def to_toml(config: Config, changed: bool = False) -> str:
    """Return the resolved settings as TOML with their meanings as comments; loading it gives the same Config. changed:
    leave out meanings, and settings that are the default."""
    lines = [] if changed else ["# every setting of this run, defaults included"]
    section = ""
    for key, field in SETTINGS.items():
        value: Any = config
        for word in key.split("."):
            value = getattr(value, word)
        if key in SECTIONS or (changed and value == field.get_default(call_default_factory=True)):
            continue
        heading, _, name = key.rpartition(".")
        if heading != section:
            section = heading
            lines.append(f"\n[{section}]")
        written = f"# {name} is not set" if value is None else f"{name} = {literal(value)}"
        lines += [*[f"# {meaning(field)}"] * (not changed), written]
    lines += ["\n[objective]", *[f"# {meaning(SETTINGS['objective'])}"] * (not changed)]
    lines += [f"{name} = {literal(value)}" for name, value in config.objective.items()]
    return "\n".join(lines) + "\n"


def write(config: Config, path: Path) -> None:
    """Write the resolved settings into the run folder, under another name and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_toml(config))
