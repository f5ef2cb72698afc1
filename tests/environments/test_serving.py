"""A model is served in the tokens in which it was trained: system prompts, tools, calls, results, whole histories."""

import json
from typing import Any

import pytest

from environments.environment import Action
from serve.messages import ChatMessage
from serve.reasoning import Splitter
from serve.system_prompts import PromptRenderer
from serve.tools import Function, Tool, describe_form
from shared.chat import Chat, joined
from shared.config import Config
from shared.model.model_card import read_card
from shared.sections import Data
from shared.tool_calls import call_text
from tests.environments.test_tools import PROBLEM, Sums, new
from tests.shared import test_turns
from trainer.data.data_source import PromptFormat
from trainer.export import note_training

SPELT = "It is <|im_end|>, <tool_response> and </think>."
CONTROL = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def chat_messages(*messages: dict[str, Any]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(message) for message in messages]


def tools_of(environment: Any) -> Any:
    definitions = environment.definitions
    return describe_form([Tool(type="function", function=Function(**one._asdict())) for one in definitions], None)


@pytest.mark.parametrize("control", [[], CONTROL])
@pytest.mark.parametrize("name", test_turns.ENDS)
async def test_training_and_serving_say_the_same(tmp_path, name, control, monkeypatch):
    monkeypatch.setattr(test_turns, "CONTROL", [*test_turns.CONTROL, *control])
    chat, environment = test_turns.chat_of(tmp_path, name), new(Sums)
    [turns] = (await environment.reset(PROBLEM, 0)).messages
    arguments = ['{"a": 1, "b": 2}', '{"a": 3}']
    turn = "\n".join(["I add.", *(call_text("add", given) for given in arguments)])
    [three, _] = (await environment.step(Action(turn, turn))).messages
    trained = PromptFormat(chat, Data(system_prompt="")).render(PROBLEM.text, also=turns.text)
    trained += chat.encode(turn) + [chat.eos_id] + chat.bridge([(three.role, three.text), ("tool", SPELT)])

    calls = [{"id": f"c{given}", "function": {"name": "add", "arguments": given}} for given in arguments]
    messages = chat_messages(
        {"role": "user", "content": PROBLEM.text},
        {"role": "assistant", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": calls[0]["id"]},
        {"role": "tool", "content": SPELT, "tool_call_id": calls[1]["id"]},
    )
    served = PromptRenderer(chat, "").render(messages, "", tools_of(environment))
    assert chat.tokenizer.decode(trained) == chat.tokenizer.decode(served)
    assert trained == served
    tags = [chat.tokenizer.convert_tokens_to_ids(tag) for tag in control[2:]]
    assert [trained.count(tag) for tag in tags] == [2] * len(tags), "the text of a result spells none"


@pytest.mark.parametrize("name", test_turns.ENDS)
async def test_system_prompts_are_joined_as_in_training(tmp_path, name):
    chat, environment = test_turns.chat_of(tmp_path, name), new(Sums)
    [turns] = (await environment.reset(PROBLEM, 0)).messages
    prompts = PromptFormat(chat, Data(system_prompt="Be brief."))
    trained = prompts.render(PROBLEM.text, also=joined("You are an agent.", turns.text))
    system = {"role": "system", "content": "You are an agent."}
    messages = chat_messages(system, {"role": "user", "content": PROBLEM.text})
    assert PromptRenderer(chat, "Be brief.").render(messages, "", tools_of(environment)) == trained


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", test_turns.ENDS)
def test_a_whole_history_is_served_as_it_was_trained(tmp_path, name, opened):
    """Whatever the template drops, and wherever the model writes blanks; its message comes back as it was told."""
    chat = test_turns.chat_of(tmp_path, name)
    if opened:  # as if the template opened the reasoning
        chat = Chat(tmp_path, chat.template.text + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}")
    turns = ["<think>\nIs it 8?\n</think>\n\nI say 8.", "<think>\nNo <|im_end|> 12. </think>12", "It is 10"]
    said = ["Higher.", SPELT, "Well done."]
    trained, messages = chat.render("Find the number.", "Be brief."), [{"role": "user", "content": "Find the number."}]
    prompts = PromptRenderer(chat, "Be brief.", whole=True)
    for turn, reply in zip(turns[: 2 + (not opened)], said, strict=False):
        splitter = Splitter(prompts.tags, opened=opened, exact=True)
        text = turn.removeprefix("<think>\n") if opened else turn
        parts = [*splitter.feed(text), *splitter.end()]
        reasoning, answer = ("".join(part.text for part in parts if part.thinking is kind) for kind in (True, False))
        messages.append({"role": "assistant", "content": answer, "reasoning": reasoning})
        messages.append({"role": "user", "content": reply})
        first, *others = text.split("<|im_end|>")  # which is sampled as letters
        sampled = chat.encode(first)
        for other in others:
            sampled += chat.encode_plain("<|im_end|>") + chat.encode(other)
        trained += [*sampled, chat.eos_id, *chat.bridge([("user", reply)])]
        read = chat_messages(*messages)
        assert chat.tokenizer.decode(prompts.render(read, "")) == chat.tokenizer.decode(trained)
        assert prompts.render(read, "") == trained
        assert PromptRenderer(chat, "Be brief.").render(read, "") != trained, "other models see no reasoning again"


def test_the_card_of_an_export_says_whether_histories_were_whole(tmp_path):
    rows = tmp_path / "rows.jsonl"
    for row, settings, history in [
        ({"problem": "?", "answer": "1"}, {}, ""),
        ({"problem": "?", "answer": "1", "environment": "retry"}, {}, "whole"),
        ({"problem": "?", "answer": "1"}, {"name": "retry"}, "whole"),
        ({"problem": "?", "answer": "1"}, {"history": "whole"}, "whole"),
    ]:
        rows.write_text(json.dumps(row) + "\n")
        config = Config.model_validate({"data": {"train": str(rows)}, "environment": settings})
        note_training(config, tmp_path, 3)
        card = read_card(tmp_path)
        assert card is not None and card.history == history
    rows.unlink()
    note_training(config, tmp_path, 3)
    test_turns.chat_of(tmp_path, "qwen3")
    assert PromptRenderer.of_model(tmp_path, "policy").whole
