"""The base of all sections of a settings file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of settings sections: refuses unknown keys, infinities and later changes."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)

    def own_contradictions(self) -> Iterator[str]:
        """Yield what the values of this section contradict, one line each, with the settings and the repair."""
        yield from ()


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as "section.key" -> value."""
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flattened |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flattened


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with some of them changed. In a table the given settings change; one with another `kind` replaces it."""
    result = dict(table)
    for name, value in changes.items():
        before = table.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            same = value.get("kind", before.get("kind")) == before.get("kind")
            value = merged(before, value) if same else value
        result[name] = value
    return result
