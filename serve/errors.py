"""Errors of the HTTP interface: OpenAI's error object with a matching status, without internal details.

{"error": {"message", "type", "param", "code"}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from shared.http_limits import REQUEST_ID

KINDS = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
FIELD = re.compile(r"[A-Za-z0-9_]{1,64}")
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    422: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "overloaded_error",
}  # fmt: skip


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response; it only declares the schema, `ApiError.body` builds the object."""

    error: ErrorObject


class ApiError(Exception):
    """An error that is returned to the client as an error object."""

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str | None = None,
        retry_after_s: float | None = None, retry: bool = True,
    ):  # fmt: skip
        """code: machine-readable name. param: the field at fault. retry_after_s: when a retry may help. retry: false if
        it cannot help, although OpenAI's clients retry after this status."""
        message = message.encode("utf-8", "replace").decode()  # it may quote half a character of the client's
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {} if retry_after_s is None else {"Retry-After": str(max(1, round(retry_after_s)))}
        if not retry:
            self.headers["X-Should-Retry"] = "false"

    def body(self) -> dict[str, Any]:
        """Return the body with the error object."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or None}}


FAULT = ApiError(500, "the server failed on this request; its log says how", code="internal_error")


def respond(error: ApiError, headers: Mapping[str, str] = {}) -> JSONResponse:
    """Return the error as a response."""
    return JSONResponse(error.body(), error.status, {**error.headers, **headers})


def explain(error: RequestValidationError) -> ApiError:
    """Return the first error of a body, in one line that names the field; with status 400 as OpenAI does."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        before = str(error.body or "")[: first["loc"][-1]]
        position = f"line {before.count(chr(10)) + 1} column {len(before) - before.rfind(chr(10))}"
        message = f"the body is not valid JSON: {first['ctx']['error']}, {position}"
        return ApiError(400, message, code="invalid_json")
    return explain_first(error.errors())


def explain_first(errors: Sequence[Any]) -> ApiError:
    """Return the first of pydantic's errors in the form of `explain`."""
    first = errors[0]
    # of the schema only names of fields: the rest is ours, with addresses of functions in it
    path = [str(part) for part in first["loc"] if part not in ("body", "query") and FIELD.fullmatch(str(part))]
    message = first["msg"].removeprefix("Value error, ")
    if "field" in first.get("ctx", {}):  # a validator of the whole body says itself which field it means
        field = ".".join([*path, first["ctx"]["field"]])
        return ApiError(400, message, code=first["type"], param=field[:200])
    field = ".".join(path)
    if not path and (first["input"] is None or first["type"] in ("model_attributes_type", "model_type")):
        kind = KINDS.get(type(first["input"]), "a number")
        return ApiError(400, f"the body is a JSON object, not {kind}", code="invalid_json")
    if first["type"] == "missing":
        return ApiError(400, f"{field or 'the body'} is missing", code="missing_field", param=field or None)
    return ApiError(400, f"{field}: {message}" if field else message, code="invalid_value", param=field or None)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Answer with any exception: bodies that do not fit their schema, and the framework's own errors (unknown paths,
    wrong methods), in the form of ApiError; all others as status 500, without details."""
    if isinstance(error, RequestValidationError):
        return respond(explain(error))
    if isinstance(error, HTTPException):
        words = {
            404: f"there is nothing at {request.scope['path'][:200]}",
            405: f"{request.method} is not allowed here",
        }
        message = words.get(error.status_code, str(error.detail)[:300])
        return respond(ApiError(error.status_code, message), dict(error.headers or {}))
    if isinstance(error, ApiError):
        return respond(error)
    # this one is sent outside of metrics.py, and the server closes the connection after it
    return respond(FAULT, {REQUEST_ID: request.state.entry.id, "Connection": "close"})
