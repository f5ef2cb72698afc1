"""The recipe in real launches: stages through a kill, SFT mode with its best checkpoint, KL from the start."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.system.conftest import Start
from tests.system.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STAGES = [
    {"name": "short", "until_step": 3},
    {"name": "long", "until_step": 7, "rollout": {"max_completion_tokens": 60, "prompts_per_step": 3}},
    {"name": "last", "rollout": {"prompts_per_step": 2, "max_async_level": 1}, "optimiser": {"minibatches": 2}},
]
GROUPS = 3 * 4 + 4 * 3 + 3 * 2


def stage_table() -> str:
    """The stages as TOML on the command line."""

    def inline(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + "}"
        return json.dumps(value)

    return "[" + ", ".join(inline(stage) for stage in STAGES) + "]"


@pytest.mark.soak  # in make test: a killed launch in test_faults.py
def test_three_stages_killed_inside_the_second_end_as_if_nothing_had_happened(start: Start, tmp_path: Path):
    settings = {
        "steps": 10, "stages": stage_table(), "checkpoint__every": 2, "objective__kl__weight": 0.05,
        "evaluate__samples": 2,
    }  # fmt: skip
    first = start(tmp_path, **settings)
    first.until_step(5)
    first.kill()
    assert first.survivors() == []
    second = start(tmp_path, **settings)
    assert second.wait(500) == 0, second.output[-6000:]
    assert "resuming" in second.output
    assert second.trained_prompts() == list(range(GROUPS)), "each group once, none lost"
    rows = {row["step"]: row for row in second.metrics()}
    assert [rows[step]["stage"] for step in range(1, 11)] == [0] * 3 + [1] * 4 + [2] * 3
    assert [rows[step]["groups/trained"] for step in range(1, 11)] == [4] * 3 + [3] * 4 + [2] * 3
    assert rows[10]["kl/reference"] != 0
    changes = [json.loads(line) for line in (second.run_dir / "stages.jsonl").read_text().splitlines()]
    assert [(change["version"], change["stage"]) for change in changes] == [(3, 1), (7, 2)]
    longest = {}
    for step in range(1, 11):
        lines = (second.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        longest[step] = max(len(c["token_ids"]) for line in lines for c in json.loads(line)["completions"])
    assert max(longest[step] for step in (1, 2, 3)) <= 40 and max(longest.values()) <= 60
    assert max(row["staleness/max"] for row in rows.values()) <= 3


def test_supervised_mode_is_evaluated_stopped_resumed_and_keeps_its_best(tmp_path: Path):
    general = tmp_path / "general.jsonl"
    general.write_text('{"problem": "Tom has 3 apples.", "completion": "In the beginning there are 3 apples."}\n')
    settings = {
        "mode": "sft", "sft__steps": 12, "sft__batch": 16, "sft__general": str(general),
        "evaluate__every": 4, "checkpoint__every": 4,
    }  # fmt: skip
    first = Launch(tmp_path, **settings)
    first.until(lambda: len(first.metrics("sft")) >= 6)
    os.kill(first.rank_pid(0), signal.SIGINT)
    assert first.wait(300) != 0 and "saving a checkpoint first" in first.output, first.output[-6000:]
    second = Launch(tmp_path, **settings)
    assert second.wait(500) == 0, second.output[-6000:]
    resumed = int(second.output.partition("from step ")[2].split()[0])
    assert 6 <= resumed < 12
    rows = second.metrics("sft")
    assert {row["step"] for row in rows} == set(range(1, 13))
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    records = [json.loads(line) for line in (second.run_dir / "evaluations.jsonl").read_text().splitlines()]
    sampled = {r["version"]: r["evaluation"]["accuracy"] for r in records if r["evaluation"]["temperature"] == 1}
    assert set(sampled) == {0, 4, 8, 12}
    best = (second.run_dir / "best").resolve().name
    assert sampled[int(best.removeprefix("step_"))] == max(sampled.values())
    assert (second.run_dir / "latest").resolve().name == "step_12"
