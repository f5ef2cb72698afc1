"""What users' code is written against: names, signatures and fields. `python -m tests.public_surface` prints them.

tests/public_surface.txt holds them, and a test compares: a change here breaks files that we never see.
"""

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from environments import environment, tools
from shared import types
from trainer import session
from trainer.objectives import inputs, objective, registry
from verify import plugins, verifiers

FILE = Path(__file__).with_suffix(".txt")
SURFACE: dict[Any, tuple[str, ...]] = {
    plugins: ("reward", "group_reward", "Case", "RewardOptions"),
    verifiers: ("verifier", "Answer", "Finding"),
    environment: ("environment", "user", "Environment", "Action", "Observation", "EnvironmentMessage"),
    tools: ("tool", "ToolEnvironment", "ToolError"),
    registry: ("publish",),
    objective: ("Objective", "Need"),
    inputs: ("LossInputs", "LossTerm", "unbounded"),
    types: ("Problem", "Reward", "Verdict", "Prompt", "Group"),
    session: ("Session",),
}
"""module -> its names that docs/rewards.md, docs/environments.md and docs/objectives.md tell users to import"""


def listing() -> list[str]:
    """One line for each function, method, field and member."""
    return [line for module, names in SURFACE.items() for name in names for line in lines(module, name)]


def lines(module: Any, name: str) -> Iterator[str]:
    """What a name of a module offers."""
    thing, called = getattr(module, name), f"{module.__name__}.{name}"
    if not inspect.isclass(thing):
        yield f"{called}{inspect.signature(thing)}"
        return
    yield f"class {called}({', '.join(base.__name__ for base in thing.__bases__)})"
    if issubclass(thing, Enum):
        yield from (f"{called}.{member.name} = {member.value!r}" for member in thing)
    yield from (f"{called}.{field}" for field in fields(thing))
    if "__init__" in vars(thing) and not hasattr(thing, "__dataclass_fields__"):
        yield f"{called}{inspect.signature(vars(thing)['__init__'])}"
    for member, value in vars(thing).items():
        function = getattr(value, "__func__", value)
        if not member.startswith("_") and inspect.isfunction(function):
            yield f"{called}.{member}{inspect.signature(function)}"
        elif not member.startswith("_") and isinstance(value, property):
            yield f"{called}.{member} (property)"


def fields(kind: type) -> Iterator[str]:
    """The fields that a class itself adds, with the type as it is written and the default."""
    for name, written in vars(kind).get("__annotations__", {}).items():
        if not name.startswith("_"):
            told = getattr(written, "__forward_arg__", written)
            yield f"{name}: {told if isinstance(told, str) else inspect.formatannotation(told)}{default(kind, name)}"


def default(kind: type, name: str) -> str:
    """ " = VALUE", or "" where a value must be given."""
    if issubclass(kind, BaseModel):
        info = kind.model_fields.get(name)
        return "" if info is None or info.is_required() else f" = {info.get_default(call_default_factory=True)!r}"
    if issubclass(kind, msgspec.Struct):
        given = inspect.signature(kind).parameters[name].default
        return "" if given is inspect.Parameter.empty else f" = {given!r}"
    found = getattr(kind, "_field_defaults", vars(kind)).get(name, inspect.Parameter.empty)
    plain = isinstance(found, (bool, int, float, str, tuple, frozenset, type(None)))
    return f" = {found!r}" if plain else ""


def main() -> None:
    """Print the listing."""
    print("\n".join(listing()))


if __name__ == "__main__":
    main()
