"""Toy programs: right results, disjoint halves, tests that see every forgotten case, demonstrations of known shares."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart import tiny_model
from examples.quickstart.prepare import Options, draw, draw_toy_programs, prepare, texts_of
from examples.quickstart.toy_programs import (
    ADD,
    ASKING,
    LARGE,
    MULTIPLY,
    NEGATIVE,
    NO_BLUNDERS,
    Blunders,
    Code,
    SpecialCase,
    Step,
    ToyProgram,
    complete,
    demonstrate_program,
    is_validation,
    make_toy_program,
)
from examples.quickstart.word_problems import WordProblem
from shared.chat import Chat
from shared.sandbox_settings import Sandbox
from trainer.data.problem_file import read_problems
from verify.code import cpp
from verify.code.runner import run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.format import check_format
from verify.language import consistency
from verify.verifiers import verifier_of

HAND_MADE = ToyProgram(
    "python", (Step(ADD, 3), Step(MULTIPLY, 2)), (SpecialCase(NEGATIVE, 7), SpecialCase(LARGE, 1, 50))
)
CODES: list[Code] = list(ASKING)
needs_compiler = pytest.mark.skipif(not cpp.compiler(), reason="g++ is not installed")


def tasks(count: int, code: Code = "python", seed: int = 3, validation: bool = False) -> list[ToyProgram]:
    rng = random.Random(seed)
    return [make_toy_program(rng, code, (1, 3), validation) for _ in range(count)]


def calculated(text: str, x: int) -> int:
    """What the words of a task make of x, read without the task's own fields."""
    if x < 0 and (found := re.search(r"For negative x the result is (\d)\.", text)):
        return int(found[1])
    if x == 0 and (found := re.search(r"For x equal to zero the result is (\d)\.", text)):
        return int(found[1])
    if (found := re.search(r"For x above (\d+) the result is (\d)\.", text)) and x > int(found[1]):
        return int(found[2])
    signs = {"add": 1, "subtract": -1}
    for verb, number in re.findall(r"(add|subtract|multiply by) (\d)", text):
        x = x * int(number) if verb == "multiply by" else x + signs[verb] * int(number)
    return x


def shares(found: list[tuple[str, ToyProgram]], sandboxes: SandboxPool) -> list[float]:
    """Share of the tests that each (completion, task) passes; 0 with a broken format."""
    passed = []
    for completion, task in found:
        parts = check_format(completion, verifier=verifier_of("code"))
        language: Code = "cpp" if parts.language == "cpp" else "python"
        program = parts.answer
        passed.append(run_tests(program, language, task.tests(), pool=sandboxes).share if program else 0.0)
    return passed


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the quickstart's files with one program in four problems."""
    folder = tmp_path_factory.mktemp("mixed")
    prepare(folder, options(0.25).model_dump(), 0)
    return folder


def options(programs: float, **others: Any) -> Options:
    return Options(problems=64, validation=32, operations=(2, 2), programs=programs, **others)


def test_a_hand_made_task_in_words_reasoning_and_python() -> None:
    assert HAND_MADE.rule == "+3*2 x<0:7 x>50:1"
    assert HAND_MADE.text == (
        "Write a Python function f(x) for this rule: add 3, then multiply by 2. For negative x the result is 7. "
        "For x above 50 the result is 1."
    )
    assert complete(HAND_MADE) == (
        "<think>We start with x: add 3, then multiply by 2. When x is negative, it is 7. When x is above 50, it is 1."
        "</think>\n```python\ndef f(x):\n    if x < 0:\n        return 7\n    if x > 50:\n        return 1\n"
        "    x += 3\n    x *= 2\n    return x\n```"
    )
    assert [HAND_MADE.result(x) for x in (-1, 0, 4, 50, 51)] == [7, 6, 14, 106, 1]


@pytest.mark.parametrize("code", CODES)
def test_results_are_those_of_the_words(code: Code) -> None:
    for task in tasks(200, code):
        for x in task.inputs():
            assert task.result(x) == calculated(task.text, x), (task.text, x)


@pytest.mark.parametrize("code", CODES)
def test_inputs_hold_both_sides_of_every_boundary(code: Code) -> None:
    for task in tasks(100, code):
        inputs = task.inputs()
        assert len(set(inputs)) == 7 and {-1, 0} <= set(inputs) and inputs == sorted(inputs)
        assert inputs == task.inputs()
        for case in task.cases:
            assert {case.covers(x) for x in inputs} == {True, False}
            if case.kind == LARGE:
                assert {case.limit, case.limit + 1} <= set(inputs)


def test_every_forgotten_case_and_every_swap_fails_a_test() -> None:
    for task in tasks(200):
        for case in task.cases:
            assert all(task.result(x) != task.stepped(x) for x in task.inputs() if case.covers(x))
        swapped = ToyProgram(task.code, task.steps[::-1], task.cases)
        if len(task.steps) == 2:
            assert all(swapped.stepped(x) != task.stepped(x) for x in range(-50, 50))


def test_halves_are_disjoint_in_both_languages_of_programs() -> None:
    def function(task: ToyProgram) -> tuple[int, ...]:
        return tuple(task.result(x) for x in range(-120, 120))

    functions = {validation: {function(task) for code in CODES for task in tasks(300, code, validation=validation)}
                 for validation in (False, True)}  # fmt: skip
    assert not functions[False] & functions[True]
    assert all(is_validation(task) for task in tasks(50, validation=True))


def test_about_one_rule_in_eight_is_validation() -> None:
    rng, validation, count = random.Random(1), 0, 1600
    for _ in range(count):
        limit = rng.choice(range(10, 100, 10))
        task = ToyProgram("python", (Step(ADD, rng.randint(1, 9)), Step(MULTIPLY, rng.randint(2, 9))), (
            SpecialCase(NEGATIVE, rng.randint(0, 9)), SpecialCase(LARGE, rng.randint(0, 9), limit)))  # fmt: skip
        validation += is_validation(task)
    assert 0.09 < validation / count < 0.16


def test_the_same_seed_draws_the_same_tasks_and_demonstrations() -> None:
    one, other = tasks(20, seed=8), tasks(20, seed=8)
    assert one == other and one != tasks(20, seed=9)
    for first, second in zip(one, other, strict=True):
        assert demonstrate_program(random.Random(1), first) == demonstrate_program(random.Random(1), second)
        assert first.tests() == second.tests()


@pytest.mark.parametrize("code", CODES)
def test_flawless_demonstrations_are_well_formed_and_in_english(code: Code) -> None:
    for task in tasks(60, code):
        parts = check_format(demonstrate_program(random.Random(1), task, NO_BLUNDERS), verifier=verifier_of("code"))
        assert parts.ok and parts.language == code
        assert consistency(task.text, parts.reasoning, parts.response).consistent


@pytest.mark.parametrize("code", CODES)
def test_broken_demonstrations_have_no_program(code: Code) -> None:
    for seed, task in enumerate(tasks(20, code)):
        completion = demonstrate_program(random.Random(seed), task, Blunders(broken=1.0))
        assert not check_format(completion, verifier=verifier_of("code")).ok


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_python_references_pass_their_tests(sandboxes: SandboxPool) -> None:
    found = tasks(8)
    assert shares([(complete(task), task) for task in found], sandboxes) == [1.0] * 8


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_cpp_references_pass_their_tests_and_python_in_their_place_none(sandboxes: SandboxPool) -> None:
    found = tasks(2, "cpp")
    wrong = demonstrate_program(random.Random(1), found[0], Blunders(python=1.0))
    assert shares([*((complete(task), task) for task in found), (wrong, found[0])], sandboxes) == [1.0, 1.0, 0.0]


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("blunders", "passed"),
    [
        (Blunders(forget=1.0), 3),  # of 7 inputs two are below zero and two above the limit
        (Blunders(swap=1.0), 4),
        (Blunders(forget=1.0, swap=1.0), 0),
    ],
    ids=["forget", "swap", "both"],
)
def test_a_blunder_fails_its_share_of_the_tests(blunders: Blunders, passed: int, sandboxes: SandboxPool) -> None:
    completion = demonstrate_program(random.Random(1), HAND_MADE, blunders)
    assert shares([(completion, HAND_MADE)], sandboxes) == [passed / 7]


def test_a_slip_is_one_wrong_digit() -> None:
    right = complete(HAND_MADE)
    for seed in range(20):
        slipped = demonstrate_program(random.Random(seed), HAND_MADE, Blunders(slip=1.0))
        assert len(slipped) == len(right)
        differing = [(a, b) for a, b in zip(right, slipped, strict=True) if a != b]
        assert len(differing) == 2 and len(set(differing)) == 1  # in the reasoning, and the same in the program
        assert all(a.isdigit() and b.isdigit() for a, b in differing)


def test_most_demonstrations_are_bad_in_the_documented_shares() -> None:
    """By arithmetic instead of in boxes: which inputs a demonstration gets right follows from its own words."""
    rng, right, passed, count = random.Random(9), 0, 0.0, 1200
    for task in [make_toy_program(rng, "python", (2, 2)) for _ in range(count)]:
        done = _read(demonstrate_program(rng, task))
        share = sum(done.result(x) == task.result(x) for x in task.inputs()) / 7 if done else 0.0
        right, passed = right + (share == 1.0), passed + share
    assert 0.20 < right / count < 0.28
    assert 0.62 < passed / count < 0.72


def _read(completion: str) -> ToyProgram | None:
    """The function that a Python program of a demonstration computes; None when there is no program."""
    program = check_format(completion, verifier=verifier_of("code")).answer
    if program is None:
        return None
    steps = [Step(sign, int(number)) for sign, number in re.findall(r"x (.)= (\d)\n", program)]
    kinds = {"<": NEGATIVE, "==": "zero", ">": LARGE}
    found = re.findall(r"if x (\S+) (\d+):\n        return (\d)", program)
    return ToyProgram(
        "python",
        tuple(steps),
        tuple(SpecialCase(kinds[sign], int(result), int(limit)) for sign, limit, result in found),
    )


def test_programs_take_their_share_evenly_and_one_in_eight_is_cpp() -> None:
    drawn = draw(options(0.25), 0, validation=False)
    kinds = [isinstance(one, ToyProgram) for one in drawn]
    assert sum(kinds) == 16 and all(sum(kinds[start : start + 8]) == 2 for start in range(0, 64, 8))
    asked = [one.code for one in drawn if isinstance(one, ToyProgram)]
    assert asked.count("cpp") == 2
    no_cpp = draw(options(1.0, cpp_one_in=0), 0, validation=False)
    assert {one.code for one in no_cpp if isinstance(one, ToyProgram)} == {"python"}
    assert {one.language for one in drawn if isinstance(one, WordProblem)} == set(Options().languages)
    assert not any(isinstance(one, ToyProgram) for one in draw(options(0.0), 0, validation=False))
    assert all(isinstance(one, ToyProgram) for one in draw(options(1.0), 0, validation=False))


def test_without_programs_and_requests_every_file_is_what_it_was_before_there_were_any(tmp_path: Path) -> None:
    """Digests of the version before; the tokenizer's texts decide the tokenizer. The demonstrations' digest changed
    with their flaws."""
    prepare(tmp_path, options(0.0, requests=0.0).model_dump(), 0)
    files = [tmp_path / name for name in ("train.jsonl", "validation.jsonl", "demonstrations.jsonl")]
    assert digest(path.read_bytes() for path in files) == "4e76a23dd0c052966e1afe3f8b5d9ba1"
    pieces = (piece for text in texts_of(options(0.0, requests=0.0)) for piece in tiny_model._between_marks(text))
    texts = (f"{piece}\0".encode() for piece in pieces)
    assert digest(texts) == "1bfc55c3f77601837dbc04e9d680c33e"
    assert json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"] == 1280


def digest(pieces: Iterable[bytes]) -> str:
    """Of all pieces, one after the other."""
    return hashlib.blake2b(b"".join(pieces), digest_size=16).hexdigest()


def test_validation_programs_are_the_same_for_every_seed() -> None:
    for validation in (False, True):
        one, other = (draw_toy_programs(options(1.0), seed, 32, validation) for seed in (0, 1))
        assert (one == other) is validation


def test_files_of_word_problems_and_programs_load(mixed: Path) -> None:
    for name, count in (("train", 64), ("validation", 32)):
        problems = read_problems(mixed / f"{name}.jsonl", "data.train").problems
        asked = [problem for problem in problems if problem.domain == "code"]
        assert len(problems) == count and len(asked) == count // 4
        assert all(problem.tests and not problem.answer for problem in asked)


def test_tasks_survive_the_tokenizer_in_few_tokens(mixed: Path) -> None:
    chat = Chat(mixed / "model")
    for code in CODES:
        for task in tasks(40, code):
            completion = complete(task)
            assert chat.decode(chat.encode(task.text)) == task.text
            assert chat.decode(chat.encode(completion)) == completion
    lengths = [len(chat.encode(complete(make_toy_program(random.Random(n), "python", (2, 2))))) for n in range(50)]
    assert sum(lengths) / 50 < 40


def test_the_sandbox_sits_all_tests() -> None:
    """None is left out, so a group's share of tests means the same for every completion."""
    assert Sandbox().max_tests >= len(HAND_MADE.inputs())
