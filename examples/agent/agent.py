"""An agent with a tool, written for OpenAI's API: it knows nothing of training. Only base_url and key are others.

It hides a number from 1 to 8. The model guesses by calling the tool, which says "higher", "lower" or "right".
"""

from __future__ import annotations

import json
import random
from typing import Any

from openai import OpenAI

NUMBERS, GUESSES = 8, 4
CLIENT = OpenAI(base_url="http://localhost", api_key="none", timeout=3600, max_retries=0)
TOOL: dict[str, Any] = {
    "name": "guess",
    "description": "Compare a number with the hidden one.",
    "parameters": {"properties": {"number": {"type": "integer"}}, "required": ["number"], "type": "object"},
}


def compare(arguments: str, hidden: int) -> str:
    """The result of a call of the tool. arguments: JSON."""
    number = json.loads(arguments).get("number")
    if not isinstance(number, int):
        return "no number"
    return "right" if number == hidden else "higher" if number < hidden else "lower"


def play(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play one game. Return the reward: 1 if the model finds the number within its guesses, else 0."""
    hidden = random.Random(problem["seed"]).randint(1, NUMBERS)
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)  # shares connections with other games
    messages: list[Any] = [{"role": "user", "content": problem["text"]}]
    tools: Any = [{"type": "function", "function": TOOL}]
    for _ in range(GUESSES):
        message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        if not calls:
            return 0.0
        messages.append(message)
        results = [(call.id, compare(call.function.arguments, hidden)) for call in calls]
        if results[0][1] == "right":
            return 1.0
        messages += [{"role": "tool", "tool_call_id": of, "content": result} for of, result in results]
    return 0.0
