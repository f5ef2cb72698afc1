"""The settings of an objective's class with those of its tables, and one line for each mistake in them.

A table with kinds is a union of classes, each with the settings that its kinds read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.section import Section
from shared.settings_file import literal, peer_settings, type_name


def tables_of(annotation: Any) -> list[type[Section]]:
    """The classes of tables that a setting of this type may be; none for one that is a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [table for inner in get_args(annotation) for table in tables_of(inner)]


def kinds_of(table: type[Section]) -> tuple[str, ...]:
    """The values of `kind` that a table may have; none for a table without it."""
    return get_args(table.model_fields["kind"].annotation) if "kind" in table.model_fields else ()


def nested(kind: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Dotted name -> field of every setting of a class and of its tables, whatever their kind."""
    fields: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        fields.setdefault(prefix + name, field)
        for table in tables_of(field.annotation):
            fields = nested(table, f"{prefix}{name}.") | fields
    return fields


def describe_tables(field: FieldInfo) -> str:
    """The kinds of a table, each with the settings that it reads, on one line."""
    lines = []
    for table in tables_of(field.annotation):
        read = ", ".join(name for name in table.model_fields if name != "kind")
        kinds = " or ".join(map(literal, kinds_of(table)))
        lines.append(f"{kinds} ({read})" if kinds and read else kinds or read)
    return f"kind = {'; '.join(lines)}" if kinds_of(tables_of(field.annotation)[0]) else "; ".join(lines)


def explain(kind: type[Section], name: str, details: ErrorDetails, others: Iterable[type[Section]]) -> str:
    """One line about a mistake that pydantic reports: the setting, and what to write. kind, name: of the objective.
    others: the classes of the other objectives."""
    known, path = nested(kind), list[str]()
    for step in map(str, details["loc"]):  # after a table with kinds comes its kind, which is no setting
        if ".".join([*path, step]) in known or step == str(details["loc"][-1]) and details["type"] == "extra_forbidden":
            path.append(step)
    setting, value = f"objective.{'.'.join(path)}", details["input"]
    field = known.get(".".join(path))
    if field is None or details["type"] == "extra_forbidden":
        return unknown(kind, name, path, value, others)
    if not tables_of(field.annotation):
        if details["type"] == "missing":
            return f"{setting} is missing: it must be {type_name(field)}"
        return f"{setting} = {literal(value)}: must be {type_name(field)}"
    tables = describe_tables(field)
    kinds = [kind for table in tables_of(field.annotation) for kind in kinds_of(table)]
    if not isinstance(value, Mapping):
        write = f"write {setting}.kind = {literal(value)}" if value in kinds else f"write [{setting}] with its settings"
        return f"{setting} is a table, not a value: {write} ({tables})"
    near = difflib.get_close_matches(str(value.get("kind")), kinds, n=1)
    hint = f"did you mean {near[0]}? It" if near else "it"
    given = f" = {literal(value['kind'])}" if "kind" in value else " is missing"
    return f"{setting}.kind{given}: {hint} must be one of {tables.removeprefix('kind = ')}"


def unknown(kind: type[Section], name: str, path: Sequence[str], value: Any, others: Iterable[type[Section]]) -> str:
    """One line about a setting that a class, or the chosen kind of a table, does not have."""
    setting, known = f"objective.{'.'.join(path)}", nested(kind)
    if len(path) > 1 and ".".join(path) in known:
        table = ".".join(path[:-1])
        return (
            f"{setting} has no effect with this objective.{table}.kind: remove it, or choose another "
            f"({describe_tables(known[table])})"
        )
    names = {f"_{inner.replace('.', '_')}": inner for inner in known if "." in inner}
    if moved := [inner for flat, inner in names.items() if len(path) == 1 and flat.endswith(f"_{path[0]}")]:
        table = moved[0].rpartition(".")[0]
        return f"{setting} is objective.{moved[0]} now: [objective.{table}] has {describe_tables(known[table])}"
    here = peer_settings()["settings"].get(".".join(path))
    if any(".".join(path) in nested(other) for other in others):
        meant = f" (what other projects call {path[0]} is {here} here)" if here else ""
        return f'{setting} = {literal(value)} has no effect with objective.name = "{name}"{meant}: remove it'
    if here:
        return f"unknown setting {setting}: that is {here} here"
    near = difflib.get_close_matches(".".join(path), known, n=1)
    return f"unknown setting {setting}" + (f"; did you mean objective.{near[0]}?" if near else "")
