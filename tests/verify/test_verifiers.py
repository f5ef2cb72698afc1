"""Verifiers by domain and by the checker that a row names: the project's, a plug-in's, reasoning-gym's own in its
process (hostile answers to checkers that evaluate them, what hangs or raises), and the problems that it generates."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.types import Completion, Problem, Reward, Verdict
from tests.verify.grading import THOUGHT, Grader, Tokens, reward, rewards, scorer_of, settings
from trainer.data.generated_problems import generate
from trainer.data.problem_file import read_problems
from verify import chosen_rewards, plugin_host
from verify.code.sandbox import codec
from verify.reward import CompletionScorer
from verify.verifiers import VERIFIERS, known_domains, read_problem, verifier_of

CALL = {"functions": [{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}],
        "ground_truth": [{"f": {"x": [1]}}]}  # fmt: skip
CALLS: dict[str, Any] = {"domain": "calls", "tests": CALL}
RIGHT_CALL = '```json\n[{"name": "f", "arguments": {"x": 1}}]\n```'
NO_COMMA = {"domain": "instructions", "tests": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}}
ESSAY = {"domain": "open", "answer_form": "response"}
HALF = {"answer": "1/2", "domain": "cod", "checker": "math"}
"""a row that keeps its domain, and is checked as another"""
NUMBERS = {"numbers": [48, 88, 87, 77, 13, 83], "target": 100}
COUNTDOWN = {
    "problem": "Find a way to make 100 using all of these numbers: 48, 88, 87, 77, 13, 83.",
    "answer": "83 + 77 - 48 - 13 + 88 - 87",
}
GYM = COUNTDOWN | {"checker": "reasoning_gym:countdown", "tests": NUMBERS}
needs_gym = pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="reasoning-gym is not installed")


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    yield
    plugin_host.close_hosts()


def boxed(*answers: str) -> list[str]:
    return [f"{THOUGHT}The answer is \\boxed{{{answer}}}." for answer in answers]


def test_every_domain_has_one_file() -> None:
    wanted = {"calls": "tests", "code": "tests", "instructions": "tests", "math": "answer", "open": "answer"}
    assert wanted.items() <= {domain: verifier_of(domain).ground_truth for domain in known_domains()}.items()
    homes = {verifier_of(domain).home for domain in wanted}
    assert len(homes) == len(wanted) and all(Path(home).parent.name == "verifiers" for home in homes)
    assert verifier_of("anything") is verifier_of("math") and verifier_of(None) is verifier_of("math")


@pytest.mark.parametrize(
    ("row", "response", "verdict", "reason"),
    [
        (CALLS, RIGHT_CALL, "correct", "as wanted"),
        (CALLS, RIGHT_CALL.replace("1", "2"), "wrong", "f: x = 2 is not accepted"),
        (CALLS, "None of them.", "no answer", "no JSON list of calls"),
        (NO_COMMA, "No sign here.", "correct", "every instruction is followed"),
        (NO_COMMA, "One, two.", "wrong", "not followed: punctuation:no_comma"),
        ({"domain": "open", "answer": "Any text."}, r"\boxed{8}", "open", "no verifier is asked"),
        ({"domain": "open", "answer": "Any text."}, "The sea.", "no answer", "format"),
        (ESSAY, "The sea is wide, and it is never still.", "open", "no verifier is asked"),
        (ESSAY, " ", "no answer", "format"),
        (HALF, r"\boxed{0.5}", "correct", ""),
        (HALF, r"\boxed{2}", "wrong", ""),
        (COUNTDOWN, r"\boxed{50*2}", "correct", ""),  # without a checker it is compared as mathematics
    ],
)  # fmt: skip
def test_the_verifier_of_the_row_decides(row: dict[str, Any], response: str, verdict: str, reason: str) -> None:
    found = reward(THOUGHT + response, row)
    assert found.verdict == verdict and found.reason.startswith(reason)
    assert found.correctness == (0.9 if verdict == "correct" else 0.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"domain": "calls", "answer": "f(1)"}, "row 1 lacks 'tests': a row with domain \"calls\" needs them"),
        ({"domain": "calls", "tests": {"functions": []}}, "row 1: its tests are not understood: 'ground_truth'"),
        ({"domain": "instructions", "tests": {"instruction_id_list": ["no"], "kwargs": [{}]}}, "is not known"),
        ({"domain": "code", "tests": 5}, "row 1: tests of type int are not understood"),
        ({"domain": "math"}, "row 1 lacks 'answer'"),
        ({"domain": "open"}, "row 1 lacks 'answer'"),
        ({"answer": "1", "checker": "maths"}, "row 1: the checker 'maths' is not there: is 'math' meant"),
        ({"answer": "1", "answer_form": "prose"}, "answer_form = 'prose' must be one of box, code block, response"),
        ({"answer": "1", "checker": "code"}, "lacks 'tests': a row with checker \"code\" needs them"),
        ({"answer": "1", "cheker": "code"}, "unknown key 'cheker': is 'checker' meant"),
    ],
)
def test_the_ground_truth_is_validated_when_data_is_read(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read_problem({"problem": "?", **row}, "row 1")


@pytest.mark.slow
def test_a_row_is_checked_by_the_verifier_that_it_names(tmp_path: Path) -> None:
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
    found = [reward(text, row, **table).verdict for text in boxed("abc", "cba", "endless")]
    found.append(reward(f"{THOUGHT}abc", row | {"answer_form": "response"}, **table).verdict)
    assert found == ["correct", "wrong", "timeout", "correct"]
    with pytest.raises(DataError, match="row 1: the checker 'backward' is not there: is 'backwards' meant"):
        read_problem({"problem": "?", **row, "checker": "backward"}, "row 1")


# ---- reasoning-gym ---------------------------------------------------------------------------------------------------


@needs_gym
@pytest.mark.slow
def test_reasoning_gym_grades_its_own_problems_and_an_answer_cannot_evaluate_anything(tmp_path: Path) -> None:
    """Each of the hostile ones is right, or does harm, where `eval` or `parse_expr` is given it as it stands."""
    found = rewards(GYM, boxed("100", "83 + 77 - 48 - 13 + 88", COUNTDOWN["answer"], "88 - 87 + 83 + 77 - 13 - 48"))
    assert [each.share for each in found] == [0.05, 0.05, 1.0, 1.0]
    assert [each.correctness for each in found] == [0, 0, 0.9, 0.9]
    spiral = {"answer": "1 2", "checker": "reasoning_gym:spiral_matrix", "tests": NUMBERS}
    algebra = {"answer": "x + 1", "checker": "reasoning_gym:polynomial_multiplication", "tests": NUMBERS}
    evil = f"__import__('pathlib').Path('{tmp_path}/owned').touch()"
    for row, right, wrong in (
        (spiral, "1 2", ["[oracle_answer]", "oracle_answer.split()"]),
        (algebra, "1 + x", ["eval('x + 1')"]),
        (GYM, COUNTDOWN["answer"], [evil, "Symbol('x').__class__", "9**9**9**9", "9**99999999"]),
    ):
        honest, *hostile = rewards(row, boxed(right, *wrong))
        assert honest.verdict is Verdict.CORRECT
        assert all(each.verdict is Verdict.WRONG and (each.share or 0) < 0.1 for each in hostile)
    assert not (tmp_path / "owned").exists()


@needs_gym
@pytest.mark.slow
def test_the_process_of_the_checkers_is_confined(tmp_path: Path) -> None:
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
def test_a_checker_that_raises_or_hangs_is_masked_and_counted() -> None:
    long = "sqrt(sin(x)**999+cos(x)**998+exp(x)*log(x))**997/(sin(x)*x+tan(x)**5+exp(cos(x)))**996"
    slow = {"checker": "reasoning_gym:simple_integration", "tests": {"variable": "x", "integrand": "2*x"}}
    rows = (GYM | {"checker": "reasoning_gym:sudoku", "tests": {"no": "puzzle"}}, GYM | slow, GYM)
    scorer = scorer_of(Tokens(boxed(COUNTDOWN["answer"], long, COUNTDOWN["answer"])), deadline_s=1, length=0)

    async def work() -> list[Reward]:
        problems = [read_problem(row, "row") for row in rows]
        asked = [(problem, Completion(0, 0, 0, token_ids=[at])) for at, problem in enumerate(problems)]
        return [(await scorer.score(*each))[0] for each in asked]

    verdicts = [each.verdict for each in asyncio.run(work())]
    assert verdicts == [Verdict.CRASH, Verdict.TIMEOUT, Verdict.CORRECT] and scorer.counts == dict.fromkeys(verdicts, 1)
    raised, hung = scorer.news()
    assert "KeyError" in raised and "reasoning_gym:sudoku" in raised and "no value after 1 s" in hung


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
        found = await scorer.score(problem, boxed(answer)[0], 50)
        try:
            share = gym.get_score_answer_fn(problem.checker.partition(":")[2])(answer, entry)
        except (TypeError, ValueError, LookupError) as error:  # boxnet's, of an answer that is no plan
            assert found.verdict is Verdict.CRASH and type(error).__name__ in found.reason, found
            assert not problem.answer
            return
        assert found.verdict is (Verdict.CORRECT if share == 1 else Verdict.WRONG), (problem, answer, share, found)
        assert found.share == share and found.answer == answer[:2000]
        assert share == 1 or not problem.answer, (problem.checker, share)

    async def work() -> None:
        for problem in read.problems:
            await check(problem)

    asyncio.run(work())


@needs_gym
@pytest.mark.slow
def test_stored_answers_score_as_their_checkers_say(tmp_path: Path) -> None:
    agrees(tmp_path, "ab,arc_agi,chain_sum/1,coin_flip,countdown,graph_color,mini_sudoku,string_insertion", 1)


@needs_gym
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_stored_answers_of_every_kind_score_as_their_checkers_say(tmp_path: Path) -> None:
    """Every generator of this version but "composite", which only mixes others."""
    factory = pytest.importorskip("reasoning_gym.factory")
    agrees(tmp_path, ",".join(sorted(factory.DATASETS.keys() - {"composite"})), 3)


def generating(folder: Path, spec: str, **table: Any) -> Config:
    data = {"train": spec, "validation": spec, "generate": table}
    return Config.model_validate({"runs_dir": str(folder), "data": data, "evaluate": {"problems": 60}})


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name in [name for name in VERIFIERS if name.startswith("reasoning_gym:")]:
        monkeypatch.delitem(VERIFIERS, name)
    spec = "reasoning_gym:countdown"
    for use in (lambda: read_problem(GYM, "row 1"), lambda: generate(generating(tmp_path, spec), "data.train", spec)):
        with pytest.raises(ConfigError, match=r"not installed: pip install -e '.\[reasoning_gym\]'"):
            use()


@needs_gym
@pytest.mark.slow
def test_generated_problems_are_disjoint_and_stay(tmp_path: Path) -> None:
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
@pytest.mark.slow
def test_what_reasoning_gym_lacks_is_told(tmp_path: Path) -> None:
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
