"""Rows that name their checker: a plug-in's, another domain's, reasoning-gym's own in its process; hostile answers to
checkers that evaluate them, and what hangs or raises."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.types import Completion, Reward, Verdict
from tests.verify.test_plugins import Fast, settings
from tests.verify.test_scorer import Tokens
from trainer.data.generated_problems import generate
from trainer.data.problem_file import read_problems
from verify import chosen_rewards, plugin_host
from verify.code.sandbox import codec
from verify.reward import CompletionScorer
from verify.scorer import RewardScorer
from verify.verifiers import VERIFIERS, read_problem, verifier_for

THOUGHT = "<think>I try the large numbers first, then I correct the rest with the small ones.</think>"
COUNTDOWN = {
    "problem": "Find a way to make 100 using all of these numbers: 48, 88, 87, 77, 13, 83.",
    "answer": "83 + 77 - 48 - 13 + 88 - 87",
}
NUMBERS = {"numbers": [48, 88, 87, 77, 13, 83], "target": 100}
GYM = COUNTDOWN | {"checker": "reasoning_gym:countdown", "tests": NUMBERS}
needs_gym = pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="reasoning-gym is not installed")


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    yield
    plugin_host.close_hosts()


def scores(cases: list[tuple[dict[str, Any], str]], **table: Any) -> list[Reward]:
    """Rewards of (row, answer): the answer stands where the row's form has it."""
    scorer = CompletionScorer(settings(**table), Fast())

    async def work() -> list[Reward]:
        found = []
        for row, answer in cases:
            problem = read_problem(row, "row 1")
            boxed = verifier_for(problem).answer_in == "box"
            response = f"The answer is \\boxed{{{answer}}}." if boxed else answer
            found.append(await scorer.score(problem, THOUGHT + response, 50))
        return found

    return asyncio.run(work())


def test_a_target_is_no_answer_to_the_question_how_to_reach_it() -> None:
    """What a row without a checker pays, and must: its answer is compared as mathematics."""
    assert [one.verdict for one in scores([(COUNTDOWN, "100"), (COUNTDOWN, "50*2")])] == [Verdict.CORRECT] * 2


@needs_gym
@pytest.mark.slow
def test_reasoning_gym_grades_its_own_problems() -> None:
    answers = ["100", "50*2", "83 + 77 - 48 - 13 + 88", COUNTDOWN["answer"], "88 - 87 + 83 + 77 - 13 - 48"]
    found = scores([(GYM, answer) for answer in answers])
    assert [one.share for one in found] == [0.05, 0.05, 0.05, 1.0, 1.0]
    assert [one.correctness for one in found] == [0, 0, 0, 0.9, 0.9]


@needs_gym
@pytest.mark.slow
def test_an_answer_cannot_evaluate_anything(tmp_path: Path) -> None:
    """Each of these is right, or does harm, where `eval` or `parse_expr` is given the answer as it stands."""
    spiral = {"problem": "?", "answer": "1 2", "checker": "reasoning_gym:spiral_matrix", "tests": {"solution": [1, 2]}}
    row, mark = (
        {"problem": "?", "answer": "x + 1", "checker": "reasoning_gym:polynomial_multiplication", "tests": {}},
        tmp_path,
    )
    cases = [
        (spiral | {"tests": NUMBERS}, "[oracle_answer]"),
        (spiral | {"tests": NUMBERS}, "oracle_answer.split()"),
        (GYM, f"__import__('pathlib').Path('{mark}/owned').touch()"),
        (GYM, "Symbol('x').__class__"),
        (GYM, "9**9**9**9"),
        (GYM, "9**99999999"),
        (row | {"tests": NUMBERS}, "eval('x + 1')"),
    ]
    assert all(one.verdict is Verdict.WRONG and (one.share or 0) < 0.1 for one in scores(cases))
    assert scores([(row | {"tests": NUMBERS}, "1 + x")])[0].verdict is Verdict.CORRECT, "honest algebra is understood"
    assert scores([(spiral | {"tests": NUMBERS}, "1 2")])[0].verdict is Verdict.CORRECT
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
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == str([True] * 5), found.stderr


@needs_gym
@pytest.mark.slow
def test_a_checker_that_raises_or_hangs_is_masked_and_counted() -> None:
    broken = read_problem({**GYM, "checker": "reasoning_gym:sudoku", "tests": {"no": "puzzle"}}, "row 1")
    slow = {"checker": "reasoning_gym:simple_integration", "tests": {"variable": "x", "integrand": "2*x"}}
    endless, whole = read_problem(GYM | slow, "row 2"), read_problem(GYM, "row 3")
    table = {"rollout": {"max_completion_tokens": 10}, "reward": {"overlong_buffer": 5, "deadline_s": 1}}

    class Gym(Tokens):
        def decode(self, ids: Any) -> str:
            long = "sqrt(sin(x)**999+cos(x)**998+exp(x)*log(x))**997/(sin(x)*x+tan(x)**5+exp(cos(x)))**996"
            return f"{THOUGHT}\\boxed{{{COUNTDOWN['answer'] if ids == [1] else long}}}"

    async def work() -> tuple[list[Reward], list[str], dict[Verdict, int]]:
        scorer = RewardScorer(type("Now", (), {"now": Config.model_validate(table)})(), Gym())  # type: ignore[arg-type]
        found = [(await scorer.score(broken, Completion(0, 0, 0, token_ids=[1])))[0]]
        found.append((await scorer.score(endless, Completion(0, 0, 0, token_ids=[2])))[0])
        found.append((await scorer.score(whole, Completion(0, 0, 0, token_ids=[1])))[0])
        await scorer.close()
        return found, scorer.news(), scorer.counts

    found, news, counts = asyncio.run(work())
    assert [one.verdict for one in found] == [Verdict.CRASH, Verdict.TIMEOUT, Verdict.CORRECT]
    assert [one.verdict.graded for one in found] == [False, False, True]
    assert counts == {Verdict.CRASH: 1, Verdict.TIMEOUT: 1, Verdict.CORRECT: 1}
    assert "KeyError" in news[0] and "reasoning_gym:sudoku" in news[0] and "no value after 1 s" in news[1]


KINDS = "ab,arc_agi,chain_sum/1,coin_flip,countdown,graph_color,mini_sudoku,spiral_matrix,string_insertion"


def agrees(folder: Path, kinds: str, size: int) -> None:
    """Whether the stored answers of generated rows score through the reward as their own checkers say."""
    gym = pytest.importorskip("reasoning_gym")
    spec, names = f"reasoning_gym:{kinds}", {name.partition("/")[0] for name in kinds.split(",")}
    data = {"train": spec, "generate": {name: {"size": size} for name in names}}
    config = Config.model_validate({"name": "run", "runs_dir": str(folder), "data": data, "seed": 5})
    problems = read_problems(generate(config, "data.train", spec), "data.train", config.data)
    assert problems.warnings == [] and {one.domain for one in problems.problems} == set(kinds.split(","))

    async def work() -> None:
        scorer = CompletionScorer(settings(deadline_s=20), Fast())
        right = raised = 0
        for problem in problems.problems:
            kind = problem.checker.partition(":")[2]
            metadata = problem.tests
            if isinstance(metadata, list):
                metadata = codec.decode(metadata)
            examples = [metadata[key] for key in metadata if "example" in key and isinstance(metadata[key], str)]
            answer = problem.answer or (examples[0] if examples else "1")
            entry = {"question": problem.text, "answer": problem.answer or None, "metadata": metadata}
            found = await scorer.score(problem, f"{THOUGHT}The answer is \\boxed{{{answer}}}.", 50)
            try:
                own = gym.get_score_answer_fn(kind)(answer, entry)
            except (TypeError, ValueError, LookupError) as error:  # boxnet's, of an answer that is no plan
                assert found.verdict is Verdict.CRASH and type(error).__name__ in found.reason, found
                assert not problem.answer
                raised += 1
                continue
            assert found.verdict is (Verdict.CORRECT if own == 1 else Verdict.WRONG), (problem, answer, own, found)
            assert found.share == own and found.answer == answer[:2000]
            assert own == 1 or not problem.answer, (kind, own)
            right += own == 1
        counts = f"{len(problems.problems)} problems, {right} right, {raised} raise"
        print(f"{len(names)} kinds, {counts}, the others as they say")

    asyncio.run(work())


@needs_gym
@pytest.mark.slow
def test_stored_answers_score_as_their_checkers_say(tmp_path: Path) -> None:
    agrees(tmp_path, KINDS, 2)


@needs_gym
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_stored_answers_of_every_kind_score_as_their_checkers_say(tmp_path: Path) -> None:
    """Every generator of this version but "composite", which only mixes others."""
    factory = pytest.importorskip("reasoning_gym.factory")
    agrees(tmp_path, ",".join(sorted(factory.DATASETS.keys() - {"composite"})), 3)


# ---- what needs no reasoning-gym -------------------------------------------------------------------------------------


def test_a_row_is_checked_by_the_verifier_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import time\nfrom verify.verifiers import Answer, verifier\n\n"
        '@verifier("backwards", ground_truth="tests")\n'
        "def backwards(answer: Answer) -> float:\n"
        '    while answer.text == "endless":\n        time.sleep(1)\n'
        "    return float(answer.text[::-1] == answer.problem.tests)\n"
    )
    choose = {"plugins": [str(file)], "deadline_s": 0.5}
    chosen_rewards.choose(settings(**choose))
    row = {"problem": "Say it.", "tests": "cba", "domain": "words", "checker": "backwards"}
    cases = [(row, "abc"), (row, "cba"), (row, "endless"), (row | {"answer_form": "response"}, "abc")]
    found = scores(cases, **choose)
    assert [one.verdict.value for one in found] == ["correct", "wrong", "timeout", "correct"]
    assert read_problem(row, "row 1").domain == "words"
    with pytest.raises(DataError, match="row 1: the checker 'backward' is not there: is 'backwards' meant"):
        read_problem(row | {"checker": "backward"}, "row 1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"checker": "maths"}, "row 1: the checker 'maths' is not there: is 'math' meant"),
        ({"answer_form": "prose"}, "answer_form = 'prose' must be one of box, code block, response"),
        ({"checker": "code", "answer": "1"}, "lacks 'tests': a row with checker \"code\" needs them"),
        ({"cheker": "code"}, "unknown key 'cheker': is 'checker' meant"),
    ],
)
def test_a_row_that_names_no_checker_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_problem({"problem": "What?", "answer": "1", **row}, "row 1")


def test_another_domain_checks_a_row_that_keeps_its_own() -> None:
    row = {"problem": "Which?", "answer": "1/2", "domain": "cod", "checker": "math"}
    assert [one.verdict.value for one in scores([(row, "0.5"), (row, "2")])] == ["correct", "wrong"]
    assert "reasoning_gym" not in " ".join(VERIFIERS) or needs_gym


def test_prose_needs_no_box() -> None:
    essay = {"problem": "Write about the sea.", "domain": "open", "answer_form": "response"}
    found = scores([(essay, "The sea is wide, and it is never still.")])[0]
    assert (found.verdict, found.total, found.share) == (Verdict.OPEN, pytest.approx(0.2), None)
    assert scores([(essay, " ")])[0].verdict is Verdict.NO_ANSWER
    boxed = essay | {"answer_form": "", "answer": "Any."}
    found = asyncio.run(CompletionScorer(settings(), Fast()).score(read_problem(boxed, "1"), THOUGHT + "The sea.", 50))
    assert found.verdict is Verdict.NO_ANSWER, "as before, where the row says nothing"
    with pytest.raises(DataError, match="lacks 'answer'"):
        read_problem({"problem": "Write.", "domain": "open"}, "row 1")


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name in [name for name in VERIFIERS if name.startswith("reasoning_gym:")]:
        monkeypatch.delitem(VERIFIERS, name)
    with pytest.raises(ConfigError, match=r"not installed: pip install -e '.\[reasoning_gym\]'"):
        read_problem(GYM, "row 1")
    spec = "reasoning_gym:countdown"
    config = Config.model_validate({"runs_dir": str(tmp_path), "data": {"train": spec}})
    with pytest.raises(ConfigError, match="not installed"):
        generate(config, "data.train", spec)


@needs_gym
@pytest.mark.slow
def test_generated_problems_are_disjoint_and_stay(tmp_path: Path) -> None:
    spec = "reasoning_gym:coin_flip,chain_sum/0"
    data = {"train": spec, "validation": spec, "generate": {"chain_sum": {"size": 40}, "coin_flip": {"size": 5}}}
    config = Config.model_validate({"runs_dir": str(tmp_path), "data": data, "evaluate": {"problems": 60}})
    files = [generate(config, setting, spec) for setting in ("data.train", "data.validation")]
    train, held_out = ([json.loads(line) for line in path.read_text().splitlines()] for path in files)
    assert [row["domain"] for row in train] == ["coin_flip"] * 5 + ["chain_sum/0"] * 40
    assert len({row["problem"] for row in (*train, *held_out)}) == len(train) + len(held_out) and len(held_out) == 60
    before = files[0].read_bytes(), files[0].stat().st_mtime_ns
    assert (
        generate(config, "data.train", spec) == files[0]
        and (files[0].read_bytes(), files[0].stat().st_mtime_ns) == before
    )
    more = config.model_copy(update={"data": config.data.model_copy(update={"generate": {"coin_flip": {"size": 6}}})})
    assert len(generate(more, "data.train", "reasoning_gym:coin_flip").read_text().splitlines()) == 6


@needs_gym
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("contdown", {}, "has no problems 'contdown': is 'countdown' meant"),
        ("countdown/9", {}, "the levels of countdown are 0 to 4"),
        ("countdown", {"countdown": {"most": 1}}, "data.generate.countdown.most: there is no such option; it has"),
        ("countdown", {"lcm": {}}, "data.generate.lcm has no effect"),
    ],
)  # fmt: skip
def test_what_reasoning_gym_lacks_is_told(tmp_path: Path, spec: str, options: dict[str, Any], message: str) -> None:
    spec = f"reasoning_gym:{spec}"
    config = Config.model_validate({"runs_dir": str(tmp_path), "data": {"train": spec, "generate": options}})
    with pytest.raises(ConfigError, match=message):
        generate(config, "data.train", spec)
    assert not list(tmp_path.rglob("*.jsonl"))
