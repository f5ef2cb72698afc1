"""Problems that stand in the data more than once, and problems to validate on that are trained on."""

import json
from pathlib import Path
from typing import Any

from shared.config import Config
from trainer.data.problem_file import ProblemFile
from trainer.data.run_data import read_files


def files(folder: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> list[ProblemFile]:
    paths = []
    for name, rows in (("train", train), ("validation", validation)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(path if rows else None)
    return read_files(Config(), paths[0], paths[1])


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"problem": f"What is {number} + 1?", "answer": str(number + 1)} | fields for number in range(count)]


def test_a_copied_file_of_problems_to_validate_on_is_told_and_other_problems_are_no_copies(tmp_path):
    """By content: ids, cases and blanks may differ."""
    copied = [{"id": f"v{n}", "answer": row["answer"], "problem": f"  {row['problem'].upper()}\n"}
              for n, row in enumerate(rows(50)[10:])]  # fmt: skip
    train, validation = files(tmp_path, rows(50), copied)
    assert not train.warnings
    [line] = validation.warnings
    assert line.startswith("data.validation: 40 of 40 problems also stand in data.train, where the first is line 11: ")
    assert "curate duplicates --against" in line and line.endswith(f"(first: {tmp_path / 'validation.jsonl'}:1)")
    other = [{"problem": f"What is {number} + 2?", "answer": str(number + 2)} for number in range(9)]
    assert [file.warnings for file in files(tmp_path, rows(9), other)] == [[], []]
    [line, *_] = files(tmp_path, rows(9), [*other, rows(9)[4]])[1].warnings
    assert "1 of 10 problems also stand in data.train, where the first is line 5" in line and line.endswith(":10)")


def test_problems_that_stand_in_a_file_more_than_once_are_told_apart_from_other_answers(tmp_path):
    """ "0.5" is 1/2, and what is open has no single answer."""
    again = [row | {"problem": row["problem"].replace(" ", "  ")} for row in rows(3)] * 2
    [line] = files(tmp_path, rows(4) + again, [])[0].warnings
    assert (
        line.startswith("data.train: 6 of 10 problems are copies of earlier ones") and "line 5 repeats line 1 " in line
    )
    assert line.endswith(":5)")
    half = {"problem": "What is half of one?", "answer": "1/2"}
    mixed = [*rows(3), half, half | {"answer": "0.5"}, rows(3)[1] | {"answer": "7"}]
    other, copies = files(tmp_path, mixed, [])[0].warnings
    assert other.startswith("data.train: 1 of 6 problems have the text of an earlier one and another ground truth: ")
    assert "line 2 has '2', line 6 '7'" in other and other.endswith(":6)")
    assert copies.startswith("data.train: 1 of 6 problems are copies of earlier ones")
    open_rows = [half | {"domain": "open", "answer": answer} for answer in ("one", "two")]
    assert all("another ground truth" not in line for line in files(tmp_path, open_rows, [])[0].warnings)


def test_problems_of_an_environment_may_have_one_text(tmp_path):
    guessed = [{"problem": "Guess the number.", "answer": str(number), "environment": "guess"} for number in range(5)]
    bare = [{"problem": "Play.", "environment": "guess"}] * 2
    assert [file.warnings for file in files(tmp_path, guessed[:3] + bare, guessed[3:] + bare)] == [[], []]
    assert "1 of 5 problems are copies" in files(tmp_path, [*guessed[:4], guessed[0]], [])[0].warnings[0]


def test_another_prefix_is_another_problem_to_train_on(tmp_path):
    begun = [row | {"prefix": prefix} for row in rows(2) for prefix in ("<think>\na", "<think>\nb")]
    train, validation = files(tmp_path, begun, rows(2))
    assert not train.warnings and "2 of 2 problems also stand in data.train" in validation.warnings[0]
