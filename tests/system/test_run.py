"""A whole launch with two FSDP2 trainers, one of which is killed: what goes on, what it must leave behind, and that the
engines hold it."""

import asyncio
import math
import re

import pytest

from rollout.local_engine import LocalEngine
from shared import settings_file
from shared.chat import Chat
from shared.languages import with_request
from tests.system.conftest import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STARTED = ["reading the problems", "starting trainers and engines", "loading the model", "connecting the engines"]
PHASES = [
    "running examples/quickstart/prepare.py", *STARTED, "SFT: imitating demonstrations", "first weights to the engines",
    "evaluating before training", "training",
    STARTED[0], "verifying the newest of 2 checkpoints", *STARTED[1:], "first weights to the engines", "training",
    "evaluating after training", "exporting the model", "stopping trainers and engines",
]  # fmt: skip


def test_a_dead_rank_ends_all_and_is_named(killed):
    step = len(killed.losses) // 4 * 4
    words = ("trainer 1 (rank 2", f"pid {killed.victim}", "killed by signal 9 (SIGKILL)", f"goes on from step {step}")
    assert killed.code != 0 and killed.survivors == [] and killed.launch.told(*words), killed.launch.output[-3000:]


def test_what_came_after_the_last_checkpoint_is_made_again_bit_for_bit(killed, run):
    losses, made = killed.losses, run.losses()
    assert run.resumed_from() == len(losses) // 4 * 4, run.output[:3000]
    assert made[: len(losses)] == losses and len(set(losses)) > len(losses) // 2, "weights moved, and no bit else"
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))


def test_every_group_is_trained_once_and_each_token_has_its_version(run):
    assert run.trained_prompts() == list(range(4 * STEPS)), "none is lost"
    assert max(row["staleness/max"] for row in run.metrics()) == 0
    for group in run.groups():
        for one in group["completions"]:
            assert one["finish_reason"] in ("stop", "length")
            edges = [0, *(span["end"] for span in one["spans"])]
            assert edges[-1] == len(one["token_ids"]) == len(one["logprobs"])
            assert [span["start"] for span in one["spans"]] == edges[:-1]
            assert {span["version"] for span in one["spans"]} == {group["prompt"]["index"] // 4}


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
    assert any(row["grad_norm"] > 0 for row in rows), "the weights did not move"
    assert rows[0]["logprob_difference/mean"] < 1e-4, "the first batch was sampled by the trained weights"
    assert all(row["sync/stall_ms"] >= 0 and row["sync/stall_steps"] >= 0 for row in rows)


def test_the_run_folder_is_complete_and_the_screen_told_the_story(run):
    exports = ("latest/model.safetensors", "best/model.safetensors")
    for name in ("config.toml", "metrics.jsonl", "evaluations.jsonl", "plot.png", *exports):
        assert (run.run_dir / name).exists(), name
    kept = {path.name for path in (run.run_dir / "checkpoints").glob("step_*")}
    # the newest two, and the best of those evaluated: an evaluation may still be under way at the last checkpoint
    assert {"step_8", "step_12"} <= kept <= {"step_0", "step_6", "step_8", "step_12"}
    for words in ("step 12/12", "language consistency", "next:", "TFLOP/s of a trainer", "memory of engine"):
        assert words in run.output
    phases = run.lines("phases.jsonl")
    assert [re.sub(r"of \d", "of 2", line["phase"]) for line in phases] == PHASES
    times = [line["time"] for line in phases]
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
