"""Reasoning in the forms of families as they publish them: found, split, counted, prefilled, ended, asked for once.

Published templates lie in tests/shared/chat_templates. Of other families a line stands here with the parts of theirs
that matter: control tokens, the argument that switches the reasoning, how the assistant's turn begins, the tags.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serve.messages import ChatMessage
from serve.reasoning import Chunk, ReasoningCounter, Splitter
from serve.system_prompts import SYSTEM_PROMPTS, PromptRenderer
from serve.tools import AnswerForm
from shared.errors import ModelError
from shared.languages import request_for
from shared.model.model_card import ModelCard
from shared.reasoning_tags import HARMONY, MARKS, Tags
from shared.tool_calls import TOOLS_PROMPT, call_text
from tests.shared.test_chat_families import (
    DEEPSEEK,
    FAMILIES,
    FOLDER,
    IM,
    Family,
    write_model,
)  # fmt: skip


class Published(NamedTuple):
    """How one family reasons."""

    template: str
    """a file in tests/shared/chat_templates, or the text itself"""
    model: Family
    tags: tuple[str, str]
    on: dict[str, Any]
    """arguments of the template with which it reasons"""
    off: dict[str, Any] | None
    """arguments with which it does not; None where no argument does that"""
    opened: bool
    """whether the template opens the reasoning"""
    completion: str
    more: tuple[tuple[str, str, str], ...] = ()
    """further completions, each with its reasoning and answer"""
    without: str = "It is 四."
    """a completion with `off`"""


def chatml(begin: str, more: str = "") -> str:
    """A template that begins the assistant's turn so. more: what it does before."""
    return (
        more + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + begin + "{% endif %}"
    )


THOUGHT = "Zwei und zwei, 二 – “so” 🙂: a < b.\nAlso <b>vier</b>"
"""what every family thinks; it answers "It is 四.\""""
THINK = f"<think>\n{THOUGHT}\n</think>\n\nIt is 四."
INSIDE = THINK.removeprefix("<think>")
TEXT = ("<think>", "</think>")
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
A, C, F = "<|channel|>analysis<|message|>", "<|channel|>commentary", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = call_text("add", '{"a": 2}')
SEED = Family("<seed:bos> <seed:eos> <seed:think> </seed:think> <seed:cot_budget_reflect> </seed:cot_budget_reflect>",
              "<seed:eos>", "<seed:eos>", "<seed:eos>")  # fmt: skip
SEED_TEMPLATE = """{% set think = ['<seed:think>', '</seed:think>'] %}{% for m in messages %}<seed:bos>{{ m.role }}
{{ m.content }}<seed:eos>{% endfor %}{% if add_generation_prompt %}<seed:bos>assistant
{% if thinking_budget is defined and thinking_budget == 0 %}<seed:think><seed:cot_budget_reflect>{% endif %}\
{% endif %}"""
V31 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}\
<｜User｜>{{ m.content }}{% else %}<｜Assistant｜></think>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking is defined and thinking else '</think>' }}\
{% endif %}"""
GRANITE32 = "{# Write your thoughts after #}{% set asks = 'Here is my thought process: and Here is my response:' %}"
GRANITE33 = "{% set asks = '<think></think> and <response></response>' if thinking else '' %}"
HUNYUAN = "{% set form = ['<answer>', '</answer>'] %}"
COMMAND = Family("<|im_start|> <|im_end|> <|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|> <|END_RESPONSE|>",
                 "<|im_end|>", "<|im_end|>", "<|im_end|>")  # fmt: skip
PUBLISHED = {
    "qwen3": Published("qwen3", IM, TEXT, ON, OFF, False, THINK, (("It is 四.", "", "It is 四."),)),
    "qwen3.5": Published("qwen3_5_think", IM, TEXT, ON, OFF, True, INSIDE),
    "qwen3 thinking 2507": Published(chatml("<think>\n"), IM, TEXT, {}, None, True, INSIDE[1:]),
    "deepseek r1 distill": Published("deepseek_r1_distill", FAMILIES["deepseek_r1_distill"], TEXT, {}, None, True,
                                     INSIDE),
    "deepseek v3.1": Published(V31, Family(DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ""), TEXT,
                               {"thinking": True}, {"thinking": False}, True, INSIDE[1:]),
    "magistral": Published("magistral", FAMILIES["magistral"], ("[THINK]", "[/THINK]"), {}, None, False,
                           f"[THINK]{THOUGHT}[/THINK]It is 四."),
    "smollm3": Published("smollm3", IM, TEXT, ON, OFF, False, THINK),
    "glm 4.5": Published("glm4moe", FAMILIES["glm4moe"], TEXT, ON, OFF, False,
                         f"\n<think>{THOUGHT}</think>\nIt is 四."),
    "gemma 4": Published("gemma4", FAMILIES["gemma4"], ("<|channel>thought\n", "<channel|>"), ON, OFF, False,
                         f"<|channel>thought\n{THOUGHT}\n<channel|>It is 四."),
    "gemma 3": Published("gemma3", FAMILIES["gemma3"], TEXT, {}, None, False, THINK, (("It is 四.", "", "It is 四."),)),
    "olmo 3": Published(chatml("<think>"), IM, TEXT, {}, None, True, INSIDE),
    "minimax m2": Published(chatml("<think>\n"), IM, TEXT, {}, None, True, INSIDE[1:]),
    "kimi k2 thinking": Published(chatml("", "{% set history = '<think></think>' %}"), IM, TEXT, {}, None, False,
                                  THINK),
    "phi 4 reasoning": Published(chatml("", "{% set asks = '<think> Thought </think> Solution' %}"), IM, TEXT, {}, None,
                                 False, THINK),
    "seed oss": Published(
        SEED_TEMPLATE, SEED, ("<seed:think>", "</seed:think>"), {}, None, False,
        f"<seed:think>{THOUGHT}</seed:think>It is 四.",
        (("<seed:think>Zwei<seed:cot_budget_reflect>1 of 2 tokens</seed:cot_budget_reflect> und</seed:think>4",
          "Zwei1 of 2 tokens und", "4"),),
    ),
    "granite 3.2": Published(
        chatml("", GRANITE32.replace("#}{%", "#}{%")), IM, ("Here is my thought process:", "Here is my response:"),
        {}, None, False, f"Here is my thought process:\n\n{THOUGHT}\n\nHere is my response:\n\nIt is 四.",
        (("Here is the answer: 4", "", "Here is the answer: 4"),),
    ),
    "granite 3.3": Published(
        chatml("", GRANITE33), IM, TEXT, {"thinking": True}, {"thinking": False}, False,
        f"<think>{THOUGHT}</think><response>It is 四.</response>",
    ),
    "hunyuan": Published(
        chatml("{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}", HUNYUAN),
        IM, TEXT, ON, OFF, False, f"<think>\n{THOUGHT}\n</think>\n<answer>\nIt is 四.\n</answer>",
        (("<think>\na\n</think>\n<answers>b", "a", "<answers>b"),), "<answer>\nIt is 四.\n</answer>",
    ),
    "ernie 4.5": Published(chatml("<think>\n", "{% set form = ['<response>', '</response>'] %}"), IM, TEXT, {}, None,
                           True, f"{THOUGHT}\n</think>\n\n<response>\nIt is 四.\n</response>\n"),
    "apriel": Published(
        chatml("Here are my reasoning steps:\n", "{% set end = '[BEGIN FINAL RESPONSE]' %}"), IM,
        ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), {}, None, True,
        f"{THOUGHT}\n[BEGIN FINAL RESPONSE]\nIt is 四.\n[END FINAL RESPONSE]",
    ),
    "command": Published(
        chatml("", "{% set form = '<|START_THINKING|><|END_THINKING|>' %}"), COMMAND,
        ("<|START_THINKING|>", "<|END_THINKING|>"), {}, None, False,
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_RESPONSE|>It is 四.<|END_RESPONSE|>",
        (("<|START_RESPONSE|>4<|END_RESPONSE|>", "", "4"),),
    ),
    "exaone deep": Published(chatml("<thought>\n", "{% set end = '</thought>' %}"), IM, ("<thought>", "</thought>"), {},
                             None, True, f"{THOUGHT}\n</thought>\n\nIt is 四."),
    "marks with begin and end": Published(
        chatml("", "{% set form = '<|begin_of_thought|><|end_of_thought|>' %}"), IM,
        ("<|begin_of_thought|>", "<|end_of_thought|>"), {}, None, False,
        f"<|begin_of_thought|>{THOUGHT}<|end_of_thought|>It is 四.",
    ),
    "gpt-oss": Published(
        "gptoss", FAMILIES["gptoss"], HARMONY[:2], {"reasoning_effort": "high"}, None, False,
        f"{A}{THOUGHT}{NEXT}{F}It is 四.<|return|>",
        (
            (f"{F}It is 四.<|return|>", "", "It is 四."),
            (f"{A}One.{NEXT}{A}Two.{NEXT}{C}<|message|>I add.{NEXT}{C} to=functions.add <|constrain|>json<|message|>"
             '{"a": 2}<|call|>', "One.\nTwo.\nI add.", CALL),
            (f'{A}One.{NEXT} to=functions.add{C} json<|message|>{{"a": 2}}<|call|>', "One.", CALL),
            (f' to=functions.add{C} json<|message|>{{"a": 2}}<|call|>', "", CALL),
            (f"<|channel|>analysis to=python code<|message|>1 + 1{NEXT}{F}4<|return|>", "1 + 1", "4"),
            (f"{A}One.{NEXT}<|channel|>final <|constrain|>json<|message|>[4]<|return|>", "One.", "[4]"),
            (f"{A}One.{NEXT}{F}4{NEXT}{A}Late.<|return|>", "One.", "4"),
            (f"{A}One", "One", ""),
            (f"{A}One.{NEXT}<|channel|>fin", "One.", ""),
            ("<|channel|>analy", "", ""),
            ("Plain, without channels.<|return|>", "", "Plain, without channels."),
            ("<think>\nOne.\n</think>\n4", "One.", "4"),
        ),
    ),
}  # fmt: skip
TAGS = ("<think>", "</think>", "[THINK]", "<seed:think>", "<|channel>", "<|channel|>", "START_THINKING", "Here is my")


def write(folder: Path, name: str) -> Path:
    """The model's folder of a family."""
    family = PUBLISHED[name]
    file = FOLDER / f"{family.template}.jinja"
    template = file.read_text(encoding="utf-8") if len(family.template) < 40 and file.is_file() else family.template
    more = TEXT if name in ("qwen3", "deepseek v3.1", "glm 4.5", "minimax m2") else ()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return write_model(folder, family.model, template, more)


def prompts_of(folder: Path, name: str, arguments: dict[str, Any] | None = None) -> PromptRenderer:
    return PromptRenderer.of_model(write(folder, name), "policy").with_arguments(arguments or {})


def deltas(prompts: PromptRenderer, text: str) -> Iterator[tuple[str, int]]:
    """The tokens of a completion with their texts, as an engine gives them: half a character is held back."""
    ids, before = prompts.chat.encode(text), ""
    for number, token in enumerate(ids, 1):
        whole = prompts.chat.tokenizer.decode(ids[:number], skip_special_tokens=False)
        delta = "" if whole.endswith("\ufffd") else whole[len(before) :]
        before += delta
        yield delta, token


def split(prompts: PromptRenderer, pieces: Sequence[tuple[str, Sequence[int]]]) -> tuple[str, str]:
    """Reasoning and answer of a completion in pieces of text and tokens."""
    splitter = Splitter(prompts.tags, opened=prompts.opened, control=prompts.control)
    chunks: list[Chunk] = []
    for text, ids in pieces:
        chunks += splitter.feed(text, ids)
    chunks += splitter.end()
    assert all(chunk.text for chunk in chunks)
    thinking, answer = ("".join(one.text for one in chunks if one.thinking is kind) for kind in (True, False))
    return thinking, answer


def completions(name: str) -> list[tuple[str, str, str]]:
    family = PUBLISHED[name]
    return [(family.completion, THOUGHT, "It is 四."), *family.more]


@pytest.mark.parametrize("name", PUBLISHED)
def test_reasoning_and_answer_are_apart_wherever_a_stream_is_cut(tmp_path: Path, name: str) -> None:
    prompts = prompts_of(tmp_path, name, PUBLISHED[name].on)
    assert prompts.tags[:2] == PUBLISHED[name].tags and prompts.opened == PUBLISHED[name].opened
    for text, reasoning, answer in completions(name):
        steps = list(deltas(prompts, text))
        letters, ids = "".join(delta for delta, _ in steps), [token for _, token in steps]
        assert letters == text
        for cut in range(len(steps) + 1):
            parts = (steps[:cut], steps[cut:])
            pieces = [("".join(delta for delta, _ in part), [token for _, token in part]) for part in parts]
            assert split(prompts, pieces) == (reasoning, answer), (text, cut)
        assert split(prompts, [(delta, [token]) for delta, token in steps]) == (reasoning, answer)
        assert split(prompts, [("", ids), *((letter, ()) for letter in letters)]) == (reasoning, answer), "late text"
        if ids[-1] in prompts.chat.stop_ids:  # engines give its token, and no text of it
            assert split(prompts, [(letters[: len(letters) - len(steps[-1][0])], ids)]) == (reasoning, answer)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_of_the_reasoning_are_counted_up_to_its_closing_tag(tmp_path: Path, name: str) -> None:
    prompts = prompts_of(tmp_path, name, PUBLISHED[name].on)
    text = PUBLISHED[name].completion
    ids, end = prompts.chat.encode(text), text.index(prompts.tags.close) + len(prompts.tags.close)
    expected = len(prompts.chat.encode(text[:end]))
    for size in (1, 3, len(ids)):
        counter = ReasoningCounter(prompts.letters, prompts.tags, opened=prompts.opened, control=prompts.control)
        for start in range(0, len(ids), size):
            counter.feed(ids[start : start + size])
        assert counter.tokens == expected


@pytest.mark.parametrize("name", [name for name, family in PUBLISHED.items() if family.off is not None])
def test_reasoning_is_switched_by_the_templates_own_argument(tmp_path: Path, name: str) -> None:
    family = PUBLISHED[name]
    assert family.off is not None
    prompts = prompts_of(tmp_path, name, family.off)
    if prompts.chat.think_closed:
        splitter = Splitter(prompts.tags, control=prompts.control)
        splitter.state = type(splitter.state).ANSWER
        chunks = [one for delta, token in deltas(prompts, family.without) for one in splitter.feed(delta, [token])]
        chunks += splitter.end()
        assert "".join(one.text for one in chunks) == "It is 四." and not any(one.thinking for one in chunks)
    else:
        assert name == "granite 3.3" and not prompts.opened, "it only asks for none"
    with pytest.raises(ModelError, match="reads no argument 'thinks'"):
        prompts.with_arguments({"thinks": True})


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_request_for_a_language_stands_once_at_the_end_of_the_last_turn(tmp_path: Path, name: str) -> None:
    family, question = PUBLISHED[name], "How many are 2 + 2?"
    form = AnswerForm(TOOLS_PROMPT, "{}")
    last = [ChatMessage(role="user", content=question)]
    earlier = [
        ChatMessage(role="user", content="Hello."),
        ChatMessage(role="assistant", content="<think>a</think>Yes?"),
    ]
    for arguments in (family.on, family.off or {}):
        prompts = prompts_of(tmp_path, name, arguments)
        for messages in (last, [ChatMessage(role="system", content="Be kind.")] + last, earlier + last):
            for code in ("de", "pt", ""):
                for more in (None, form):
                    text = prompts.chat.tokenizer.decode(prompts.render(messages, code, more))
                    if code:
                        assert text.count(request_for(code)) == 1 and f"{question}\n\n{request_for(code)}" in text
                    assert (messages[0].text in text) and (more is None) != ("You may call tools" in text)
    policy = prompts.system_prompt("de")
    named = {tag for tag in TAGS if tag in policy}
    expected = () if prompts.tags.channels else (tag for tag in TAGS if any(tag in one for one in prompts.tags[:2]))
    assert named == {*expected}


def test_the_policy_says_nothing_of_tags_where_the_template_has_channels() -> None:
    for texts in SYSTEM_PROMPTS.values():
        prompt, whole = texts.system_prompt(HARMONY), texts.system_prompt(Tags(*TEXT))
        assert "{open}" not in prompt and not any(mark in prompt for mark in MARKS)
        assert whole.startswith(prompt) and len(prompt.split("\n\n")) == 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_reasoning_is_begun_and_ended_in_the_familys_form(tmp_path: Path, name: str) -> None:
    prompts = prompts_of(tmp_path, name, PUBLISHED[name].on)
    prompt = prompts.render([ChatMessage(role="user", content="2 + 2?")], "de")
    ids, words = prompts.begin_reasoning(prompt, "de")
    assert ids[: len(prompt)] == prompt and words == SYSTEM_PROMPTS["de"].first_words
    added = prompts.chat.tokenizer.decode(ids[len(prompt) :])
    opening = "" if prompts.opened else prompts.tags.open.rstrip() + ("" if prompts.tags.channels else "\n")
    assert added == opening + words
    for opened, before in ((True, words), (prompts.opened, "")):
        splitter = Splitter(prompts.tags, opened=opened, control=prompts.control)
        splitter.feed(before, prompts.chat.encode(before))
        text, tokens = prompts.end_reasoning("de", splitter, begun=bool(before))
        assert prompts.chat.tokenizer.decode(tokens) == text
        chunks = splitter.feed(text + "Vier.", tokens) + splitter.end()
        phrase = SYSTEM_PROMPTS["de"].budget_phrase if before else ""
        assert "".join(one.text for one in chunks if one.thinking).strip() == phrase
        assert "".join(one.text for one in chunks if not one.thinking) == "Vier."


def test_a_model_that_a_run_has_trained_reasons_as_runs_ask(tmp_path: Path) -> None:
    import msgspec

    for name in ("seed oss", "gemma 4", "gpt-oss"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, name)
        (folder / "maestrale.json").write_bytes(msgspec.json.encode(ModelCard("r", 1, "magistral")))
        tags = PromptRenderer.of_model(folder, "trained").tags
        assert tags == HARMONY if name == "gpt-oss" else tags[:2] == TEXT, "channels stand in every completion"


def test_a_form_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, IM, chatml("<|thoughts|>\n"))
    with pytest.raises(ModelError, match=r"names '<\|thoughts\|>' for the reasoning.*chat_template.jinja"):
        PromptRenderer.of_model(tmp_path, "policy")
    template = (FOLDER / "gptoss.jinja").read_text(encoding="utf-8")
    write_model(tmp_path, Family("<|start|> <|end|> <|return|>", "<|return|>", "<|return|>", ""), template)
    with pytest.raises(ModelError, match=r"tokenizer lacks their control tokens \(<\|channel\|>, <\|message\|>\)"):
        PromptRenderer.of_model(tmp_path, "policy")


def test_a_call_ends_a_completion_in_channels_whatever_the_models_files_say(tmp_path: Path) -> None:
    template = (FOLDER / "gptoss.jinja").read_text(encoding="utf-8")
    write_model(tmp_path, FAMILIES["gptoss"]._replace(ends="<|return|>"), template)
    chat = PromptRenderer.of_model(tmp_path, "policy").chat
    assert chat.tokenizer.convert_ids_to_tokens(list(chat.stop_ids)) == ["<|return|>", "<|call|>"]
