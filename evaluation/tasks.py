"""Benchmarks: their files, their sampling, and the tasks that are made from their rows, with their prompts.

The form of a row determines the kind of its task: `tests` of programs, instructions or function calls, else an
`answer`. A prompt is the problem, and the form that its answer must have in the problem's language.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from evaluation.settings import EvaluationSettings
from shared.errors import ConfigError, DataError
from shared.jsonl import Row, read_rows, spread, text_of
from shared.types import Problem
from shared.user_file import missing
from verify.code.tests import language_of, read_tests
from verify.language import detect
from verify.published import to_native
from verify.verifiers import check_language, read_problem, verifier_of, without_environment
from verify.verifiers.calls import plain_schema, tool_name

Kind = Literal["answer", "program", "instructions", "calls"]


class BenchmarkFile(NamedTuple):
    """The file of a named benchmark, and the split of its rows."""

    stem: str
    """its name in the folder of data, without .jsonl or .jsonl.gz"""
    split: str = ""
    """split of the rows that are used; "" for all"""

    def find(self, folder: Path) -> Path | None:
        """Return its path in a folder, None if it is not there."""
        paths = [folder / f"{self.stem}{suffix}" for suffix in (".jsonl", ".jsonl.gz")]
        return next((path for path in paths if path.is_file()), None)


BENCHMARK_FILES = {
    "gsm8k": BenchmarkFile("gsm8k_test"),
    "gsm8k_train": BenchmarkFile("gsm8k_train"),  # for training, as examples/gsm8k does
    "math500": BenchmarkFile("math500"),
    "aime24": BenchmarkFile("aime24"),
    "mgsm": BenchmarkFile("mgsm"),
    "mbpp": BenchmarkFile("mbpp", "test"),  # the others are for training
    "humaneval": BenchmarkFile("humaneval"),
    "humaneval_cpp": BenchmarkFile("humaneval_cpp"),
    "ifeval": BenchmarkFile("ifeval"),
    "function_call": BenchmarkFile("bfcl_simple_irrelevance"),
}
QUICK_PROBLEMS = 20


class BenchmarkSampling(NamedTuple):
    """The sampling parameters of a benchmark's completions."""

    temperature: float
    top_p: float
    max_tokens: int
    samples: int
    """number of samples of each problem"""


class BenchmarkTask(NamedTuple):
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
    sampling: BenchmarkSampling
    tasks: list[BenchmarkTask]


def read_benchmarks(settings: EvaluationSettings) -> list[Benchmark]:
    """Read the benchmarks of the settings, and check every row. Raises ConfigError, DataError."""
    if not settings.benchmarks:
        raise ConfigError(f"no benchmark is given: name some of {', '.join(BENCHMARK_FILES)}, or JSONL files")
    benchmarks: dict[str, Benchmark] = {}
    for name in settings.benchmarks:
        benchmark = read_benchmark(name, settings)
        if benchmark.name in benchmarks:
            raise ConfigError(f"benchmarks: {benchmark.name} is given twice")
        benchmarks[benchmark.name] = benchmark
    return list(benchmarks.values())


def read_benchmark(name: str, settings: EvaluationSettings) -> Benchmark:
    """Read one benchmark by its name or file. Raises ConfigError, DataError."""
    source = BENCHMARK_FILES.get(name)
    if source is None and not Path(name).is_file():
        why = missing(Path(name), "file", "*.jsonl*", BENCHMARK_FILES)
        raise ConfigError(f'"{name}" is no benchmark ({", ".join(BENCHMARK_FILES)}), and {why}')
    path = source.find(Path(settings.data)) if source else Path(name)
    if source is not None and path is None:
        raise ConfigError(
            f"data = {settings.data or 'nothing'}: there is no such file there as {name} needs, {source.stem}.jsonl: "
            f"make it with `python -m evaluation.download {name}`, or give the folder that has it with --data"
        )
    assert path is not None
    stem = name if source else path.name.removesuffix(".gz").removesuffix(".jsonl")
    tasks = []
    for row in read_rows(path, "data" if source else "benchmarks"):
        meta = row.fields.get("meta")
        if isinstance(meta, dict) and meta.get("skip"):
            continue
        if source is None or not source.split or row.fields.get("split") == source.split:
            tasks.append(make_task(stem, row, settings))
    if not tasks:
        raise DataError(f"{path} holds no problems")
    ids = {task.problem.id for task in tasks}
    if len(ids) < len(tasks):
        raise DataError(f"{path}: {len(tasks) - len(ids)} rows have the id of another row: give each its own")
    limit = settings.limit or (QUICK_PROBLEMS if settings.preset == "quick" else len(tasks))
    return Benchmark(stem, choose_sampling(settings, stem, tasks[0].kind), spread(tasks, limit))


def choose_sampling(settings: EvaluationSettings, name: str, kind: Kind) -> BenchmarkSampling:
    """Return the preset's sampling of a benchmark (docs/evaluation.md), overridden by the settings."""
    aime = name.startswith("aime")
    samples = 1 if settings.preset == "quick" else 64 if aime else 16 if kind == "program" else 1
    preset = {
        "magistral": BenchmarkSampling(0.7, 0.95, 40960, samples),
        "paper": BenchmarkSampling(0.7, 1.0 if kind == "answer" else 0.95, 40960 if aime else 32768, samples),
        "quick": BenchmarkSampling(0.7, 0.95, 4096, samples),
    }[settings.preset]
    given = {field: getattr(settings, field) for field in BenchmarkSampling._fields}
    return preset._replace(**{field: value for field, value in given.items() if value is not None})


def make_task(benchmark: str, row: Row, settings: EvaluationSettings) -> BenchmarkTask:
    """Make the task of a row. Raises DataError."""
    fields = {"id": f"line {row.number}", **to_native(row.fields, row.where)[0]}
    if "language" not in fields:
        fields["language"] = detect(text_of(fields, "problem", row.where)).language or "en"
    if asked := text_of(fields, "reasoning_language", row.where, ""):
        check_language(asked, "reasoning_language", row.where)
    tests = fields.get("tests")
    form = tests.get("type") if isinstance(tests, Mapping) else None
    tools = None
    if form in ("ifeval", "function_call"):
        kind: Kind = "instructions" if form == "ifeval" else "calls"
        problem = _with_tests(fields, row.where)
        if (validate := verifier_of(kind).validate) is not None:
            try:
                validate(problem)
            except DataError as error:
                raise DataError(f"{row.where}: {error}") from error
        functions = problem.tests["functions"] if kind == "calls" else []
        prompt = problem.text
        if kind == "calls" and settings.function_calls == "tools":
            tools = tools_of(functions)
        elif kind == "calls":
            prompt = ask_calls(problem, functions)
    else:
        kind = "program" if tests is not None else "answer"
        fields["domain"] = "code" if kind == "program" else fields.get("domain", "math")
        problem = without_environment(read_problem(fields, row.where), row.where, "an evaluation samples")
        if not problem.verified:
            raise DataError(f"{row.where}: an open problem has no right answers: leave it out of an evaluation")
        prompt = problem.text
        if settings.ask_form:
            prompt = ask_program(problem) if kind == "program" else ask_answer(problem)
    asked_for = [prompt, tools, *filter(None, [problem.reasoning_language])]
    digest = hashlib.sha256(json.dumps(asked_for, sort_keys=True).encode()).hexdigest()[:16]
    return BenchmarkTask(benchmark, kind, problem, prompt, tools, digest)


def _with_tests(fields: dict[str, Any], where: str) -> Problem:
    """Make the problem of a row that has tests and no answer."""
    return Problem(
        id=str(fields["id"]), text=text_of(fields, "problem", where), answer="", language=str(fields["language"]),
        domain=str(fields.get("domain", "general")), source=str(fields.get("source", "")), tests=fields["tests"],
        reasoning_language=str(fields.get("reasoning_language") or ""),
    )  # fmt: skip


BOXED = {
    "en": r"Put your final answer in \boxed{}.",
    "fr": r"Mets ta réponse finale dans \boxed{}.",
    "de": r"Schreibe deine endgültige Antwort in \boxed{}.",
    "es": r"Escribe tu respuesta final dentro de \boxed{}.",
    "it": r"Scrivi la risposta finale in \boxed{}.",
    "ru": r"Запиши окончательный ответ в \boxed{}.",
    "zh": r"请把最终答案写在 \boxed{} 中。",
}
"""language -> the sentence that asks for an answer"""
PROGRAM = {
    "en": "Give the complete program with all its imports in one Markdown code block that begins with {0}.",
    "fr": "Donne le programme complet, imports compris, dans un seul bloc de code Markdown qui commence par {0}.",
    "de": "Gib das vollständige Programm mit allen Importen in einem Markdown-Codeblock an, der mit {0} beginnt.",
    "es": "Da el programa completo, con sus importaciones, en un solo bloque de código Markdown que empiece por {0}.",
    "it": "Dai il programma completo, import compresi, in un unico blocco di codice Markdown che inizia con {0}.",
    "ru": "Приведи программу целиком, с импортами, в одном блоке кода Markdown, который начинается с {0}.",
    "zh": "请给出完整的程序（包括所有导入），放在一个以 {0} 开头的 Markdown 代码块中。",
}
"""language -> the sentence that asks for a program; {0} is the fence"""
HEAD = "Complete this Python function."
CALLS = """You can call these functions:

```json
{functions}
```

{request}

Answer with the calls that this needs as a JSON list, in one Markdown code block that begins with ```json:

[{{"name": "...", "arguments": {{...}}}}]

If none of the functions can do what is asked, give the empty list []."""


def ask_answer(problem: Problem) -> str:
    """Return a prompt that asks for a final answer in a box."""
    return f"{problem.text}\n\n{BOXED.get(problem.language, BOXED['en'])}"


def ask_program(problem: Problem) -> str:
    """Return a prompt that asks for a program in a fenced block, in the language of the tests."""
    language = language_of(read_tests(problem.tests)) or "python"
    text = problem.text
    if isinstance(problem.tests, Mapping) and problem.tests.get("prefix") == text:  # HumanEval: nothing but a head
        text = f"{HEAD}\n\n```python\n{text.rstrip()}\n```"
    return f"{text.rstrip()}\n\n{PROGRAM.get(problem.language, PROGRAM['en']).format(f'```{language}')}"


def ask_calls(problem: Problem, functions: list[dict[str, Any]]) -> str:
    """Return a prompt that lists the functions and asks for calls as JSON."""
    listed = json.dumps(plain_schema(functions), ensure_ascii=False, indent=1)
    return CALLS.format(functions=listed, request=problem.text)


def tools_of(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions as tools of OpenAI's API."""
    return [
        {"type": "function", "function": {**plain_schema(one), "name": tool_name(one["name"])}} for one in functions
    ]
