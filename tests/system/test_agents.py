"""Launches that train other people's agents and environments, unmodified, while weights change and an engine dies."""

import json
import os
import signal
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from shared.config import Config
from tests.environments.servers import ROOT, agents, openenv, python, verifiers_agents
from tests.system.launch import Launch

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]
EXAMPLE = "examples/agent/settings.toml"


def inline(value: Any) -> str:
    """TOML of a value in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {inline(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def train(folder: Path, url: str, options: dict[str, Any] | None = None, **settings: Any) -> Launch:
    """Launch with a server of agents, and other environments."""
    given = inline({"agent": {"url": url}, **(options or {})})
    return Launch(folder, file=EXAMPLE, environment__options=given, **settings)


def rewards(launch: Launch) -> list[float]:
    return [row["reward/mean"] for row in launch.metrics()]


def check_episodes(launch: Launch) -> list[dict[str, Any]]:
    """The trained episodes: each once, every turn recorded and every sampled token in one, with the version of its
    weights. None failed, but for empty answers, which verifiers refuses."""
    bound = Config.model_validate({"rollout": {"prompts_per_step": 4, "max_async_level": 2}}).max_staleness
    trained = launch.trained_prompts()
    assert len(trained) == len(set(trained)), "an episode was trained twice"
    for one in launch.completions():
        failure = one["turns"][-1].get("failure", "")
        assert one["finish_reason"] in ("stop", "length") or "EmptyModelResponseError" in failure, one["turns"][-1]
        sampled = [place for turn in one["turns"] for place in range(turn["start"], turn["end"])]
        assert sampled == [place for span in one["spans"] for place in range(span["start"], span["end"])]
    assert all(row["staleness/max"] <= bound and row["environment/failed"] < 0.02 for row in launch.metrics())
    print(f"rewards {rewards(launch)}")
    return launch.completions()


def test_a_plain_agent_trains_through_updates_and_the_death_of_an_engine(tmp_path):
    """Every group is trained, so that a lost one is seen."""
    with agents("agent.py") as url:
        launch = train(tmp_path, url, rollout__max_restarts=3, objective__filter_groups_by="off")
        launch.until_step(15)
        engine = launch.engine_pid(2)
        launch.until_busy(engine)
        os.kill(engine, signal.SIGKILL)
        launch.finish()
    found, trained = check_episodes(launch), launch.trained_prompts()
    assert trained[: -8 * 4] == list(range(len(trained) - 8 * 4)), "an episode was lost"
    assert any(one["restarts"] for one in found), "no episode was under way when the engine died"
    assert any(len({span["version"] for span in one["spans"]}) > 1 for one in found), "no update arrived in flight"
    turns = [turn for group in launch.groups() for one in group["turns"] for turn in one if turn["role"] == "policy"]
    assert len(turns) == sum(len(one["turns"]) for one in found) and any(
        "<tool_call>" in turn["text"] for turn in turns
    )
    assert mean(rewards(launch)[-8:]) > mean(rewards(launch)[:3]) + 0.25


def test_an_agent_of_langgraph_trains(tmp_path):
    with agents("langgraph_agent.py", python("agents", "langgraph", "langchain_openai")) as url:
        launch = train(tmp_path, url, steps=8, evaluate__every=0).finish()
    assert max(len(one["turns"]) for one in check_episodes(launch)) > 1 and any(rewards(launch))


def test_environments_of_verifiers_openenv_and_an_mcp_server_train(tmp_path):
    kinds = ["reverse-text", "alphabet-sort", "openenv", "mcp"]
    clock = f"{python('agents', 'mcp_server_time')} -m mcp_server_time --local-timezone UTC"
    mcp = {"command": clock, "tools": ["convert_time"], "shared": True}
    with verifiers_agents(tmp_path) as url, openenv() as server:
        launch = train(
            tmp_path, url, {"openenv": {"url": server, "action": "guess", "observation": "hint"}, "mcp": mcp},
            steps=60, evaluate__every=0, prepare__script=str(ROOT / "tests" / "environments" / "foreign.py"),
            rollout__prompts_per_step=8, prepare__options=inline({"kinds": kinds, "mcp": mcp}), environment__name="",
            model__max_tokens=2048, environment__observation_tokens=1024, sft__steps=100,
        ).finish()  # fmt: skip
    check_episodes(launch)
    calls = [row for row in launch.metrics() if row.get("environment/tool_calls")]
    assert calls and any(row["environment/failed_calls"] for row in calls)
    by_kind: dict[str, list[float]] = {kind: [] for kind in kinds}
    for group in launch.groups():
        kind = group["prompt"]["problem"]["id"].removeprefix("train-").rpartition("-")[0]
        by_kind[kind].append(mean(one["total"] for one in group["rewards"]))
    print(f"rewards {by_kind}")
    assert all(len(found) >= 15 for found in by_kind.values())
