"""A real launch on published sets as they are: one file of their rows, and demonstrations as chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.published import SETS
from tests.system.launch import Launch
from verify.verifiers import read_problem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_launch_trains_on_published_rows_and_says_how_it_read_them(tmp_path: Path) -> None:
    rows = [each.row for name in sorted(SETS) for each in SETS[name][:4]]
    (tmp_path / "rows.json").write_text(json.dumps({"data": rows}))
    chats = [
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": f"<think>{n}</think>{n}"}]}
        for n in range(8)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    launch = Launch(
        tmp_path,
        steps=2,
        sft__steps=2,
        data__train=str(tmp_path / "rows.json"),
        data__validation="",
        data__system_prompt="",
        sft__demonstrations=str(tmp_path / "chats.jsonl"),
        checkpoint__every=2,
        model__max_tokens=400,
        prepare__options__max_tokens=400,
    )
    assert launch.wait() == 0, launch.output[-6000:]
    assert len(launch.metrics()) == 2
    assert launch.told(f"data.train: {len(rows)} problems read", "as worked solutions (GSM8K, MATH)", "4 as MBPP")
    assert launch.told("sft.demonstrations: read 8 as a conversation in 'conversations'")
    texts = {group["prompt"]["problem"]["text"] for group in launch.groups()}
    assert texts and texts <= {read_problem(row, "").text for row in rows}
