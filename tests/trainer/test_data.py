"""Data: a file is checked whole before a run, with line and repair; draws are a pure function of (seed, index)."""

import asyncio
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from shared.config import Config
from shared.errors import DataError
from shared.sections import Data
from shared.types import Problem
from tests.tables import read_table
from trainer.data.data_source import DataSource, PromptFormat, completion_seed, opened
from trainer.data.problem_file import ProblemFile, check_answers, read_problems, without_long
from trainer.stages import Stages
from verify.answer_checker import AnswerChecker

GOOD = {"problem": "1+1?", "answer": "2"}


class LetterChat:
    """One token a letter: enough of a chat format to count lengths."""

    longest_token = 1
    think_prefix = ""
    added = re.compile("(?!)")

    def render(self, text: str, system: str, _quoted: object = None) -> list[int]:
        return [ord(letter) % 256 for letter in system + text]

    def encode_plain(self, text: str) -> list[int]:
        return self.render(text, "")


def make_config(**settings: object) -> Config:
    tokens = {"rollout": {"max_completion_tokens": 100}, "model": {"max_tokens": 120}}
    return Config.model_validate({**tokens, "data": {"system_prompt": ""}, **settings})


def source_of(problems: list[Problem], **settings: object) -> DataSource:
    config = make_config(**settings)
    return DataSource(problems, Stages(config), PromptFormat(LetterChat(), config.data))


def make_source(count: int, **settings: object) -> DataSource:
    return source_of([Problem(str(i), "x" * (1 + i % 5), "1") for i in range(count)], **settings)


def ids(source: DataSource, *span: int) -> list[str]:
    return [source.problem_at(index).id for index in range(*span)]


def written(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def read(folder: Path, *rows: object, data: Data | None = None) -> ProblemFile:
    return read_problems(written(folder, *rows), "data.train", *([data] if data else []))


def test_a_file_that_cannot_be_read_names_the_setting(tmp_path):
    with pytest.raises(DataError, match=r"data\.train = .*nothing\.jsonl"):
        read_problems(tmp_path / "nothing.jsonl", "data.train")
    with pytest.raises(DataError, match="it is no file"):
        read_problems(tmp_path, "data.train")
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"problem": "%d", "answer": "1"}\n' % number for number in range(1000)))
    middle = len(whole) // 2
    for damaged in (whole[:-20], whole[:middle] + b"\xff\xff\xff" + whole[middle + 3 :]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read"):
            read_problems(path, "data.train")


@pytest.mark.parametrize("answer", ["see solution", "The answer is 42", "Both sides are equal since x is positive"])
def test_ground_truth_answers_that_nothing_equals_are_refused(tmp_path, answer):
    with pytest.raises(DataError, match=r'rows\.jsonl:2: the answer .* every completion would be wrong.*"open"'):
        read(tmp_path, GOOD, {**GOOD, "answer": answer})
    assert read(tmp_path, {**GOOD, "answer": answer, "domain": "open"}).problems


@pytest.mark.parametrize("case", read_table("trainer/refused_rows"), ids=lambda case: case["message"][:40])
def test_rows_that_mean_something_else_are_refused(tmp_path, case):
    """The lines of a file, and what is said of the last one."""
    with pytest.raises(DataError, match=case["message"]):
        read(tmp_path, *case["lines"])


def test_an_error_shows_the_first_faults_and_counts_all(tmp_path):
    with pytest.raises(DataError) as error:
        read(tmp_path, *[{"problem": "1+1?", "anwser": "2"}] * 8, GOOD, "{oops")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("data.train: 9 rows of ") and lines[0].endswith("cannot be used:")
    assert len(lines) == 8 and lines[-2].strip() == "... and 3 more like these", "five of a kind"
    assert "is not JSON" in lines[-1]


def test_what_is_meant_is_taken(tmp_path):
    """Numbers, null for what may be absent, further columns, a mark before UTF-8, whole characters in two halves."""
    path = tmp_path / "rows.jsonl"
    first = {
        **GOOD,
        "answer": 2,
        "id": 7,
        "level": 3,
        "type": "sum",
        "subject": None,
        "problem_id": 1,
        "answers": ["2"],
    }
    second = {**GOOD, "answer": 1e-7, "language": None, "domain": None, "id": None, "source": None, "idx": 3}
    rows = [json.dumps(first), json.dumps(second), r'{"problem": "\ud83d\ude00", "answer": "1"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(rows).encode())
    numbered, other, smiling = read_problems(path, "data.train").problems
    assert (numbered.id, numbered.answer, other.language, other.domain, smiling.text) == ("7", "2", "en", "math", "😀")
    path.write_text(json.dumps(GOOD), encoding="utf-16")
    with pytest.raises(DataError, match=r"rows\.jsonl:1 is UTF-16.*save the file as UTF-8"):
        read_problems(path, "data.train")


def test_what_may_be_meant_is_a_warning_with_count_and_first_line(tmp_path):
    rows = [GOOD, {**GOOD, "domain": "physics"}, {**GOOD, "answer": "opposite sides are parallel"}]
    domain, words = read(tmp_path, *rows).warnings
    assert "1 of 3 problems are of domain 'physics'" in domain and "rows.jsonl:2)" in domain
    assert "1 of 3 problems have an answer of several words" in words and "rows.jsonl:3)" in words
    assert len(read(tmp_path, *rows, data=Data(domains=["physics"])).warnings) == 1


@pytest.mark.soak  # in make test: rows of published sets as their authors write them, tests/published.py
def test_the_real_sets_are_taken_without_a_false_alarm(data_folder):
    """28,589 rows, of which those with an answer or a program are problems; ifeval and bfcl have neither."""
    count, warnings = 0, []
    for path in sorted(data_folder.glob("*.jsonl*")):
        if path.name.startswith(("ifeval", "bfcl")):
            with pytest.raises(DataError, match="lacks 'answer'"):
                read_problems(path, "data.train")
            continue
        file = read_problems(path, "data.train")
        count += len(file.problems)
        warnings += file.warnings
    assert count == 27408
    (none,) = [line for line in warnings if "reasoning_gym" not in line]
    assert '2 of 7,395 problems have an answer such as "None"' in none
    assert len(warnings) == 3, '100 answers in sentences (knights and knaves), a domain of its own, MATH\'s two "None"'


def test_prompts_that_are_too_long_are_told_before_the_run_with_their_share(tmp_path):
    """A megabyte of text is one of them: it is looked at in a thread, and never again while the run draws."""
    file = read(tmp_path, *({"problem": "x" * size, "answer": "1"} for size in (5, 20, 21, 1 << 20, 3)))
    source = source_of(file.problems)
    long = source.measure(file.problems)
    assert [file.where(problem).rpartition(":")[2] for problem in long] == ["3", "4"]
    assert [len(problem.text) for problem in without_long(file, file.problems, long, source.room_in_words)] == [
        5,
        20,
        3,
    ]
    (line,) = file.warnings
    assert "data.train: 2 of 5 problems are left out (40.0%): each is longer than 20 tokens" in line and ":3)" in line
    limits = "model.max_tokens = 120 less rollout.max_completion_tokens = 100; system prompt and chat format take 0"
    assert limits in line and "shorten data.system_prompt" in line
    assert {len(source.draw(index).token_ids) for index in range(200)} == {5, 20, 3}
    with pytest.raises(DataError, match=r"data\.train: every problem of .* is longer than 20 tokens"):
        without_long(file, long, long, source.room_in_words)


def test_answers_that_the_verifier_does_not_understand_are_counted_or_refused(tmp_path):
    answers = ["2", "x^2", "E(Y|X)", "f \\colon X \\to Y", "Monday", "\\frac{1}{2}", *map(str, range(100))]
    file = read(tmp_path, *({**GOOD, "answer": answer} for answer in answers))

    async def check(*shares: float) -> None:
        async with AnswerChecker(1) as checker:
            for share in shares:
                config = Config.model_validate({"reward": {"max_failure_share": share}})
                await check_answers(file, file.problems, checker, config)

    refusal = r"does not understand 2 of 106 ground truths.*\n.*rows\.jsonl:3: 'E\(Y\|X\)'"
    with pytest.raises(DataError, match=refusal):
        asyncio.run(check(0.05, 0.001))
    (line,) = file.warnings
    assert "2 of 106 problems have a ground truth that the verifier does not understand" in line and ":3)" in line


def test_every_epoch_draws_every_problem_once_in_its_own_order():
    source = make_source(50)
    epochs = [ids(source, start, start + 50) for start in (0, 50, 100)]
    assert all(Counter(epoch) == Counter(map(str, range(50))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ids(make_source(50), 150) == sum(epochs, [])
    assert ids(make_source(50, seed=1), 50) != epochs[0]
    assert ids(make_source(3, data={"order": "file"}), 6) == ["0", "1", "2", "0", "1", "2"]


def test_prioritised_draws_are_in_proportion_to_failures_and_repeat():
    """Successes 0, 1/2, 1, 3/4 (of the row): chances 4/7, 2/7, 0, 1/7, within four deviations of 7,000 draws."""
    source = make_source(3, data={"order": "prioritised", "system_prompt": ""})
    source.problems.append(Problem("3", "x", "1", pass_rate=0.75))
    source.stages.state.success |= {"1": 0.5, "2": 1.0}
    counts = Counter(drawn := ids(source, 7000))
    for name, chance in (("0", 4 / 7), ("1", 2 / 7), ("2", 0), ("3", 1 / 7)):
        assert abs(counts[name] - 7000 * chance) <= 4 * (7000 * chance * (1 - chance)) ** 0.5, name
    assert ids(source, 50) == drawn[:50]
    source.stages.state.success = dict.fromkeys("0123", 1.0)
    assert source.problem_at(0).id in "0123", "all are solved: any"


def test_too_long_prompts_are_skipped_and_keep_their_index():
    source = make_source(2, data={"order": "file", "system_prompt": ""})
    source.problems[0] = Problem("long", "y" * 500, "1")
    assert [source.draw(index).index for index in (0, 1, 2)] == [1, 1, 3]
    source.problems[1] = source.problems[0]
    with pytest.raises(DataError, match="every problem is longer than 20 tokens"):
        source.draw(0)


def test_a_stage_draws_what_fits_it_from_its_own_first_index():
    problems = [
        Problem("easy", "a", "1", pass_rate=1.0),
        Problem("half", "b", "1", pass_rate=0.5),
        Problem("unknown", "c", "1"),
        Problem("code", "d", "", domain="code", tests=["assert f(1) == 1"], pass_rate=0.5),
        Problem("done", "e", "1", pass_rate=0.5),
    ]
    source = source_of(problems, data={"order": "file", "domains": ["math"], "pass_rate": [0.5, 0.8]})
    source.stages.state.first_index, source.stages.state.retired = 41, ["done"]
    assert ids(source, 41, 45) == ["half", "unknown", "half", "unknown"]
    source.stages = Stages(make_config(data={"domains": ["poetry"]}))
    with pytest.raises(DataError, match=r"data\.domains = \['poetry'\].*widen"):
        source.problem_at(0)


def test_a_prompt_has_the_template_and_system_prompt_of_its_domain():
    settings = Data(system_prompt="S:", templates={"code": "{problem}, in Python"})
    prompts = PromptFormat(LetterChat(), settings)
    assert bytes(prompts.render("add", "code")) == b"S:add, in Python"
    assert bytes(prompts.render("add", "math")) == b"S:add"
    assert bytes(prompts.without_system().render("add", "code")) == b"add"


def test_a_row_asks_for_its_reasoning_language_at_the_end_of_the_users_turn():
    settings = Data(system_prompt="magistral", templates={"math": "{problem} Box it."})
    prompts = PromptFormat(LetterChat(), settings)
    plain = bytes(prompts.prompt_of(Problem("1", "1+1?", "2")))
    asked = bytes(prompts.prompt_of(Problem("1", "1+1?", "2", reasoning_language="de")))
    assert plain.endswith(b"1+1? Box it.") and b"the summary in the language of the task." in plain
    assert asked.endswith(b"1+1? Box it.\n\nDenke und antworte auf Deutsch.")
    assert b"the summary in German (Deutsch), even if the task is in another language." in asked
    problems = [Problem("short", "?", "1"), Problem("long", "?", "1", reasoning_language="de")]
    source = source_of(problems, model={"max_tokens": 130})
    assert [problem.id for problem in source.measure(problems)] == ["long"], "the request takes room"


def test_seeds_differ_between_prompts_and_samples_and_repeat():
    seeds = {completion_seed(0, index, sample) for index in range(100) for sample in range(16)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**62 for seed in seeds)
    assert completion_seed(0, 3, 4) == completion_seed(0, 3, 4) != completion_seed(1, 3, 4)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 6), (0.25, 3), (1.0, 12)])
def test_a_share_of_the_problems_is_made_open_evenly(share, count):
    """Programs and rows that are open already are not counted; domain, and with it prompts, stay."""
    problems = [
        Problem(f"{n}", "t", "1", domain="open" if hidden else "math", hidden=hidden, tests=None if n % 5 else ["x"])
        for n in range(20)
        for hidden in [n % 5 == 1]
    ]
    made = opened(problems, share)
    assert [(problem.id, problem.domain) for problem in made] == [(each.id, each.domain) for each in problems]
    marked = [now for now, was in zip(made, problems, strict=True) if was.verified and not now.verified]
    assert len(marked) == count and all(problem.tests is None for problem in marked)


@pytest.mark.parametrize("max_tokens", [40, 120, 4096])
@pytest.mark.parametrize("system", ["", "You solve the user's task by reasoning first and answering second. " * 5])
def test_probe_sequences_differ_in_length_and_hold_problems_and_answers(system, max_tokens):
    limits = {"model": {"max_tokens": max_tokens}, "rollout": {"max_completion_tokens": 32}}
    problems = [Problem("a", "Wie viel ist 2+3?", "fuenf"), Problem("b", "How much is 9-1?", "eight")]
    probe = source_of(problems, data={"system_prompt": system}, **limits).probe()
    lengths = [len(ids) for ids in probe]
    assert lengths == sorted(set(lengths)) and lengths[0] >= 2 and lengths[-1] == min(256, max_tokens - 1)
    texts = ["".join(map(chr, ids)) for ids in probe]
    assert all(text.endswith(("fuenf"[-len(text) :], "eight"[-len(text) :])) for text in texts)
    assert max_tokens == 40 or "2+3?fuenf" in texts[1] + texts[2]


def test_problems_keep_the_columns_that_rewards_ask_for_and_one_that_no_row_has_is_named(tmp_path):
    rows = [{**GOOD, "level": 3, "other": 1}, {"prompt": [{"role": "user", "content": "2+2?"}], "label": "4"}]
    path = written(tmp_path, *rows)
    kept = [one.columns for one in read_problems(path, "data.train", kept={"prompt": "", "level": "mine"}).problems]
    assert kept == [{"level": 3}, {"prompt": rows[1]["prompt"]}]
    assert [one.columns for one in read_problems(path, "data.train", kept={"*": ""}).problems] == rows
    assert not any(one.columns for one in read_problems(path, "data.train").problems)
    with pytest.raises(DataError, match="reward mine asks for 'solution', and no row of .* has this column: they have"):
        read_problems(path, "data.train", kept={"solution": "mine", "level": ""})
