"""The openai package, unmodified: python openai_client.py URL [FILE]; prints what it got as JSON.

FILE: JSON, [[name of a type, object as JSON], ...], to compare with its types.
"""

import json
import sys
from pathlib import Path

import openai
from openai_types import check

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", timeout=30)
ask = {"model": "tiny", "messages": [{"role": "user", "content": "How many apples?"}], "max_tokens": 400}


def failure(**wrong):
    """The class and the code of the error that a wrong request raises."""
    try:
        client.chat.completions.create(**{**ask, **wrong})
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return None


raw = client.chat.completions.with_raw_response.create(**ask, extra_body={"reasoning_language": "fr"})
whole = raw.parse()
chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
response = client.responses.create(model="tiny", input="How many apples?")
events = list(client.responses.create(model="tiny", input="How many apples?", stream=True))
completion = client.completions.create(model="tiny", prompt="Once", max_tokens=400)
parts = client.completions.create(model="tiny", prompt="Once", max_tokens=400, stream=True)
print(json.dumps({
    "version": openai.__version__,
    "typed": sum(check(json.loads(Path(file).read_text())) for file in sys.argv[2:]),
    "models": [model.id for model in client.models.list()],
    "retries": raw.retries_taken,
    "text": whole.choices[0].message.content,
    "reasoning": [whole.choices[0].message.reasoning, whole.choices[0].message.reasoning_content],
    "thinking_tokens": whole.usage.completion_tokens_details.reasoning_tokens,
    "language": whole.model_extra["reasoning_language"],
    "streamed_text": "".join(delta.content or "" for delta in deltas),
    "streamed_reasoning": "".join(getattr(delta, "reasoning", None) or "" for delta in deltas),
    "tokens": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
    "finish": [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason],
    "response": response.output_text,
    "response_thinking_tokens": response.usage.output_tokens_details.reasoning_tokens,
    "response_streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
    "response_last": [events[-1].type, events[-1].response.output_text],
    "completion": completion.choices[0].text,
    "completion_streamed": "".join(choice.text for part in parts for choice in part.choices),
    "failures": [
        failure(model="other"), failure(temperature=9), failure(messages=[]), failure(stream=True, n=99),
        failure(messages=[{"role": "user", "content": "x" * 20_000}]),
    ],
}))  # fmt: skip
