"""Demonstrations: what is read, and how general instructions are mixed in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.quickstart.tiny_model import build, train_tokenizer
from shared.chat import Chat
from shared.errors import DataError
from shared.sections import Data, Sft
from trainer.data import PromptFormat
from trainer.objectives.sequences import Demonstration
from trainer.sft import Demonstrations, load_demonstrations, read_demonstrations, sft_rate


class LetterChat:
    """One token a letter."""

    eos_id = 0
    added = re.compile("(?!)")

    def render(self, text: str, system: str, _quoted: object = None) -> list[int]:
        return [ord(letter) % 256 for letter in system + text]

    def encode_completion(self, text: str) -> list[int]:
        return [ord(letter) % 256 for letter in text]


PROMPTS = PromptFormat(LetterChat(), Data(system_prompt="S:", templates={"code": "{problem}!"}))  # type: ignore[arg-type]


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_reasoning_has_the_prompt_of_its_domain_and_general_instructions_none(tmp_path: Path):
    reasoning = write(
        tmp_path / "traces.jsonl",
        {"problem": "add", "completion": "c"},
        {"problem": "add", "completion": "c", "domain": "code"},
        {"problem": "add", "completion": "c", "system": "tools:"},
        {"problem": "1+1", "solution": "one more", "answer": "2"},
        {"problem": "x" * 500, "completion": "too long"},
    )
    general = write(tmp_path / "general.jsonl", {"problem": "hello", "completion": "hi"})
    found = load_demonstrations(reasoning, general, Sft(), PROMPTS, 100)
    assert [bytes(one.prompt) for one in found.reasoning] == [b"S:add", b"S:add!", b"S:\n\ntools:add", b"S:1+1"]
    assert bytes(found.reasoning[3][1]) == b"<think>\none more\n</think>\nThe answer is \\boxed{2}.\0"
    assert found.general == [Demonstration([*b"hello"], [*b"hi", 0])]


def test_a_share_of_every_batch_is_general():
    demonstrations = Demonstrations([Demonstration([1], [1])], [Demonstration([2], [2])], general_share=0.1)
    counts = [sum(one.prompt == [2] for one in demonstrations.batch_at(step, 16, 0)) for step in range(400)]
    assert set(counts) == {1, 2} and 1.55 < sum(counts) / 400 < 1.65, "1.6 of 16 on average"
    assert demonstrations.batch_at(7, 16, 0) == demonstrations.batch_at(7, 16, 0)
    only = Demonstrations([Demonstration([1], [1])], [], general_share=0.1)
    assert only.batch_at(0, 8, 0) == [Demonstration([1], [1])] * 8


def test_a_file_without_anything_that_fits_names_its_setting(tmp_path: Path):
    long = write(tmp_path / "long.jsonl", {"problem": "x" * 500, "completion": "y"})
    with pytest.raises(DataError, match=r"sft\.demonstrations: .* model\.max_tokens = 100"):
        load_demonstrations(long, None, Sft(), PROMPTS, 100)
    short = write(tmp_path / "short.jsonl", {"problem": "x", "completion": "y"})
    with pytest.raises(DataError, match=r"sft\.general: "):
        load_demonstrations(short, long, Sft(), PROMPTS, 100)


def test_published_demonstrations_and_columns_of_the_users_own(tmp_path: Path):
    chats = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]
    chats += [{"ask": "hi", "say": "ho"}, {"problem": "hi", "completion": "ho"}]
    prompts = PromptFormat(LetterChat(), Data(system_prompt="", columns={"problem": "ask", "completion": "say"}))  # type: ignore[arg-type]
    lines: list[str] = []
    path = write(tmp_path / "chats.jsonl", *chats[1:])
    assert read_demonstrations(path, "sft.general", prompts, 100, lines) == [Demonstration([*b"hi"], [*b"ho", 0])] * 2
    assert not lines, "all in our own form"
    plain = PromptFormat(LetterChat(), Data(system_prompt=""))  # type: ignore[arg-type]
    [one] = read_demonstrations(write(path, chats[0]), "sft.general", plain, 100, lines)
    assert one == Demonstration([*b"hi"], [*b"ho", 0])
    assert lines == ["sft.general: read 1 as a conversation in 'conversations'"]


def test_the_rate_warms_up_and_decays():
    settings = Sft(steps=100, learning_rate=1.0)
    assert sft_rate(0, settings) == pytest.approx(0.05) and sft_rate(19, settings) == 1.0
    assert sft_rate(99, settings) == pytest.approx(0.1)


def test_a_demonstration_of_several_turns_is_what_an_episode_is(tmp_path: Path):
    build(tmp_path / "model", 0, train_tokenizer(["no 5 7 ?"] * 9, 280), 64)
    chat = Chat(tmp_path / "model")
    messages = [("assistant", "5"), ("user", "<|end|>no"), ("assistant", "7")]
    row = {"problem": "?", "completion": [{"role": role, "content": text} for role, text in messages]}
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [one] = read_demonstrations(path, "sft.demonstrations", PromptFormat(chat, Data(system_prompt="")), 100, [])
    between = chat.bridge([("user", "<|end|>no")])
    assert one.prompt == chat.render("?", "")
    path.write_text(json.dumps(row | {"system": "no ?"}) + "\n")
    [told] = read_demonstrations(path, "sft.demonstrations", PromptFormat(chat, Data(system_prompt="7")), 100, [])
    assert told == one._replace(prompt=chat.render("?", "7\n\nno ?")), "what an environment adds to the system prompt"
    first, last = [*chat.encode("5"), chat.eos_id], [*chat.encode("7"), chat.eos_id]
    assert one.completion == first + between + last and chat.eos_id not in between
    assert one.mask == bytes([2] * len(first) + [0] * len(between) + [2] * len(last))
    for wrong, why in (
        ([("user", "x"), ("assistant", "5")], "begins"),
        ([("assistant", "5"), ("user", "x")], "must end"),
        ([], "must end"),
    ):
        row = {"problem": "?", "completion": [{"role": role, "content": text} for role, text in wrong]}
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=why):
            read_demonstrations(path, "sft.demonstrations", PromptFormat(chat, Data()), 100, [])
