"""POST /v1/chat/completions over HTTP: shapes, languages, tries, budgets, however the stream of the engine was cut. It
is scripted here; test_vllm.py has the real one."""

import pytest

from serve.engine import Delta

FRENCH = "Il y a trois pommes dans le panier et nous en ajoutons encore deux, ce qui fait cinq pommes en tout."
ENGLISH = "There are three apples in the basket and we add two more of them, which makes five apples in all."
QUESTION = "Combien de pommes y a-t-il dans le panier si l'on en ajoute deux aux trois premières ?"
RIGHT = f"<think>\n{FRENCH}\n</think>\n\nIl y a donc cinq pommes dans le panier."
WRONG = f"<think>\n{ENGLISH}\n</think>\n\nThere are five apples in the basket."


def joined(events, name, index=0):
    """The text of a field over a stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(name) or "" for choice in choices)


def test_reasoning_and_answer_are_apart_whole_and_streamed(serve):
    served = serve(RIGHT)
    body = served.ask(seed=3).json()
    (choice,) = body["choices"]
    message, usage, language = choice["message"], body["usage"], body["reasoning_language"]
    assert message["reasoning"] == message["reasoning_content"] == FRENCH
    assert message["content"] == "Il y a donc cinq pommes dans le panier." and message["refusal"] is None
    assert (body["object"], body["model"], choice["finish_reason"]) == ("chat.completion", "tiny", "stop")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(FRENCH) < thinking < usage["completion_tokens"]
    assert (language["requested"], language["match"], language["detected"]) == (None, None, "fr")
    events = served.events(stream_options={"include_usage": True})
    assert joined(events, "reasoning").strip() == joined(events, "reasoning_content").strip() == FRENCH
    assert joined(events, "content") == message["content"]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-2]["choices"][0]["finish_reason"] == "stop" and events[-2]["reasoning_language"]["detected"] == "fr"
    assert events[-1]["choices"] == [] and events[-1]["usage"] == usage
    assert {event["object"] for event in events} == {"chat.completion.chunk"} and len({e["id"] for e in events}) == 1


@pytest.mark.parametrize(
    ("format", "names"), [("openai", {"reasoning"}), ("deepseek", {"reasoning_content"}), ("hidden", set())]
)
def test_reasoning_stands_where_the_client_wants_it(serve, format, names):
    served = serve(RIGHT)
    message = served.ask(reasoning_format=format).json()["choices"][0]["message"]
    events = served.events(reasoning_format=format)
    assert {name for name in ("reasoning", "reasoning_content") if name in message} == names
    assert all(bool(joined(events, name)) == (name in names) for name in ("reasoning", "reasoning_content"))
    assert message["content"] == joined(events, "content") == "Il y a donc cinq pommes dans le panier."


def test_reasoning_may_stand_in_the_content(serve):
    served = serve(RIGHT)
    inline, mistral = (served.ask(reasoning_format=name).json()["choices"][0]["message"]["content"]
                       for name in ("inline", "mistral"))  # fmt: skip
    assert inline.startswith(f"<think>\n{FRENCH}\n</think>\nIl y a donc")
    assert joined(served.events(reasoning_format="inline"), "content").split() == inline.split()
    assert [chunk["type"] for chunk in mistral] == ["thinking", "text"]
    deltas = [choice["delta"] for event in served.events(reasoning_format="mistral") for choice in event["choices"]]
    assert next(filter(None, (delta.get("content") for delta in deltas)))[0]["type"] == "thinking"


def test_several_choices_have_seeds_of_their_own(serve):
    served = serve(lambda prompt, sampling, call: f"<think>a</think>{sampling.seed}")
    choices = served.ask(n=3, seed=5).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["5", "6", "7"]
    body = served.ask("Hello", n=2).json()
    assert "reasoning_language" not in body, "none speaks for the others"
    assert [choice["reasoning_language"]["tries"] for choice in body["choices"]] == [1, 1]
    events = served.events(n=3, seed=5)
    assert [joined(events, "content", index) for index in range(3)] == ["5", "6", "7"]


def test_sampling_is_as_asked_or_the_servers_own(serve):
    served = serve("x", temperature=0.6, top_p=0.9)
    served.ask(temperature=0, top_p=0.5, top_k=4, stop="end", max_tokens=9, max_completion_tokens=7, seed=1)
    served.ask(stop=[])
    asked, usual = served.engine.samplings
    assert (asked.temperature, asked.top_p, asked.top_k, asked.stop, asked.max_tokens) == (0, 0.5, 4, ["end"], 7)
    assert (usual.temperature, usual.top_p, usual.stop, usual.seed) == (0.6, 0.9, [], None)
    assert served.ask(max_tokens=1).json()["choices"][0]["finish_reason"] == "stop"


def test_the_question_decides_and_the_prompt_asks_in_that_language(serve):
    served = serve(RIGHT, reasoning_language="auto")
    reply = served.ask(QUESTION)
    assert reply.json()["reasoning_language"] == {
        "requested": "fr", "source": "question", "enforcement": "prompt", "detected": "fr", "share": 1.0,
        "answer_detected": "fr", "match": True, "tries": 1,
    }  # fmt: skip
    assert reply.headers["x-reasoning-language"] == "fr"
    (prompt,) = served.engine.prompts
    assert prompt.startswith("<system>Tu accomplis la tâche")
    assert prompt.endswith(f"{QUESTION}\n\nRéfléchis et réponds en français.<eos><assistant>")


def second_time(prompt, sampling, call):
    """English first; then French, behind the French beginning."""
    return WRONG if call == 0 else f" {FRENCH}</think>Cinq pommes, donc."


def test_retry_begins_again_before_anything_was_told_and_counts_both_tries(serve):
    def script(prompt, sampling, call):
        return f"<think>\n{ENGLISH} {ENGLISH}" if call == 0 else second_time(prompt, sampling, call)

    served = serve(script, token_s=0.001, reasoning_language="fr", reasoning_language_enforcement="retry")
    events = served.events(QUESTION, seed=4, stream_options={"include_usage": True})
    reasoning, usage, language = joined(events, "reasoning"), events[-1]["usage"], events[-2]["reasoning_language"]
    assert reasoning == f"Bon, réfléchissons étape par étape. {FRENCH}"
    assert served.engine.prompts[1].endswith("<assistant><think>\nBon, réfléchissons étape par étape.")
    assert (language["tries"], language["match"], language["enforcement"]) == (2, True, "retry")
    assert served.engine.told < 2 * len(ENGLISH) + len(FRENCH), "the first try was aborted"
    assert [sampling.seed for sampling in served.engine.samplings] == [4, 5]
    first = language["first_try"]
    assert first["reasoning"].strip().startswith("There are three apples") and first["answer"] == ""
    assert (first["detected"], first["tokens"]) == ("en", first["reasoning_tokens"]) and first["tokens"] >= 80
    spoken = len(f" {FRENCH}".encode()) + 1  # and the closing tag; its tokens are bytes
    assert usage["completion_tokens_details"]["reasoning_tokens"] == first["tokens"] + spoken
    assert usage["completion_tokens"] == first["tokens"] + spoken + len("Cinq pommes, donc.")


def long_reasoning(prompt, sampling, call):
    """Reasoning without an end, unless somebody ended it."""
    return "Cinq." if call else "<think>" + "et puis encore un " * 50


def test_reasoning_ends_with_its_budget(serve):
    served = serve(long_reasoning, reasoning_language="fr")
    message = served.ask(QUESTION, thinking_token_budget=60, max_tokens=300).json()["choices"][0]["message"]
    reasoning = message["reasoning"]
    assert reasoning.startswith("et puis encore un") and reasoning.count("encore") in (3, 4)
    assert reasoning.endswith("\nJ'ai assez réfléchi, je réponds maintenant.") and message["content"] == "Cinq."
    first, second = served.engine.prompts
    assert second.startswith(first) and second.endswith("je réponds maintenant.\n</think>\n\n")
    assert served.engine.samplings[1].max_tokens < 300 - 60 and served.engine.running == 0


def test_no_effort_is_no_reasoning(serve):
    served = serve("4")
    reply = served.ask(reasoning_effort="none", max_tokens=1).json()
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning"], reply["usage"]["completion_tokens"]) == ("", None, 1)
    assert served.ask(reasoning_effort="none").json()["choices"][0]["message"]["content"] == "4"
    assert served.engine.prompts[-1].endswith("<assistant><think>\n\n</think>\n\n")
    assert served.ask(thinking_token_budget=5).json()["choices"][0]["message"]["reasoning"] is None, "it did not think"
    reply = serve(long_reasoning).ask(thinking_token_budget=30, max_tokens=40).json()
    assert reply["choices"][0]["finish_reason"] == "length" and reply["choices"][0]["message"]["content"] == ""


def grouped(generate, size):
    """An engine that tells `size` tokens at a time, as vLLM does where its reader lags behind."""

    async def generate_grouped(prompt_ids, sampling):
        group = []
        async for delta in generate(prompt_ids, sampling):
            group.append(delta)
            if len(group) == size or delta.finish_reason:
                ids, ranked = ([value for part in group for value in part[place]] for place in (1, 2))
                yield Delta("".join(part.text for part in group), ids, ranked, delta.finish_reason)
                group = []

    return generate_grouped


def test_tokens_are_counted_alike_however_many_the_engine_tells_at_once(serve):
    served = serve("")
    single = served.engine.generate
    for text in (RIGHT, "<think>\nx</think>y", FRENCH, "<think>never closed", "<think></think>"):
        served.engine.script = lambda *_, text=text: text
        usages = []
        for size in (1, 2, 3, 7, 1000):
            served.engine.generate = grouped(single, size)
            usages += [served.ask().json()["usage"], served.events(stream_options={"include_usage": True})[-1]["usage"]]
        assert all(usage == usages[0] for usage in usages), text
