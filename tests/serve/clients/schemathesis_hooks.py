"""What schemathesis takes for no fault, although a request that fits the description of the API is refused."""

import schemathesis

NOT_TOLD = {
    "unknown_tool": "JSON Schema cannot tell that the function which tool_choice names has to be one of tools",
    "context_length_exceeded": "nor how long the model's context is",
    "unknown_token": "nor how many tokens the model knows",
    "unknown_form": "nor which order of turns its template takes",
    "chat_template_kwargs": "nor which arguments its template reads",
    "min_tokens": "nor that one number is at most another one, and what ends an answer has no part in it",
    "reasoning_language": "nor which tags of BCP 47 are languages",
    "arguments": "nor that a text is JSON",
    "seed": "and schemathesis rounds its bounds, 64 bits, to floats",
}


@schemathesis.hook
def filter_failure(context, failure, case, response):
    """Whether it is a fault, and no refusal by one of these rules, which its code or field names."""
    error = response.json()["error"] if response.status_code == 400 else {}
    return NOT_TOLD.keys().isdisjoint((error.get("code"), (error.get("param") or "").rpartition(".")[2]))
