"""Verifiers by domain and by the checker that a row names: calls, instructions, programs, mathematics, a plug-in's, and
reasoning-gym's own in its process (hostile answers to checkers that evaluate them, what hangs or raises)."""

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.sandbox_settings import Sandbox
from shared.types import Completion, Problem, Reward, Verdict
from tests.asynchronous import asynchronous
from tests.processor_time import at_most
from tests.tables import read_table
from tests.verify.grading import THOUGHT, Grader, Tokens, reward, rewards, scorer_of, settings
from trainer.data.generated_problems import generate
from trainer.data.problem_file import read_problems
from verify import chosen_rewards, plugin_host
from verify.code.runner import ProgramVerifier
from verify.code.sandbox import codec
from verify.code.sandbox.client import SandboxRefused
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import draw, read_tests
from verify.reward import CompletionScorer, score
from verify.verifiers import VERIFIERS, known_domains, read_problem, verifier_of
from verify.verifiers.calls import FunctionCall, fault, plain_schema, read_call, read_calls, tool_name
from verify.verifiers.instructions import CHECKS, follow, loose_forms, sentence_count

ROWS = read_table("verify/verified")
needs_gym = pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="reasoning-gym is not installed")


@pytest.fixture(autouse=True, scope="module")
def ended():
    yield
    plugin_host.close_hosts()


def boxed(*answers: str) -> list[str]:
    return [f"{THOUGHT}The answer is \\boxed{{{answer}}}." for answer in answers]


def test_every_domain_has_a_verifier_and_other_domains_that_of_mathematics():
    wanted = {"calls": "tests", "code": "tests", "instructions": "tests", "math": "answer", "open": "answer"}
    assert wanted.items() <= {domain: verifier_of(domain).ground_truth for domain in known_domains()}.items()
    assert verifier_of("anything") is verifier_of("math") and verifier_of(None) is verifier_of("math")


@pytest.mark.parametrize("row", [row for row in ROWS if row["kind"] == "quick"], ids=lambda row: row["response"])
def test_the_verifier_of_the_row_decides(row):
    result = reward(THOUGHT + row["response"], row["row"])
    assert result.verdict == row["verdict"] and result.reason.startswith(row["reason"])
    assert result.correctness == (0.9 if row["verdict"] == "correct" else 0.0)


@pytest.mark.slow
def test_a_row_is_checked_by_the_verifier_that_it_names(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import time\nfrom verify.verifiers import Answer, verifier\n\n"
        '@verifier("backwards", ground_truth="tests")\n'
        "def backwards(answer: Answer) -> float:\n"
        '    while answer.text == "endless":\n        time.sleep(1)\n'
        "    return float(answer.text[::-1] == answer.problem.tests)\n"
    )
    table = {"plugins": [str(file)], "deadline_s": 0.5}
    chosen_rewards.choose(settings(**table))
    row = {"tests": "cba", "domain": "words", "checker": "backwards"}
    result = [reward(text, row, **table).verdict for text in boxed("abc", "cba", "endless")]
    result.append(reward(f"{THOUGHT}abc", row | {"answer_form": "response"}, **table).verdict)
    assert result == ["correct", "wrong", "timeout", "correct"]
    with pytest.raises(DataError, match="row 1: the checker 'backward' is not there: is 'backwards' meant"):
        read_problem({"problem": "?", **row, "checker": "backward"}, "row 1")


DOUBLE = {"id": "double", "problem": "Print the double.", "domain": "code",
          "tests": [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(40)]}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row["kind"] != "quick"], ids=lambda row: row["response"][12:])
def test_programs_are_run_in_sandboxes(row):
    if row["kind"] == "C++" and not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    result = score(row["row"], THOUGHT + row["response"])
    assert (result.verdict, result.total) == (
        row["verdict"],
        pytest.approx({"correct": 1.1, "wrong": 0.2}[row["verdict"]]),
    )
    assert row["reason"] in result.reason and result.share == row.get("share", result.share)


@pytest.mark.slow
def test_a_group_sits_one_exam_and_another_group_another():
    """A program that fails a single test of forty is caught by just the groups that draw it."""
    programs, problem = ProgramVerifier(Sandbox(max_tests=3, max_concurrency=1)), read_problem(DOUBLE, "row")
    caught, expected = [], []
    source = "n = int(input())\nprint(2 * n if n != 7 else 0)\n"

    async def run() -> None:
        for group in range(24):
            [verdict] = {(await programs.run(problem, source, "python", group)).verdict for _ in range(2)}
            caught.append(verdict is Verdict.WRONG)
            drawn = draw(read_tests(problem.tests), 3, f"double/{group}")
            expected.append(any(getattr(test, "input", "") == "7\n" for test in drawn))
        await programs.close()

    asyncio.run(run())
    assert caught == expected and 0 < sum(caught) < 24


@asynchronous
async def test_a_host_that_cannot_isolate_refuses_and_names_the_setting(monkeypatch):
    def refuse(self: SandboxPool) -> None:
        raise SandboxRefused("sandbox refused: this host cannot isolate untrusted programs")

    monkeypatch.setattr(SandboxPool, "start_sandbox", refuse)
    programs = ProgramVerifier(Sandbox())
    with pytest.raises(SandboxRefused, match="reward.sandbox.isolation"):
        await programs.start()
    result = await programs.run(read_problem(DOUBLE, "row"), "print(1)", "python", 0)
    assert result.verdict is Verdict.SANDBOX_REFUSED and not result.graded
    await programs.close()


AREA = {
    "functions": [{"name": "geo.area", "parameters": {"type": "dict", "required": ["base", "height"], "properties": {
        "base": {"type": "integer"}, "height": {"type": "float"}, "unit": {"type": "string"},
        "flags": {"type": "array", "items": {"type": "string"}}, "where": {"type": "dict"},
        "exact": {"type": "boolean"},
    }}}],
    "ground_truth": [{"geo.area": {
        "base": [10], "height": [5.5, 5], "unit": ["square units", ""], "flags": [["a", "b"], ""],
        "where": [{"city": ["Bonn", "Berlin"], "zip": [1, ""]}, ""], "exact": [True, ""],
    }}],
}  # fmt: skip
RIGHT = FunctionCall("geo.area", {"base": 10, "height": 5})


@pytest.mark.parametrize("row", read_table("verify/calls"), ids=lambda row: json.dumps(row["arguments"]))
def test_right_and_wrong_arguments(row):
    result = fault([RIGHT._replace(arguments=RIGHT.arguments | row["arguments"])], AREA)
    assert row["words"] in result and bool(row["words"]) is bool(result)


def test_wrong_functions_and_numbers_of_calls():
    assert fault([RIGHT._replace(name="geo_area")], AREA) == "", "tools have no dots in their names"
    assert fault([RIGHT._replace(name="volume")], AREA) == "calls volume, wanted geo.area"
    assert fault([], AREA) == "0 calls, wanted 1" and fault([RIGHT, RIGHT], AREA) == "2 calls, wanted 1"
    assert fault([FunctionCall("geo.area", {"base": 10})], AREA) == "geo.area: height is missing"
    none = {"functions": AREA["functions"], "ground_truth": [], "expect": "no_call"}
    assert fault([], none) == "" and "no function fits" in fault([RIGHT], none)
    functions = [{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}]
    two = {"functions": functions, "ground_truth": [{"f": {"x": [1]}}, {"f": {"x": [2]}}]}
    assert fault([FunctionCall("f", {"x": 2}), FunctionCall("f", {"x": 1})], two) == "", "in any order"
    assert fault([FunctionCall("f", {"x": 1}), FunctionCall("f", {"x": 1})], two) == "f: x = 1 is not accepted"
    twice = {"functions": functions, "ground_truth": [{"f": {"x": [1]}}] * 2}
    assert fault([FunctionCall("f", {"x": 1}), FunctionCall("f", {"x": 2})], twice) == "f: x = 2 is not accepted"


LETTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="`"), min_size=1, max_size=9)
SCALARS = st.none() | st.booleans() | st.integers() | LETTERS
ARGUMENTS = st.dictionaries(LETTERS, SCALARS | st.lists(SCALARS, max_size=3), max_size=3)


@examples(max_examples=30)
@given(st.lists(st.builds(FunctionCall, LETTERS, ARGUMENTS), max_size=3))
def test_calls_are_read_from_text(calls):
    text = json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls])
    assert read_calls(text) == read_calls(f"So:\n```json\n[]\n```\nor rather\n```json\n{text}\n```\nDone.") == calls


def test_other_texts_are_no_calls():
    assert read_calls('```json\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n```') == [FunctionCall("f", {"x": 1})]
    assert read_call({"name": "f", "arguments": ""}) == FunctionCall("f", {})
    for text in ("none fits", '{"x": 1}', '[{"name": 3}]', '{"name": "f", "arguments": [1]}', "[" * 90_000,
                 '{"name": "f", "arguments": "{"}', '```json\n[{"name": "f"', "[] " * 50_000):  # fmt: skip
        assert read_calls(text) is None


def test_schemas_become_json_schemas():
    result = plain_schema({"type": "dict", "properties": {"type": {"type": "any", "optional": True},
                          "a": {"type": "tuple", "items": {"type": "float"}}}})  # fmt: skip
    assert result == {"type": "object", "properties": {"type": {}, "a": {"type": "array", "items": {"type": "number"}}}}
    assert tool_name("math.sqrt/2") == "math_sqrt_2"


CASES = {row["kind"]: row for row in read_table("verify/instructions")}


@pytest.mark.parametrize("name", CHECKS)
def test_right_and_wrong_answers(name):
    case = CASES[name]
    for answer in case["right"]:
        assert follow(answer, [name], [case["given"]]).strict == [True], answer
    for answer in (*case["wrong"], "", " \n"):
        assert follow(answer, [name], [case["given"]]).strict == [False], answer


def test_loose_forgives_an_introduction_an_ending_and_stars():
    names, comma = ["punctuation:no_comma", "startend:quotation", "keywords:existence"], ["punctuation:no_comma"]
    answer = 'Sure, here it is:\n"**one** fine day"\nI hope, that helps.'
    result = follow(answer, names, [{}, {}, {"keywords": ["one fine"]}])
    assert result.strict == [False, False, False] and result.loose == [True, True, True]
    assert follow("a, b", comma, [{}]).loose == [False]
    assert follow("one, line", comma, [{}]).loose == [False], "nothing is left without its one line"
    assert loose_forms("a\nb\nc") == ["a\nb\nc", "a\nb", "b\nc", "b"]
    counts = {"Really?! Yes... maybe. J. R. Tolkien wrote it.": 4, "no end": 1, "...": 0}
    assert {text: sentence_count(text) for text in counts} == counts


def test_what_is_not_known_is_named():
    for name, fields, message in (
        ("keywords:rhyme", {}, '"keywords:rhyme" is not known'),
        ("keywords:existence", {}, "lacks a value"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}, 'relation "about"'),
    ):
        with pytest.raises(DataError, match=message):
            follow("a", [name], [fields])


def test_no_answer_takes_long():
    for evil in ("[" * 60_000, "*" * 60_000, "\n" * 60_000, "<<" * 30_000, ". " * 30_000, "." * 60_000 + "a",
                 "P.P." * 15_000, "***" * 20_000, "SECTION" * 9_000):  # fmt: skip
        with at_most(20):  # 25 checks of sixty thousand signs
            for name, case in CASES.items():
                follow(evil, [name], [case["given"]])


NUMBERS = {"numbers": [48, 88, 87, 77, 13, 83], "target": 100}
SUM = "83 + 77 - 48 - 13 + 88 - 87"
GYM = {"problem": "Find a way to make 100 using all of these numbers: 48, 88, 87, 77, 13, 83.", "answer": SUM,
       "checker": "reasoning_gym:countdown", "tests": NUMBERS}  # fmt: skip


@needs_gym
@pytest.mark.slow
def test_reasoning_gym_grades_its_own_problems_and_an_answer_cannot_evaluate_anything(tmp_path):
    """Each of the hostile ones is right, or does harm, where `eval` or `parse_expr` is given it as it stands."""
    result = rewards(GYM, boxed("100", "83 + 77 - 48 - 13 + 88", SUM, "88 - 87 + 83 + 77 - 13 - 48"))
    assert [each.share for each in result] == [0.05, 0.05, 1.0, 1.0]
    assert [each.correctness for each in result] == [0, 0, 0.9, 0.9]
    spiral = {"answer": "1 2", "checker": "reasoning_gym:spiral_matrix", "tests": NUMBERS}
    algebra = {"answer": "x + 1", "checker": "reasoning_gym:polynomial_multiplication", "tests": NUMBERS}
    evil = f"__import__('pathlib').Path('{tmp_path}/owned').touch()"
    for row, right, wrong in (
        (spiral, "1 2", ["[oracle_answer]", "oracle_answer.split()"]),
        (algebra, "1 + x", ["eval('x + 1')"]),
        (GYM, SUM, [evil, "Symbol('x').__class__", "9**9**9**9", "9**99999999"]),
    ):
        honest, *hostile = rewards(row, boxed(right, *wrong))
        assert honest.verdict is Verdict.CORRECT
        assert all(each.verdict is Verdict.WRONG and (each.share or 0) < 0.1 for each in hostile)
    assert not (tmp_path / "owned").exists()


@needs_gym
@pytest.mark.slow
def test_the_process_of_the_checkers_is_confined(tmp_path):
    program = (
        "import os, socket, verify.reasoning_gym_checkers\n"
        "def refused(call, *given):\n"
        "    try: call(*given)\n"
        "    except OSError: return True\n"
        f"print([refused(os.open, '/etc/passwd', 0), refused(os.open, '{tmp_path}/x', os.O_CREAT | os.O_WRONLY),\n"
        "       refused(os.fork), refused(socket.socket), refused(os.execv, '/bin/true', ['true'])])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str([True] * 5), done.stderr


@needs_gym
@pytest.mark.slow
def test_a_checker_that_raises_or_hangs_is_masked_and_counted():
    long = "sqrt(sin(x)**999+cos(x)**998+exp(x)*log(x))**997/(sin(x)*x+tan(x)**5+exp(cos(x)))**996"
    slow = {"checker": "reasoning_gym:simple_integration", "tests": {"variable": "x", "integrand": "2*x"}}
    rows = (GYM | {"checker": "reasoning_gym:sudoku", "tests": {"no": "puzzle"}}, GYM | slow, GYM)
    scorer = scorer_of(Tokens(boxed(SUM, long, SUM)), deadline_s=3, length=0)

    async def work() -> list[Reward]:
        problems = [read_problem(row, "row") for row in rows]
        asked = [(problem, Completion(0, 0, 0, token_ids=[at])) for at, problem in enumerate(problems)]
        return [(await scorer.score(*each))[0] for each in asked]

    verdicts = [each.verdict for each in asyncio.run(work())]
    assert verdicts == [Verdict.CRASH, Verdict.TIMEOUT, Verdict.CORRECT] and scorer.counts == dict.fromkeys(verdicts, 1)
    raised, hung = scorer.news()
    assert "KeyError" in raised and "reasoning_gym:sudoku" in raised and "no value after 3 s" in hung


def agrees(folder: Path, kinds: str, size: int) -> None:
    """Whether the stored answers of generated rows score through the reward as their own checkers say."""
    gym = pytest.importorskip("reasoning_gym")
    spec, names = f"reasoning_gym:{kinds}", {name.partition("/")[0] for name in kinds.split(",")}
    data = {"train": spec, "generate": {name: {"size": size} for name in names}}
    config = Config.model_validate({"name": "run", "runs_dir": str(folder), "data": data, "seed": 5})
    read = read_problems(generate(config, "data.train", spec), "data.train", config.data)
    assert read.warnings == [] and {problem.domain for problem in read.problems} == set(kinds.split(","))
    scorer = CompletionScorer(settings(deadline_s=20), Grader())

    async def check(problem: Problem) -> None:
        metadata = codec.decode(problem.tests) if isinstance(problem.tests, list) else problem.tests
        examples = [metadata[key] for key in metadata if "example" in key and isinstance(metadata[key], str)]
        answer = problem.answer or (examples[0] if examples else "1")
        entry = {"question": problem.text, "answer": problem.answer or None, "metadata": metadata}
        result = await scorer.score(problem, boxed(answer)[0], 50)
        try:
            share = gym.get_score_answer_fn(problem.checker.partition(":")[2])(answer, entry)
        except (TypeError, ValueError, LookupError) as error:  # boxnet's, of an answer that is no plan
            assert result.verdict is Verdict.CRASH and type(error).__name__ in result.reason, result
            assert not problem.answer
            return
        assert result.verdict is (Verdict.CORRECT if share == 1 else Verdict.WRONG), (problem, answer, share, result)
        assert result.share == share and result.answer == answer[:2000]
        assert share == 1 or not problem.answer, (problem.checker, share)

    async def work() -> None:
        for problem in read.problems:
            await check(problem)

    asyncio.run(work())


@needs_gym
@pytest.mark.slow
def test_stored_answers_score_as_their_checkers_say(tmp_path):
    agrees(tmp_path, "ab,arc_agi,chain_sum/1,coin_flip,countdown,graph_color,mini_sudoku,string_insertion", 1)


@needs_gym
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_stored_answers_of_every_kind_score_as_their_checkers_say(tmp_path):
    """Every generator of this version but "composite", which only mixes others."""
    factory = pytest.importorskip("reasoning_gym.factory")
    agrees(tmp_path, ",".join(sorted(factory.DATASETS.keys() - {"composite"})), 3)


def generating(folder: Path, spec: str, **table: Any) -> Config:
    data = {"train": spec, "validation": spec, "generate": table}
    return Config.model_validate({"runs_dir": str(folder), "data": data, "evaluate": {"problems": 60}})


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name in [name for name in VERIFIERS if name.startswith("reasoning_gym:")]:
        monkeypatch.delitem(VERIFIERS, name)
    spec = "reasoning_gym:countdown"
    for use in (lambda: read_problem(GYM, "row 1"), lambda: generate(generating(tmp_path, spec), "data.train", spec)):
        with pytest.raises(
            ConfigError, match=r"not installed: uv pip install --python \S+ 'reasoning-gym<0\.2,>=0\.1\.25'$"
        ):
            use()


@needs_gym
@pytest.mark.soak  # in make test: the checkers of stored answers, and rows of other generators
def test_generated_problems_are_disjoint_and_stay(tmp_path):
    spec = "reasoning_gym:coin_flip,chain_sum/0"
    config = generating(tmp_path, spec, chain_sum={"size": 40}, coin_flip={"size": 5})
    files = [generate(config, setting, spec) for setting in ("data.train", "data.validation")]
    train, test = ([json.loads(line) for line in path.read_text().splitlines()] for path in files)
    assert [row["domain"] for row in train] == ["coin_flip"] * 5 + ["chain_sum/0"] * 40
    assert len({row["problem"] for row in (*train, *test)}) == len(train) + len(test) and len(test) == 60
    before = files[0].read_bytes(), files[0].stat().st_mtime_ns
    assert generate(config, "data.train", spec) == files[0]
    assert (files[0].read_bytes(), files[0].stat().st_mtime_ns) == before
    more = generating(tmp_path, spec, coin_flip={"size": 6})
    assert len(generate(more, "data.train", "reasoning_gym:coin_flip").read_text().splitlines()) == 6


@needs_gym
@pytest.mark.soak
def test_what_reasoning_gym_lacks_is_told(tmp_path):
    for spec, options, message in (
        ("contdown", {}, "has no problems 'contdown': is 'countdown' meant"),
        ("countdown/9", {}, "the levels of countdown are 0 to 4"),
        ("countdown", {"countdown": {"most": 1}}, "data.generate.countdown.most: there is no such option; it has"),
        ("countdown", {"lcm": {}}, "data.generate.lcm has no effect"),
    ):
        spec = f"reasoning_gym:{spec}"
        with pytest.raises(ConfigError, match=message):
            generate(generating(tmp_path, spec, **options), "data.train", spec)
    assert not list(tmp_path.rglob("*.jsonl"))
