"""Environments of verifiers 0.4 (`verifiers.v1`) as agents, in the same way as those of 0.1 in verifiers_agent.py.

    VERIFIERS='{"reverse-text": {}}' python server.py verifiers_v1_agent.py

VERIFIERS: JSON of the names of task sets, and their options. The text of a problem is "NAME ROW", a task in order.
verifiers starts a program for each rollout, with `uv`, which must be there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import Coroutine
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.env import Env
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_environment

TASKS = 4096
"""Tasks taken of a task set that has no end."""
SERVING: list[Any] = []
"""Contexts of environments, open to the end of this process."""
LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()


def wait(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine in the loop to which the environments belong."""
    return asyncio.run_coroutine_threadsafe(work, LOOP).result()


def load(name: str, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """An environment that is ready for rollouts, and its tasks."""
    kind = concrete_type(environment_class(name), EnvConfig, origin=Env) or EnvConfig
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    environment = load_environment(kind.model_validate({"taskset": {"id": name, **options}, "agent": agent}))
    SERVING.append(environment.serving())
    wait(SERVING[-1].__aenter__())
    return environment, list(itertools.islice(environment.taskset.load(), TASKS))


LOADED = {name: load(name, options) for name, options in json.loads(os.environ["VERIFIERS"]).items()}


def play(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Let the environment roll out the task that the problem names; return its reward."""
    name, row = problem["text"].split()
    environment, tasks = LOADED[name]
    return float(wait(_roll_out(environment, tasks[int(row)], base_url, api_key)))


async def _roll_out(environment: Any, task: Any, base_url: str, api_key: str) -> float:
    variable = f"KEY_OF_{api_key}"  # verifiers reads keys from variables alone
    os.environ[variable] = api_key
    try:
        client = EvalClientConfig(base_url=base_url, api_key_var=variable)
        [slot] = environment.slots(task)
        episode = await environment.run_slot(slot, ModelContext(model="policy", client=client))
    finally:
        del os.environ[variable]
    if not episode.ok:
        raise RuntimeError(str([*episode.errors, *(error for trace in episode.traces for error in trace.errors)]))
    return float(episode.traces[0].reward)
