"""What all bodies of requests have in common.

What this does not do: know any endpoint. Who calls this: schemas, tools, completions, responses_request, tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

UNSUPPORTED = "supported by this server"
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""a list of which only the first mistake is told: a body can hold a million"""


def refuse_fields(body: Any, names: Iterable[str], why: str) -> None:
    """Raises ValueError for a body that uses one of these fields; empty ones are no use."""
    for name in names if isinstance(body, dict) else ():
        if body.get(name) not in (None, False, "", [], {}):
            raise ValueError(f"{name} is not {why}")


class Body(BaseModel):
    """Base of all bodies: NaN and infinities are refused, and null is a field that is not there."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        """Clients send null for what they do not use."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body
