"""Data: bad lines are named, draws are a pure function of (seed, index)."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from shared.config import Config
from shared.errors import DataError
from shared.types import Problem
from trainer.data import DataSource, completion_seed, load_problems


class LetterChat:
    """One token a letter: enough of a chat format to count lengths."""

    def render(self, text: str, system: str) -> list[int]:
        return [ord(letter) % 256 for letter in system + text]


def make_source(count: int, **settings: object) -> DataSource:
    tokens = {"rollout": {"max_completion_tokens": 100}, "model": {"max_tokens": 120}}
    config = Config.model_validate({**tokens, **settings})
    problems = [Problem(str(i), "x" * (1 + i % 5), "1") for i in range(count)]
    return DataSource(problems, config, LetterChat(), "")  # type: ignore[arg-type]


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"problem": "a", "answer": "1"}', "{oops"], r"rows.jsonl:2 is not JSON"),
        ([{"problem": "a"}], r"rows.jsonl:1 lacks 'answer'"),
        ([{"problem": " ", "answer": "1"}], r"rows.jsonl:1 lacks 'problem'"),
        (["[1, 2]"], r"rows.jsonl:1 is not a JSON object"),
        ([], "holds no problem"),
    ],
)
def test_a_bad_line_is_named_with_file_number_and_repair(tmp_path: Path, lines: list[object], message: str):
    with pytest.raises(DataError, match=message):
        load_problems(write(tmp_path / "rows.jsonl", *lines), "data.train")


def test_a_missing_file_names_the_setting(tmp_path: Path):
    with pytest.raises(DataError, match=r"data\.train = .*nothing\.jsonl"):
        load_problems(tmp_path / "nothing.jsonl", "data.train")


def test_a_truncated_gzip_is_a_clear_error(tmp_path: Path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"problem": "a", "answer": "1"}\n' * 1000)[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        load_problems(path, "data.train")


def test_every_epoch_draws_every_problem_once_in_its_own_order():
    source = make_source(50)
    epochs = [[source.problem_at(index).id for index in range(start, start + 50)] for start in (0, 50, 100)]
    assert all(Counter(epoch) == Counter(map(str, range(50))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = make_source(50)
    assert [again.problem_at(index).id for index in range(150)] == sum(epochs, [])
    assert [make_source(50, seed=1).problem_at(i).id for i in range(50)] != epochs[0]


def test_file_order_is_kept():
    source = make_source(3, data={"order": "file"})
    assert [source.problem_at(index).id for index in range(6)] == ["0", "1", "2", "0", "1", "2"]


def test_too_long_prompts_are_skipped_and_counted_and_keep_their_index():
    source = make_source(2, data={"order": "file"})
    source.problems[0] = Problem("long", "y" * 500, "1")
    assert [source.draw(index).index for index in (0, 1, 2)] == [1, 1, 3]
    assert source.too_long == 2
    source.problems[1] = source.problems[0]
    with pytest.raises(DataError, match=r"raise model\.max_tokens"):
        source.draw(0)


def test_seeds_differ_between_prompts_and_samples_and_repeat():
    seeds = {completion_seed(0, index, sample) for index in range(100) for sample in range(16)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**62 for seed in seeds)
    assert completion_seed(0, 3, 4) == completion_seed(0, 3, 4) != completion_seed(1, 3, 4)


def test_real_problem_files_load(data_folder: Path):
    problems = load_problems(data_folder / "gsm8k_train.jsonl.gz", "data.train")
    assert len(problems) == 7473 and problems[0].language == "en" and problems[0].answer
