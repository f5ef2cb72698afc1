"""What all bodies of requests have in common.

Parameters of other servers that this one does not know, or cannot do, are refused by name (parameters.py lists them):
whoever sends one wants something, and would not get it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""a list of which only the first mistake is told: a body can hold a million"""


class Refused(NamedTuple):
    """A parameter that other servers know and this one does not take."""

    why: str
    """and what to do instead"""
    nothing: tuple[Any, ...] = (False,)
    """values that ask for nothing, besides null and empty ones; they are no mistakes"""

    def asks(self, value: Any) -> bool:
        """Whether a value asks for something."""
        return value not in (None, "", [], {}, *self.nothing)


def mistake(field: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """An error of a validator of a whole body, about one of its fields."""
    return PydanticCustomError(code, "{message}", {"message": message, "field": field})


class Body(BaseModel):
    """Base of all parts of bodies: NaN and infinities are refused, and null is a field that is not there."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        """Clients send null for what they do not use."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class Parameters(Body):
    """Base of whole bodies, and of groups of parameters in them: a parameter that would do nothing is refused."""

    refused: ClassVar[Mapping[str, Refused]] = {}
    """those that clients may know from other servers"""

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, body: Any) -> Any:
        """Raises PydanticCustomError for the first parameter that is refused or unknown."""
        if not isinstance(body, dict):
            return body
        known = cls.model_fields
        for name, value in body.items():
            if name in known or value is None:
                continue
            if (found := cls.refused.get(name)) is None:
                raise mistake(name, unknown(name, [*known, *cls.refused]), "unknown_parameter")
            if found.asks(value):
                raise mistake(name, f"{name} is not supported: {found.why}", "unsupported_parameter")
        return {name: value for name, value in body.items() if name in known}


def unknown(name: str, names: list[str]) -> str:
    """What is said of a parameter that nobody knows."""
    near = difflib.get_close_matches(name[:100], names, 1)
    hint = f'did you mean "{near[0]}"?' if near else "leave it out"
    return f'there is no parameter "{name[:100]}": {hint}'
