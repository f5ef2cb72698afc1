"""What each accepted parameter of sampling does, by its effect, with an untrained model in a real vLLM engine.

Its texts mean nothing, so whatever is seen comes from the parameter. test_parameters.py: which ones there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.command import QUESTION, Command, untrained_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """One server for all tests of this file."""
    running = Command(untrained_model(tmp_path_factory.mktemp("runs")), tmp_path_factory.mktemp("serve") / "log")
    yield running
    running.close()


class Asked:
    """A completion and its tokens."""

    def __init__(self, command: Command, **body: Any):
        values = {"prompt": QUESTION, "max_tokens": 16, "temperature": 0, **body}
        reply = command.client.post("/v1/completions", json=values)
        assert reply.is_success, reply.text
        choice = reply.json()["choices"][0]
        self.text, self.finish, self.stop = choice["text"], choice["finish_reason"], choice["stop_reason"]
        self.count = reply.json()["usage"]["completion_tokens"]


def ids(command: Command, text: str) -> list[int]:
    found: list[int] = command.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def plain(command: Command) -> list[int]:
    """Ids of three tokens that are letters, far apart."""
    return [ids(command, letter)[-1] for letter in "QZX"]


def end_of(command: Command) -> int:
    """The token at which the model ends by itself."""
    from rollout.vllm_config import read_stop_tokens

    model = Path(command.process.args[command.process.args.index("--model") + 1])  # type: ignore[union-attr, index]
    return read_stop_tokens(str(model))[0]


def test_greedy_is_what_narrow_sampling_draws(command: Command) -> None:
    greedy = Asked(command).text
    assert Asked(command, temperature=2, top_k=1).text == greedy != Asked(command, temperature=2, seed=1).text
    assert Asked(command, temperature=2, top_p=1e-6).text == greedy
    assert Asked(command, temperature=2, min_p=1.0).text == greedy
    assert Asked(command, temperature=2, seed=5).text == Asked(command, temperature=2, seed=5).text
    assert Asked(command, max_tokens=3).count == 3


def test_logit_bias_and_allowed_tokens(command: Command) -> None:
    first, second, third = plain(command)
    assert Asked(command, logit_bias={str(first): 100}).text == "Q" * 16
    assert set(Asked(command, allowed_token_ids=[first, second, third], temperature=2, seed=1).text) <= set("QZX")
    assert set(Asked(command, allowed_token_ids=[first, third], logit_bias={str(first): -100}).text) == {"X"}


def test_penalties(command: Command) -> None:
    first, second, _ = plain(command)
    pair: dict[str, Any] = {"allowed_token_ids": [first, second], "max_tokens": 40}
    low, high = -30.0, 30.0  # what Z needs beside Q, so that neither always wins
    for _ in range(8):
        middle = (low + high) / 2
        wins = Asked(command, **{**pair, "max_tokens": 1}, logit_bias={str(second): middle}).text == "Z"
        low, high = (low, middle) if wins else (middle, high)
    # below zero, where a repetition is multiplied with its penalty
    pair["logit_bias"] = {str(first): -20, str(second): low - 20}
    for name, apart, alike in (
        ("presence_penalty", 2, -2), ("frequency_penalty", 2, -2), ("repetition_penalty", 50, 0.02),
    ):  # fmt: skip
        texts = [Asked(command, **pair, **{name: value}).text for value in (apart, alike)]
        changes = [sum(one != other for one, other in zip(text, text[1:], strict=False)) for text in texts]
        assert changes[0] > changes[1], (name, texts)


def test_bad_words(command: Command) -> None:
    first, second, _ = plain(command)
    letters = {"allowed_token_ids": [first, second], "logit_bias": {str(first): 5}}
    assert set(Asked(command, **letters).text) == {"Q"}
    assert set(Asked(command, **letters, bad_words=["Q"]).text) == {"Z"}


def test_ends(command: Command) -> None:
    first, second, _ = plain(command)
    letters: dict[str, Any] = {"allowed_token_ids": [first, second], "temperature": 2, "seed": 3, "max_tokens": 60}
    free = Asked(command, **letters)
    assert free.finish == "length" and free.count == 60 and "QZ" in free.text
    until = free.text.index("QZ")
    by_text = Asked(command, **letters, stop="QZ")
    assert (by_text.text, by_text.finish, by_text.stop) == (free.text[:until], "stop", "QZ")
    told = Asked(command, **letters, stop="QZ", include_stop_str_in_output=True)
    assert told.text == free.text[: until + 2] and told.count == by_text.count == until + 2
    by_token = Asked(command, **letters, stop_token_ids=[second])
    assert (by_token.text, by_token.finish, by_token.stop) == (free.text[: free.text.index("Z")], "stop", second)


def test_the_models_own_end(command: Command) -> None:
    end = end_of(command)
    wish = {"logit_bias": {str(end): 100}}
    at_once = Asked(command, **wish)
    assert (at_once.text, at_once.count, at_once.finish, at_once.stop) == ("", 1, "stop", None)
    later = Asked(command, **wish, min_tokens=5)
    assert later.count == 6 and later.finish == "stop"
    never = Asked(command, **wish, ignore_eos=True)
    assert never.count == 16 and never.finish == "length"
    shown = Asked(command, **wish, ignore_eos=True, skip_special_tokens=True)
    assert shown.text != never.text and shown.count == 16


def chat(command: Command, path: str, **body: Any) -> str:
    """Reasoning and answer of a chat, or of a response, which have the same parameters."""
    common = {"temperature": 0, "reasoning_language": "off", **body}
    if path == "/v1/responses":
        reply = command.client.post(path, json={"input": QUESTION, "max_output_tokens": 12, **common})
        assert reply.is_success, reply.text
        return "".join(part["text"] for item in reply.json()["output"] for part in item["content"])
    reply = command.client.post(path, json={"messages": MESSAGES, "max_tokens": 12, **common})
    assert reply.is_success, reply.text
    message = reply.json()["choices"][0]["message"]
    return (message["reasoning"] or "") + (message["content"] or "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_chats_have_them_too(command: Command, path: str) -> None:
    first, second, _ = plain(command)
    pair: dict[str, Any] = {"allowed_token_ids": [first, second]}
    assert chat(command, path, logit_bias={str(first): 100}) == "Q" * 12
    mixed = chat(command, path, **pair, temperature=2, seed=4)
    assert set(mixed) == set("QZ") and len(mixed) == 12
    assert chat(command, path, **pair, temperature=2, seed=4) == mixed
    favoured = {"logit_bias": {str(first): 5}}
    assert set(chat(command, path, **pair, **favoured, bad_words=["Q"])) == {"Z"}
    assert chat(command, path, **pair, temperature=2, seed=4, stop="Z") == mixed[: mixed.index("Z")]
    told = chat(command, path, **pair, temperature=2, seed=4, stop="Z", include_stop_str_in_output=True)
    assert told == mixed[: mixed.index("Z") + 1]
    assert chat(command, path, **pair, temperature=2, seed=4, stop_token_ids=[second]) == mixed[: mixed.index("Z")]
    below = {"logit_bias": {str(first): -20, str(second): -20}}
    for penalty in ({"frequency_penalty": 2, "presence_penalty": 2}, {"repetition_penalty": 50}):
        assert chat(command, path, **pair, **below, **penalty) != chat(command, path, **pair, **below)
    greedy = chat(command, path)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert chat(command, path, temperature=2, **narrow) == greedy
    wish = {"logit_bias": {str(end_of(command)): 100}}
    assert chat(command, path, **wish) == "" != chat(command, path, **wish, min_tokens=4)
    assert chat(command, path, **wish, ignore_eos=True) != ""
    bad = command.client.post("/v1/completions", json={"prompt": "x", "stop_token_ids": [10**6]})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "stop_token_ids"


def test_a_stop_in_the_reasoning_of_a_real_engine(command: Command) -> None:
    """Reasoning and answer are forced letter by letter: Q and Z until the tag that a budget of reasoning writes."""
    first, second, _ = plain(command)
    body = {"messages": MESSAGES, "allowed_token_ids": [*ids(command, "<think>\n"), first, second], "seed": 2,
            "temperature": 1, "thinking_token_budget": 30, "max_tokens": 90, "reasoning_language": "off",
            "logit_bias": {str(first): 4, str(second): 4}}  # fmt: skip
    reply = command.client.post("/v1/chat/completions", json={**body, "stop": ["QZ"]}).json()
    choice, usage = reply["choices"][0], reply["usage"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "QZ"
    assert "QZ" not in choice["message"]["content"] and usage["completion_tokens"] < 90
