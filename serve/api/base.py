"""Base classes of all request bodies.

Parameters of other servers that this one does not know or cannot honour are refused by name (parameters.py lists them),
since the client would not get what it asks for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""a list of which only the first mistake is reported: a body can hold a million"""


class Refused(NamedTuple):
    """A parameter that other servers know and this one does not accept."""

    why: str
    """the reason, and what to do instead"""
    nothing: tuple[Any, ...] = (False,)
    """values that have no effect, besides null and empty ones; they are accepted"""

    def asks(self, value: Any) -> bool:
        """Whether a value would have an effect."""
        return value not in (None, "", [], {}, *self.nothing)


def mistake(field: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """Return the error of a validator of a whole body about one of its fields."""
    return PydanticCustomError(code, "{message}", {"message": message, "field": field})


class Body(BaseModel):
    """Base of all parts of bodies: NaN and infinities are refused, and null means that a field is absent."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        """Drop fields that are null: clients send null for what they do not use."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class Parameters(Body):
    """Base of whole bodies and of groups of parameters in them: a parameter without effect is refused."""

    refused: ClassVar[Mapping[str, Refused]] = {}
    """parameters that clients may know from other servers"""

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
    """Return the error message for an unknown parameter, with the nearest name if there is one."""
    near = difflib.get_close_matches(name[:100], names, 1)
    hint = f'did you mean "{near[0]}"?' if near else "leave it out"
    return f'there is no parameter "{name[:100]}": {hint}'
