"""`python -m trainer objectives`: the objectives by name, and `... objectives dapo`: all about one, on one screen.

Formulas, needs and uses are those of docs/objectives.md; values and their sources are those of the code.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from shared.errors import command_of
from shared.section import flat
from shared.settings_file import literal, type_name
from trainer.objectives.objective import Objective
from trainer.objectives.registry import EXAMPLES, OBJECTIVES, find, load_all, read_objective
from trainer.objectives.tables import describe_tables, nested, tables_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "objectives.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
WIDTH = 118
WHEN = "when to take it"


@cache
def table(first: str) -> list[dict[str, str]]:
    """The table of the page whose first column is called so: [rows] of column -> cell."""
    match = re.search(rf"^\| {re.escape(first)} \|.*\n\|.*\n(?:\|.*\n)*", TEXT, re.MULTILINE)
    lines = match[0].splitlines() if match else ["|", "|"]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


@cache
def described(first: str) -> dict[str, dict[str, str]]:
    """What the page says of each objective of the table with this first column: its row and its own section."""
    rows = {re.findall(r"`(\w+)`", row[first])[0]: row for row in table(first)}
    for name, row in rows.items():
        section = TEXT.partition(f"\n#### `{name}`\n")[2].partition("\n#")[0]
        items = re.findall(r"^- ([\w ]+): (.*(?:\n  .*)*)", section, re.MULTILINE)
        row |= {title: " ".join(words.split()) for title, words in items}
    return rows


def departures(name: str) -> str:
    """What the page says about how this objective departs from its paper; "" for nothing."""
    items = " ".join(TEXT.partition("## What departs")[2].split()).split(" - ")
    return " ".join(item.partition(": ")[2] for item in items if name in item.partition(":")[0].split(", "))


def describe_all() -> Iterator[str]:
    """Yield a line for each objective of the product, then of the examples: its name and what it is for."""
    load_all()
    for name, published in OBJECTIVES.items():
        use = described("name").get(name, {}).get(WHEN, published.source)
        yield f"{name:<18} {use.replace('`', '')}"
    for name, row in described("example").items():
        yield from ("", f"{EXAMPLES / name}.py:{name}", *textwrap.wrap(row[WHEN].replace("`", ""), WIDTH - 4))


def describe(name: str) -> Iterator[str]:
    """Yield all about one objective: formula, source, needs, and every value in force with where it comes from.

    Raises ConfigError for an unknown name."""
    kind, source, paper = find(name)
    short = name.rpartition(":")[2]
    row = {**described("name"), **described("example")}.get(short)
    yield f"{name}: {source}"
    if row is None:
        yield inspect.getdoc(inspect.getmodule(kind)) or ""
    else:
        texts = {"formula": "formula", "needs": "needs", WHEN: "when", "bias and variance": "bias"}
        for column, title in texts.items():
            yield from entry(title, row[column].replace("`", ""))
    yield from entry("here", departures(short))
    file = Path(inspect.getfile(kind)).resolve()
    yield from entry("code", f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}, class {kind.__name__}")
    yield ""
    yield from values(read_objective({"name": name}), set(flat(paper)), source)


def entry(title: str, text: str) -> list[str]:
    """A titled text, broken into lines."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {title:<8} ", subsequent_indent=" " * 11) if text else []


def values(objective: Objective, paper: set[str], source: str) -> Iterator[str]:
    """Yield every value in force and its source. paper: the settings that the paper gives."""
    settings = {name: value for name, value in flat(objective.in_force).items() if name != "name"}
    width = max(map(len, settings))
    for name, value in settings.items():
        top, _, inner = name.partition(".")
        classes = [kind for kind in reversed(type(objective).mro()) if top in vars(kind).get("__annotations__", {})]
        default = "default of this kind" if inner and inner != "kind" else f"default of {classes[0].__name__}"
        yield f"  {name:<{width}}  {literal(value):<18} {source if name in paper else default}"
    tables = [name for name in type(objective).model_fields if getattr(objective, name) is None]
    if tables:
        yield f"  not set: {', '.join(tables)}"


def describe_settings() -> str:
    """Every setting of every objective with its type and meaning, for --help."""
    load_all()
    lines: list[str] = []
    described: set[str] = set()
    kinds: list[type[Objective]] = [Objective, *(published.kind for published in OBJECTIVES.values())]
    for kind in dict.fromkeys(kinds):
        names = [name for name, published in OBJECTIVES.items() if published.kind is kind]
        fields = {name: field for name, field in nested(kind).items() if name not in described}
        if fields and names:
            lines.append(f"\n  of {', '.join(names)} also")
        for name, field in fields.items():
            tables = tables_of(field.annotation)
            lines.append(f"  [objective.{name}]" if tables else f"  --objective.{name}=")
            what = describe_tables(field) if tables else type_name(field)
            lines.append(f"        {' '.join((field.description or '').split())} ({what})")
        described |= set(fields)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str], show: Callable[[str], None]) -> int:
    """Print the list, or all about the objectives that are named. Raises ConfigError for an unknown name."""
    load_all()
    for name in arguments:
        for line in describe(name):
            show(line)
    if not arguments:
        for line in describe_all():
            show(line)
        again = command_of("trainer objectives")
        show(f"\n{again} NAME shows formula, source and every value of one (docs/objectives.md)")
    return 0
