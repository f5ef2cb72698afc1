"""What each accepted parameter of sampling does, by its effect, with an untrained model in a real vLLM engine.

Its texts mean nothing, so whatever is seen comes from the parameter. test_parameters.py: which ones there are. The
server is one that uvicorn starts.
"""

import signal
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rollout.vllm_config import read_stop_tokens
from serve.engine import SamplingParameters
from tests.serve.command import QUESTION, Command, untrained_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """One server for all tests of this file, with settings of the environment and of a file."""
    folder = tmp_path_factory.mktemp("runs")
    model, settings = untrained_model(folder), folder / "serve.toml"
    settings.write_text(f'name = "of a file"\ncache_bytes = {64 << 20}\ndtype = "float32"\n')
    variables = {"MAESTRALE_MODEL": str(model), "MAESTRALE_CONFIG": str(settings)}
    running = Command(model, folder / "log", program=["uvicorn", "serve.app:app"], **variables)
    try:
        yield running
        running.process.terminate()
        assert running.process.wait(90) in (0, -signal.SIGTERM)
    finally:
        running.close()


def test_uvicorn_serves_with_settings_of_the_environment(command):
    assert [model["id"] for model in command.client.get("/v1/models").json()["data"]] == ["of a file"]


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
    tokens: list[int] = command.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


@pytest.fixture(scope="module")
def letters(command):
    """Ids of Q, Z and X, three tokens that are letters, far apart."""
    return [ids(command, letter)[-1] for letter in "QZX"]


def test_greedy_is_what_narrow_sampling_draws(command):
    greedy = Asked(command).text
    assert Asked(command, temperature=2, top_k=1).text == greedy != Asked(command, temperature=2, seed=1).text
    assert Asked(command, temperature=2, top_p=1e-6).text == greedy
    assert Asked(command, temperature=2, min_p=1.0).text == greedy
    assert Asked(command, temperature=2, seed=5).text == Asked(command, temperature=2, seed=5).text
    assert Asked(command, max_tokens=3).count == 3


def test_letters_can_be_favoured_and_forbidden(command, letters):
    first, second, third = letters
    assert Asked(command, logit_bias={str(first): 100}).text == "Q" * 16
    assert set(Asked(command, allowed_token_ids=letters, temperature=2, seed=1).text) <= set("QZX")
    assert set(Asked(command, allowed_token_ids=[first, third], logit_bias={str(first): -100}).text) == {"X"}
    favoured = {"allowed_token_ids": [first, second], "logit_bias": {str(first): 5}}
    assert set(Asked(command, **favoured).text) == {"Q"}
    assert set(Asked(command, **favoured, bad_words=["Q"]).text) == {"Z"}


def test_penalties(command, letters):
    first, second, _ = letters
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
        changes = [sum(letter != after for letter, after in pairwise(text)) for text in texts]
        assert changes[0] > changes[1], (name, texts)


def test_ends(command, letters):
    body: dict[str, Any] = {"allowed_token_ids": letters[:2], "temperature": 2, "seed": 3, "max_tokens": 60}
    free = Asked(command, **body)
    assert free.finish == "length" and free.count == 60 and "QZ" in free.text
    until = free.text.index("QZ")
    by_text = Asked(command, **body, stop="QZ")
    assert (by_text.text, by_text.finish, by_text.stop) == (free.text[:until], "stop", "QZ")
    shown = Asked(command, **body, stop="QZ", include_stop_str_in_output=True)
    assert shown.text == free.text[: until + 2] and shown.count == by_text.count == until + 2
    by_token = Asked(command, **body, stop_token_ids=letters[1:2])
    assert (by_token.text, by_token.finish, by_token.stop) == (free.text[: free.text.index("Z")], "stop", letters[1])
    bad = command.client.post("/v1/completions", json={"prompt": "x", "stop_token_ids": [10**6]})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "stop_token_ids"


def test_the_models_own_end(command):
    wish = {"logit_bias": {str(read_stop_tokens(str(command.model))[0]): 100}}
    at_once = Asked(command, **wish)
    assert (at_once.text, at_once.count, at_once.finish, at_once.stop) == ("", 1, "stop", None)
    later = Asked(command, **wish, min_tokens=5)
    assert later.count == 6 and later.finish == "stop"
    never = Asked(command, **wish, ignore_eos=True)
    assert never.count == 16 and never.finish == "length"
    shown = Asked(command, **wish, ignore_eos=True, skip_special_tokens=True)
    assert shown.text != never.text and shown.count == 16


def test_chats_and_responses_are_sampled_as_completions_are(served):
    body = {"temperature": 1.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1,
            "repetition_penalty": 2, "logit_bias": {"9": 3}, "allowed_token_ids": [9, 10], "bad_words": ["b"],
            "seed": 4, "ignore_eos": True, "min_tokens": 1}  # fmt: skip
    for path, asked in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES}),
                        ("responses", {"input": "x"})):  # fmt: skip
        assert served.client.post(f"/v1/{path}", json={**asked, **body}).is_success
    completion, *others = [replace(sampling, max_tokens=9) for sampling in served.engine.samplings[-3:]]
    assert others == [completion] * 2 == [SamplingParameters(**{**body, "max_tokens": 9, "logit_bias": {9: 3}})] * 2


def test_a_stop_in_the_reasoning_of_a_real_engine(command, letters):
    """Reasoning and answer are forced letter by letter: Q and Z until the tag that a budget of reasoning writes."""
    first, second, _ = letters
    body = {"messages": MESSAGES, "allowed_token_ids": [*ids(command, "<think>\n"), first, second], "seed": 2,
            "temperature": 1, "thinking_token_budget": 30, "max_tokens": 90, "reasoning_language": "off",
            "logit_bias": {str(first): 4, str(second): 4}}  # fmt: skip
    reply = command.client.post("/v1/chat/completions", json={**body, "stop": ["QZ"]}).json()
    choice, usage = reply["choices"][0], reply["usage"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "QZ"
    assert "QZ" not in choice["message"]["content"] and usage["completion_tokens"] < 90
