"""LiteLLM, unmodified: python litellm_client.py URL; prints what it got as JSON."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices on the internet

import litellm
import openai

ask = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "timeout": 30, "num_retries": 0, "temperature": 0,
       "max_tokens": 400, "messages": [{"role": "user", "content": "How many apples?"}]}  # fmt: skip
found = {}
for provider in ("openai", "hosted_vllm"):
    whole = litellm.completion(model=f"{provider}/tiny", **ask)
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(model=f"{provider}/tiny", stream=True, **ask)]
    message = whole.choices[0].message
    found[provider] = {
        "text": message.content,
        "reasoning": getattr(message, "reasoning_content", None),
        "thinking_tokens": whole.usage.completion_tokens_details.reasoning_tokens,
        "streamed_text": "".join(delta.content or "" for delta in deltas),
        "streamed_reasoning": "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
    }
failures = []
for wrong in ({"model": "openai/other"}, {"model": "openai/tiny", "temperature": 9}):
    try:
        litellm.completion(**{**ask, **wrong})
    except openai.APIError as error:  # from which LiteLLM's classes derive
        failures.append(f"{type(error).__module__}.{type(error).__name__}")
print(json.dumps({"found": found, "failures": failures}))
