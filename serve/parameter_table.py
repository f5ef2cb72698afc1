"""Write the table of all parameters: `python -m serve.parameter_table > docs/parameters.md`."""

from __future__ import annotations

from collections.abc import Iterator

from serve.completions import CompletionRequest
from serve.parameters import INTERNAL, RequestBody
from serve.responses import ResponsesRequest
from serve.schemas import ChatRequest

ENDPOINTS: dict[str, type[RequestBody]] = {
    "chat": ChatRequest, "completions": CompletionRequest, "responses": ResponsesRequest,
}  # fmt: skip
HEAD = """# Parameters

Every parameter of OpenAI's chat completions, completions and responses, and of vLLM's server and its `SamplingParams`,
is accepted and has the effect that stands here, or is refused with status 400 and its name. So is one that nobody
knows: the error names the nearest one. null, and a value that asks for nothing (`echo: false`), are no mistakes.
`tests/serve/test_parameters.py` holds this table against the installed packages and the code, which write it
(`python -m serve.parameter_table > docs/parameters.md`); `tests/serve/test_effects.py` tests by effect, with a real
engine.
"""
ACCEPTED = """
## Accepted

| parameter | chat | completions | responses | effect |
|---|---|---|---|---|
"""
REFUSED = """
## Refused

| parameter | chat | completions | responses | why, and what to do | values that ask for nothing |
|---|---|---|---|---|---|
"""


def accepted() -> Iterator[str]:
    """Lines of the first table."""
    names = sorted({name for model in ENDPOINTS.values() for name in model.model_fields})
    for name in names:
        fields = [model.model_fields.get(name) for model in ENDPOINTS.values()]
        texts = [" ".join((field.description or "").split()) if field is not None else "" for field in fields]
        first, *others = dict.fromkeys(filter(None, texts))
        told = "; ".join([first, *(f"{list(ENDPOINTS)[texts.index(text)]}: {text}" for text in others)])
        marks = " | ".join("yes" if text else "" for text in texts)
        yield f"| `{name}` | {marks} | {told} |\n"


def refused() -> Iterator[str]:
    """Lines of the second table."""
    names = sorted({name for model in ENDPOINTS.values() for name in model.refused} - INTERNAL.keys())
    for name in names:
        found = [model.refused.get(name) for model in ENDPOINTS.values()]
        why = dict.fromkeys(one.why for one in found if one is not None)
        nothing = {str(value).lower() for one in found if one is not None for value in one.nothing}
        marks = " | ".join("no" if one is not None else "" for one in found)
        yield f"| `{name}` | {marks} | {'; '.join(why)} | {', '.join(sorted(nothing))} |\n"


def table() -> str:
    """The document."""
    internal = ", ".join(f"`{name}`" for name in sorted(INTERNAL))
    last = f"\nRefused everywhere as fields inside vLLM, which its own server does not take either: {internal}.\n"
    return HEAD + ACCEPTED + "".join(accepted()) + REFUSED + "".join(refused()) + last


if __name__ == "__main__":
    print(table(), end="")
