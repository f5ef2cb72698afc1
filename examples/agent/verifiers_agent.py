"""An environment of verifiers 0.1 as an agent: its code stays as it is, and asks the gateway in place of a server.

    VERIFIERS_ENVIRONMENT=reverse-text python server.py verifiers_agent.py

VERIFIERS_OPTIONS: JSON of the arguments of its `load_environment`. The text of a problem is the number of a row of the
environment's data set. It runs where verifiers is installed; docs/environments/verifiers.md.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

ENVIRONMENT = vf.load_environment(
    os.environ["VERIFIERS_ENVIRONMENT"], **json.loads(os.environ.get("VERIFIERS_OPTIONS", "{}"))
)
ROWS = ENVIRONMENT.get_dataset()


def play(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Let the environment roll out the row whose number is the problem's text; return its reward."""
    return asyncio.run(_roll_out(ROWS[int(problem["text"])], base_url, api_key))


async def _roll_out(row: Any, base_url: str, api_key: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=3600, max_retries=0) as client:
        found = await ENVIRONMENT.run_rollout(row, OpenAIChatCompletionsClient(client), "policy", {})
    if found.get("error"):
        raise RuntimeError(str(found["error"]))
    return float(found["reward"])
