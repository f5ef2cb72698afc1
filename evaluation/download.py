"""Make the files of the named benchmarks from where they are published: `python -m evaluation.download aime24 mgsm`.

On a machine without internet, give the published files with --mirror: a folder, or the address of a server, that holds
them under their host and path, as `wget -x ADDRESS` stores them.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from evaluation.settings import EvaluationSettings
from evaluation.tasks import BENCHMARK_FILES, read_benchmark
from shared.atomic_write import claim, write_whole
from shared.chat_endpoint import PLAIN, packing
from shared.command_line import CommandParser
from shared.errors import DataError, MaestraleError, print_error, run_command
from shared.json_reader import parse_json

DEADLINE_S, WHOLE_S = 60.0, 1800.0
"""seconds without a byte, and for a whole file"""
REDIRECTS = 5
MOST_BYTES = 64 << 20
"""largest published file, unpacked too"""
GITHUB = "https://raw.githubusercontent.com"
HUB = "https://huggingface.co/datasets"
GSM8K = f"{GITHUB}/openai/grade-school-math/master/grade_school_math/data"
BFCL = f"{GITHUB}/ShishirPatil/gorilla/main/berkeley-function-call-leaderboard/bfcl_eval/data"
MGSM_LANGUAGES = ("en", "de", "es", "fr", "ru", "zh")
Json = dict[str, Any]


class PublishedFiles(NamedTuple):
    """The published files of a benchmark, and the conversion of their rows into ours."""

    addresses: list[str]
    convert: Callable[..., Iterator[Json]]
    """takes the rows of each file"""


def gsm8k(rows: list[Json], split: str = "test") -> Iterator[Json]:
    """Convert GSM8K: the answer is behind ####, the solution before it, without marks such as <<6*200=1200>>."""
    for number, row in enumerate(rows):
        steps, _, answer = row["answer"].rpartition("####")
        solution = re.sub("<<.*?>>", "", steps).strip()
        yield {"id": f"gsm8k/{split}/{number}", "problem": row["question"], "answer": answer.strip().replace(",", ""),
               "solution": solution}  # fmt: skip


def math500(rows: list[Json]) -> Iterator[Json]:
    """Convert MATH-500."""
    for row in rows:
        name = row["unique_id"].removesuffix(".json")
        yield {"id": f"math500/{name}", "problem": row["problem"], "answer": row["answer"]}


def aime24(rows: list[Json]) -> Iterator[Json]:
    """Convert AIME 2024."""
    for number, row in enumerate(rows, 1):
        problem = row["problem"] if "problem" in row else row["question"]
        yield {"id": f"aime24/{number}", "problem": problem, "answer": str(row["answer"])}


def mgsm(*files: list[Json]) -> Iterator[Json]:
    """Convert MGSM, a file for each language: problem and answer with a tab between them."""
    for language, rows in zip(MGSM_LANGUAGES, files, strict=True):
        for number, row in enumerate(rows):
            answer = row["cells"][1].replace(",", "")
            yield {
                "id": f"mgsm/{language}/{number}",
                "language": language,
                "problem": row["cells"][0],
                "answer": answer,
            }


def mbpp(rows: list[Json]) -> Iterator[Json]:
    """Convert the test split of MBPP: the prompt shows the first of the checks."""
    for row in rows:
        if 11 <= row["task_id"] <= 510:
            checks = row["test_list"]
            problem = f"{row['text']}\n\nYour function must pass this check (more checks are hidden):\n{checks[0]}"
            code = "\n".join(filter(None, [row["test_setup_code"], *checks])).replace("\r\n", "\n")
            tests = {"type": "asserts", "prog": "python", "code": code}
            yield {"id": f"mbpp/{row['task_id']}", "split": "test", "problem": problem, "tests": tests,
                   "solution": row.get("code", "")}  # fmt: skip


def humaneval(rows: list[Json]) -> Iterator[Json]:
    """Convert HumanEval: the problem is the head of the function."""
    for row in rows:
        code = f"{row['test'].strip()}\n\ncheck({row['entry_point']})"
        tests = {"type": "asserts", "prog": "python", "prefix": row["prompt"], "entry_point": row["entry_point"],
                 "code": code}  # fmt: skip
        yield {"id": row["task_id"].lower(), "problem": row["prompt"], "tests": tests}


def humaneval_cpp(rows: list[Json]) -> Iterator[Json]:
    """Convert HumanEval-X in C++, without the problems whose tests need Boost or OpenSSL."""
    for row in rows:
        if not any(library in row["declaration"] + row["test"] for library in ("<boost/", "<openssl/")):
            head = row["prompt" if row["task_id"] == "CPP/38" else "declaration"]  # there it holds part of the solution
            tests = {"type": "main", "prog": "cpp", "prefix": head, "code": row["test"]}
            problem = f"Complete this C++17 function.\n\n{row['prompt']}"
            yield {"id": f"humaneval_cpp/{row['task_id'].partition('/')[2]}", "problem": problem, "tests": tests}


def ifeval(rows: list[Json]) -> Iterator[Json]:
    """Convert IFEval."""
    for row in rows:
        tests = {"type": "ifeval", "instruction_id_list": row["instruction_id_list"], "kwargs": row["kwargs"]}
        yield {"id": f"ifeval/en/{row['key']}", "domain": "general", "problem": row["prompt"], "tests": tests}


def function_call(simple: list[Json], answers: list[Json], irrelevance: list[Json]) -> Iterator[Json]:
    """Convert BFCL: questions with one right call, and those to which no function fits."""
    truths = {row["id"]: row["ground_truth"] for row in answers}
    for row in [*simple, *irrelevance]:
        tests = {
            "type": "function_call",
            "functions": row["function"],
            "ground_truth": truths.get(row["id"], []),
        }
        if row["id"].startswith("simple") and not tests["ground_truth"]:
            raise ValueError(f"{row['id']} has no possible answer")
        problem = row["question"][0][-1]["content"]
        yield {"id": f"bfcl/{row['id']}", "domain": "general", "problem": problem, "tests": tests}


PUBLISHED = {
    "gsm8k": PublishedFiles([f"{GSM8K}/test.jsonl"], gsm8k),
    "gsm8k_train": PublishedFiles([f"{GSM8K}/train.jsonl"], partial(gsm8k, split="train")),
    "math500": PublishedFiles([f"{HUB}/HuggingFaceH4/MATH-500/resolve/main/test.jsonl"], math500),
    "aime24": PublishedFiles([f"{GITHUB}/QwenLM/Qwen2.5-Math/main/evaluation/data/aime24/test.jsonl"], aime24),
    "mgsm": PublishedFiles(
        [f"{GITHUB}/google-research/url-nlp/main/mgsm/mgsm_{language}.tsv" for language in MGSM_LANGUAGES], mgsm
    ),
    "mbpp": PublishedFiles([f"{GITHUB}/google-research/google-research/master/mbpp/mbpp.jsonl"], mbpp),
    "humaneval": PublishedFiles([f"{GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz"], humaneval),
    "humaneval_cpp": PublishedFiles(
        [f"{GITHUB}/THUDM/CodeGeeX/main/codegeex/benchmark/humaneval-x/cpp/data/humaneval_cpp.jsonl.gz"], humaneval_cpp
    ),
    "ifeval": PublishedFiles(
        [f"{GITHUB}/google-research/google-research/master/instruction_following_eval/data/input_data.jsonl"], ifeval
    ),
    "function_call": PublishedFiles(
        [f"{BFCL}/BFCL_v4_simple_python.json", f"{BFCL}/possible_answer/BFCL_v4_simple_python.json",
         f"{BFCL}/BFCL_v4_irrelevance.json"], function_call,
    ),
}  # fmt: skip


def fetch(address: str, mirror: str) -> bytes | bytearray:
    """Return a published file. Raises DataError."""
    path = address.removeprefix("https://")
    try:
        if mirror and not mirror.startswith(("http://", "https://")):
            with (Path(mirror) / path).open("rb") as stream:
                return at_most(stream.read(MOST_BYTES + 1))
        return _get(f"{mirror.rstrip('/')}/{path}" if mirror else address)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise DataError(
            f"{address} cannot be had{f' from {mirror}' if mirror else ''} ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}): fetch it on another machine "
            f"(wget -x {address}), and give the folder in which it is then {path} with --mirror"
        ) from error


def _get(address: str) -> bytearray:
    """Return the body behind an address, as it comes. Raises HTTPError, InvalidURL, OSError."""
    data, ends = bytearray(), time.monotonic() + WHOLE_S
    for _ in range(REDIRECTS + 1):
        with httpx.stream("GET", address, headers=PLAIN, timeout=DEADLINE_S) as response:
            if response.next_request is not None:  # httpx would read its body whole
                address = str(response.next_request.url)
                continue
            if packed := packing(response.raise_for_status().headers):
                raise OSError(packed)
            for piece in response.iter_raw():
                data += piece
                at_most(data)
                if time.monotonic() > ends:
                    raise OSError(f"not whole after {WHOLE_S:g} s")
            return data
    raise OSError(f"more than {REDIRECTS} redirects")


def at_most(data: bytes | bytearray) -> bytes | bytearray:
    """The data itself. Raises OSError for more than MOST_BYTES."""
    if len(data) > MOST_BYTES:
        raise OSError(f"more than {MOST_BYTES >> 20} MiB, which no published file has")
    return data


def read(address: str, data: bytes | bytearray) -> list[Json]:
    """Return the rows of a published file: JSON lines, or {"cells": [...]} of tab-separated lines."""
    if address.endswith(".gz"):
        with gzip.open(io.BytesIO(data)) as packed:
            data = at_most(packed.read(MOST_BYTES + 1))
    lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    if address.endswith(".tsv"):
        return [{"cells": line.split("\t")} for line in lines if line]
    return [parse_json(line) for line in lines if line]


def make(name: str, folder: Path, mirror: str) -> str:
    """Make the file of one benchmark, and read it as an evaluation does; returns what was made. Raises DataError."""
    published = PUBLISHED[name]
    files = [(address, fetch(address, mirror)) for address in published.addresses]
    try:
        common = {"source": name, "domain": "math", "language": "en"}
        rows = [common | row for row in published.convert(*(read(*file) for file in files))]
    except (LookupError, ValueError, TypeError, AttributeError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{published.addresses[0]}: the published file has another form than this version knows "
            f"({type(error).__name__}: {error}): make {BENCHMARK_FILES[name].stem}.jsonl by hand (docs/evaluation.md)"
        ) from error
    path = folder / f"{BENCHMARK_FILES[name].stem}.jsonl"
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    tasks = read_benchmark(name, EvaluationSettings(benchmarks=[name], data=str(folder))).tasks
    return f"{path}: {len(tasks)} problems"


def main(arguments: list[str]) -> int:
    """Make the files of some benchmarks; returns the exit code."""
    parser = CommandParser(prog="python -m evaluation.download", description=__doc__)
    parser.add_argument("benchmarks", nargs="+", choices=list(PUBLISHED), metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the files (default: data)")
    parser.add_argument("--mirror", default="", help="folder or address that has the published files")
    given = parser.parse_args(arguments)
    try:
        claim(given.data, f"data = {given.data}")
        for name in given.benchmarks:
            print(make(name, given.data, given.mirror))
    except MaestraleError as error:
        return print_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
