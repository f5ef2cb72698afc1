"""An agent with a tool, written for OpenAI's API: it knows nothing of training. Only base_url and key are others.

It has a shelf of fruit. The model is asked how many of a kind there are, and may count them by calling the tool.
"""

from __future__ import annotations

import json
import random
from typing import Any

from openai import OpenAI

KINDS, MOST, TURNS = ("apples", "lemons", "plums"), 9, 4
CLIENT = OpenAI(base_url="http://localhost", api_key="none", timeout=3600, max_retries=0)
TOOL: dict[str, Any] = {
    "name": "count",
    "description": "Count fruit of a kind.",
    "parameters": {"properties": {"kind": {"type": "string"}}, "required": ["kind"], "type": "object"},
}


def shelf(seed: int) -> dict[str, int]:
    """How many there are of each kind of fruit."""
    rng = random.Random(seed)
    return {kind: rng.randint(1, MOST) for kind in KINDS}


def run(arguments: str, there: dict[str, int]) -> str:
    """The result of a call of the tool. arguments: JSON."""
    return str(there.get(str(json.loads(arguments).get("kind")), "no such kind"))


def play(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the question. Return the reward: 1 for the right number, else 0."""
    there = shelf(problem["seed"])
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)  # shares connections with other episodes
    messages: list[Any] = [{"role": "user", "content": problem["text"]}]
    tools: Any = [{"type": "function", "function": TOOL}]
    for _ in range(TURNS):
        message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        if not calls:
            return float((message.content or "").strip() == str(there[problem["answer"]]))
        messages.append(message)
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments, there)})
    return 0.0
