"""What only the real problem sets beside the checkout can show; `pytest --soak` runs it (the same rules on rows of our
own: test_cases.py, test_published.py, test_calls.py, test_instructions.py, test_language.py, test_program.py)."""

import ast
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shared.jsonl import read_rows
from shared.types import Verdict
from tests.verify.blocking import judge
from tests.verify.rewritings import DIFFERENT, SAME
from trainer.data.problem_file import read_problems
from verify.code.runner import run_tests
from verify.code.tests import Limits
from verify.ground_truth import may_be_placeholder, not_an_answer
from verify.language import detect
from verify.verifiers import read_problem
from verify.verifiers.calls import FunctionCall, fault, read_calls
from verify.verifiers.instructions import follow

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row.fields for path in sorted(folder.glob(f"{name}.jsonl*")) for row in read_rows(path)]


def test_answers_equal_themselves_and_their_rewritings(data_folder):
    of_all = [row["answer"] for row in rows(data_folder, "*") if row.get("domain") == "math"]
    answers = sorted({answer for answer in of_all if isinstance(answer, str)})
    assert [answer for answer in answers if judge(answer, answer) is not Verdict.CORRECT] == []
    assert {answer for answer in answers if not_an_answer(answer) or may_be_placeholder(answer)} <= {"None"}
    tried, wrong = 0, []
    for name, change in (SAME | DIFFERENT).items():
        changed = [(answer, new) for answer in answers if (new := change(answer)) is not None]
        tried += len(changed)
        wrong += [(name, *pair) for pair in changed if (judge(*pair) is Verdict.CORRECT) is not (name in SAME)]
    assert tried > 20_000 and not wrong, wrong[:20]


def rebuilt(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the real set with its published columns."""
    if name == "gsm8k_test":
        return {"question": row["problem"], "answer": f"{row['solution']}\n#### {row['answer']}"}
    if name == "math500":
        return {key: row[key] for key in ("problem", "solution", "level", "subject")}
    if name == "deepmath_sample":
        return {"question": row["problem"], "final_answer": row["answer"], "difficulty": row["level"], "topic": "x"}
    return {"ID": row["id"], "Problem": row["problem"], "Answer": int(row["answer"])}


@pytest.mark.parametrize("name", ["gsm8k_test", "math500", "deepmath_sample", "aime24"])
def test_published_columns_have_the_answers_that_the_sets_are_known_by(name, data_folder):
    known = read_problems(next(data_folder.glob(f"{name}.jsonl*")), "data.train").problems
    read = [read_problem(rebuilt(name, row), "a row") for row in rows(data_folder, name)]
    assert [each.text for each in read] == [each.text for each in known]
    other = [(a.answer, b.answer) for a, b in zip(read, known, strict=True) if a.answer != b.answer]
    assert len(other) <= 0.01 * len(known), other[:9]


def test_problems_are_detected_in_every_language(data_folder):
    read = rows(data_folder, "mgsm")
    counts = Counter(row["language"] for row in read)
    right = Counter(row["language"] for row in read if detect(row["problem"]).language == row["language"])
    assert set(counts) == {"de", "en", "es", "fr", "ru", "zh"}
    assert all(right[language] / counts[language] >= 0.99 for language in counts), right


def test_all_instructions_of_ifeval_are_understood(data_folder):
    read = [row["tests"] for row in rows(data_folder, "ifeval")]
    assert len(read) == 541
    for tests in read:
        result = follow("A short answer, in English.", tests["instruction_id_list"], tests["kwargs"])
        assert len(result.strict) == len(tests["instruction_id_list"])


def accepted(values: list[Any]) -> Any:
    """The first accepted value; None where the argument is best left out."""
    value = next((value for value in values if value != ""), None)
    if isinstance(value, dict):
        return {key: accepted(inner) for key, inner in value.items() if accepted(inner) is not None}
    return [accepted([inner]) for inner in value] if isinstance(value, list) else value


def test_an_accepted_call_of_every_row_is_right_and_an_empty_one_is_not(data_folder):
    read = rows(data_folder, "bfcl_simple_irrelevance")
    assert len(read) == 640
    for row in read:
        pairs = [pair for truth in row["tests"]["ground_truth"] for pair in truth.items()]
        calls = [FunctionCall(name, accepted([arguments])) for name, arguments in pairs]
        assert fault(calls, row["tests"]) == "" and bool(fault([], row["tests"])) == bool(calls), row["id"]
        assert read_calls(json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls])) == calls


def break_returns(row: dict[str, Any]) -> str:
    """The solution with another value in every `return`."""
    tree = ast.parse(row["tests"].get("prefix", "") + row["solution"])
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            node.value = ast.Constant("broken")
    return ast.unparse(tree)


@pytest.mark.parametrize(("name", "language"), [("mbpp", "python"), ("humaneval", "python"), ("humaneval_cpp", "cpp")])
def test_references_pass_and_broken_ones_fail(sandboxes, data_folder, name, language):
    if language == "cpp" and not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    for row in (row for row in rows(data_folder, name) if not row["meta"].get("skip")):
        limits = Limits(test_s=12)  # one reference works for 3.5 s even on a quiet machine
        result = run_tests(row["solution"], language, row["tests"], limits, pool=sandboxes)
        if "boost/any.hpp: No such file" in result.reason or "undefined reference to `MD5_Init'" in result.reason:
            continue  # three C++ rows need libraries that few machines have
        assert result.verdict is Verdict.CORRECT, (row["id"], result)
        if language == "python":
            result = run_tests(break_returns(row), language, row["tests"], pool=sandboxes)
            assert result == Verdict.WRONG or "return" not in row["solution"], (row["id"], result)
