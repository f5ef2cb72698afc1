"""The quickstart's files: word problems in seven languages, small programs with tests that see every forgotten case,
imperfect demonstrations of known shares, and a tiny model."""

import hashlib
import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.quickstart import prepare as quickstart
from examples.quickstart import tiny_model
from examples.quickstart import toy_programs as toys
from examples.quickstart import word_problems as words
from examples.quickstart.prepare import Options, draw, prepare
from examples.quickstart.toy_programs import Blunders, Code, SpecialCase, Step, ToyProgram
from examples.quickstart.word_problems import PHRASES, Flaws, WordProblem
from shared.chat import Chat
from shared.errors import ConfigError
from shared.languages import LANGUAGES
from shared.sandbox_settings import Sandbox
from shared.sections import Data, Sft
from tests.model_folder import load_model
from tests.packed import pack_from
from trainer.data.data_source import PromptFormat
from trainer.data.problem_file import read_problems
from trainer.sft import load_demonstrations
from verify.code import cpp
from verify.code.runner import run_tests
from verify.format import Parts, check_format
from verify.language import consistency
from verify.verifiers import verifier_of

LANGUAGE_CODES = list(PHRASES)
STORY = WordProblem("en", "Tom has 12 apples.", 12, (3, -4), 0)
CASES = SpecialCase(toys.NEGATIVE, 7), SpecialCase(toys.LARGE, 1, 50)
PROGRAM = ToyProgram("python", (Step(toys.ADD, 3), Step(toys.MULTIPLY, 2)), CASES)
CODES: list[Code] = list(toys.ASKING)


def consistent(story: WordProblem | ToyProgram, parts: Parts, asked: str = "") -> bool:
    return bool(consistency(story.text, parts.reasoning, parts.response, asked=asked).consistent)


def test_a_hand_made_story_is_calculated_step_by_step_and_a_slip_carries_on():
    reasoning, total = words.calculate(STORY, "en")
    assert total == STORY.answer == 11
    assert reasoning == "In the beginning there are 12 apples. Then we add 3: 12+3=15. Then we take away 4: 15-4=11."
    assert words.complete(reasoning, "en", total) == rf"<think>{reasoning}</think>The answer is \boxed{{11}}."
    reasoning, total = words.calculate(STORY, "de", slip_at=0, slip=2)
    assert total == 13 and "12+3=17" in reasoning and "17-4=13" in reasoning


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("validation", [False, True])
def test_stories_stay_within_their_numbers_and_their_half(language, validation):
    rng = random.Random(3)
    for _ in range(50):
        story = words.make_word_problem(rng, language, (1, 3), validation)
        assert words.is_validation(story.start, story.changes) == validation
        assert words.START[0] <= story.start <= words.START[1] and 1 <= len(story.changes) <= 3
        assert all(words.CHANGE[0] <= abs(change) <= words.CHANGE[1] for change in story.changes)
        assert all(1 <= story.start + sum(story.changes[:count]) <= words.MOST for count in (1, 2, 3))
        numbers = [int(number) for number in re.findall(r"\d+", story.text)]
        assert numbers == [story.start, *map(abs, story.changes)] and not re.search(r"[{}<>]", story.text)
        assert story.problem("x").answer == str(story.answer)


def test_no_chain_of_sums_is_on_both_sides_and_its_side_never_changes():
    rng, chains = random.Random(0), []
    for side in (False, True):
        stories = [words.make_word_problem(rng, "en", (1, 2), side) for _ in range(600)]
        chains.append({(story.start, story.changes) for story in stories})
    assert not chains[0] & chains[1]
    assert {start for start in range(2, 21) if words.is_validation(start, (1, -2))} == {3, 10}


def test_every_single_sum_that_is_evaluated_is_also_trained():
    sizes = [change for change in range(-words.CHANGE[1], words.CHANGE[1] + 1) if abs(change) >= words.CHANGE[0]]
    sums: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    for start in range(words.START[0], words.START[1] + 1):
        for first in sizes:
            for second in sizes:
                if 1 <= start + first <= words.MOST and 1 <= start + first + second <= words.MOST:
                    sums[words.is_validation(start, (first, second))] |= {(start, first), (start + first, second)}
    assert sums[True] <= sums[False]


@pytest.mark.parametrize("language", LANGUAGE_CODES)
@pytest.mark.parametrize("flaws", [words.NO_FLAWS, Flaws(guess=1.0)], ids=["calculated", "guessed"])
def test_demonstrations_without_flaws_are_well_formed_and_told_in_one_language(language, flaws):
    rng, in_one = random.Random(7), 0
    for _ in range(100):
        story = words.make_word_problem(rng, language, (2, 3))
        parts = check_format(words.demonstrate(rng, story, LANGUAGE_CODES, flaws))
        assert parts.ok and (parts.answer == str(story.answer) or flaws != words.NO_FLAWS)
        in_one += consistent(story, parts)
    assert in_one >= 98


@pytest.mark.parametrize("language", LANGUAGE_CODES)
def test_demonstrations_are_in_the_language_asked_for_and_foreign_ones_are_always_told_apart(language):
    rng = random.Random(6)
    for asked in LANGUAGE_CODES:
        story = replace(words.make_word_problem(rng, language, (2, 2)), asked=asked)
        problem = story.problem("x")
        assert (problem.reasoning_language, problem.language) == (asked, language)
        parts = check_format(words.demonstrate(rng, story, LANGUAGE_CODES, words.NO_FLAWS))
        assert parts.answer == str(story.answer) and consistent(story, parts, asked)
        assert not consistent(
            story, check_format(words.demonstrate(rng, story, LANGUAGE_CODES, Flaws(foreign=1.0))), asked
        )
        assert PHRASES[asked].answer in words.estimate(rng, story)
        reasoning = {code: words.calculate(story, code)[0] for code in (language, asked)}
        for thought, answered in ((reasoning[asked], language), (reasoning[language], asked),
                                  (PHRASES[asked].guess, language)):  # fmt: skip
            parts = check_format(words.complete(thought, answered, 3))
            assert asked == language or not consistent(story, parts)
    alone = words.demonstrate(rng, words.make_word_problem(rng, language, (2, 2)), [language], Flaws(foreign=1.0))
    assert PHRASES[language].answer in alone, "there is no other language"


def test_most_demonstrations_are_bad_in_the_documented_shares():
    rng, count = random.Random(9), 1500
    right = whole = in_one = 0
    for number in range(count):
        story = words.make_word_problem(rng, LANGUAGE_CODES[number % len(LANGUAGE_CODES)], (2, 2))
        parts = check_format(words.demonstrate(rng, story, LANGUAGE_CODES))
        whole += parts.ok
        right += parts.answer == str(story.answer)
        in_one += parts.ok and consistent(story, parts)
    assert 0.88 < whole / count < 0.96 and 0.35 < right / count < 0.48 and 0.45 < in_one / count < 0.56


def tasks(count: int, code: Code = "python", seed: int = 3, validation: bool = False) -> list[ToyProgram]:
    rng = random.Random(seed)
    return [toys.make_toy_program(rng, code, (1, 3), validation) for _ in range(count)]


def calculated(text: str, x: int) -> int:
    """What the words of a task make of x, read without the task's own fields."""
    if x < 0 and (case := re.search(r"For negative x the result is (\d)\.", text)):
        return int(case[1])
    if x == 0 and (case := re.search(r"For x equal to zero the result is (\d)\.", text)):
        return int(case[1])
    if (case := re.search(r"For x above (\d+) the result is (\d)\.", text)) and x > int(case[1]):
        return int(case[2])
    signs = {"add": 1, "subtract": -1}
    for verb, number in re.findall(r"(add|subtract|multiply by) (\d)", text):
        x = x * int(number) if verb == "multiply by" else x + signs[verb] * int(number)
    return x


def read_program(completion: str) -> ToyProgram | None:
    """The function that a Python program of a demonstration computes; None when there is no program."""
    program = check_format(completion, verifier=verifier_of("code")).answer
    if program is None:
        return None
    steps = tuple(Step(sign, int(number)) for sign, number in re.findall(r"x (.)= (\d)\n", program))
    kinds = {"<": toys.NEGATIVE, "==": "zero", ">": toys.LARGE}
    cases = re.findall(r"if x (\S+) (\d+):\n        return (\d)", program)
    special = tuple(SpecialCase(kinds[sign], int(result), int(limit)) for sign, limit, result in cases)
    return ToyProgram("python", steps, special)


def test_a_hand_made_task_in_words_reasoning_and_python():
    assert PROGRAM.rule == "+3*2 x<0:7 x>50:1"
    assert PROGRAM.text == (
        "Write a Python function f(x) for this rule: add 3, then multiply by 2. For negative x the result is 7. "
        "For x above 50 the result is 1."
    )
    assert toys.complete(PROGRAM) == (
        "<think>We start with x: add 3, then multiply by 2. When x is negative, it is 7. When x is above 50, it is 1."
        "</think>\n```python\ndef f(x):\n    if x < 0:\n        return 7\n    if x > 50:\n        return 1\n"
        "    x += 3\n    x *= 2\n    return x\n```"
    )
    assert [PROGRAM.result(x) for x in (-1, 0, 4, 50, 51)] == [7, 6, 14, 106, 1]
    assert Sandbox().max_tests >= len(PROGRAM.inputs()), "a share of tests means the same for every completion"


@pytest.mark.parametrize("code", CODES)
def test_results_are_those_of_the_words_and_tests_see_every_forgotten_case_and_every_swap(code):
    for task in tasks(200, code):
        inputs = task.inputs()
        assert [task.result(x) for x in inputs] == [calculated(task.text, x) for x in inputs], task.text
        assert len(set(inputs)) == 7 and {-1, 0} <= set(inputs) and inputs == sorted(inputs) == task.inputs()
        for case in task.cases:
            assert {case.covers(x) for x in inputs} == {True, False}, "both sides of every boundary"
            assert case.kind != toys.LARGE or {case.limit, case.limit + 1} <= set(inputs)
            assert all(task.result(x) != task.stepped(x) for x in inputs if case.covers(x))
        swapped = ToyProgram(task.code, task.steps[::-1], task.cases)
        assert len(task.steps) != 2 or all(swapped.stepped(x) != task.stepped(x) for x in range(-50, 50))


def test_halves_of_programs_are_disjoint_and_about_one_rule_in_eight_is_validation():
    functions: dict[bool, set[tuple[int, ...]]] = {}
    for side in (False, True):
        drawn = [task for code in CODES for task in tasks(300, code, validation=side)]
        functions[side] = {tuple(task.result(x) for x in range(-120, 120)) for task in drawn}
        assert all(toys.is_validation(task) is side for task in drawn)
    assert not functions[False] & functions[True]
    rng, validation, count = random.Random(1), 0, 1600
    for _ in range(count):
        steps = Step(toys.ADD, rng.randint(1, 9)), Step(toys.MULTIPLY, rng.randint(2, 9))
        large = SpecialCase(toys.LARGE, rng.randint(0, 9), rng.choice(range(10, 100, 10)))
        validation += toys.is_validation(
            ToyProgram("python", steps, (SpecialCase(toys.NEGATIVE, rng.randint(0, 9)), large))
        )
    assert 0.09 < validation / count < 0.16


@pytest.mark.parametrize("code", CODES)
def test_flawless_demonstrations_are_in_english_and_broken_ones_have_no_program(code):
    for seed, task in enumerate(tasks(60, code)):
        flawless = toys.demonstrate_program(random.Random(1), task, toys.NO_BLUNDERS)
        parts = check_format(flawless, verifier=verifier_of("code"))
        assert parts.ok and parts.language == code and consistent(task, parts)
        broken = toys.demonstrate_program(random.Random(seed), task, Blunders(broken=1.0))
        assert not check_format(broken, verifier=verifier_of("code")).ok


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_references_pass_their_tests_and_a_blunder_fails_its_share(sandboxes):
    def blunder(task: ToyProgram, **chances: float) -> str:
        return toys.demonstrate_program(random.Random(1), task, Blunders(**chances))

    expected = [(toys.complete(task), task, 1.0) for task in tasks(8)]
    expected += [  # of 7 inputs two are below zero and two above the limit
        (blunder(PROGRAM, forget=1.0), PROGRAM, 3 / 7),
        (blunder(PROGRAM, swap=1.0), PROGRAM, 4 / 7),
        (blunder(PROGRAM, forget=1.0, swap=1.0), PROGRAM, 0.0),
    ]
    if cpp.compiler():
        first, second = tasks(2, "cpp")
        expected += [(toys.complete(task), task, 1.0) for task in (first, second)]
        expected.append((blunder(first, python=1.0), first, 0.0))
    for completion, task, share in expected:
        parts = check_format(completion, verifier=verifier_of("code"))
        language: Code = "cpp" if parts.language == "cpp" else "python"
        assert parts.answer and run_tests(parts.answer, language, task.tests(), pool=sandboxes).share == share


def test_a_slip_is_one_wrong_digit():
    right = toys.complete(PROGRAM)
    for seed in range(20):
        slipped = toys.demonstrate_program(random.Random(seed), PROGRAM, Blunders(slip=1.0))
        differing = [(a, b) for a, b in zip(right, slipped, strict=True) if a != b]
        assert len(differing) == 2 and len(set(differing)) == 1  # in the reasoning, and the same in the program
        assert all(a.isdigit() and b.isdigit() for a, b in differing)


def test_most_demonstrations_of_programs_are_bad_in_the_documented_shares():
    """By arithmetic instead of in boxes: which inputs a demonstration gets right follows from its own words."""
    rng, shares = random.Random(9), []
    for task in [toys.make_toy_program(rng, "python", (2, 2)) for _ in range(1200)]:
        done = read_program(toys.demonstrate_program(rng, task))
        shares.append(sum(done.result(x) == task.result(x) for x in task.inputs()) / 7 if done else 0.0)
    assert 0.20 < shares.count(1.0) / 1200 < 0.28 and 0.62 < sum(shares) / 1200 < 0.72


def options(programs: float, **others: Any) -> Options:
    return Options(problems=64, validation=32, operations=(2, 2), programs=programs, **others)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of the quickstart's files with one program in four problems."""
    folder = tmp_path_factory.mktemp("made")
    prepare(folder, options(0.25).model_dump(), 0)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def digest(pieces: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(pieces), digest_size=16).hexdigest()


def test_problems_and_demonstrations_load(made):
    halves = [read_problems(made / f"{name}.jsonl", name).problems for name in ("train", "validation")]
    for problems, count in zip(halves, (64, 32), strict=True):
        programs = [problem for problem in problems if problem.domain == "code"]
        assert len(problems) == count and len(programs) == count // 4
        assert all(problem.tests and not problem.answer for problem in programs)
        kinds = {"stories": "", "stories, own language asked for": "own", "stories, another language asked for": "x"}
        assert {problem.source for problem in problems if problem not in programs} == set(kinds)
        for problem in problems:
            kind = "own" if problem.reasoning_language == problem.language else problem.reasoning_language and "x"
            assert problem in programs or kinds[problem.source] == kind
    train, validation = halves
    assert not {problem.text for problem in train} & {problem.text for problem in validation}
    assert len({problem.id for problem in train + validation}) == 96
    assert {problem.language for problem in validation} == set(Options().languages)
    asked = {problem.text: problem.reasoning_language for problem in train}
    rows = [json.loads(line) for line in (made / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row.get("reasoning_language", "") == asked[row["problem"]] for row in rows)
    prompts = PromptFormat(Chat(made / "model"), Data(system_prompt=""))
    demonstrations = load_demonstrations(made / "demonstrations.jsonl", None, Sft(), prompts, 512)
    assert len(demonstrations.reasoning) == 64 * quickstart.DEMONSTRATIONS_PER_PROBLEM
    first = json.loads((made / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert set(first) == {"id", "problem", "answer", "language", "domain", "source"}, "it asks for no language"


def test_the_same_seed_gives_the_same_files_and_validation_is_the_same_for_every_seed(made, tmp_path):
    before = files(made)
    for seed, changed in ((0, set()), (1, {"train.jsonl", "demonstrations.jsonl", "model/model.safetensors"})):
        (tmp_path / str(seed)).mkdir()
        prepare(tmp_path / str(seed), options(0.25).model_dump(), seed)
        again = files(tmp_path / str(seed))
        assert again.keys() == before.keys() and {name for name in again if again[name] != before[name]} == changed


def test_without_programs_and_requests_every_file_is_what_it_was_before_there_were_any(tmp_path):
    """Digests of the version before; the tokenizer's texts decide the tokenizer. The demonstrations' digest changed
    with their flaws, and with the word about them."""
    bare = options(0.0, requests=0.0)
    prepare(tmp_path, bare.model_dump(), 0)
    names = ("train.jsonl", "validation.jsonl", "demonstrations.jsonl")
    assert digest((tmp_path / name).read_bytes() for name in names) == "164b66e0ca9fa37c0361844c9ff00992"
    pieces = (f"{piece}\0".encode() for text in quickstart.texts_of(bare) for piece in tiny_model._between_marks(text))
    assert digest(pieces) == "1bfc55c3f77601837dbc04e9d680c33e"
    assert json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"] == 1280


def test_programs_take_their_share_evenly_and_one_in_eight_is_cpp():
    drawn = draw(options(0.25), 0, validation=False)
    kinds = [isinstance(one, ToyProgram) for one in drawn]
    assert sum(kinds) == 16 and all(sum(kinds[start : start + 8]) == 2 for start in range(0, 64, 8))
    assert [one.code for one in drawn if isinstance(one, ToyProgram)].count("cpp") == 2
    assert {one.language for one in drawn if isinstance(one, WordProblem)} == set(Options().languages)
    assert all(isinstance(one, WordProblem) for one in draw(options(0.0), 0, validation=False))
    for one in draw(options(1.0, cpp_one_in=0), 0, validation=False):
        assert isinstance(one, ToyProgram) and one.code == "python"


def test_three_in_four_ask_for_a_language_half_of_them_for_another_and_every_pair_takes_its_turn():
    def pairs(**given: Any) -> Counter[tuple[str, str]]:
        drawn = draw(Options(**given), 0, validation=False)
        return Counter((one.language, one.asked) for one in drawn if isinstance(one, WordProblem))

    counts = pairs(problems=7 * 48)
    crossed = {pair: count for pair, count in counts.items() if pair[1] not in ("", pair[0])}
    assert sum(counts[code, ""] for code in PHRASES) == 7 * 12 and sum(counts[code, code] for code in PHRASES) == 7 * 18
    assert len(crossed) == 42 and set(crossed.values()) == {3}
    assert set(pairs(problems=9, languages=["fr"])) == {("fr", "")}, "there is no other language"
    assert {asked for _, asked in pairs(problems=63, requests=0)} == {""}


@pytest.mark.parametrize(("wrong", "message"), [
    ({"languages": ["en", "xx"]}, "prepare.options.languages names xx; known are en, fr"),
    ({"languages": ["en", "en"]}, "prepare.options.languages .* each once"),
    ({"languages": []}, "prepare.options.languages .* at least one"),
    ({"operations": [3, 2]}, r"prepare.options.operations = \[3, 2\] must be \[fewest, most\]"),
    ({"operations": [1]}, "prepare.options.operations.*required"),
    ({"problems": 0}, "prepare.options.problems = 0: .*greater than or equal to 1"),
    ({"problemz": 9}, "unknown setting prepare.options.problemz: .* are problems, validation"),
], ids=str)  # fmt: skip
def test_a_wrong_option_is_one_line(wrong, message):
    with pytest.raises(ConfigError, match=message) as error:
        quickstart.read_options(wrong)
    assert len(str(error.value).splitlines()) == 1


def test_too_many_problems_name_the_option():
    with pytest.raises(ConfigError, match="prepare.options.validation asks for 3000"):
        draw(Options(validation=3000, languages=["en"], operations=(1, 1)), 0, validation=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    quickstart.make_tiny_model(folder, Options(operations=(2, 2), max_tokens=192), 0)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    return folder


def test_texts_survive_the_tokenizer_in_few_tokens(folder, made):
    rng, prompts, completions = random.Random(4), [], []
    stories, programs = Chat(folder), Chat(made / "model")
    texts = [(stories, "a 漢 ж\n{x} \\frac{1}{2} 🙂", "<think>\n\n</think> \\boxed{}")]
    for number in range(140):
        story = words.make_word_problem(rng, LANGUAGE_CODES[number % len(LANGUAGE_CODES)], (2, 2))
        texts.append((stories, story.text, words.demonstrate(rng, story, LANGUAGE_CODES, words.NO_FLAWS)))
        prompts.append(len(stories.render(story.text, "")))
        completions.append(len(stories.encode(texts[-1][2])))
    texts += [(programs, task.text, toys.complete(task)) for code in CODES for task in tasks(40, code)]
    for chat, *both in texts:
        for text in both:
            assert chat.decode(chat.encode(text)) == text
    assert sum(prompts) / 140 < 25 and sum(completions) / 140 < 40
    lengths = [len(programs.encode(toys.complete(task))) for task in draw(options(1.0, cpp_one_in=0), 0, False)]
    assert sum(lengths) / len(lengths) < 40


def test_marks_and_digits_are_single_tokens_and_a_completion_ends_with_one_that_the_chat_stops_at(folder):
    chat = Chat(folder)
    for text in (*tiny_model.MARKS, tiny_model.END, *"0123456789"):
        assert len(chat.encode(text)) == 1
    assert len(chat.encode("1907")) == 4
    end = chat.encode(tiny_model.END)
    assert chat.stop_ids == tuple(end) and chat.eos_id == end[0] and chat.think_prefix == ""
    assert chat.decode([*chat.encode("7"), *end]) == "7"
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    text = chat.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>s<|user|>u<|assistant|>a<|end|><|user|>u<|assistant|>"


def test_it_loads_in_transformers_with_the_logits_of_our_decoder(folder):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours, chat = load_model(folder), Chat(folder)
    ids = chat.render(STORY.text, "")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(ours(pack_from([ids], [1]), output="logits"), expected, atol=1e-5, rtol=1e-5)
    assert sum(parameter.numel() for parameter in ours.parameters()) < 1_200_000
    assert theirs.generation_config.eos_token_id == chat.eos_id and theirs.config.dtype == torch.float32
    assert theirs.config.max_position_embeddings == 192


def test_every_id_has_a_token_even_for_one_language():
    tokenizer = tiny_model.train_tokenizer(quickstart.texts_of(Options(languages=["it"])))
    assert tokenizer.get_vocab_size() == tiny_model.VOCABULARY
    assert all(tokenizer.id_to_token(number) is not None for number in range(tiny_model.VOCABULARY))


def test_pages_name_the_models_size_and_demonstrations_say_that_they_are_flawed(tmp_path):
    prepare(tmp_path, {"problems": 8, "validation": 8}, seed=0)
    folder = Path(quickstart.__file__).parent
    table = tomllib.loads((folder / "settings.toml").read_text())["prepare"]["options"]
    quickstart.make_tiny_model(tmp_path / "whole", Options.model_validate(table), 0)
    size = f"{sum(each.numel() for each in load_model(tmp_path / 'whole').parameters()) / 1e6:.1f}"
    assert f"A model of {size} million parameters" in (folder / "README.md").read_text()
    assert f"({size} M parameters)" in (folder / "settings.toml").read_text()
    rows = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()]
    assert {row["source"] for row in rows} == {quickstart.FLAWED}
