"""The files of the example "python": sums, and demonstrations that let a program add them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from environments.environment import Action
from environments.python import Python
from examples.python.prepare import CALLING, MISTYPED, prepare
from shared.chat import Chat
from shared.errors import ConfigError
from shared.types import Problem
from tests.environments.test_tools import new
from trainer.sft import encode_turns


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    prepare(folder, {"problems": 1000, "validation": 100, "max_tokens": 160}, 5)
    return folder


def test_validation_is_held_out_and_answers_are_right(files: Path) -> None:
    train, validation = rows(files / "train.jsonl"), rows(files / "validation.jsonl")
    assert (len(train), len(validation)) == (1000, 100) and {row["environment"] for row in train} == {"python"}
    assert not {row["problem"] for row in train} & {row["problem"] for row in validation}
    for row in train:
        assert sum(map(int, row["problem"].removeprefix("What is ").rstrip("?").split("+"))) == int(row["answer"])


def test_demonstrations_are_episodes_of_which_a_known_share_is_mistyped(files: Path) -> None:
    found, answers = (
        rows(files / "demonstrations.jsonl"),
        {r["problem"]: r["answer"] for r in rows(files / "train.jsonl")},
    )
    calls = [row for row in found if len(row["completion"]) == 3]
    wrong = [row for row in calls if answers[row["problem"]] not in row["completion"][2]["content"]]
    for share, count, expected in ((len(calls), len(found), CALLING), (len(wrong), len(calls), MISTYPED)):
        assert abs(share / count - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
    assert all(answers[row["problem"]] in row["completion"][0]["content"] for row in found if row not in calls)

    async def play() -> None:
        for row in calls[:3]:
            one, (turn, result, _) = new(Python), row["completion"]
            begun = await one.reset(Problem("p", row["problem"], ""), 1)
            observation = await one.step(Action(turn["content"], turn["content"]))
            assert [message.text for message in begun.messages] == [row["system"]]
            assert [(message.role, message.text) for message in observation.messages] == [("tool", result["content"])]

    asyncio.run(play())


def test_an_episode_fits_and_digits_are_tokens(files: Path) -> None:
    chat = Chat(files / "model")
    assert [chat.decode([token]) for token in chat.encode("1234+5678")] == list("1234+5678")
    for row in rows(files / "demonstrations.jsonl")[:200]:
        prompt, said = chat.render(row["problem"], row["system"]), encode_turns(chat, row["completion"], "row")
        assert len(prompt) < 64 and len(said.completion) < 60


def test_a_mistake_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="problems"):
        prepare(tmp_path, {"problems": 0}, 0)
