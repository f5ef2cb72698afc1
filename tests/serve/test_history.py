"""Histories of models trained on episodes: what a client sends back is what the model wrote, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from serve.engine import SamplingParameters
from shared.model.model_card import CARD, ModelCard
from tests.serve.conftest import Serve
from tests.shared.test_chat import PLAIN, make_folder

DROPPING = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")
OPENING = PLAIN + "<think>{{ '\n' }}"
THOUGHTS = "\nIs it more than 8?  \n"
ANSWER = "\n\n 12,\n\nI say. "


def folder(path: Path, template: str, history: str) -> Path:
    config = {"max_position_embeddings": 4096, "eos_token_id": 1}
    made = Path(make_folder(path / "tiny", template, config=config))
    (made / CARD).write_bytes(msgspec.json.encode(ModelCard("run", 3, "Be brief.", history=history)))
    return made


@pytest.mark.parametrize("format", ["both", "openai", "deepseek", "mistral", "inline"])
@pytest.mark.parametrize("template", [PLAIN, DROPPING, OPENING], ids=["keeping", "dropping", "opening"])
def test_a_message_that_comes_back_is_what_was_sampled(
    serve: Serve, tmp_path: Path, template: str, format: str
) -> None:
    ids: list[list[int]] = []
    opening = "<think>\n" if template == OPENING else "<think>"
    said = f"{opening if template != OPENING else ''}{THOUGHTS}</think>{ANSWER}"

    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        ids.append(prompt)
        return said

    served = serve(script, model=str(folder(tmp_path, template, "whole")), reasoning_format=format)
    served.engine.chat = chat = served.server.prompts.chat
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Find the number."}]
        for _ in range(2):
            message = client.chat.completions.create(model="tiny", messages=messages).choices[0].message
            messages += [message.to_dict(), {"role": "user", "content": "More."}]
        client.chat.completions.create(model="tiny", messages=messages)
        trained = chat.render("Find the number.", "Be brief.")
        for prompt in ids:
            assert prompt == trained
            trained = [*trained, *chat.encode(said), chat.eos_id, *chat.bridge([("user", "More.")])]
        if format != "both":
            return
        ids.clear()
        items: list[Any] = [{"role": "user", "content": "Find the number."}]
        for _ in range(3):
            found = client.responses.create(model="tiny", input=items)
            items += [*(item.to_dict() for item in found.output), {"role": "user", "content": "More."}]
        assert ids[2] == trained[: len(ids[2])] and len(ids[2]) > len(ids[1])


def test_other_models_see_no_reasoning_again(serve: Serve, tmp_path: Path) -> None:
    served = serve("x", model=str(folder(tmp_path, PLAIN, "")))
    messages = [
        {"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "reasoning": "secret"},
        {"role": "user", "content": "C"},
    ]  # fmt: skip
    assert served.client.post("/v1/chat/completions", json={"messages": messages}).is_success
    assert served.engine.prompts == ["<system>Be brief.<eos><user>A<eos><assistant>B<eos><user>C<eos><assistant>"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "B"}],
        [{"role": "system", "content": "A"}],
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "reasoning": {"text": 1}}],
        [{"role": "user", "content": "A"}] + [{"role": "tool", "content": "<eos>"}] * 300,
    ],
)
def test_strange_histories_are_answered_or_refused(
    serve: Serve, tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    served = serve("x", model=str(folder(tmp_path, DROPPING, "whole")))
    reply = served.client.post("/v1/chat/completions", json={"messages": messages})
    assert reply.status_code == (200 if messages[0]["role"] == "user" else 400)
