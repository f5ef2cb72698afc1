"""Every parameter of OpenAI's and vLLM's APIs stands in docs/parameters.md, as accepted or as refused by name; and what
is refused, of all endpoints (bodies.jsonl). What accepted ones do is tested with a real engine, in test_vllm.py.
"""

import re
from pathlib import Path

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from serve.completions import CompletionRequest
from serve.parameters import NO_EFFECT
from serve.responses import ResponsesRequest
from serve.schemas import ChatRequest
from tests.tables import read_table

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
QUESTION = {"role": "user", "content": "x"}
NEEDED = {CHAT: {"messages": [QUESTION]}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}
BODIES = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}
PAGE = (Path(__file__).parents[2] / "docs" / "parameters.md").read_text(encoding="utf-8")
ACCEPTED, REFUSED = PAGE.split("\n## Accepted\n")[1].split("\n## Refused\n")
REFUSED_ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in REFUSED.splitlines() if row[:3] == "| `"]
INSIDE_VLLM = set(re.findall(r"`(\w+)`", REFUSED.partition("\nRefused everywhere")[2]))
OPENAI = {
    CHAT: chat_params.CompletionCreateParamsBase, COMPLETIONS: completion_params.CompletionCreateParamsBase,
    RESPONSES: response_params.ResponseCreateParamsBase,
}  # fmt: skip
TOO_LONG = [
    (COMPLETIONS, {"prompt": "y" * 9000}), (CHAT, {"tools": [{"type": "function", "function": {"name": "a"}}] * 200}),
    (CHAT, {"messages": [QUESTION, {"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "a", "arguments": "[" * 100_000}}]}]}),
]  # fmt: skip


def check(serve, names):
    """All of them stand in the page, and none is dropped without a word."""
    served = serve("x")
    for number, (path, parameters) in enumerate(names.items()):
        silent, fields = [], BODIES[path].model_fields.keys()
        for name in sorted(parameters):
            reply = served.client.post(path, json={**NEEDED[path], name: [{"no": "value"}]})
            error = reply.json().get("error") or {}
            refused = reply.status_code == 400 and (error["param"] or "").split(".")[0] == name
            if not refused or (error["code"] == "unknown_parameter") is (name in fields):
                silent.append(name)
        refused = {row[0].strip("`") for row in REFUSED_ROWS if row[1 + number] == "no"} | INSIDE_VLLM
        assert len(parameters) > 10 and not silent, path
        assert not parameters - fields - refused, f"{path}: what docs/parameters.md lacks"


def test_every_parameter_of_openai_is_accepted_or_refused_by_name(serve):
    check(serve, {path: {*body.__annotations__, "stream"} for path, body in OPENAI.items()})


@pytest.mark.slow
def test_every_parameter_of_vllm_is_accepted_or_refused_by_name(serve):
    from vllm import SamplingParams
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    sampling = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    bodies = zip(BODIES, (ChatCompletionRequest, CompletionRequest, ResponsesRequest), strict=True)
    check(serve, {path: {*body.model_fields, *sampling} for path, body in bodies})


def test_mistakes_and_what_would_do_nothing_are_refused_by_name(serve):
    served = serve("x", max_sequences=8, queue=8)
    for row in read_table("serve/bodies", kind="refused"):
        reply = served.client.post(row["path"], json={**NEEDED.get(row["path"], {}), **row["body"]})
        error = reply.json()["error"]
        assert reply.status_code == (404 if row["code"] == "model_not_found" else 400), row
        assert (error["param"], error["code"]) == (row["param"], row["code"]), row
        assert row.get("message", "") in error["message"] and error["message"], row
        assert served.server.admitted == 0 and not served.engine.prompts
    for path, body in TOO_LONG:
        assert served.client.post(path, json={**NEEDED[path], **body}).status_code == 400, path


def test_values_that_ask_for_nothing_are_no_mistakes(serve):
    served = serve("x")
    for row in read_table("serve/bodies", kind="accepted"):
        assert served.client.post(row["path"], json={**NEEDED[row["path"]], **row["body"]}).is_success, row
    size = len(served.server.prompts.chat.tokenizer)
    assert [served.ask(allowed_token_ids=[token]).status_code for token in (size - 1, size)] == [200, 400]


def accepted():
    """The rows of the accepted parameters, from the fields of the bodies and their docstrings."""
    for name in sorted({name for body in BODIES.values() for name in body.model_fields}):
        fields = [body.model_fields.get(name) for body in BODIES.values()]
        texts = [" ".join((field.description or "").split()) if field is not None else "" for field in fields]
        first, *others = dict.fromkeys(filter(None, texts))
        kinds = ("chat", "completions", "responses")
        effect = "; ".join([first, *(f"{kinds[texts.index(text)]}: {text}" for text in others)])
        yield f"| `{name}` | {' | '.join('yes' if text else '' for text in texts)} | {effect} |"


def test_the_tables_in_the_documentation_are_those_of_the_code():
    assert [row for row in ACCEPTED.splitlines() if row[:3] == "| `"] == list(accepted())
    names = [row[0].strip("`") for row in REFUSED_ROWS]
    assert names == sorted(set(names)) and len(names) > 50
    for name, (_, *marks, why, written) in zip(names, REFUSED_ROWS, strict=True):
        served = [name in body.model_fields for body in BODIES.values()]
        assert why and "no" in marks and not any(served[number] for number in range(3) if marks[number]), name
        nothing = NO_EFFECT.get(name)
        values = "" if nothing is None else ", ".join(sorted({str(value).lower() for value in nothing})) or "empty"
        assert written == values, name
