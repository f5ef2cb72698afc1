"""A whole asynchronous launch with two FSDP2 trainers: what it must leave behind, and that the engines hold it."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from shared import settings_file
from shared.chat import Chat
from shared.config import Config
from shared.languages import with_request
from shared.launch.messages import GenerateRequest
from shared.metrics import read_rows
from shared.types import Completion
from tests.system.conftest import Start
from tests.system.launch import Launch, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def run(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    launch = start(
        tmp_path_factory.mktemp("run"),
        placement__trainers=2,
        steps=10,
        rollout__max_completion_tokens=100,
        rollout__max_sequences=4,
        checkpoint__every=4,
        evaluate__every=5,
    )
    assert launch.wait(240) == 0, launch.output[-6000:]
    return launch


def test_every_group_is_trained_exactly_once_and_nothing_is_aborted(run: Launch):
    assert run.trained_prompts() == list(range(40))
    reasons = {c["finish_reason"] for group in run.groups() for c in group["completions"]}
    assert reasons <= {"stop", "length"}
    assert all(row["completions/aborted"] == 0 for row in run.metrics())


def test_speed_and_memory_of_every_step_are_told(run: Launch, seasoned: Path):
    for row in run.metrics():
        assert row["tflops_per_device"] > 0 and "mfu" not in row, "a CPU has no data sheet"
        assert row["tokens/trained_per_s_per_device"] == row["tokens/trained_per_s"] / 2
        assert row["tokens/generated_per_s_per_device"] == row["tokens/generated_per_s"]
        assert min(row[f"memory/{kind}_peak_bytes"] for kind in ("controller", "trainer", "engine")) > 1 << 20
    assert "TFLOP/s of a trainer" in run.output and "memory of engine" in run.output
    sft = [row for row in read_rows(seasoned / "metrics.jsonl") if row["kind"] == "sft"]
    assert len(sft) == 70 and all(row["sft/tflops_per_device"] > 0 for row in sft)
    assert all(row["sft/trainer_peak_bytes"] > 1 << 20 and row["sft/tokens_per_s_per_device"] > 0 for row in sft)


def test_completions_span_versions_and_no_token_is_older_than_the_bound(run: Launch):
    config = Config.model_validate({"rollout": {"prompts_per_step": 4, "max_async_level": 2}})
    assert max(row["staleness/max"] for row in run.metrics()) <= config.max_staleness
    completions = [c for group in run.groups() for c in group["completions"]]
    assert any(len({span["version"] for span in c["spans"]}) > 1 for c in completions)
    for completion in completions:
        edges = [0, *(span["end"] for span in completion["spans"])]
        assert edges[-1] == len(completion["token_ids"]) == len(completion["logprobs"])
        assert [span["start"] for span in completion["spans"]] == edges[:-1]
        versions = [span["version"] for span in completion["spans"]]
        assert versions == sorted(versions)


def test_trainer_and_engine_agree_on_log_probs_and_the_update_is_reported(run: Launch):
    for row in run.metrics():
        assert math.isfinite(row["loss"]) and row["grad_norm"] >= 0
        assert row["sync/logprob_diff_mean"] < 1e-4, "float32 on both sides"
        assert row["sync/bytes"] > 0 and row["sync/write_s"] > 0
    assert sum(row["grad_norm"] > 0 for row in run.metrics()) >= 8, "the weights hardly moved"
    assert run.metrics()[0]["logprob_difference/mean"] < 1e-4, "the first batch was sampled by the trained weights"
    assert any(row["sync/stall_ms"] > 0 and row["sync/stall_steps"] > 0 for row in run.metrics())


def test_the_phases_of_the_launch_are_written_down_in_their_order(run: Launch):
    lines = [json.loads(line) for line in (run.run_dir / "phases.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == [
        "reading the problems", "starting trainers and engines", "loading the model", "connecting the engines",
        "first weights to the engines", "evaluating before training", "training", "evaluating after training",
        "exporting the model", "stopping trainers and engines",
    ]  # fmt: skip
    times = [line["time"] for line in lines]
    assert times == sorted(times) and times[6] <= run.metrics()[0]["time"] <= times[7]


def test_a_fresh_engine_with_the_export_gives_the_running_engines_greedy_text(run: Launch):
    from rollout.engine import Engine

    export = (run.run_dir / "latest").resolve()
    config = settings_file.load(run.run_dir / "config.toml")
    lines = [json.loads(line) for line in (run.run_dir / "evaluations.jsonl").read_text().splitlines()]
    last = next(x["evaluation"] for x in reversed(lines) if x["evaluation"]["temperature"] == 0)
    chat = Chat(export)

    async def answer() -> list[str]:
        engine = Engine(config, str(export), rank=0, engine=0)
        await engine.start()
        done: dict[int, Completion] = {}
        engine.outputs.on_finished = lambda request: done.__setitem__(request.completion.group, request.completion)
        requests = [
            GenerateRequest(
                chat.render(with_request(sample["problem"]["text"], sample["problem"]["reasoning_language"]), ""),
                Completion(group=i, index=0, seed=1),
                config.rollout.max_completion_tokens,
                0.0,
            )
            for i, sample in enumerate(last["samples"])
        ]
        await engine.generate(requests)
        async with asyncio.timeout(60):
            while len(done) < len(requests):
                await asyncio.sleep(0.05)
        await engine.stop()
        return [chat.decode(done[i].token_ids) for i in range(len(requests))]

    assert asyncio.run(answer()) == [sample["text"] for sample in last["samples"]]


def test_the_run_folder_is_complete_and_the_screen_told_the_story(run: Launch):
    exports = ("latest/model.safetensors", "best/model.safetensors")
    for name in ("config.toml", "metrics.jsonl", "evaluations.jsonl", "plot.png", *exports):
        assert (run.run_dir / name).exists(), name
    kept = {path.name for path in (run.run_dir / "checkpoints").glob("step_*")}
    assert {"step_8", "step_10"} <= kept, "the newest two"
    # on a busy machine an evaluation may still have been under way when the last checkpoint was written
    assert kept <= {"step_0", "step_5", "step_8", "step_10"}, "and the best of those evaluated"
    for told in ("step 10/10", "language consistency", "next:"):
        assert told in run.output


@pytest.mark.soak  # in make test: tests/rollout/weights/test_meeting.py
def test_two_agents_with_different_sizes_train_over_the_network(start: Start, tmp_path: Path):
    port = free_port()

    def agent(node: int, ranks: int) -> Launch:
        where = (
            "--nnodes=2",
            f"--node-rank={node}",
            f"--nproc-per-node={ranks}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
        )
        return start(
            tmp_path, torchrun=where, placement__trainers=2, placement__engines=1, rollout__transport="network", steps=3
        )

    first, second = agent(0, 3), agent(1, 1)
    assert first.wait(240) == 0, first.output[-6000:] + second.output[-3000:]
    assert second.wait(30) == 0, second.output[-3000:]
    assert first.trained_prompts() == list(range(12))
    assert all(row["sync/logprob_diff_mean"] < 1e-4 for row in first.metrics())
