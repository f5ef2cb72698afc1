"""Pass rates, clusters of equal answers, and the stages difficulty and labels on hand-made samples."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from curate import difficulty, runner
from curate.difficulty import DifficultyStage, LabelsStage, largest_cluster
from curate.sample import Sample, SampleStage, pass_rate, read_pass_rate, read_samples, samples_of_group, with_samples
from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.jsonl import Row
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict

RIGHT, WRONG, NONE, LATE = Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER, Verdict.TIMEOUT


def test_samples_of_other_refusals_are_not_gone_on_with(tmp_path):
    def settings_of(refuse: list[str]) -> dict[str, Any]:
        config = Config.model_validate({"reward": {"refuse": refuse}})
        stage = SimpleNamespace(run_config=config, model_dir=tmp_path, digest="", samples=4)
        return SampleStage.settings.fget(stage)  # type: ignore[attr-defined, no-any-return]

    assert settings_of(["several"]) != settings_of([])
    assert settings_of(["several", "hidden"]) == settings_of(["hidden", "several"])


def samples(*verdicts: Verdict) -> list[Sample]:
    return [Sample("5", verdict, 10) for verdict in verdicts]


def row(**fields: Any) -> Row:
    return Row("problems.jsonl:1", 1, fields)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(fields) + "\n" for fields in rows))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_pass_rate_is_over_graded_completions():
    assert pass_rate(samples(RIGHT, WRONG, NONE, RIGHT, LATE)) == 0.5
    assert pass_rate(samples(LATE, Verdict.UNVERIFIABLE)) is None
    assert pass_rate(samples(NONE)) == 0


def test_samples_go_into_a_row_and_come_back():
    made = [Sample(r"\frac12", RIGHT, 31), Sample(None, NONE, 64)]
    fields = with_samples({"problem": "?", "pass_rate": 0.1, "samples": "old"}, made)
    fields = json.loads(json.dumps(fields))
    assert fields["problem"] == "?" and fields["pass_rate"] == 0.5
    assert fields["samples"][0] == {"answer": r"\frac12", "verdict": "correct", "tokens": 31}
    assert read_samples(row(**fields)) == made and read_pass_rate(row(**fields)) == 0.5


def test_of_a_group_only_answers_are_kept_and_no_programs():
    def group(domain: str) -> Group:
        completions = [Completion(3, index, 0, token_ids=[1] * (index + 4)) for index in range(2)]
        rewards: list[Reward | None] = [
            Reward(1.0, 0.1, 0.9, 0.0, 0.0, RIGHT, answer="print(5)"), Reward(0.0, 0.0, 0.0, 0.0, 0.0, NONE),
        ]  # fmt: skip
        return Group(Prompt(3, Problem("a", "?", "5", domain=domain), [1]), completions, rewards)

    assert samples_of_group(group("math")) == [Sample("print(5)", RIGHT, 4), Sample(None, NONE, 5)]
    assert [sample.answer for sample in samples_of_group(group("code"))] == [None, None]
    problem, reward = (
        Problem("p", "?", "prose", domain="open", hidden=True),
        Reward(0, 0, 0, 0, 0, Verdict.OPEN, answer="a"),
    )
    assert samples_of_group(Group(Prompt(0, problem, [1]), [Completion(0, 0, 0, [1, 2])], [reward])) == [
        Sample("a", Verdict.OPEN, 2)
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({}, "lacks 'samples'"), ({"samples": []}, "lacks 'samples'"), ({"samples": [{"answer": "5"}]}, "damaged")],
)
def test_rows_that_were_not_sampled_are_refused(fields, words):
    with pytest.raises(DataError, match=rf"problems.jsonl:1.*{words}.*run the stage sample first"):
        read_samples(row(**fields))


@pytest.mark.parametrize("rate", ["", True, "high", 1.5])
def test_a_pass_rate_must_be_a_share(rate):
    with pytest.raises(DataError, match="lacks 'pass_rate': run the stage sample first"):
        read_pass_rate(row())
    with pytest.raises(DataError, match="between 0 and 1; run the stage sample first"):
        read_pass_rate(row(pass_rate=rate))


def cluster(answers: list[str], more_than: float) -> tuple[list[str] | None, int]:
    """(forms of the largest cluster, questions asked); answers are equal when they have the same first letter."""
    asked = 0

    async def equal(known: str, other: str) -> bool:
        nonlocal asked
        asked += 1
        return known[0] == other[0]

    found = asyncio.run(largest_cluster(answers, equal, more_than))
    return (None if found is None else [*found.answers, str(found.size)]), asked


def test_different_forms_of_one_answer_count_together():
    assert cluster(["a1", "b", "a2", "a1", "b"], 2) == (["a1", "a2", "3"], 2)
    assert cluster(["a", "a", "b", "b"], 2) == (None, 1)
    assert cluster([], 0) == (None, 0)


def test_no_more_is_asked_than_a_majority_needs():
    assert cluster(["a"] * 3, 3) == (None, 0)
    assert cluster(["a"] * 5, 3) == (["a", "5"], 0)
    assert cluster(list("abcdefgh"), 5) == (None, 0 + 1 + 2 + 3)  # after a, b, c, d: one each, and 4 left


def test_difficulty_keeps_what_is_sometimes_solved(tmp_path):
    rates = [0.0, 0.05, 0.5, 0.9, 0.95, None]
    given = write(tmp_path / "in.jsonl", [{"problem": str(i), "pass_rate": r} for i, r in enumerate(rates)])
    report = runner.run(DifficultyStage(least=0.1), [given], tmp_path / "out.jsonl", quiet=True).report
    assert [kept["pass_rate"] for kept in results(tmp_path / "out.jsonl")] == [0.5, 0.9]
    assert report["rejected"] == {
        difficulty.NEVER: 1, difficulty.UNKNOWN: 1, difficulty.OFTEN: 1, difficulty.SELDOM: 1
    }  # fmt: skip
    reasons = [rejected["rejected"]["detail"] for rejected in results(tmp_path / "out.rejected.jsonl")]
    assert "pass rate 0.95 is above 0.9" in reasons and "pass rate 0.05 is below 0.1" in reasons


def test_difficulty_can_leave_the_samples_out(tmp_path):
    given = write(tmp_path / "in.jsonl", [{"problem": "?", "pass_rate": 0.5, "samples": [1]}])
    runner.run(DifficultyStage(without_samples=True), [given], tmp_path / "out.jsonl", quiet=True)
    assert results(tmp_path / "out.jsonl") == [{"problem": "?", "pass_rate": 0.5}]


def labelled(answer: str, *answers: str | None) -> dict[str, Any]:
    made = [Sample(found, WRONG, 9) for found in answers]
    return {"problem": "?", "answer": answer, "samples": msgspec.to_builtins(made)}


@pytest.mark.usefixtures("quick_checkers")
def test_labels_that_a_majority_contradicts_are_dropped(tmp_path):
    half, mixed = r"\frac{1}{2}", ["0.5", r"\frac12", r"\frac{2}{4}", "3"]
    rows = [
        labelled("7", *mixed),  # three of four say one half, in three ways
        labelled(half, *mixed),  # and the ground truth says so too
        labelled("7", "0.5", r"\frac12", "3", "3"),  # half of them is no majority
        labelled("7", "3", "3", None, None),  # completions without an answer count among all
        labelled("6", "7", "7", "7", "6"),
        {**labelled("", "7", "7", "7"), "domain": "code", "tests": [1]},
        labelled(r"\frac{1", "7", "7", "7"),  # not understood is not contradicted
    ]
    given = write(tmp_path / "in.jsonl", rows)
    report = runner.run(LabelsStage(workers=1), [given], tmp_path / "out.jsonl", quiet=True).report
    assert report["rejected"] == {difficulty.CONTRADICTED: 2} and report["counts"] == {"without a majority": 2}
    details = [rejected["rejected"]["detail"] for rejected in results(tmp_path / "out.rejected.jsonl")]
    assert details == [
        "3 of 4 samples agree on 0.5, the ground truth is 7", "3 of 4 samples agree on 7, the ground truth is 6",
    ]  # fmt: skip


def test_impossible_thresholds_are_told():
    with pytest.raises(ConfigError, match="--least = 0.9 and --most = 0.5"):
        DifficultyStage(0.9, 0.5)
    with pytest.raises(ConfigError, match="--majority = 0.3"):
        LabelsStage.of({"majority": 0.3})
