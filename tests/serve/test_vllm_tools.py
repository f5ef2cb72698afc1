"""Tools that the server runs, with the real engine and the `openai` client; the model knows one episode by heart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from examples.python.prepare import prepare
from shared.chat import Chat
from shared.config import Config
from shared.sections import Data
from shared.types import IMITATED
from tests.serve.command import Command
from trainer.data.data_source import PromptFormat
from trainer.export import note_training
from trainer.sft import encode_turns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


def prompt_of(chat: Chat, row: dict[str, Any]) -> list[int]:
    """[tokens] of a demonstration's prompt, as training has it."""
    return PromptFormat(chat, Data(system_prompt="")).render(row["problem"], also=[row["system"]])


def learn_by_heart(folder: Path, chat: Chat, row: dict[str, Any]) -> None:
    """Train the model of a folder on one demonstration, until it says nothing else."""
    prompt, said = prompt_of(chat, row), encode_turns(chat, row["completion"], "row")
    ids = torch.tensor([prompt + said.completion])
    imitated = torch.tensor([kind == IMITATED for kind in said.mask])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(200):
        logits = model(ids).logits[0, len(prompt) - 1 : -1][imitated]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :][imitated])
        if loss < 0.03:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.03
    path, weights = folder / "model.safetensors", model.state_dict()
    save_file({name: weights[name].contiguous() for name in load_file(path)}, path)


def test_a_model_calls_the_servers_tool_and_answers_with_its_result(tmp_path: Path) -> None:
    prepare(tmp_path, {"problems": 20, "validation": 1, "max_tokens": 160}, 0)
    folder, rows = tmp_path / "model", map(json.loads, (tmp_path / "demonstrations.jsonl").read_text().splitlines())
    row = next(row for row in rows if len(row["completion"]) == 3)
    learn_by_heart(folder, Chat(folder), row)
    note_training(Config.model_validate({"data": {"system_prompt": ""}, "environment": {"name": "python"}}), folder, 1)
    call, result, answer = (turn["content"] for turn in row["completion"])
    command = Command(folder, tmp_path / "log", settings=("--tools", "python", "--reasoning-language", "off"))
    try:
        with openai.OpenAI(base_url=f"{command.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": row["problem"]}], "temperature": 0}
            choice = client.chat.completions.create(**ask).choices[0]
            message: Any = choice.message
            [executed] = message.executed_tools
            assert executed["arguments"] in call and executed["output"] == result
            assert f"<think>{message.reasoning}</think>{message.content}" == answer and choice.finish_reason == "stop"
            deltas = [
                one.delta for chunk in client.chat.completions.create(**ask, stream=True) for one in chunk.choices
            ]
            assert [one.executed_tools for one in deltas if hasattr(one, "executed_tools")] == [[executed]]
            assert "".join(one.content or "" for one in deltas) == message.content
            chat, usage = Chat(folder), client.chat.completions.create(**ask).usage
            assert usage is not None and usage.prompt_tokens == len(prompt_of(chat, row))
            assert usage.completion_tokens == sum(len(chat.encode(text)) + 1 for text in (call, answer))
    finally:
        command.close()
