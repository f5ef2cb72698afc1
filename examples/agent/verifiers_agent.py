"""Environments of verifiers 0.1 as agents: their code stays as it is, and asks the gateway in place of a server.

    VERIFIERS='{"reverse-text": {"dataset_name": "data/texts"}}' python server.py verifiers_agent.py

VERIFIERS: JSON of the names of environments, and the arguments of their `load_environment`. The text of a problem is
"NAME ROW", a row of the environment's data set. It runs where verifiers is installed; docs/environments/verifiers.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.clients import OpenAIChatCompletionsClient

ENVIRONMENTS = {name: vf.load_environment(name, **given) for name, given in json.loads(os.environ["VERIFIERS"]).items()}
ROWS = {name: environment.get_dataset() for name, environment in ENVIRONMENTS.items()}
CERTIFICATES = ssl.create_default_context()  # loaded once: that takes longer than an episode


def play(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Let the environment roll out the row that the problem names; return its reward."""
    name, row = problem["text"].split()
    return asyncio.run(_roll_out(ENVIRONMENTS[name], ROWS[name][int(row)], base_url, api_key))


async def _roll_out(environment: Any, row: Any, base_url: str, api_key: str) -> float:
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES, timeout=3600)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http) as client:
        outcome = await environment.run_rollout(row, OpenAIChatCompletionsClient(client), "policy", {})
    if outcome.get("error"):
        raise RuntimeError(str(outcome["error"]))
    return float(outcome["reward"])
