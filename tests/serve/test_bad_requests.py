"""What is wrong with a request is told in one clear line, with the field and the repair."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import Serve

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "x"}]
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (b"", "empty_body", "empty"), (b"  \n", "empty_body", "JSON object"),
        (b'{"a": 1,}', "invalid_json", "line 1 column 9"), (b'{\n"a": \'x\'}', "invalid_json", "line 2 column 6"),
        (b"[1]", "invalid_json", "not a list"), (b'"x"', "invalid_json", "not a string"),
        (b"null", "invalid_json", "null"),
        (b"\xff\xfe", "invalid_json", "UTF-8"),
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_objects(serve: Serve, path: str, text: bytes, code: str, words: str) -> None:
    reply = serve("x").client.post(path, content=text, headers=JSON)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == code and words in error["message"] and error["type"] == "invalid_request_error"


def test_content_types(serve: Serve) -> None:
    served = serve("x")
    body = json.dumps({"messages": MESSAGES})
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/problem+json"):
        assert served.client.post(CHAT, content=body, headers={"content-type": kind}).is_success
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"},
                    {"content-type": "application/x-www-form-urlencoded"},
                    {"content-type": "application/jsonx"}):  # fmt: skip
        reply = served.client.post(CHAT, content=body, headers=headers)
        error = reply.json()["error"]
        assert reply.status_code == 415
        assert error["code"] == "unsupported_media_type" and error["param"] == "content-type"
        assert "send Content-Type: application/json" in error["message"]
    packed = served.client.post(CHAT, content=body, headers={**JSON, "content-encoding": "gzip"})
    assert packed.status_code == 415 and packed.json()["error"]["param"] == "content-encoding"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        ({"type": "input_image", "image_url": "x"}, "input_image"), ({"type": "file", "file": {}}, "file"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video_url"), ({"text": "x"}, "type"), ("x", "object"),
    ],
)  # fmt: skip
def test_what_is_no_text(serve: Serve, part: Any, words: str) -> None:
    served = serve("x")
    content = [{"type": "text", "text": "look"}, part]
    for path, body, param in (
        (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": content}]}, "messages.1.content.1"),
        ("/v1/responses", {"input": [{"role": "user", "content": content}]}, "input.0.content.1"),
        ("/tokenize", {"messages": [{"role": "user", "content": content}]}, "messages.0.content.1"),
    ):
        error = served.client.post(path, json=body).json()["error"]
        assert error["param"] == param and words in error["message"], error
        if words not in ("type", "object"):
            assert "text only" in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"messages": MESSAGES * 1025}, 400, "messages", "1024"), ({"messages": MESSAGES, "n": 17}, 400, "n", "16"),
        ({"messages": MESSAGES, "max_tokens": 5000}, 400, "max_tokens", "4096"),
        ({"messages": MESSAGES, "max_completion_tokens": 5000}, 400, "max_completion_tokens", "leave it out"),
        ({"messages": [{"role": "user", "content": "y" * 5000}]}, 400, "messages", "shorten"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": "z" * (4 << 20)}]}, 413, None, "shorten"),
        ({}, 400, "messages", "missing"),
    ],
)  # fmt: skip
def test_limits(serve: Serve, body: dict[str, Any], status: int, param: str | None, words: str) -> None:
    served = serve("x")
    reply = served.client.post(CHAT, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param) and words in error["message"], error
    assert served.server.admitted == 0


def test_limits_of_the_others(serve: Serve) -> None:
    served = serve("x")
    for path, body, param in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 5000}, "max_tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 5000}, "max_output_tokens"),
        ("/v1/completions", {"prompt": "y" * 5000}, "prompt"), ("/v1/responses", {"input": "y" * 5000}, "input"),
        ("/v1/completions", {}, "prompt"), ("/v1/responses", {}, "input"), ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/v1/responses", {"input": 5}, "input"), ("/v1/responses", {"input": [{"type": "item_reference"}]}, "input.0"),
    ):  # fmt: skip
        reply = served.client.post(path, json=body)
        error = reply.json()["error"]
        assert reply.status_code == 400 and (error["param"] or "").startswith(param), (path, error)
