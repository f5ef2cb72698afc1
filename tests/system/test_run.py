"""A whole asynchronous launch with two FSDP2 trainers: what it must leave behind, and that the engines hold it."""

import asyncio
import math

import pytest

from rollout.local_engine import LocalEngine
from shared import settings_file
from shared.chat import Chat
from shared.config import Config
from shared.languages import with_request
from tests.system.conftest import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PHASES = [
    "running examples/quickstart/prepare.py", "reading the problems", "starting trainers and engines",
    "loading the model", "connecting the engines", "SFT: imitating demonstrations", "first weights to the engines",
    "evaluating before training", "training", "evaluating after training", "exporting the model",
    "stopping trainers and engines",
]  # fmt: skip


def test_every_group_is_trained_once_and_no_token_is_older_than_the_bound(run):
    assert run.trained_prompts() == list(range(4 * STEPS))
    config = Config.model_validate({"rollout": {"prompts_per_step": 4, "max_async_level": 2}})
    assert max(row["staleness/max"] for row in run.metrics()) <= config.max_staleness
    assert any(len({span["version"] for span in one["spans"]}) > 1 for one in run.completions())
    for one in run.completions():
        assert one["finish_reason"] in ("stop", "length")
        edges = [0, *(span["end"] for span in one["spans"])]
        assert edges[-1] == len(one["token_ids"]) == len(one["logprobs"])
        assert [span["start"] for span in one["spans"]] == edges[:-1]
        versions = [span["version"] for span in one["spans"]]
        assert versions == sorted(versions)


def test_every_step_tells_its_update_speed_and_memory(run):
    rows = run.metrics()
    for row in rows:
        assert math.isfinite(row["loss"]) and row["grad_norm"] >= 0 and row["completions/aborted"] == 0
        assert row["sync/logprob_diff_mean"] < 1e-4, "float32 on both sides"
        assert row["sync/bytes"] > 0 and row["sync/write_s"] > 0
        assert row["tflops_per_device"] > 0 and "mfu" not in row, "a CPU has no data sheet"
        assert row["tokens/trained_per_s_per_device"] == row["tokens/trained_per_s"] / 2
        assert row["tokens/generated_per_s_per_device"] == row["tokens/generated_per_s"]
        assert min(row[f"memory/{kind}_peak_bytes"] for kind in ("controller", "trainer", "engine")) > 1 << 20
    assert sum(row["grad_norm"] > 0 for row in rows) >= STEPS - 2, "the weights hardly moved"
    assert rows[0]["logprob_difference/mean"] < 1e-4, "the first batch was sampled by the trained weights"
    assert any(row["sync/stall_ms"] > 0 and row["sync/stall_steps"] > 0 for row in rows)


def test_the_run_folder_is_complete_and_the_screen_told_the_story(run):
    exports = ("latest/model.safetensors", "best/model.safetensors")
    for name in ("config.toml", "metrics.jsonl", "evaluations.jsonl", "plot.png", *exports):
        assert (run.run_dir / name).exists(), name
    kept = {path.name for path in (run.run_dir / "checkpoints").glob("step_*")}
    # the newest two, and the best of those evaluated: an evaluation may still be under way at the last checkpoint
    assert {"step_4", "step_6"} <= kept <= {"step_0", "step_3", "step_4", "step_6"}
    for words in ("step 6/6", "language consistency", "next:", "TFLOP/s of a trainer", "memory of engine"):
        assert words in run.output
    times = [line["time"] for line in run.lines("phases.jsonl")]
    assert [line["phase"] for line in run.lines("phases.jsonl")] == PHASES
    assert times == sorted(times) and times[8] <= run.metrics()[0]["time"] <= times[9]


def test_a_fresh_engine_with_the_export_gives_the_running_engines_greedy_text(run):
    config, export = settings_file.load(run.run_dir / "config.toml"), (run.run_dir / "latest").resolve()
    evaluations = [line["evaluation"] for line in run.lines("evaluations.jsonl")]
    samples = [found for found in evaluations if found["temperature"] == 0][-1]["samples"]
    chat, problems = Chat(export), [sample["problem"] for sample in samples]
    prompts = [chat.render(with_request(one["text"], one["reasoning_language"]), "") for one in problems]

    async def answers() -> list[str]:
        async with LocalEngine(config, str(export)) as engine:
            answers = await asyncio.gather(*(engine.client.sample(prompt, [1], 0.0) for prompt in prompts))
        return [chat.decode(completion.token_ids) for [completion] in answers]

    assert asyncio.run(answers()) == [sample["text"] for sample in samples]
