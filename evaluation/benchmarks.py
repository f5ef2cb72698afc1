"""Benchmarks: their files, their sampling, and the tasks that are made from their rows.

The form of a row determines the kind of its task, so that a user's own file needs no name here: `tests` of programs,
instructions or function calls, else an `answer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from evaluation.prompts import ask_answer, ask_calls, ask_program, tools_of
from evaluation.settings import Settings
from shared.errors import ConfigError, DataError
from shared.jsonl import Row, problem_of, read_rows, spread, text_of
from shared.types import Problem
from verify.code.exam import checked
from verify.instructions import follow
from verify.language import detect

Kind = Literal["answer", "program", "instructions", "calls"]


class Source(NamedTuple):
    """The file of a named benchmark, and the split of its rows."""

    file: str
    split: str = ""
    """split of the rows that are used; "" for all"""


SOURCES = {
    "gsm8k": Source("gsm8k_test.jsonl.gz"),
    "math500": Source("math500.jsonl.gz"),
    "aime24": Source("aime24.jsonl"),
    "mgsm": Source("mgsm.jsonl.gz"),
    "mbpp": Source("mbpp.jsonl.gz", "test"),  # the others are for training
    "humaneval": Source("humaneval.jsonl"),
    "humaneval_cpp": Source("humaneval_cpp.jsonl"),
    "ifeval": Source("ifeval.jsonl"),
    "function_call": Source("bfcl_simple_irrelevance.jsonl.gz"),
}
QUICK_PROBLEMS = 20


class Sampling(NamedTuple):
    """The sampling parameters of a benchmark's completions."""

    temperature: float
    top_p: float
    max_tokens: int
    samples: int
    """number of samples of each problem"""


class Task(NamedTuple):
    """One problem, with the prompt and the tools of its request."""

    benchmark: str
    kind: Kind
    problem: Problem
    prompt: str
    tools: list[dict[str, Any]] | None
    """tools of the request, if functions are called through the API"""
    prompt_sha: str
    """SHA-256 of prompt and tools, the first 16 hexadecimal digits"""


class Benchmark(NamedTuple):
    """The chosen tasks of one file, and how they are sampled."""

    name: str
    sampling: Sampling
    tasks: list[Task]


def read_benchmarks(settings: Settings) -> list[Benchmark]:
    """Read the benchmarks of the settings, and check every row. Raises ConfigError, DataError."""
    if not settings.benchmarks:
        raise ConfigError(f"no benchmark is given: name some of {', '.join(SOURCES)}, or JSONL files")
    found: dict[str, Benchmark] = {}
    for wish in settings.benchmarks:
        benchmark = read_benchmark(wish, settings)
        if benchmark.name in found:
            raise ConfigError(f"benchmarks: {benchmark.name} is given twice")
        found[benchmark.name] = benchmark
    return list(found.values())


def read_benchmark(wish: str, settings: Settings) -> Benchmark:
    """Read one benchmark by its name or file. Raises ConfigError, DataError."""
    source = SOURCES.get(wish)
    if source is None and not Path(wish).is_file():
        raise ConfigError(f'"{wish}" is neither a file nor a benchmark: {", ".join(SOURCES)} are')
    path = Path(settings.data) / source.file if source else Path(wish)
    if source and not (settings.data and path.is_file()):
        raise ConfigError(
            f"data = {settings.data or 'nothing'}: there is no such file there as {wish} needs, {source.file}: give "
            "the folder that you have put it into with --data, or a JSONL file of your own (docs/evaluation.md)"
        )
    name = wish if source else path.name.removesuffix(".gz").removesuffix(".jsonl")
    tasks = []
    for row in read_rows(path, "data" if source else "benchmarks"):
        meta = row.fields.get("meta")
        if isinstance(meta, dict) and meta.get("skip"):
            continue
        if source is None or not source.split or row.fields.get("split") == source.split:
            tasks.append(make_task(name, row, settings))
    if not tasks:
        raise DataError(f"{path} holds no problems")
    ids = {task.problem.id for task in tasks}
    if len(ids) < len(tasks):
        raise DataError(f"{path}: {len(tasks) - len(ids)} rows have the id of another row: give each its own")
    limit = settings.limit or (QUICK_PROBLEMS if settings.preset == "quick" else len(tasks))
    return Benchmark(name, choose_sampling(settings, name, tasks[0].kind), spread(tasks, limit))


def choose_sampling(settings: Settings, name: str, kind: Kind) -> Sampling:
    """Return the preset's sampling of a benchmark, overridden by the settings.

    paper: Magistral (2506.10910): temperature 0.7, top-p 1.0 for mathematics and 0.95 for programs, 40k
    tokens for AIME and 32k else, 64 samples for AIME and 16 for programs; values for other benchmarks are ours.
    """
    aime = name.startswith("aime")
    samples = 1 if settings.preset == "quick" else 64 if aime else 16 if kind == "program" else 1
    preset = {
        "magistral": Sampling(0.7, 0.95, 40960, samples),
        "paper": Sampling(0.7, 1.0 if kind == "answer" else 0.95, 40960 if aime else 32768, samples),
        "quick": Sampling(0.7, 0.95, 4096, samples),
    }[settings.preset]
    said = {field: getattr(settings, field) for field in Sampling._fields}
    return preset._replace(**{field: value for field, value in said.items() if value is not None})


def make_task(benchmark: str, row: Row, settings: Settings) -> Task:
    """Make the task of a row. Raises DataError."""
    fields = {"id": f"line {row.number}", **row.fields}
    if "language" not in fields:
        fields["language"] = detect(text_of(fields, "problem", row.where)).language or "en"
    tests = fields.get("tests")
    form = tests.get("type") if isinstance(tests, Mapping) else None
    tools = None
    if form in ("ifeval", "function_call"):
        kind: Kind = "instructions" if form == "ifeval" else "calls"
        problem = _with_tests(fields, row.where)
        functions = check_tests(problem, kind, row.where)
        prompt = problem.text
        if kind == "calls" and settings.function_calls == "tools":
            tools = tools_of(functions)
        elif kind == "calls":
            prompt = ask_calls(problem, functions)
    else:
        kind = "program" if tests is not None else "answer"
        fields["domain"] = "code" if kind == "program" else fields.get("domain", "math")
        problem = checked(problem_of(fields, row.where), row.where)
        if not problem.verified:
            raise DataError(f"{row.where}: an open problem has no right answers: leave it out of an evaluation")
        prompt = problem.text
        if settings.ask_form:
            prompt = ask_program(problem) if kind == "program" else ask_answer(problem)
    digest = hashlib.sha256(json.dumps([prompt, tools], sort_keys=True).encode()).hexdigest()[:16]
    return Task(benchmark, kind, problem, prompt, tools, digest)


def _with_tests(fields: dict[str, Any], where: str) -> Problem:
    """Make the problem of a row that has tests and no answer."""
    return Problem(
        id=str(fields["id"]), text=text_of(fields, "problem", where), answer="", language=str(fields["language"]),
        domain=str(fields.get("domain", "general")), source=str(fields.get("source", "")), tests=fields["tests"],
    )  # fmt: skip


def check_tests(problem: Problem, kind: Kind, where: str) -> list[dict[str, Any]]:
    """Return the functions that may be called, none for instructions. Raises DataError if a row cannot be graded."""
    tests = problem.tests
    try:
        if kind == "instructions":
            follow("a", tests["instruction_id_list"], tests["kwargs"])
            return []
        functions = tests["functions"]
        named = all(isinstance(one["name"], str) for one in functions)
        if not named or not all(isinstance(one, dict) for one in tests["ground_truth"]):
            raise DataError("functions need a name, ground_truth is a list of objects")
        return list(functions)
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise DataError(f"{where}: its tests are not understood: {error}") from error
