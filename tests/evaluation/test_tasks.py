"""Every benchmark from ../shared/data: a server that knows the answers scores 1, one that does not scores 0."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.settings import EvaluationSettings
from evaluation.tasks import BENCHMARK_FILES, BenchmarkTask, make_task, read_benchmark
from shared.errors import DataError
from shared.jsonl import Row, read_rows
from tests.evaluation.conftest import evaluate, figures, prompt_of, records, write_rows
from tests.serve.conftest import Serve
from verify.verifiers.calls import tool_name

REASONING = "<think>Let me think about this for a moment before I write it down.</think>\n\n"


def solutions(data: Path, name: str) -> dict[str, str]:
    """id -> reference solution of a program."""
    path = BENCHMARK_FILES[name].find(data)
    assert path is not None
    return {str(row.fields["id"]): str(row.fields.get("solution", "")) for row in read_rows(path)}


def first(values: list[Any]) -> Any:
    """The first accepted value of an argument that is not left out."""
    value = next((one for one in values if one != ""), None)
    if isinstance(value, dict):
        return {key: first(inner) for key, inner in value.items() if first(inner) is not None}
    return [first([one]) for one in value] if isinstance(value, list) else value


def wanted_calls(task: BenchmarkTask) -> list[dict[str, Any]]:
    return [{"name": name, "arguments": first([arguments])} for one in task.problem.tests["ground_truth"]
            for name, arguments in one.items()]  # fmt: skip


def perfect(task: BenchmarkTask, solution: str) -> str:
    if task.kind == "answer":
        return rf"It is \boxed{{{task.problem.answer}}}."
    if task.kind == "calls":
        return f"```json\n{json.dumps(wanted_calls(task))}\n```"
    prefix = task.problem.tests.get("prefix", "")
    language = "cpp" if task.problem.tests["type"] == "main" else "python"
    return f"```{language}\n{prefix}{solution}\n```"


def always_wrong(task: BenchmarkTask) -> str:
    """An answer in the right form that is wrong everywhere."""
    if task.kind == "answer":
        return r"It is \boxed{-987654321}."
    if task.kind == "calls":
        return '```json\n[{"name": "nothing", "arguments": {}}]\n```'
    return {"main": "```cpp\nint main() { return 1; }\n```"}.get(task.problem.tests["type"], "```python\npass\n```")


def scripted(serve: Serve, tasks: list[BenchmarkTask], say: Callable[[BenchmarkTask], str]) -> str:
    """Our server, whose engine finds the task in the prompt; its address."""
    known = {task.prompt: REASONING + say(task) for task in tasks}

    def script(prompt_ids: list[int], *_: Any) -> str:
        text = served.engine.prompts[-1]
        return next(answer for prompt, answer in known.items() if prompt in text)

    served = serve(script, max_tokens=1 << 17, system_prompt="")
    return f"{served.url}/v1"


def tasks_of(name: str, data: Path, **settings: Any) -> list[BenchmarkTask]:
    return list(read_benchmark(name, EvaluationSettings(benchmarks=[name], data=str(data), **settings)).tasks)


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_perfect_is_one_and_always_wrong_is_zero(serve, data_folder, tmp_path, sandboxes):
    """All benchmarks in one evaluation, since each starts processes that check."""
    names, limit = [name for name in BENCHMARK_FILES if name != "ifeval"], 1
    tasks = {name: tasks_of(name, data_folder, limit=limit) for name in names}
    assert {len(each) for each in tasks.values()} == {limit}
    known = {name: solutions(data_folder, name) for name in names}
    arguments = [*names, "--data", str(data_folder), "--limit", str(limit)]
    answers = {task.prompt: perfect(task, known[name][task.problem.id]) for name in names for task in tasks[name]}
    every = [task for each in tasks.values() for task in each]
    url = scripted(serve, every, lambda task: answers[task.prompt])
    right = evaluate(url, tmp_path / "right", *arguments, "--samples", "2")["benchmarks"]
    url = scripted(serve, every, always_wrong)
    wrong = evaluate(url, tmp_path / "wrong", *arguments, "--samples", "1")["benchmarks"]
    assert right.keys() == wrong.keys() == set(names)
    for name in names:
        best, worst, both = right[name], wrong[name], {"1": 1, "2": 1}
        assert best["pass_at"] == both and best["interval"] == [1, 1], (name, records(tmp_path / "right"))
        assert best["majority_at"] == (both if tasks[name][0].kind == "answer" else None), name
        assert best["problems"] == limit and best["responses"] == 2 * limit and not best["warnings"], name
        assert len(best["languages"]) == 1, name
        assert worst["pass_at"] == {"1": 0} and worst["interval"] == [0, 0], name
        assert worst["unextracted"] == worst["ungraded"] == worst["errors"] == 0, name


def test_instructions_right_and_wrong(plain, data_folder, tmp_path):
    """IFEval has no reference answers: some rows whose instructions a short text can follow."""
    texts = {
        ("punctuation:no_comma",): "no commas here",
        ("change_case:english_lowercase",): "all of these english words are in lower case",
        ("startend:quotation",): '"A quotation."',
        ("detectable_format:title",): "<<A title>>\nAnd a text.",
    }
    rows = [row.fields for row in read_rows(data_folder / "ifeval.jsonl")]
    chosen = [row for row in rows if tuple(row["tests"]["instruction_id_list"]) in texts][:12]
    assert len(chosen) == 12
    file = write_rows(tmp_path / "ifeval.jsonl", *chosen)
    known = {row["problem"]: texts[tuple(row["tests"]["instruction_id_list"])] for row in chosen}
    right = figures(plain(lambda body, _: known[prompt_of(body)]).url, tmp_path / "right", file)
    assert right["pass_at"]["1"] == 1 and set(right["instructions"].values()) == {1} and right["majority_at"] is None
    wrong = figures(plain(lambda *_: "Sorry, I Cannot do that, at all.").url, tmp_path / "wrong", file)
    assert wrong["pass_at"]["1"] == 0 and set(wrong["instructions"].values()) == {0}


def test_loose_instructions_are_told_beside(plain, tmp_path):
    names = ["punctuation:no_comma", "startend:quotation"]
    row = {"problem": "Say hello without commas and in quotation marks.",
           "tests": {"type": "ifeval", "kwargs": [{}, {}], "instruction_id_list": names}}  # fmt: skip
    server = plain(lambda *_: 'Here you are.\n"Hello"')
    scores = figures(server.url, tmp_path / "out", write_rows(tmp_path / "i.jsonl", row))
    assert scores["instructions"] == {
        "prompt_strict": 0, "prompt_loose": 1, "instruction_strict": 0.5, "instruction_loose": 1,
    }  # fmt: skip
    assert records(tmp_path / "out")[0]["reason"] == "not followed: startend:quotation"


def test_function_calls_through_tools(plain, data_folder, tmp_path):
    tasks = {task.prompt: task for task in tasks_of("function_call", data_folder, limit=20, function_calls="tools")}

    def call(body: dict[str, Any], _: int) -> dict[str, Any]:
        functions = [tool["function"] for tool in body["tools"]]
        calls = [{"id": "1", "type": "function", "function": {"name": one["name"].replace(".", "_"),
                  "arguments": json.dumps(one["arguments"])}} for one in wanted_calls(tasks[prompt_of(body)])
                 ]  # fmt: skip
        names = {function["name"] for function in functions}
        assert body["tool_choice"] == "auto" and {one["function"]["name"] for one in calls} <= names
        assert "dict" not in json.dumps([function["parameters"]["type"] for function in functions])
        return {"content": None, "tool_calls": calls} if calls else {"content": "None of them can do that."}

    arguments = ["--data", str(data_folder), "--limit", "20", "--function-calls", "tools"]
    right = figures(plain(call).url, tmp_path / "right", "function_call", *arguments)
    assert right["pass_at"]["1"] == 1
    assert set(right["parts"]) == {"set/bfcl_v4_irrelevance", "set/bfcl_v4_simple_python"}
    odd = plain(lambda *_: {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{not json"}}]})
    wrong = figures(odd.url, tmp_path / "wrong", "function_call", *arguments)
    assert wrong["pass_at"]["1"] == 0 and wrong["unextracted"] == 1


@pytest.mark.slow
def test_function_calls_through_the_tools_of_our_server(serve, data_folder, tmp_path):
    def call(task: BenchmarkTask) -> str:
        calls = [{**one, "name": tool_name(one["name"])} for one in wanted_calls(task)]
        return "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in calls) or "None of them fits."

    url = scripted(serve, tasks_of("function_call", data_folder, limit=12, function_calls="tools"), call)
    arguments = ["--data", str(data_folder), "--limit", "12", "--function-calls", "tools"]
    scores = figures(url, tmp_path / "out", "function_call", *arguments)
    assert scores["pass_at"]["1"] == 1 and scores["errors"] == 0, records(tmp_path / "out")
    assert any(record["extracted"] == "no call" for record in records(tmp_path / "out"))


def test_prompts_ask_for_the_form_in_the_language_of_the_problem(data_folder):
    def prompts(name: str) -> dict[str, str]:
        return {task.problem.language: task.prompt for task in tasks_of(name, data_folder)}

    mgsm = prompts("mgsm")
    assert set(mgsm) == {"en", "de", "es", "fr", "ru", "zh"} and all(r"\boxed{}" in text for text in mgsm.values())
    assert "endgültige Antwort" in mgsm["de"] and "最终答案" in mgsm["zh"]
    assert "```python" in prompts("mbpp")["en"] and "```cpp" in prompts("humaneval_cpp")["en"]
    assert prompts("humaneval")["en"].startswith("Complete this Python function.\n\n```python\n")


def test_the_protocols(data_folder):
    def sampling(name: str, preset: str, **said: Any) -> tuple[float, float, int, int]:
        settings = EvaluationSettings(benchmarks=[name], data=str(data_folder), preset=preset, **said)  # type: ignore[arg-type]
        return tuple(read_benchmark(name, settings).sampling)

    assert sampling("aime24", "magistral") == (0.7, 0.95, 40960, 64)
    assert sampling("aime24", "paper") == (0.7, 1.0, 40960, 64)
    assert sampling("gsm8k", "paper") == (0.7, 1.0, 32768, 1)
    assert sampling("mbpp", "paper") == (0.7, 0.95, 32768, 16)
    assert sampling("aime24", "quick") == (0.7, 0.95, 4096, 1)
    assert sampling("aime24", "paper", samples=2, temperature=0.0, top_p=0.5, max_tokens=9) == (0.0, 0.5, 9, 2)


def test_only_problems_that_are_for_evaluation_are_taken(data_folder):
    counts = [("mbpp", {}, 500), ("humaneval_cpp", {}, 161), ("ifeval", {}, 541), ("mgsm", {"preset": "quick"}, 20),
              ("mgsm", {"preset": "quick", "limit": 30}, 30)]  # fmt: skip
    assert all(len(tasks_of(name, data_folder, **settings)) == count for name, settings, count in counts)


def test_an_open_problem_is_no_benchmark():
    fields = {"problem": "Why does ice float?", "answer": "It is lighter.", "domain": "open"}
    with pytest.raises(DataError, match="file:3: an open problem has no right answers: leave it out"):
        make_task("mine", Row("file:3", 3, fields), EvaluationSettings())
