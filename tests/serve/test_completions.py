"""POST /v1/completions, /tokenize and /detokenize over a scripted engine; test_vllm.py has the real one."""

import json

from serve.completions import TokenPlaces

LETTERS = "é 苹果 👩‍👩‍👧 a\u0301 x"


def complete(served, **body):
    """The response to a raw prompt."""
    return served.client.post("/v1/completions", json={"prompt": "One, two,", **body})


def joined(text):
    """The choices of a stream."""
    choices = {}
    for event in (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")):
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], choice)
            if whole is not choice:
                whole |= {"text": whole["text"] + choice["text"], "finish_reason": choice["finish_reason"]}
                for name, values in choice["logprobs"].items():
                    whole["logprobs"][name] += values
    return [choices[index] for index in sorted(choices)]


def starts_of(chat, ids):
    """Where each token begins, in letters of the text before it."""
    return [len(chat.tokenizer.decode(ids[:size]).rstrip("\ufffd")) for size in range(len(ids))]


def test_a_prompt_goes_to_the_model_as_it_stands(serve):
    served = serve("<think>three</think> four", reasoning_language="fr")
    body = complete(served, prompt="<user>One, two,").json()
    assert served.engine.prompts == ["<user>One, two,"]
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<think>three</think> four", "stop")
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["usage"]["prompt_tokens"] == len(served.server.prompts.chat.encode("<user>One, two,"))
    assert served.engine.samplings[0].max_tokens == 16, "OpenAI's default"
    lines = complete(served, stream=True, stream_options={"include_usage": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]" and len(events) > 3
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == "<think>three</think> four"
    assert [choice["finish_reason"] for choice in events[-2]["choices"]] == ["stop"]
    assert events[-1]["usage"] == complete(served).json()["usage"]


def test_several_prompts_and_choices(serve):
    served = serve(lambda prompt, sampling, call: f"{sampling.seed} {len(prompt)}")
    ids = served.server.prompts.chat.encode("abc")
    texts = [choice["text"] for choice in complete(served, prompt=["ab", "abc"], n=2, seed=5).json()["choices"]]
    assert texts == [f"{seed} {len(ids) - (seed < 7)}" for seed in (5, 6, 7, 8)]
    assert complete(served, prompt=ids).json()["choices"][0]["text"] == f"None {len(ids)}"
    assert len(complete(served, prompt=[ids, ids]).json()["choices"]) == 2


def test_log_probs_of_a_prompt_are_keyed_by_token_as_in_vllm_and_computed_once(serve):
    served = serve("three four", logprob=-0.25)
    ids = served.server.prompts.chat.encode("One, two,")
    (choice,) = complete(served, prompt=ids, prompt_logprobs=0, max_tokens=1).json()["choices"]
    texts = [served.server.prompts.chat.tokenizer.decode([token]) for token in ids]
    entries = [{str(token): {"logprob": -0.25, "decoded_token": text}} for token, text in zip(ids, texts, strict=True)]
    assert choice["prompt_logprobs"] == [None, *entries[1:]] and choice["logprobs"] is None
    alone = complete(served, prompt=ids[:1], prompt_logprobs=3).json()["choices"][0]
    assert alone["prompt_logprobs"] == [None], "nothing stands before a first token"
    assert "prompt_logprobs" not in complete(served).json()["choices"][0]
    served.engine.samplings.clear()
    choices = complete(served, prompt=[ids, ids[:2]], prompt_logprobs=0, n=3).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [len(ids)] * 3 + [2] * 3
    assert [sampling.prompt_logprobs for sampling in served.engine.samplings].count(0) == 2, "once each prompt"


def test_echo_tells_the_prompt_and_its_log_probs(serve):
    text = " Ünd 果"
    served = serve(text, logprob=-0.25)
    chat = served.server.prompts.chat
    ids = chat.encode(LETTERS)
    for most in (0, 1, 400):
        after, body = chat.encode(text)[:most], {"echo": True, "logprobs": 1, "max_tokens": most, "n": 2}
        texts = [chat.tokenizer.decode([token]) for token in (*ids, *after)]
        for prompt in (LETTERS, ids, [ids, ids[:5]]):
            whole = complete(served, prompt=prompt, **body).json()
            choices = whole["choices"]
            for choice in choices[:2]:
                ranked = choice["logprobs"]
                assert ranked["tokens"] == texts and choice["text"].startswith(LETTERS)
                assert most == 1 or choice["text"] == LETTERS + text * (most > 0)
                assert ranked["token_logprobs"] == [None] + [-0.25] * (len(texts) - 1)
                assert ranked["top_logprobs"] == [None, *({text: -0.25} for text in texts[1:])]
                assert ranked["text_offset"] == starts_of(chat, [*ids, *after]) and "prompt_logprobs" not in choice
                assert choice["finish_reason"] == ("stop" if most == 400 else "length")
            used = whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]
            assert prompt == [ids, ids[:5]] or used == (2 * len(ids), 2 * len(after))
            streamed = joined(complete(served, prompt=prompt, stream=True, **body).text)
            assert [{**choice, **same} for choice, same in zip(choices, streamed, strict=True)] == choices
        assert [len(choice["logprobs"]["tokens"]) - len(after) for choice in choices] == [len(ids)] * 2 + [5] * 2


def test_echo_without_log_probs_and_log_probs_without_echo(serve):
    served = serve("é果", logprob=-0.25)
    chat = served.server.prompts.chat
    plain = complete(served, prompt="One", echo=True, prompt_logprobs=0).json()["choices"][0]
    assert plain["text"] == "Oneé果" and plain["logprobs"] is None and len(plain["prompt_logprobs"]) > 1
    assert served.engine.samplings[-1].prompt_logprobs == 0
    both = complete(served, prompt="One", echo=True, prompt_logprobs=0, logprobs=2).json()["choices"][0]
    assert served.engine.samplings[-1].prompt_logprobs == 2 and both["prompt_logprobs"][0] is None
    ranked = complete(served, logprobs=0).json()["choices"][0]["logprobs"]
    assert ranked["text_offset"] == starts_of(chat, chat.encode("é果")) == [0, 0, 1, 1, 1]
    assert len(ranked["tokens"]) == 5 and complete(served, max_tokens=0).json()["choices"][0]["text"] == ""


def test_log_probs_of_prompts_have_a_bound(serve, monkeypatch):
    served = serve("three", logprob=-0.25)
    ids = served.server.prompts.chat.encode("One, two,")
    monkeypatch.setattr("serve.completions.MOST_PROMPT_CANDIDATES", 4 * len(ids))
    two = {"prompt": [ids, ids]}
    for body in ({"prompt_logprobs": 1, **two}, {"echo": True, "logprobs": 1, "n": 2}):
        assert complete(served, **body).is_success
    for name, body in (("prompt_logprobs", {"prompt_logprobs": 2, **two}), ("logprobs", {"logprobs": 2, "n": 2}),
                       ("logprobs", {"logprobs": 4})):  # fmt: skip
        reply = complete(served, echo=True, **body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name


def test_places_go_on_after_bytes_that_are_no_text():
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    pieces = (b"a\xc3", b"\xa9b", b"c")
    assert TokenPlaces(lambda ids: decode(b"".join(pieces[token] for token in ids))).add(range(3)) == [0, 1, 3]
    letters = "aé👩".encode()
    assert TokenPlaces(decode).add(letters) == [0, 1, 1, 2, 2, 2, 2]
    assert TokenPlaces(decode, letters[:2]).add(letters[2:]) == [0, 1, 1, 1, 1], "the completion tells the whole letter"
    assert TokenPlaces(decode).add([*[0xFF] * 9, *b"abcd"])[-3:] == [10, 11, 12]


def test_texts_and_conversations_as_tokens(serve):
    served = serve("x", reasoning_language="en")
    chat = served.server.prompts.chat

    def post(path, **body):
        return served.client.post(path, json=body)

    whole = post("/tokenize", prompt="One, two<eos>").json()
    assert whole == {"tokens": chat.encode("One, two<eos>"), "count": len(whole["tokens"]), "max_model_len": 4096}
    asked = post("/tokenize", messages=[{"role": "user", "content": "Hi"}]).json()
    served.ask("Hi")
    assert chat.tokenizer.decode(asked["tokens"]) == served.engine.prompts[0], "system prompt and all"
    assert post("/detokenize", tokens=whole["tokens"]).json() == {"prompt": "One, two<eos>"}
    assert post("/detokenize", tokens=[]).json() == {"prompt": ""}
    assert post("/tokenize", prompt="One", add_special_tokens=False).json()["tokens"] == chat.encode("One")
    assert served.client.get("/tokenizer_info").json()["eos_token"] == chat.tokenizer.eos_token
