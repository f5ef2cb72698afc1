"""One run with adapters on published sets as they are: asked to end, killed, and killed in one rank."""

import json
import signal
from typing import Any

import pytest

from tests.published import SETS
from verify.verifiers import read_problem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_launch_that_is_stopped_and_killed_goes_on_bit_for_bit(start, tmp_path):
    """Only the checkpoint that SIGTERM asked for is written: what comes after it is made again, and is the same."""
    rows, chats = [each.row for name in sorted(SETS) for each in SETS[name][:4]], tmp_path / "chats.jsonl"
    (tmp_path / "rows.json").write_text(json.dumps({"data": rows}))
    turns = [
        ({"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": f"<think>{n}</think>{n}"}) for n in range(8)
    ]
    chats.write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in turns))
    settings: dict[str, Any] = {
        "steps": 10_000, "rollout__max_async_level": 0, "lora__rank": 4, "checkpoint__every": 0, "sft__steps": 2,
        "sft__demonstrations": str(chats), "data__train": str(tmp_path / "rows.json"), "data__validation": "",
        "data__system_prompt": "", "model__max_tokens": 400,
    }  # fmt: skip
    first = start(tmp_path, command="trainer", **settings)
    first.until_step(1)
    stacks = first.run_dir / "stacks" / "rank0.txt"
    before = stacks.read_text()
    refused = start(tmp_path, log_dir=tmp_path / "logs", **settings)
    assert refused.wait() != 0 and "in use by another launch" in refused.output
    assert stacks.read_text() == before
    first.remember_processes()
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM, first.output[-3000:]
    assert first.survivors() == []
    assert first.told("SIGTERM came", "saving a checkpoint") and first.told("(rank 4, alpha 32) on frozen weights")
    assert first.told(f"data.train: {len(rows)} problems read", "as worked solutions (GSM8K, MATH)", "4 as MBPP")
    assert first.told("sft.demonstrations: read 8 as a conversation in 'conversations'")
    step = len(first.metrics())
    saved = {folder.parent.name for folder in (first.run_dir / "checkpoints").glob("step_*/manifest.json")}
    assert saved == {"step_0", f"step_{step}"}, "nothing of what was trained is lost"

    second = start(tmp_path, **settings)
    second.until_step(step + 2)
    second.kill()
    assert second.survivors() == [], "a rank outlived the launcher"
    losses = second.losses()

    third = start(tmp_path, command="trainer", **settings)
    third.until_step(len(losses) + 1)
    victim = third.signal_rank(1, signal.SIGKILL)
    assert third.wait() == 128 + signal.SIGKILL and third.survivors() == []
    words = ("trainer 0 (rank 1", f"pid {victim}", "killed by signal 9 (SIGKILL)", f"goes on from step {step}")
    assert third.told(*words), third.output[-3000:]
    assert second.resumed_from() == third.resumed_from() == step
    assert [row["step"] for row in third.metrics()] == list(range(1, len(third.losses()) + 1))
    assert third.losses()[: len(losses)] == losses and len(set(losses)) == len(losses), "weights moved, and no bit else"
    trained = third.trained_prompts()
    assert trained == list(range(len(trained))) and len(trained) >= 4 * len(losses), "every prompt once, none lost"
    texts = {group["prompt"]["problem"]["text"] for group in third.groups()}
    assert texts <= {read_problem(row, "").text for row in rows}
