"""What stages decide of rows, case by case (decisions.jsonl), with real sandboxes where programs are run."""

import json
import shutil
from typing import Any

import pytest

from curate.difficulty import DifficultyStage, LabelsStage
from curate.duplicates import DuplicatesStage, NgramIndex, jaccard, read_text, same_drawings
from curate.format import FormatStage
from curate.languages import HumanStage
from curate.programs import ProgramsStage, proposed, read_solutions, variants
from curate.stage import CurationStage, Decision, Kept, Rejected
from tests.curate.deciding import decide_rows
from tests.tables import read_table
from verify.code.sandbox.client import SandboxRefused
from verify.code.tests import CallTest, StdioTest, language_of, read_tests

pytestmark = pytest.mark.usefixtures("quick_checkers")
CASES = [
    pytest.param(case, id=case["name"], marks=[pytest.mark.slow] * (case["stage"] == "programs"))
    for case in read_table("curate/decisions")
]
STAGES: dict[str, type[CurationStage]] = {
    "format": FormatStage, "duplicates": DuplicatesStage, "programs": ProgramsStage, "difficulty": DifficultyStage,
    "labels": LabelsStage, "human": HumanStage,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"programs": {"variants": False, "max_concurrency": 1}, "labels": {"workers": 1},
                                      "format": {"workers": 1}, "duplicates": {"workers": 1}}  # fmt: skip
FIELDS = {"programs": {"problem": "Do it.", "domain": "code"}}
"""stage -> what each of its rows has"""
STDIO = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(1, 6)]


def decide(stage: str, rows: list[dict[str, Any]], **options: Any) -> list[Decision]:
    try:
        return decide_rows(STAGES[stage](**{**OPTIONS.get(stage, {}), **options}), rows)
    except SandboxRefused as error:
        pytest.skip(str(error))


def shown(row: dict[str, Any], decision: Decision) -> Any:
    """A decision as the table has it: the reason of a rejection, or the fields of each kept row that differ."""
    if isinstance(decision, Rejected):
        return decision.reason
    changed = [{name: value for name, value in kept.items() if json.dumps(value) != json.dumps(row.get(name))}
               | ({"-": gone} if (gone := [name for name in row if name not in kept]) else {})
               for kept in decision.rows]  # fmt: skip
    counts = {"counts": dict(decision.counts)} if decision.counts else {}
    return json.loads(json.dumps({"rows": changed, **counts})) if counts or changed != [{}] else "kept"


@pytest.mark.timeout(360)
@pytest.mark.parametrize("case", CASES)
def test_decisions(case, tmp_path):
    if "C++" in case["name"] and not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    options = dict(case.get("options", {}))
    if "against" in case:
        (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case["against"]))
        options["against"] = [tmp_path / "test.jsonl"]
    rows = [{"id": f"r{n}", **FIELDS.get(case["stage"], {}), **row} for n, row in enumerate(case["rows"], 1)]
    decisions = decide(case["stage"], rows, **options)
    assert [shown(row, decision) for row, decision in zip(rows, decisions, strict=True)] == case["decisions"]


@pytest.mark.slow
def test_a_count_of_tests_that_are_made_fits_what_it_counts():
    """A count that does not fit fails both solutions, and its test goes."""
    tests = [{"input": "2\n3 9\n", "output": "12\n"}, {"input": "1\n5\n", "output": "5\n"}]
    total = "n = int(input())\nnumbers = list(map(int, input().split()))\nassert len(numbers) == n\nprint(sum(numbers))"
    solutions = [total, total.replace("sum(numbers)", "sum(sorted(numbers))")]
    row = {"id": "c", "tests": tests, "solutions": solutions, **FIELDS["programs"]}
    [decision] = decide("programs", [row], make_tests=4, least_tests=1)
    assert isinstance(decision, Kept)
    made = decision.rows[0]["tests"]["tests"][2:]
    for test in made:
        count, numbers = test["input"].splitlines()
        assert int(count) == len(numbers.split()) and int(test["output"]) == sum(map(int, numbers.split()))
    assert decision.counts["tests made"] == len(made) >= 1


@pytest.mark.slow
def test_variants_are_read_in_their_language_and_repeated_values_stay_wrapped():
    row = {"id": "x", "problem": "Удвой число.", "language": "ru", "domain": "code", "tests": STDIO}
    [decision] = decide("programs", [{**row, "solution": "print(2 * int(input()))"}], variants=True)
    assert isinstance(decision, Kept)
    assert [language_of(read_tests(each["tests"])) for each in decision.rows] == ["python", "cpp"]
    wrapped = {"fn_name": "f", "inputs": [[1], [1], [3]], "outputs": [[2], [2], [6]]}
    [decision] = decide("programs", [{**FIELDS["programs"], "tests": wrapped}], least_tests=2)
    assert isinstance(decision, Kept)
    tests = read_tests(decision.rows[0]["tests"])
    assert len(tests) == 2 and all(isinstance(test, CallTest) and test.wrapped for test in tests)


def test_solutions_are_read_in_all_their_shapes():
    row = {"solutions": ["print(1)", {"source": "int main() {}"}, {"language": "C++", "code": "x"}, 7, "print(1)"],
           "solution": "```cpp\nint main() {}\n```"}  # fmt: skip
    assert [(solution.source.strip(), solution.language) for solution in read_solutions(row, read_tests(STDIO))] == [
        ("print(1)", "python"), ("int main() {}", "cpp"), ("x", "cpp"), ("int main() {}", "cpp"),
    ]  # fmt: skip
    tests = read_tests({"type": "main", "code": "int main() {}", "prefix": "int f() {"})
    assert read_solutions({"solution": "x"}, tests)[0].language == "cpp"


def test_inputs_that_are_made_keep_the_shape_and_the_bounds_of_those_that_are_there():
    inputs = ["3 x1 -2\n1.5 word\n", "9\n"]
    made = variants(inputs, 8, "p")
    assert len(set(made)) == len(made) == 8 and not set(made) & set(inputs)
    for text in made:
        words = text.split()
        assert words[1:2] + words[3:] in (["x1", "1.5", "word"], []) and len(words) in (1, 5)
        assert all(-2 <= int(words[place]) <= 9 for place in (0, 2)[: len(words)])
    assert variants(inputs, 8, "p") == made != variants(inputs, 8, "q")
    assert variants(["word"], 3, "p") == variants([], 3, "p") == variants(["5\n"], 3, "p") == []
    tests = [StdioTest("1 5\n", "6\n", 1e-3, "cpp")]
    first, *others = proposed(tests, ["2 2\n", 7, "1 5\n", "2 2\n"], 2, "p")
    assert first == StdioTest("2 2\n", "", 1e-3, "cpp") and len(others) == 2
    assert "1 5\n" not in {test.input for test in others}


def test_standing_phrases_are_no_contamination():
    phrase = "can be written as $\\frac{m}{n}$ where $m$ and $n$ are relatively prime positive integers. Find $m+n$."
    dice = read_text(f"The probability that six dice of different colours show no two equal faces in a row {phrase}")
    bug = read_text(f"A bug walks along the edges of a cube until it has seen every corner; the chance {phrase}")
    assert NgramIndex([dice]).sharing(bug) == [] and NgramIndex([dice]).sharing(dice) == [(0, 1.0)]


def test_a_text_is_compared_by_tokens_numbers_core_and_drawing():
    text = read_text("Let $x\\leq 10{,}000$ and \\text{ find } \\left( 2.50 \\right)^{} + 007 [asy] dot((1,2)); [/asy]")
    assert text.tokens == ("let", "x", "<", "=", "10000", "and", "find", "(", "2.50", ")", "+", "7")
    assert sorted(text.numbers) == ["10000", "2.50", "7"] and text.core == text.tokens[1:5] + text.tokens[7:]
    assert text.drawing == ("[", "asy", "]", "dot", "(", "(", "1", "2", ")", ")", "[", "/", "asy", "]")
    assert same_drawings(text, read_text("In the figure, find $x$."))
    assert read_text("求 3 个数").tokens == ("求", "3", "个", "数") and read_text("求三个数的和").is_chinese
    assert jaccard(frozenset("abc"), frozenset("bcd")) == 0.5
