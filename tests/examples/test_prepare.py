"""The quickstart's files: complete, disjoint, the same for the same seed and options; wrong options are told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.prepare import DEMONSTRATIONS_PER_PROBLEM, Options, draw, prepare, read_options
from examples.quickstart.word_problems import PHRASES, WordProblem
from shared.chat import Chat
from shared.errors import ConfigError
from shared.sections import Data, Sft
from trainer.data.data_source import PromptFormat
from trainer.data.problem_file import read_problems
from trainer.sft import load_demonstrations

OPTIONS: dict[str, Any] = {"problems": 60, "validation": 21}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    prepare(folder, OPTIONS, 0)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_problems_and_demonstrations_load(made: Path) -> None:
    train = read_problems(made / "train.jsonl", "data.train").problems
    validation = read_problems(made / "validation.jsonl", "data.validation").problems
    assert (len(train), len(validation)) == (60, 21)
    assert not {problem.text for problem in train} & {problem.text for problem in validation}
    assert len({problem.id for problem in train + validation}) == 81
    assert {problem.language for problem in validation} == set(Options().languages)
    prompts = PromptFormat(Chat(made / "model"), Data(system_prompt=""))
    demonstrations = load_demonstrations(made / "demonstrations.jsonl", None, Sft(), prompts, 512)
    assert len(demonstrations.reasoning) == 60 * DEMONSTRATIONS_PER_PROBLEM


def test_the_same_seed_and_options_give_the_same_files(made: Path, tmp_path: Path) -> None:
    prepare(tmp_path, OPTIONS, 0)
    assert files(tmp_path) == files(made)


def test_validation_problems_are_the_same_for_every_seed(made: Path, tmp_path: Path) -> None:
    prepare(tmp_path, OPTIONS, 1)
    found, before = files(tmp_path), files(made)
    assert {name for name in found if found[name] != before[name]} == {
        "train.jsonl", "demonstrations.jsonl", "model/model.safetensors",
    }  # fmt: skip


def test_three_in_four_ask_for_a_language_half_of_them_for_another_and_every_pair_takes_its_turn() -> None:
    problems = [one for one in draw(Options(problems=7 * 48), 0, validation=False) if isinstance(one, WordProblem)]
    pairs = Counter((one.language, one.asked) for one in problems)
    crossed = {pair: count for pair, count in pairs.items() if pair[1] not in ("", pair[0])}
    assert sum(pairs[code, ""] for code in PHRASES) == 7 * 12 and sum(pairs[code, code] for code in PHRASES) == 7 * 18
    assert len(crossed) == 42 and set(crossed.values()) == {3}
    alone = draw(Options(problems=9, languages=["fr"]), 0, False)
    assert not any(one.asked for one in alone if isinstance(one, WordProblem)), "there is no other language"
    none = draw(Options(problems=63, requests=0), 0, False)
    assert not any(one.asked for one in none if isinstance(one, WordProblem))


def test_rows_and_their_demonstrations_ask_for_the_same_language(made: Path) -> None:
    for name in ("train", "validation"):
        rows = read_problems(made / f"{name}.jsonl", name).problems
        sources = {"stories": "", "stories, own language asked for": "own", "stories, another language asked for": "x"}
        assert {one.source for one in rows} == set(sources)
        for one in rows:
            kind = "own" if one.reasoning_language == one.language else one.reasoning_language and "x"
            assert sources[one.source] == kind
    asked = {one.text: one.reasoning_language for one in read_problems(made / "train.jsonl", "train").problems}
    for line in (made / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert row.get("reasoning_language", "") == asked[row["problem"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"languages": ["en", "xx"]}, "prepare.options.languages names xx; known are en, fr"),
        ({"languages": ["en", "en"]}, "prepare.options.languages .* each once"),
        ({"languages": []}, "prepare.options.languages .* at least one"),
        ({"operations": [3, 2]}, r"prepare.options.operations = \[3, 2\] must be \[fewest, most\]"),
        ({"operations": [1]}, "prepare.options.operations.*required"),
        ({"problems": 0}, "prepare.options.problems = 0: .*greater than or equal to 1"),
        (
            {"problemz": 9},
            "unknown setting prepare.options.problemz: the quickstart's options are problems, validation",
        ),
    ],
    ids=str,
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_options(options)
    assert len(str(caught.value).splitlines()) == 1


def test_too_many_problems_name_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prepare.options.problems asks for 20000"):
        prepare(tmp_path, {"problems": 20_000, "languages": ["en"], "operations": [1, 1]}, 0)


def test_rows_follow_the_data_schema(made: Path) -> None:
    row = json.loads((made / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert set(row) == {"id", "problem", "answer", "language", "domain", "source"}, "it asks for no language"
