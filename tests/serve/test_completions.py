"""POST /v1/completions, /tokenize and /detokenize over a scripted engine; test_vllm.py has the real one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from serve.completions import TokenPlaces
from serve.engine import SamplingParameters
from tests.serve.conftest import Serve, Served


def complete(served: Served, **body: Any) -> Any:
    """The response to a raw prompt."""
    return served.client.post("/v1/completions", json={"prompt": "One, two,", **body})


def seeded(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
    """Its seed and the length of its prompt."""
    return f"{sampling.seed} {len(prompt)}"


def test_a_prompt_goes_to_the_model_as_it_stands(serve: Serve) -> None:
    served = serve("<think>three</think> four", reasoning_language="fr")
    body = complete(served, prompt="<user>One, two,").json()
    assert served.engine.prompts == ["<user>One, two,"]
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<think>three</think> four", "stop")
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(served.server.prompts.chat.encode("<user>One, two,"))
    assert served.engine.samplings[0].max_tokens == 16, "OpenAI's default"
    assert "<user>" in served.server.prompts.chat.tokenizer.decode(served.server.prompts.chat.encode("<user>"))


def test_a_stream_says_the_same(serve: Serve) -> None:
    served = serve("three four five")
    lines = complete(served, stream=True, stream_options={"include_usage": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]" and len(events) > 3
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == "three four five"
    assert [choice["finish_reason"] for choice in events[-2]["choices"]] == ["stop"]
    assert events[-1]["usage"] == complete(served).json()["usage"]


def test_several_prompts_and_choices(serve: Serve) -> None:
    served = serve(seeded)
    ids = served.server.prompts.chat.encode("abc")
    texts = [choice["text"] for choice in complete(served, prompt=["ab", "abc"], n=2, seed=5).json()["choices"]]
    assert texts == [f"{seed} {len(ids) - (seed < 7)}" for seed in (5, 6, 7, 8)]
    assert complete(served, prompt=ids).json()["choices"][0]["text"] == f"None {len(ids)}"
    assert len(complete(served, prompt=[ids, ids]).json()["choices"]) == 2


def test_log_probs_of_a_prompt_are_keyed_by_token_as_in_vllm(serve: Serve) -> None:
    served = serve("three four", logprob=-0.25)
    ids = served.server.prompts.chat.encode("One, two,")
    (choice,) = complete(served, prompt=ids, prompt_logprobs=0, max_tokens=1).json()["choices"]
    texts = [served.server.prompts.chat.tokenizer.decode([one]) for one in ids]
    entries = [{str(one): {"logprob": -0.25, "decoded_token": text}} for one, text in zip(ids, texts, strict=True)]
    assert choice["prompt_logprobs"] == [None, *entries[1:]] and choice["logprobs"] is None
    assert served.engine.samplings[0].prompt_logprobs == 0
    alone = complete(served, prompt=ids[:1], prompt_logprobs=3).json()["choices"][0]
    assert alone["prompt_logprobs"] == [None], "nothing stands before a first token"
    assert "prompt_logprobs" not in complete(served).json()["choices"][0]
    both = complete(served, prompt=[ids, ids[:2]], prompt_logprobs=0).json()["choices"]
    assert [len(one["prompt_logprobs"]) for one in both] == [len(ids), 2]


def test_log_probs_of_a_prompt_are_computed_once_and_have_a_bound(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve("three four", logprob=-0.25)
    ids = served.server.prompts.chat.encode("One, two,")
    choices = complete(served, prompt=[ids, ids[:2]], prompt_logprobs=0, n=3).json()["choices"]
    assert [len(one["prompt_logprobs"]) for one in choices] == [len(ids)] * 3 + [2] * 3
    assert [one.prompt_logprobs for one in served.engine.samplings].count(0) == 2, "once each prompt"
    monkeypatch.setattr("serve.completions.MOST_PROMPT_CANDIDATES", 4 * len(ids))
    assert complete(served, prompt=[ids, ids], prompt_logprobs=1).is_success
    reply = complete(served, prompt=[ids, ids], prompt_logprobs=2)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt_logprobs"


LETTERS = "é 苹果 👩‍👩‍👧 a\u0301 x"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 400])
def test_echo_tells_the_prompt_and_its_log_probs(serve: Serve, max_tokens: int, stream: bool) -> None:
    said = " Ünd 果"
    served = serve(said, logprob=-0.25)
    chat = served.server.prompts.chat
    ids, after = chat.encode(LETTERS), chat.encode(said)[:max_tokens]
    body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": 2, "stream": stream}
    bodies = [complete(served, prompt=prompt, **body) for prompt in (LETTERS, ids, [ids, ids[:5]])]
    for choices in map(choices_of, bodies):
        for choice in choices[:2]:
            told, texts = choice["logprobs"], [chat.tokenizer.decode([token]) for token in (*ids, *after)]
            assert told["tokens"] == texts and choice["text"].startswith(LETTERS)
            assert max_tokens == 1 or choice["text"] == LETTERS + said * (max_tokens > 0)
            assert told["token_logprobs"] == [None] + [-0.25] * (len(texts) - 1)
            assert told["top_logprobs"] == [None, *({text: -0.25} for text in texts[1:])]
            starts = [len(chat.tokenizer.decode([*ids, *after][:size]).rstrip("\ufffd")) for size in range(len(texts))]
            assert told["text_offset"] == starts and "prompt_logprobs" not in choice
            assert choice["finish_reason"] == ("stop" if max_tokens == 400 else "length")
    assert [len(choice["logprobs"]["tokens"]) - len(after) for choice in choices] == [len(ids)] * 2 + [5] * 2
    usage = {} if stream else bodies[0].json()["usage"]
    assert stream or (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * len(ids), 2 * len(after))


def choices_of(reply: Any) -> list[dict[str, Any]]:
    """The choices of a response; those of a stream are put together."""
    if reply.headers["content-type"] == "application/json":
        return list(reply.json()["choices"])
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    joined: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        whole = joined.setdefault(choice["index"], choice)
        if whole is not choice:
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            for name, values in choice["logprobs"].items():
                whole["logprobs"][name] += values
    return [joined[index] for index in sorted(joined)]


def test_echo_without_log_probs_and_log_probs_without_echo(serve: Serve) -> None:
    served = serve("é果", logprob=-0.25)
    ids = served.server.prompts.chat.encode("é果")
    plain = complete(served, prompt="One", echo=True, prompt_logprobs=0).json()["choices"][0]
    assert plain["text"] == "Oneé果" and plain["logprobs"] is None and len(plain["prompt_logprobs"]) > 1
    assert served.engine.samplings[-1].prompt_logprobs == 0
    both = complete(served, prompt="One", echo=True, prompt_logprobs=0, logprobs=2).json()["choices"][0]
    assert served.engine.samplings[-1].prompt_logprobs == 2 and both["prompt_logprobs"][0] is None
    told = complete(served, logprobs=0).json()["choices"][0]["logprobs"]
    starts = [len(served.server.prompts.chat.tokenizer.decode(ids[:size]).rstrip("\ufffd")) for size in range(len(ids))]
    assert told["text_offset"] == starts and max(starts) == 1 and len(told["tokens"]) == len(ids)
    assert complete(served, max_tokens=0).json()["choices"][0]["text"] == ""


def test_echoed_log_probs_have_a_bound(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("three", logprob=-0.25)
    ids = served.server.prompts.chat.encode("One, two,")
    monkeypatch.setattr("serve.completions.MOST_PROMPT_CANDIDATES", 4 * len(ids))
    assert complete(served, echo=True, logprobs=1, n=2).is_success
    for body in ({"logprobs": 2, "n": 2}, {"logprobs": 4}):
        reply = complete(served, echo=True, **body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "logprobs"


def test_places_go_on_after_bytes_that_are_no_text() -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    letters = "aé👩".encode()
    broken = [0xFF] * 9
    assert TokenPlaces(decode).add(letters) == [0, 1, 1, 2, 2, 2, 2]
    assert TokenPlaces(decode, letters[:2]).add(letters[2:]) == [0, 1, 1, 1, 1], "the completion tells the whole letter"
    assert TokenPlaces(decode).add([*broken, *b"abcd"])[-3:] == [10, 11, 12]


@pytest.mark.parametrize(
    ("body", "status"),
    [({"prompt": ""}, 400), ({"prompt": []}, 400), ({"prompt": [[]]}, 400), ({"prompt": [10**9]}, 400),
     ({"prompt": [-1]}, 400), ({"prompt": [True]}, 400), ({"prompt": ["a"] * 17}, 400), ({"n": 99}, 400),
     ({"prompt_logprobs": -1}, 400), ({"prompt_logprobs": 21}, 400), ({"prompt_logprobs": 0, "stream": True}, 400),
     ({"max_tokens": -1}, 400), ({"max_tokens": 0, "min_tokens": 1}, 400), ({"suffix": "x"}, 400),
     ({"logprobs": 99}, 400), ({"model": "other"}, 404), ({"prompt": "y" * 9000}, 400),
     ({"prompt": ["a"] * 16, "n": 16}, 400), ({"prompt": None}, 400)],
)  # fmt: skip
def test_mistakes(serve: Serve, body: dict[str, Any], status: int) -> None:
    served = serve("x", max_sequences=8, queue=8)
    reply = complete(served, **body)
    assert reply.status_code == status and reply.json()["error"]["message"] and served.server.admitted == 0
    assert complete(served, echo=False, suffix=None, best_of=1).is_success


def test_texts_and_conversations_as_tokens(serve: Serve) -> None:
    served = serve("x", reasoning_language="en")
    chat = served.server.prompts.chat

    def tokenize(**body: Any) -> Any:
        return served.client.post("/tokenize", json=body).json()

    found = tokenize(prompt="One, two<eos>")
    assert found == {"tokens": chat.encode("One, two<eos>"), "count": len(found["tokens"]), "max_model_len": 4096}
    asked = tokenize(messages=[{"role": "user", "content": "Hi"}])
    served.ask("Hi")
    assert chat.tokenizer.decode(asked["tokens"]) == served.engine.prompts[0], "system prompt and all"
    back = served.client.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": "One, two<eos>"}
    assert served.client.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    assert tokenize(prompt="One", add_special_tokens=False)["tokens"] == chat.encode("One")
    assert served.client.get("/tokenizer_info").json()["eos_token"] == chat.tokenizer.eos_token
    assert served.client.post("/tokenize", json={"prompt": "One", "add_special_tokens": True}).status_code == 400
    assert served.client.post("/tokenize", json={}).status_code == 400
    assert served.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
