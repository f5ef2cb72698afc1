"""The recipe in real launches: SFT mode and its best checkpoint; SFT mode and stages through a kill."""

import json
import signal
from typing import Any

import pytest

from tests.system.conftest import imitate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STAGES = (
    '[{name = "short", until_step = 3},'
    ' {name = "long", until_step = 7, rollout = {max_completion_tokens = 60, prompts_per_step = 3}},'
    ' {name = "last", rollout = {prompts_per_step = 2, max_async_level = 1}, optimiser = {minibatches = 2}}]'
)
GROUPS = 3 * 4 + 4 * 3 + 3 * 2


@pytest.mark.soak  # in make test: the launch of test_run.py begins with SFT; trainer/test_evaluation.py
def test_supervised_mode_is_evaluated_and_keeps_its_best(imitation):
    rows = imitation.metrics("sft")
    assert [row["step"] for row in rows] == list(range(1, 71)) and rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    for row in rows:
        assert row["sft/tflops_per_device"] > 0 and row["sft/tokens_per_s_per_device"] > 0
        assert row["sft/trainer_peak_bytes"] > 1 << 20
    records = [(line["version"], line["evaluation"]) for line in imitation.lines("evaluations.jsonl")]
    sampled = {version: record["accuracy"] for version, record in records if record["temperature"] == 1}
    best = (imitation.run_dir / "best").resolve().name
    assert set(sampled) == {0, 35, 70} and sampled[int(best.removeprefix("step_"))] == max(sampled.values())
    assert (imitation.run_dir / "latest").resolve().name == "step_70"


@pytest.mark.soak  # in make test: a killed launch in test_deaths.py
def test_supervised_mode_killed_and_resumed_ends_bit_for_bit_as_the_undisturbed_one(imitation, tmp_path):
    killed = imitate(tmp_path)
    killed.until(lambda: len(killed.metrics("sft")) >= 28)
    killed.signal_rank(1, signal.SIGKILL)
    assert killed.wait() == 128 + signal.SIGKILL and killed.survivors() == []
    made, resumed = len(killed.losses("sft")), imitate(tmp_path).finish()
    assert 10 <= (first := resumed.resumed_from()) < made < 70, "some steps are made again"
    losses = imitation.losses("sft")
    assert resumed.losses("sft") == losses[:made] + losses[first:]


@pytest.mark.soak  # in make test: a killed launch in test_deaths.py
def test_three_stages_killed_inside_the_second_end_as_if_nothing_had_happened(start, tmp_path):
    settings: dict[str, Any] = {
        "steps": 10, "stages": STAGES, "checkpoint__every": 2, "objective__kl__weight": 0.05, "evaluate__samples": 2,
    }  # fmt: skip
    first = start(tmp_path, **settings)
    first.until_step(5)
    first.kill()
    assert first.survivors() == []
    second = start(tmp_path, **settings).finish()
    assert "resuming" in second.output
    assert second.trained_prompts() == list(range(GROUPS)), "each group once, none lost"
    rows = second.metrics()
    assert [(row["step"], row["stage"], row["groups/trained"]) for row in rows] == [
        (step, stage, 4 - stage) for step, stage in enumerate([0] * 3 + [1] * 4 + [2] * 3, 1)
    ]
    assert rows[-1]["kl/reference"] != 0 and max(row["staleness/max"] for row in rows) <= 3
    assert [(change["version"], change["stage"]) for change in second.lines("stages.jsonl")] == [(3, 1), (7, 2)]
    for step in range(1, 11):
        lines = (second.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        longest = max(len(one["token_ids"]) for line in lines for one in json.loads(line)["completions"])
        assert longest <= (40 if step <= 3 else 60)
