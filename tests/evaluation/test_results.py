"""Shares of responses: what their denominators are, and which texts seem to hold the answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evaluation.client import ParsedResponse
from evaluation.grading import ResponseGrader
from evaluation.results import Votes, figures
from evaluation.samples import SampleRecord
from evaluation.tasks import BenchmarkSampling
from shared.types import Problem, Verdict


def record(sample: int, **fields: Any) -> SampleRecord:
    """One sample of the only problem."""
    sampling = BenchmarkSampling(samples=3, temperature=0.7, top_p=0.95, max_tokens=99)
    return SampleRecord(benchmark="sums", id="1", sample=sample, settings="", kind="answer", source="", language="en",
                        prompt_sha="", seed=0, sampling=sampling, model="m", **fields)  # fmt: skip


def test_samples_without_a_response_are_in_no_share_but_their_own() -> None:
    samples = [
        record(0, correct=True, answer="3", verdict=Verdict.CORRECT),
        record(1, correct=False, answer="so 3", verdict=Verdict.NO_ANSWER, missed=True),
        record(2, error="status 503"),
    ]
    shares = figures([samples], [Votes(1, [], 1)], 3, seed=0)
    assert shares["responses"] == 2 and shares["errors"] == pytest.approx(1 / 3)
    assert shares["missed"] == shares["unextracted"] == shares["pass_at"]["1"] == 0.5
    assert shares["pass_at"]["2"] == 1 and shares["pass_at"]["3"] is None, "two responses are not three"


@pytest.mark.parametrize(("text", "missed"), [
    ("so it is 3", True), ("so it is 3.", True), ("it is 3, I think", True),
    ("so it is 3.5", False), ("so it is 13", False), ("so it is 2.3", False), ("3 " + "x" * 2000, False),
])  # fmt: skip
def test_a_text_seems_to_hold_the_answer_where_it_is_no_piece_of_another_number(text: str, missed: bool) -> None:
    task = cast(Any, SimpleNamespace(kind="answer", tools=None, problem=Problem(id="1", text="1 + 2", answer="3")))
    grader = ResponseGrader(cast(Any, None), cast(Any, None))
    grade = asyncio.run(grader.grade(task, ParsedResponse("", text, [])))
    assert (grade.verdict, grade.missed) == (Verdict.NO_ANSWER, missed)
