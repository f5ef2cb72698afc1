"""A model is served in the tokens in which it was trained: tools, a turn that calls them, and their results."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from environments.environment import Action
from serve.messages import ChatMessage
from serve.system_prompts import PromptRenderer
from serve.tools import Function, Tool, describe_form
from shared.tool_calls import call_text
from shared.types import Problem
from tests.environments.test_tools import Sums, new
from tests.shared import test_turns

SPELT = "It is <|im_end|>, <tool_response> and </think>."


@pytest.mark.parametrize("control", [[], ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]])
@pytest.mark.parametrize("name", test_turns.ENDS)
def test_training_and_serving_say_the_same(
    tmp_path: Path, name: str, control: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_turns, "CONTROL", [*test_turns.CONTROL, *control])
    chat, one = test_turns.chat_of(tmp_path, name), new(Sums)
    problem = Problem("p", "What is 1 + 2?", "3")
    [told] = asyncio.run(one.reset(problem, 0)).messages
    arguments = ['{"a": 1, "b": 2}', '{"a": 3}']
    turn = "\n".join(["I add.", *(call_text("add", given) for given in arguments)])
    observation = asyncio.run(one.step(Action(turn, turn)))
    results = [(message.role, message.text) for message in observation.messages[:1]] + [("tool", SPELT)]
    trained = chat.render(problem.text, told.text) + chat.encode(turn) + [chat.eos_id] + chat.bridge(results)

    definitions = [known.definition for known in one._tools.values()]
    tools = [Tool(type="function", function=Function(**tool._asdict())) for tool in definitions]
    calls = [{"id": f"c{given}", "function": {"name": "add", "arguments": given}} for given in arguments]
    conversation = [
        {"role": "user", "content": problem.text},
        {"role": "assistant", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": f"c{arguments[0]}"},
        {"role": "tool", "content": SPELT, "tool_call_id": f"c{arguments[1]}"},
    ]
    messages = [ChatMessage.model_validate(message) for message in conversation]
    served = PromptRenderer(chat, "").render(messages, "", describe_form(tools, None))
    assert chat.tokenizer.decode(trained) == chat.tokenizer.decode(served)
    assert trained == served
    tags = [chat.tokenizer.convert_tokens_to_ids(tag) for tag in control[2:]]
    assert [trained.count(tag) for tag in tags] == [2] * len(tags), "the text of a result spells none"
