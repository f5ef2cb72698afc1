r"""Makes the files of the example "python": sums of three numbers, demonstrations that add them in the head or let a
program do it, and a tiny model that knows the words.

[prepare]
script = "examples/python/prepare.py"
options = { problems = 4000 }

The sums of the demonstrations are right where no program is called, but there are far too few of them to learn to add
three numbers of four digits. Of the calls many have a mistyped digit, and the answer is then what the program
printed. Validation problems are drawn from another seed, which is always the same, and none is trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from environments.python import Python
from environments.tools import tool_of
from examples.quickstart.tiny_model import build, train_tokenizer, write_lines
from shared.errors import ConfigError
from shared.section import Section
from shared.tool_calls import call_text, result_text, tools_prompt

VOCABULARY = 1088
NUMBERS = 3
DIGITS = 4
CALLING = 0.8
"""share of the demonstrations that call the tool"""
MISTYPED = 0.4
"""share of the calls with a wrong digit"""
DEMONSTRATIONS_PER_PROBLEM = 2


class SumFiles(Section):
    """What is made."""

    problems: int = Field(4000, ge=1)
    validation: int = Field(256, ge=1)
    max_tokens: int = Field(256, ge=1)
    """longest sequence of the model, tokens"""


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, validation.jsonl, demonstrations.jsonl and model/ into the folder. Raises ConfigError."""
    try:
        files = SumFiles.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"prepare.options: {error}") from error
    validation = _sums(random.Random("held-out sums"), files.validation, frozenset())
    train = _sums(random.Random(f"sums {seed}"), files.problems, frozenset(validation))
    rng = random.Random(f"demonstrations of sums {seed}")
    system = tools_prompt([tool_of(Python.python).definition])
    rows = [
        {"problem": _text(one), "system": system, "completion": demonstrate(rng, one)}
        for one in train
        for _ in range(DEMONSTRATIONS_PER_PROBLEM)
    ]
    write_lines(folder / "demonstrations.jsonl", rows)
    for name, sums in (("train", train), ("validation", validation)):
        write_lines(
            folder / f"{name}.jsonl",
            (
                {"id": f"{name}-{number}", "problem": _text(one), "answer": str(_value(one)), "environment": "python"}
                for number, one in enumerate(sums)
            ),
        )
    texts = [system] * 20 + [_text(one) for one in train[:500]]
    for expression in train[:500]:
        turns = demonstrate(rng, expression)
        texts += [result_text(turn["content"]) if turn["role"] == "tool" else turn["content"] for turn in turns]
    build(folder / "model", seed, train_tokenizer(texts, VOCABULARY), files.max_tokens)


def demonstrate(rng: random.Random, expression: str) -> list[dict[str, str]]:
    """The turns of a demonstration: the sum at once, or a call, perhaps mistyped, and its result as the answer."""
    if rng.random() >= CALLING:
        return [{"role": "assistant", "content": _answer("I add in my head.", str(_value(expression)))}]
    typed = _mistyped(rng, expression) if rng.random() < MISTYPED else expression
    printed = str(_value(typed))
    return [
        {"role": "assistant", "content": call_text("python", json.dumps({"code": typed}))},
        {"role": "tool", "content": f"{printed}\n"},
        {"role": "assistant", "content": _answer("The program has added.", printed)},
    ]


def _answer(reasoning: str, number: str) -> str:
    return f"<think>{reasoning}</think>\\boxed{{{number}}}"


def _text(expression: str) -> str:
    return f"What is {expression}?"


def _value(expression: str) -> int:
    return sum(map(int, expression.split("+")))


def _mistyped(rng: random.Random, expression: str) -> str:
    """The expression with another digit at one place."""
    index = rng.choice([index for index, letter in enumerate(expression) if letter != "+"])
    first = index == 0 or expression[index - 1] == "+"
    digit = rng.choice([one for one in "0123456789"[first:] if one != expression[index]])
    return f"{expression[:index]}{digit}{expression[index + 1 :]}"


def _sums(rng: random.Random, count: int, without: frozenset[str]) -> list[str]:
    """`count` different expressions such as "1234+5678+9012"."""
    sums: dict[str, None] = {}
    while len(sums) < count:
        expression = "+".join(str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in range(NUMBERS))
        if expression not in without:
            sums[expression] = None
    return list(sums)
