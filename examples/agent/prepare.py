"""Makes the files of the example "agent": rows that say what the agent asks, demonstrations that call its tool with
numbers at random, and a tiny model that knows the words.

[prepare]
script = "examples/agent/prepare.py"
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from examples.agent.agent import NUMBERS, TOOL
from examples.quickstart.tiny_model import build, train_tokenizer
from shared.errors import ConfigError
from shared.tool_calls import TOOLS_PROMPT, ToolDefinition, call_text, signatures

VOCABULARY, MAX_TOKENS = 384, 256
PROBLEMS = 128
TEXT = f"Find the hidden number from 1 to {NUMBERS}."


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, validation.jsonl, demonstrations.jsonl and model/ into the folder. Raises ConfigError."""
    if options:
        raise ConfigError(f"prepare.options: this example has none, not {', '.join(options)}")
    system = TOOLS_PROMPT.replace("{given}", signatures([ToolDefinition(**TOOL)]))
    rng = random.Random(f"guesses {seed}")
    calls = [call_text(TOOL["name"], json.dumps({"number": rng.randint(1, NUMBERS)})) for _ in range(PROBLEMS)]
    rows = ({"problem": TEXT, "system": system, "completion": call} for call in calls)
    _write(folder / "demonstrations.jsonl", rows)
    for name in ("train", "validation"):
        rows = ({"id": f"{name}-{number}", "problem": TEXT} for number in range(PROBLEMS))
        _write(folder / f"{name}.jsonl", rows)
    words = [
        system,
        TEXT,
        "<tool_response>\nhigher\n</tool_response>",
        "<tool_response>\nlower\n</tool_response>",
        *calls,
    ]
    build(folder / "model", seed, train_tokenizer(words * 20, VOCABULARY), MAX_TOKENS)


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
