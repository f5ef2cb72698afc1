"""Data: bad lines are named, draws are a pure function of (seed, index)."""

from __future__ import annotations

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
from trainer.data.data_source import DataSource, PromptFormat, completion_seed, opened
from trainer.data.problem_file import read_problems
from trainer.stages import Stages


class LetterChat:
    """One token a letter: enough of a chat format to count lengths."""

    longest_token = 1
    think_prefix = ""
    added = re.compile("(?!)")

    def render(self, text: str, system: str, _quoted: object = None) -> list[int]:
        return [ord(letter) % 256 for letter in system + text]

    def encode_plain(self, text: str) -> list[int]:
        return self.render(text, "")


def make_source(count: int, **settings: object) -> DataSource:
    config = make_config(**settings)
    problems = [Problem(str(i), "x" * (1 + i % 5), "1") for i in range(count)]
    return DataSource(problems, Stages(config), PromptFormat(LetterChat(), config.data))  # type: ignore[arg-type]


def make_config(**settings: object) -> Config:
    tokens = {"rollout": {"max_completion_tokens": 100}, "model": {"max_tokens": 120}}
    return Config.model_validate({**tokens, "data": {"system_prompt": ""}, **settings})


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_missing_file_names_the_setting(tmp_path: Path):
    with pytest.raises(DataError, match=r"data\.train = .*nothing\.jsonl"):
        read_problems(tmp_path / "nothing.jsonl", "data.train")


def test_a_damaged_gzip_is_a_clear_error(tmp_path: Path):
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"problem": "%d", "answer": "1"}\n' % number for number in range(1000)))
    middle = len(whole) // 2
    for damaged in (whole[:-20], whole[:middle] + b"\xff\xff\xff" + whole[middle + 3 :]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read"):
            read_problems(path, "data.train")


def test_every_epoch_draws_every_problem_once_in_its_own_order():
    source = make_source(50)
    epochs = [[source.problem_at(index).id for index in range(start, start + 50)] for start in (0, 50, 100)]
    assert all(Counter(epoch) == Counter(map(str, range(50))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = make_source(50)
    assert [again.problem_at(index).id for index in range(150)] == sum(epochs, [])
    assert [make_source(50, seed=1).problem_at(i).id for i in range(50)] != epochs[0]


def test_file_order_is_kept():
    source = make_source(3, data={"order": "file", "system_prompt": ""})
    assert [source.problem_at(index).id for index in range(6)] == ["0", "1", "2", "0", "1", "2"]


def test_prioritised_draws_are_in_proportion_to_failures_and_repeat():
    """Successes 0, 1/2, 1, 3/4 (of the row): chances 4/7, 2/7, 0, 1/7, within four deviations of 7,000 draws."""
    source = make_source(3, data={"order": "prioritised", "system_prompt": ""})
    source.problems.append(Problem("3", "x", "1", pass_rate=0.75))
    source.stages.state.success |= {"1": 0.5, "2": 1.0}
    counts = Counter(drawn := [source.problem_at(index).id for index in range(7000)])
    for name, chance in (("0", 4 / 7), ("1", 2 / 7), ("2", 0), ("3", 1 / 7)):
        assert abs(counts[name] - 7000 * chance) <= 4 * (7000 * chance * (1 - chance)) ** 0.5, name
    assert [source.problem_at(index).id for index in range(50)] == drawn[:50]
    source.stages.state.success = dict.fromkeys("0123", 1.0)
    assert source.problem_at(0).id in "0123", "all are solved: any"


def test_too_long_prompts_are_skipped_and_keep_their_index():
    source = make_source(2, data={"order": "file", "system_prompt": ""})
    source.problems[0] = Problem("long", "y" * 500, "1")
    assert [source.draw(index).index for index in (0, 1, 2)] == [1, 1, 3]
    source.problems[1] = source.problems[0]
    with pytest.raises(DataError, match=r"raise model\.max_tokens"):
        source.draw(0)


def test_a_stage_draws_what_fits_it_from_its_own_first_index():
    source = make_source(1)
    source.all = [
        Problem("easy", "a", "1", pass_rate=1.0),
        Problem("half", "b", "1", pass_rate=0.5),
        Problem("unknown", "c", "1"),
        Problem("code", "d", "", domain="code", tests=["assert f(1) == 1"], pass_rate=0.5),
        Problem("done", "e", "1", pass_rate=0.5),
    ]
    narrow = make_config(data={"order": "file", "system_prompt": "", "domains": ["math"], "pass_rate": [0.5, 0.8]})
    source.stages = Stages(narrow)
    source.stages.state.first_index, source.stages.state.retired = 41, ["done"]
    assert [source.problem_at(index).id for index in range(41, 45)] == ["half", "unknown", "half", "unknown"]
    source.stages = Stages(make_config(data={"domains": ["poetry"]}))
    with pytest.raises(DataError, match=r"data\.domains = \['poetry'\].*widen"):
        source.problem_at(0)


def test_a_prompt_has_the_template_and_system_prompt_of_its_domain():
    settings = Data(system_prompt="S:", templates={"code": "{problem}, in Python"})
    prompts = PromptFormat(LetterChat(), settings)  # type: ignore[arg-type]
    assert bytes(prompts.render("add", "code")) == b"S:add, in Python"
    assert bytes(prompts.render("add", "math")) == b"S:add"
    assert bytes(prompts.without_system().render("add", "code")) == b"add"


def test_a_row_asks_for_its_reasoning_language_at_the_end_of_the_users_turn() -> None:
    settings = Data(system_prompt="magistral", templates={"math": "{problem} Box it."})
    prompts = PromptFormat(LetterChat(), settings)  # type: ignore[arg-type]
    plain = bytes(prompts.prompt_of(Problem("1", "1+1?", "2")))
    asked = bytes(prompts.prompt_of(Problem("1", "1+1?", "2", reasoning_language="de")))
    assert plain.endswith(b"1+1? Box it.") and b"the summary in the language of the task." in plain
    assert asked.endswith(b"1+1? Box it.\n\nDenke und antworte auf Deutsch.")
    assert b"the summary in German (Deutsch), even if the task is in another language." in asked
    source = make_source(1, data={"system_prompt": ""}, model={"max_tokens": 130})
    source.all = [Problem("short", "?", "1"), Problem("long", "?", "1", reasoning_language="de")]
    assert [problem.id for problem in source.measure(source.all)] == ["long"], "the request takes room"


def test_seeds_differ_between_prompts_and_samples_and_repeat():
    seeds = {completion_seed(0, index, sample) for index in range(100) for sample in range(16)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**62 for seed in seeds)
    assert completion_seed(0, 3, 4) == completion_seed(0, 3, 4) != completion_seed(1, 3, 4)


def test_a_share_of_the_problems_is_made_open_evenly() -> None:
    """Programs and rows that are open already are not counted; domain, and with it prompts, stay."""
    problems = [
        Problem(
            str(n), "t", "1", domain="open" if n % 5 == 1 else "math", hidden=n % 5 == 1, tests=None if n % 5 else ["x"]
        )
        for n in range(20)
    ]
    for share, count in ((0.0, 0), (0.5, 6), (0.25, 3), (1.0, 12)):
        found = opened(problems, share)
        assert [(problem.id, problem.domain) for problem in found] == [(one.id, one.domain) for one in problems]
        marked = [one for one, was in zip(found, problems, strict=True) if was.verified and not one.verified]
        assert len(marked) == count and all(problem.tests is None for problem in marked)


@pytest.mark.parametrize("max_tokens", [40, 120, 4096])
@pytest.mark.parametrize("system", ["", "You solve the user's task by reasoning first and answering second. " * 5])
def test_probe_sequences_differ_in_length_and_hold_problems_and_answers(system: str, max_tokens: int) -> None:
    config = make_config(
        data={"system_prompt": system}, model={"max_tokens": max_tokens}, rollout={"max_completion_tokens": 32}
    )
    problems = [Problem("a", "Wie viel ist 2+3?", "fuenf"), Problem("b", "How much is 9-1?", "eight")]
    source = DataSource(problems, Stages(config), PromptFormat(LetterChat(), config.data))  # type: ignore[arg-type]
    probe = source.probe()
    lengths = [len(ids) for ids in probe]
    assert lengths == sorted(set(lengths)) and lengths[0] >= 2 and lengths[-1] == min(256, max_tokens - 1)
    texts = ["".join(map(chr, ids)) for ids in probe]
    assert all(text.endswith(("fuenf"[-len(text) :], "eight"[-len(text) :])) for text in texts)
    assert max_tokens == 40 or "2+3?fuenf" in texts[1] + texts[2]
