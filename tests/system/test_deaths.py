"""One run with adapters on published sets as they are: killed in one rank, and asked to end."""

import json
import signal
from typing import Any

import pytest

from tests.published import SETS
from verify.verifiers import read_problem

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]  # in make test: the killed launch of test_run.py


def test_a_launch_that_is_killed_and_stopped_goes_on_bit_for_bit(start, tmp_path):
    """What came after the last checkpoint is made again, and is the same."""
    rows, chats = [each.row for name in sorted(SETS) for each in SETS[name][:4]], tmp_path / "chats.jsonl"
    (tmp_path / "rows.json").write_text(json.dumps({"data": rows}))
    turns = [
        ({"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": f"<think>{n}</think>{n}"}) for n in range(8)
    ]
    chats.write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in turns))
    settings: dict[str, Any] = {
        "steps": 10_000, "rollout__max_async_level": 0, "lora__rank": 4, "checkpoint__every": 8, "sft__steps": 2,
        "sft__demonstrations": str(chats), "data__train": str(tmp_path / "rows.json"), "data__validation": "",
        "data__system_prompt": "", "model__max_tokens": 400,
    }  # fmt: skip
    first = start(tmp_path, **settings)
    first.until(lambda: len(first.metrics()) % 8 in (4, 5))
    victim = first.signal_rank(1, signal.SIGKILL)
    assert first.wait() != 0 and first.survivors() == []
    assert first.told("(rank 4, alpha 32) on frozen weights")
    assert first.told(f"data.train: {len(rows)} problems read", "as worked solutions (GSM8K, MATH)", "4 as MBPP")
    assert first.told("sft.demonstrations: read 8 as a conversation in 'conversations'")
    losses, step = first.losses(), len(first.losses()) // 8 * 8
    words = ("trainer 0 (rank 1", f"pid {victim}", "killed by signal 9 (SIGKILL)", f"goes on from step {step}")
    assert first.told(*words), first.output[-3000:]

    second = start(tmp_path, command="trainer", **settings)
    second.until_step(len(losses) + 1)
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM, second.output[-3000:]
    assert second.survivors() == [] and second.told("SIGTERM came", "saving a checkpoint")
    assert second.resumed_from() == step, second.output[:3000]
    made = second.losses()
    assert (second.run_dir / "checkpoints" / f"step_{len(made)}" / "manifest.json").exists(), "nothing is lost"
    assert [row["step"] for row in second.metrics()] == list(range(1, len(made) + 1))
    assert made[: len(losses)] == losses and len(set(losses)) > len(losses) // 2, "weights moved, and no bit else"
    trained = second.trained_prompts()
    assert trained == list(range(len(trained))) and len(trained) >= 4 * len(losses), "every prompt once, none lost"
    texts = {group["prompt"]["problem"]["text"] for group in second.groups()}
    assert texts <= {read_problem(row, "").text for row in rows}
