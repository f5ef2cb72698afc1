"""What all bodies of requests have in common.

What this does not do: know any endpoint. Who calls this: schemas, tools, completions, responses_request, tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""a list of which only the first mistake is told: a body can hold a million"""


class Body(BaseModel):
    """Base of all bodies: NaN and infinities are refused, and null is a field that is not there."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        """Clients send null for what they do not use."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body
