"""Reasoning in the forms of families as they publish them: found, split, counted, prefilled, ended, asked for once.

A line of families.jsonl is a family: its template (a `file` of tests/shared/chat_templates, or the parts that matter:
control tokens, how the assistant's turn begins), its tags, the template's arguments with which it reasons (`on`) and
does not (`off`), whether the template opens the reasoning, and completions with their reasoning and answer. At the end
gpt-oss through a server: its channels, its effort, its calls, and what is prefilled into which channel.
"""

import json

import msgspec
import pytest

from serve.messages import ChatMessage
from serve.reasoning import ReasoningCounter, Splitter, State
from serve.system_prompts import SYSTEM_PROMPTS, PromptRenderer
from serve.tools import AnswerForm
from shared.errors import ModelError
from shared.languages import request_for
from shared.model.model_card import ModelCard
from shared.reasoning_tags import HARMONY, MARKS, Tags
from shared.tool_calls import TOOLS_PROMPT, call_text
from tests.shared.test_chat_families import FAMILIES, FOLDER, IM, Family, write_model
from tests.tables import read_table

PUBLISHED = {row["name"]: row for row in read_table("serve/families")}
TEXT = ("<think>", "</think>")
TAGS = ("<think>", "</think>", "[THINK]", "<seed:think>", "<|channel>", "<|channel|>", "START_THINKING", "Here is my")
A, C, F = "<|channel|>analysis<|message|>", "<|channel|>commentary", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
GPTOSS = (FOLDER / "gptoss.jinja").read_text(encoding="utf-8")


def write(folder, name):
    """The model's folder of a family."""
    row = PUBLISHED[name]
    template = row.get("template") or (FOLDER / f"{row['file']}.jinja").read_text(encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return write_model(folder, Family(*row["model"]), template)


@pytest.fixture(scope="module", params=PUBLISHED)
def family(request, tmp_path_factory):
    """A line of the table, its prompts as it reasons, and as it does not, where it can do without."""
    row = PUBLISHED[request.param]
    prompts = PromptRenderer.of_model(write(tmp_path_factory.mktemp("family"), row["name"]), "policy")
    return row, prompts.with_arguments(row["on"]), "off" in row and prompts.with_arguments(row["off"])


def deltas(prompts, text):
    """The tokens of a completion with their texts, as an engine gives them: half a character is held back."""
    ids, before = prompts.chat.encode(text), ""
    for number, token in enumerate(ids, 1):
        whole = prompts.chat.tokenizer.decode(ids[:number], skip_special_tokens=False)
        delta = "" if whole.endswith("\ufffd") else whole[len(before) :]
        before += delta
        yield delta, token


def split(splitter, pieces):
    """Reasoning and answer of a completion in pieces of text and tokens."""
    chunks = [chunk for text, ids in pieces for chunk in splitter.feed(text, ids)] + splitter.end()
    assert all(chunk.text for chunk in chunks)
    return tuple("".join(chunk.text for chunk in chunks if chunk.thinking is kind) for kind in (True, False))


def test_reasoning_and_answer_are_apart_and_counted_wherever_a_stream_is_cut(family):
    row, prompts, _ = family
    form = {"opened": prompts.opened, "control": prompts.control}
    assert [*prompts.tags[:2]] == row["tags"] and prompts.opened == row["opened"]

    def parts(pieces):
        return [*split(Splitter(prompts.tags, **form), pieces)]

    for text, *expected in row["completions"]:
        steps = list(deltas(prompts, text))
        ids = [token for _, token in steps]
        assert "".join(delta for delta, _ in steps) == text
        for cut in range(len(steps) + 1):
            pieces = [("".join(delta for delta, _ in part), [token for _, token in part])
                      for part in (steps[:cut], steps[cut:])]  # fmt: skip
            assert parts(pieces) == expected, (text, cut)
        assert parts([(delta, [token]) for delta, token in steps]) == expected
        assert parts([("", ids), *((letter, ()) for letter in text)]) == expected, "late text"
        if ids[-1] in prompts.chat.stop_ids:  # engines give its token, and no text of it
            assert parts([(text[: len(text) - len(steps[-1][0])], ids)]) == expected
    text, close = row["completions"][0][0], prompts.tags.close
    ids = prompts.chat.encode(text)
    for size in (1, 3, len(ids)):
        counter = ReasoningCounter(prompts.letters, prompts.tags, **form)
        for start in range(0, len(ids), size):
            counter.feed(ids[start : start + size])
        assert counter.tokens == len(prompts.chat.encode(text[: text.index(close) + len(close)]))


def test_reasoning_is_switched_by_the_templates_own_argument(family):
    row, _, prompts = family
    if not prompts:
        return
    if prompts.chat.think_closed:
        splitter = Splitter(prompts.tags, control=prompts.control)
        splitter.state = State.ANSWER
        pieces = ((delta, [token]) for delta, token in deltas(prompts, row["without"]))
        assert split(splitter, pieces) == ("", "It is 四.")
    else:
        assert row["name"] == "granite 3.3" and not prompts.opened, "it only asks for none"
    with pytest.raises(ModelError, match="'thinks'"):
        prompts.with_arguments({"thinks": True})


def test_the_request_for_a_language_stands_once_at_the_end_of_the_last_turn(family):
    question = "How many are 2 + 2?"
    last = [ChatMessage(role="user", content=question)]
    earlier = [ChatMessage(role="user", content="Hello."),
               ChatMessage(role="assistant", content="<think>a</think>Yes?")]  # fmt: skip
    for prompts in filter(None, family[1:]):
        for messages in (last, [ChatMessage(role="system", content="Be kind."), *last], earlier + last):
            for code, form in (("de", None), ("pt", AnswerForm(TOOLS_PROMPT, "{}")), ("", None)):
                text = prompts.chat.tokenizer.decode(prompts.render(messages, code, form))
                if code:
                    assert text.count(request_for(code)) == 1 and f"{question}\n\n{request_for(code)}" in text
                assert messages[0].text in text and (form is not None) == ("You may call tools" in text)
    policy = prompts.system_prompt("de")
    named = [tag for tag in TAGS if any(tag in text for text in prompts.tags[:2]) and not prompts.tags.channels]
    assert [tag for tag in TAGS if tag in policy] == named


def test_reasoning_is_begun_and_ended_in_the_familys_form(family):
    _, prompts, _ = family
    prompt, texts = prompts.render([ChatMessage(role="user", content="2 + 2?")], "de"), SYSTEM_PROMPTS["de"]
    ids, words = prompts.begin_reasoning(prompt, "de")
    assert ids[: len(prompt)] == prompt and words == texts.first_words
    opening = "" if prompts.opened else prompts.tags.open.rstrip() + ("" if prompts.tags.channels else "\n")
    assert prompts.chat.tokenizer.decode(ids[len(prompt) :]) == opening + words
    for opened, before in ((True, words), (prompts.opened, "")):
        splitter = Splitter(prompts.tags, opened=opened, control=prompts.control)
        splitter.feed(before, prompts.chat.encode(before))
        text, tokens = prompts.end_reasoning("de", splitter, begun=bool(before))
        assert prompts.chat.tokenizer.decode(tokens) == text
        reasoning, answer = split(splitter, [(text + "Vier.", tokens)])
        assert (reasoning.strip(), answer) == (texts.budget_phrase if before else "", "Vier.")


def test_the_policy_says_nothing_of_tags_where_the_template_has_channels():
    for texts in SYSTEM_PROMPTS.values():
        prompt, whole = texts.system_prompt(HARMONY), texts.system_prompt(Tags(*TEXT))
        assert "{open}" not in prompt and not any(mark in prompt for mark in MARKS)
        assert whole.startswith(prompt) and len(prompt.split("\n\n")) == 2


@pytest.mark.parametrize("name", ["seed oss", "gemma 4", "gpt-oss"])
def test_a_model_that_a_run_has_trained_reasons_as_runs_ask(tmp_path, name):
    (write(tmp_path, name) / "maestrale.json").write_bytes(msgspec.json.encode(ModelCard("r", 1, "magistral")))
    tags = PromptRenderer.of_model(tmp_path, "trained").tags
    assert tags == HARMONY if name == "gpt-oss" else tags[:2] == TEXT, "channels stand in every completion"


def test_a_form_that_cannot_be_read_is_refused_by_name(tmp_path):
    write_model(tmp_path, IM, "{% for m in messages %}{{ m.content }}{% endfor %}<|thoughts|>\n")
    with pytest.raises(ModelError, match=r"'<\|thoughts\|>'.*chat_template.jinja"):
        PromptRenderer.of_model(tmp_path, "policy")
    write_model(tmp_path, Family("<|start|> <|end|> <|return|>", "<|return|>", "<|return|>", ""), GPTOSS)
    with pytest.raises(ModelError, match=r"\(<\|channel\|>, <\|message\|>\)"):
        PromptRenderer.of_model(tmp_path, "policy")


def test_a_call_ends_a_completion_in_channels_whatever_the_models_files_say(tmp_path):
    write_model(tmp_path, FAMILIES["gptoss"]._replace(ends="<|return|>"), GPTOSS)
    chat = PromptRenderer.of_model(tmp_path, "policy").chat
    assert chat.tokenizer.convert_ids_to_tokens(list(chat.stop_ids)) == ["<|return|>", "<|call|>"]


@pytest.fixture
def serve_harmony(serve, tmp_path):
    """serve_harmony(script, setting=value, ...): a server of gpt-oss whose engine says what the script returns."""
    folder = write(tmp_path, "gpt-oss")

    def begin(script, **settings):
        served = serve(script, model=str(folder), **settings)
        served.engine.chat = served.server.prompts.chat
        return served

    return begin


def test_channels_take_efforts_and_no_control_token_of_theirs_reaches_a_client(serve_harmony):
    served = serve_harmony(f"{A}We add.{NEXT}{F}It is 四.")
    for format in ("both", "inline", "mistral", "hidden"):
        message = served.ask(reasoning_format=format).json()["choices"][0]["message"]
        events = served.events(reasoning_format=format)
        if format != "mistral":
            parts = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
            expected = "<think>\nWe add.\n</think>\nIt is 四." if format == "inline" else "It is 四."
            assert message["content"] == "".join(parts) == expected
        assert ("We add." in json.dumps(message)) == (format != "hidden")
        assert not any(mark in json.dumps([message, events]) for mark in MARKS)
    usage = served.ask().json()["usage"]["completion_tokens_details"]
    assert usage["reasoning_tokens"] == len(served.engine.chat.encode(f"{A}We add.{NEXT}{F}"))
    for effort, expected in (("low", "low"), ("minimal", "low"), ("medium", "medium"), ("max", "high")):
        assert served.ask(reasoning_effort=effort).status_code == 200
        assert f"Reasoning: {expected}\n" in served.engine.prompts[-1], "beside the budget"
    served.ask(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert "Reasoning: high\n" in served.engine.prompts[-1]
    assert served.client.post("/v1/responses", json={"input": "2?", "reasoning": {"effort": "low"}}).status_code == 200
    assert "Reasoning: low\n" in served.engine.prompts[-1]
    for language, status in (("de", 400), ("off", 200)):  # a mask would hold the language in all channels
        reply = served.ask(reasoning_language=language, reasoning_language_enforcement="constrain")
        assert reply.status_code == status and (status == 200 or "give prompt" in reply.json()["error"]["message"])


def test_reasoning_in_channels_is_prefilled_and_ended_in_its_channel(serve_harmony):
    def script(prompt, sampling, call):
        return "Vier." if served.engine.prompts[-1].endswith(F) else " Zwei und zwei sind vier, das ist klar." * 3

    served = serve_harmony(script, reasoning_language="de")
    reply = served.ask(reasoning_language_enforcement="prefill", thinking_token_budget=20).json()["choices"][0]
    begin, phrase = SYSTEM_PROMPTS["de"].first_words, SYSTEM_PROMPTS["de"].budget_phrase
    first, last = served.engine.prompts
    assert first.endswith(f"<|start|>assistant{A}{begin}") and first.count(request_for("de")) == 1
    assert last.startswith(first) and last.endswith(f"\n{phrase}{NEXT}{F}")
    assert reply["message"]["content"] == "Vier." and reply["message"]["reasoning"].startswith(f"{begin} Zwei")
    served.ask(reasoning_effort="none")
    assert served.engine.prompts[-1].endswith(f"<|start|>assistant{F}")


@pytest.mark.parametrize(("stream", "choice"), [(False, "auto"), (True, "auto"), (False, "required"), (True, "none")])
def test_a_call_in_the_commentary_channel_is_a_call(serve_harmony, stream, choice):
    header = f"{C} to=functions.add <|constrain|>json<|message|>"

    def script(prompt, sampling, call):
        before = served.engine.prompts[-1]
        if before.endswith(header):
            return '{"a": 2}'
        return f"{'' if before.endswith(A) else A}I add.{NEXT}{header}" + '{"a": 2}' * (choice == "none")

    served = serve_harmony(script)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    if stream:
        parts = [event["choices"][0]["delta"] for event in served.events(tools=tools, tool_choice=choice)]
        calls = [call for part in parts for call in part.get("tool_calls", [])]
        content = "".join(part.get("content") or "" for part in parts)
    else:
        [reply] = served.ask(tools=tools, tool_choice=choice).json()["choices"]
        calls, content = reply["message"]["tool_calls"], reply["message"]["content"] or ""
        assert reply["finish_reason"] == "tool_calls" and reply["message"]["reasoning"] == "I add."
    if choice == "none":  # nothing was offered, and what looks like a call is text, as for every model
        assert not calls and content == call_text("add", '{"a": 2}')
        return
    assert content == "" and [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 2}'}]
    assert "You may call tools" in served.engine.prompts[-1]
    assert [sampling.constraint for sampling in served.engine.samplings] == [None, None]


def test_a_form_holds_for_the_final_channel_whatever_its_header(serve_harmony):
    steps = [f"We add.{NEXT}<|channel|>final <|constrain|>json<|message|>", '{"n": 4}']
    served = serve_harmony(lambda prompt, sampling, call: steps[call])
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    message = served.ask(response_format=form).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("We add.", '{"n": 4}')
    first, second = served.engine.samplings
    assert first.constraint is None and first.through == "<|message|>" and second.constraint is not None
