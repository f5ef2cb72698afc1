"""Data and tiny models with which other people's environments are used in launches. As prepare.script of a run:
prepare.options = { kinds = ["reverse-text", "alphabet-sort", "openenv", "mcp"], mcp = { command = "..." } }

The data sets of verifiers' environments have the columns of the real ones: "prompt"; "names".
"""

import asyncio
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from environments.environment import made
from environments.mcp_tools import Mcp
from examples.quickstart.tiny_model import build, train_tokenizer
from shared.sections import RewardWeights
from shared.tool_calls import call_text
from shared.types import Problem
from tests.environments.agents import grade

ROWS, DEMONSTRATIONS, VOCABULARY, MAX_TOKENS = 64, 256, 1280, 2048
LETTERS = "abcd"
PEOPLE = [f"{first} {last}" for first in ("Ada", "Bob") for last in ("Xu", "Zu")]
REVERSE = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
SORT = "Sort these names in alphabetical order by {by} name: {names}\n\nUse exactly this format:\n{form}"
AGAIN = (
    "Now sort ALL of these names alphabetically by {by} name: {names}\n\nThese are in addition to the prior list. Mark "
    "any NEW names (that weren't in the prior list) with `// new name!` at the end.\n\nUse exactly this format:\n{form}"
)
ZONES = {"Asia/Tokyo": 9, "Asia/Dubai": 4, "Africa/Lagos": 1}
Row = dict[str, Any]


def letters(rng: random.Random) -> str:
    return " ".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 3)))


def data_set(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a data set for an environment of verifiers: a folder that `datasets.load_dataset` takes."""
    rng = random.Random(f"{kind} {seed}")
    rows = (
        {"prompt": letters(rng)} if kind == "reverse-text" else {"names": rng.sample(PEOPLE, len(PEOPLE))}
        for _ in range(ROWS)
    )
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", rows)
    return folder


def listed(tag: str, names: Iterable[str]) -> str:
    lines = "\n".join(names)
    return f"<{tag}>\n{lines}\n</{tag}>"


def turns(*texts: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in texts]


def demonstration(kind: str, rng: random.Random, tools: str) -> Row:
    """One demonstration, which has the form of an answer and is wrong by chance. tools: what "mcp" says."""
    if kind == "reverse-text":
        reversed_text = f"<reversed_text>\n{letters(rng)}\n</reversed_text>"
        return {"problem": letters(rng), "system": REVERSE, "completion": reversed_text}
    if kind == "alphabet-sort":
        names = [rng.choice(PEOPLE).replace(" ", "") for _ in range(4)]
        marked = [name + rng.choice(["", " // new name!"]) for name in names]
        by = rng.choice(["FIRST", "LAST"])
        form, forms = listed("alphabetical_sorted", ["Name1"]), ["Name1", "Name1 // new name!"]
        again = AGAIN.format(by=by, names=names[1], form=listed("combined_alphabetical_sorted", [rng.choice(forms)]))
        first, second = listed("alphabetical_sorted", names[2:3]), listed("combined_alphabetical_sorted", marked[2:])
        completion = turns(("assistant", first), ("user", again), ("assistant", second))
        return {"problem": SORT.format(by=by, names=names[0], form=form), "completion": completion}
    if kind == "openenv":
        return {"problem": "Find the number.\n\nfrom 1 to 8", "completion": str(rng.randint(1, 8))}
    zone, hour = rng.choice([*ZONES, "Mars/Base"]), rng.randint(0, 9)
    call = {"source_timezone": "UTC", "time": f"0{hour}:00", "target_timezone": zone}
    answer = f"<think>\n{zone}\n</think>\n\\boxed{{{rng.randint(0, 9)}}}"
    completion = turns(
        ("assistant", call_text("convert_time", json.dumps(call))), ("tool", "so"), ("assistant", answer)
    )
    return {"problem": asked(rng.choice(list(ZONES)), hour), "system": tools, "completion": completion}


def asked(zone: str, hour: int) -> str:
    return f"It is 0{hour}:00 in UTC. Which hour is it in {zone}?"


async def tools_of(options: Mapping[str, Any]) -> str:
    """What the environment "mcp" tells of the tools of its server."""
    one = made(Mcp, "mcp", options, grade, RewardWeights())
    try:
        return (await one.reset(Problem("p", "", ""), 0)).messages[0].text
    finally:
        await one.close()


def rows(kind: str, name: str) -> Iterable[Row]:
    for number in range(ROWS):
        row: Row = {"id": f"{name}-{kind}-{number}", "problem": f"{kind} {number}", "environment": kind}
        if "-" in kind:
            row["environment"] = "agent"
        elif kind == "openenv":
            row["problem"] = "Find the number."
        else:
            zone, hour = list(ZONES)[number % 3], number % 10
            row |= {"problem": asked(zone, hour), "answer": str(ZONES[zone] + hour)}
        yield row


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, validation.jsonl, demonstrations.jsonl and model/ into the folder."""
    kinds, rng = options["kinds"], random.Random(f"demonstrations {seed}")
    tools = asyncio.run(tools_of(options["mcp"])) if "mcp" in kinds else ""
    shown = [demonstration(kind, rng, tools) for kind in kinds for _ in range(DEMONSTRATIONS)]
    write(folder / "demonstrations.jsonl", shown)
    for name in ("train", "validation"):
        write(folder / f"{name}.jsonl", (row for kind in kinds for row in rows(kind, name)))
    words = ["higher", "lower", "right"]
    for row in shown:
        completion = row["completion"]
        words += [row["problem"], row.get("system", "")]
        words += [completion] if isinstance(completion, str) else [turn["content"] for turn in completion]
    build(folder / "model", seed, train_tokenizer(words, VOCABULARY), MAX_TOKENS)


def write(path: Path, made: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
