"""Makes the files of the example "agent": questions for the agent, demonstrations that call its tool and answer at
random half the time, and a tiny model that knows the words.

[prepare]
script = "examples/agent/prepare.py"
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.agent.agent import KINDS, MOST, TOOL
from examples.quickstart.tiny_model import build, train_tokenizer, write_lines
from shared.errors import ConfigError
from shared.tool_calls import TOOLS_PROMPT, ToolDefinition, call_text, result_text, signatures

VOCABULARY, MAX_TOKENS = 384, 256
PROBLEMS, DEMONSTRATIONS = 128, 1024
READ = 0.5
"""share of demonstrations that answer what the tool said; without any, a model that has read nothing else takes very
long to find that it may"""


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, validation.jsonl, demonstrations.jsonl and model/ into the folder. Raises ConfigError."""
    if options:
        raise ConfigError(f"prepare.options: this example has none, not {', '.join(options)}")
    system = TOOLS_PROMPT.replace("{given}", signatures([ToolDefinition(**TOOL)]))
    rng = random.Random(f"fruit {seed}")
    shown = [_demonstrate(rng.choice(KINDS), rng) for _ in range(DEMONSTRATIONS)]
    write_lines(folder / "demonstrations.jsonl", ({**row, "system": system} for row in shown))
    for name in ("train", "validation"):
        kinds = [rng.choice(KINDS) for _ in range(PROBLEMS)]
        rows = ({"id": f"{name}-{n}", "problem": _ask(kind), "answer": kind} for n, kind in enumerate(kinds))
        write_lines(folder / f"{name}.jsonl", rows)
    turns = [turn["content"] for row in shown for turn in row["completion"]]
    words = [system, *map(_ask, KINDS), *turns, *(result_text(turn) for turn in turns)]
    build(folder / "model", seed, train_tokenizer(words, VOCABULARY), MAX_TOKENS)


def _ask(kind: str) -> str:
    return f"How many {kind} are there?"


def _demonstrate(kind: str, rng: random.Random) -> dict[str, Any]:
    """The right call, a result, and half the time a number that has nothing to do with it."""
    result = rng.randint(1, MOST)
    turns = (
        ("assistant", call_text(TOOL["name"], json.dumps({"kind": kind}))),
        ("tool", str(result)),
        ("assistant", str(result if rng.random() < READ else rng.randint(1, MOST))),
    )
    return {"problem": _ask(kind), "completion": [{"role": role, "content": text} for role, text in turns]}
