"""How families of models mark their reasoning: the pair of tags around it, and what may be around the answer.

Runs ask for <think> and </think>, or for the control tokens [THINK] and [/THINK] of a tokenizer that has them. A model
that no run has trained is served in the form of its family, which its chat template names.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shared.errors import ModelError


class Tags(NamedTuple):
    """The pair of tags that open and close the reasoning."""

    open: str
    close: str
    answer: tuple[str, str] = ("", "")
    """tags that a model may write around its answer"""
    dropped: tuple[str, ...] = ()
    """control tokens inside the reasoning, which are no text"""
    channels: bool = False
    """whether a completion is a sequence of messages, each with its channel in a header (harmony); then `open` and
    `close` are the headers of the reasoning and of the answer"""


TEXT = Tags("<think>", "</think>")
CONTROL = Tags("[THINK]", "[/THINK]")
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
"""control tokens of harmony (gpt-oss)"""
HARMONY = Tags(f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}", channels=True)
FAMILIES = (
    Tags("<|channel>thought\n", "<channel|>"),  # Gemma 4
    Tags(
        "<seed:think>", "</seed:think>", dropped=("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
    ),  # Seed-OSS
    Tags("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    Tags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ("", "[END FINAL RESPONSE]")),  # Apriel
    Tags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),  # Command
)
"""forms that are recognised by their tags in the template"""
ANSWERS = (("<answer>", "</answer>"), ("<response>", "</response>"))
"""around answers after </think>: Hunyuan; ERNIE 4.5, Granite 3.3"""
KNOWN = frozenset(
    tag for tags in (TEXT, CONTROL, *FAMILIES) for tag in (tags.open.strip(), tags.close, *tags.answer, *tags.dropped)
).union(*ANSWERS, MARKS) - {""}
"""all texts that families mark reasoning and answers with"""
MARK = re.compile(
    r"""[<\[◁][^\s<>\[\]'"{}◁▷]*(?:think|thought|reason|inner_(?:prefix|suffix))[^\s<>\[\]'"{}◁▷]*[>\]▷]""", re.I
)
COMMENT = re.compile(r"\{#.*?#\}", re.S)
SETTING = re.compile("effort|budget|mode|enable|length", re.I)
"""in marks that are no tags of reasoning but say how much of it is wanted"""
PAIRS = "< </, [ [/, ◁ ◁/, begin end, start end, BEGIN END, START END, prefix suffix"
PARTNERS = [pair.split() for pair in PAIRS.split(", ")]
"""marks that distinguish a closing tag from its opening one"""


def tags_of_template(text: str, control: bool, published: bool, where: str) -> Tags:
    """The tags of the reasoning, by a chat template. control: whether the tokenizer has the control tokens [THINK] and
    [/THINK]. published: whether they are those of the family; else those that runs ask for, but for channels, which
    are in all completions. where: whose template it is. Raises ModelError for a family whose tags are not known."""
    text = COMMENT.sub("", text)
    if CHANNEL in text and MESSAGE in text:
        return HARMONY
    if control or not published:
        return CONTROL if control else TEXT
    for tags in FAMILIES:
        if tags.open.rstrip() in text and tags.close in text:
            return tags
    if TEXT.close in text or TEXT.open in text:
        return TEXT._replace(answer=next((pair for pair in ANSWERS if all(tag in text for tag in pair)), ("", "")))
    marks = [mark for mark in dict.fromkeys(MARK.findall(text)) if not SETTING.search(mark)]
    for mark in marks:
        for opens, closes in PARTNERS:
            if opens in mark and (partner := mark.replace(opens, closes, 1)) != mark and partner in text:
                return Tags(mark, partner)
    if marks:
        raise ModelError(
            f"{where} names {', '.join(map(repr, marks))} for the reasoning, and no tag pair that separates it from "
            "the answer: add to the model's folder a chat_template.jinja that names the tag before the reasoning and "
            "the one after it, as <think> and </think>"
        )
    return TEXT
