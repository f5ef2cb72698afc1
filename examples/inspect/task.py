"""A task of inspect-ai: problems of a JSONL file, whose answers are compared by meaning, as training compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer, stderr
from inspect_ai.solver import generate

from shared.jsonl import read_rows, text_of
from shared.types import Verdict
from verify.answer_checker import AnswerChecker
from verify.extract import extract_answer


@scorer(metrics=[accuracy(), stderr()])  # type: ignore[untyped-decorator]
def same_meaning() -> Any:
    r"""Compare the content of the last \boxed{} of a response, its reasoning aside, with the target."""
    checker = AnswerChecker()

    async def score(state: Any, target: Any) -> Any:
        answer = extract_answer(state.output.completion)
        if answer is None:
            return Score(value=INCORRECT, explanation="the response has no box")
        await checker.start()
        verdict = await checker.check(target.text, answer)
        return Score(
            value=CORRECT if verdict is Verdict.CORRECT else INCORRECT, answer=answer, explanation=str(verdict)
        )

    return score


@task  # type: ignore[untyped-decorator]
def problems(file: str, reasoning_language: str = "") -> Any:
    """Ask for the answers to a file of {"problem", "answer", "id"?}. reasoning_language: sent to the server, "" for
    none."""
    samples = [
        Sample(input=text_of(row.fields, "problem", row.where), target=text_of(row.fields, "answer", row.where),
               id=text_of(row.fields, "id", row.where, f"line {row.number}"))
        for row in read_rows(Path(file))
    ]  # fmt: skip
    sent = GenerateConfig(extra_body={"reasoning_language": reasoning_language} if reasoning_language else None)
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=same_meaning(), config=sent)
