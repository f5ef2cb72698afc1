"""Scripted players behind a real HTTP server."""

from __future__ import annotations

import random
from typing import Any

from oversight.prompts import Ask
from tests.evaluation.conftest import Plain as Plain
from tests.evaluation.conftest import plain as plain
from tests.oversight.scripted import agent, trusting


def scripted_reply(body: dict[str, Any], number: int) -> str:
    """What a scripted model says to a prompt of agent or judge; the same prompt and seed get the same reply."""
    prompt = body["messages"][0]["content"]
    rng = random.Random(f"{prompt} {body['seed']}")
    speaking = prompt.startswith("You are ") and "expert in debates" in prompt
    side = int(prompt.partition("the judge that answer ")[2][:1]) if speaking else 0
    purpose: Any = "speech" if speaking else "question" if "Ask one question" in prompt else "verdict"
    ask = Ask(role="judge", purpose=purpose, messages=body["messages"], answer=side)
    return agent(rng, 1.0, 0.9)(ask) if speaking else trusting(rng)(ask)
