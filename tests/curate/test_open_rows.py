"""Open problems pass the stages of curation that compare answers."""

from __future__ import annotations

import msgspec

from curate.demonstrations import DemonstrationsStage, GradedCompletion
from curate.difficulty import DifficultyStage, LabelsStage
from curate.duplicates import DuplicatesStage
from curate.format import FormatStage
from curate.languages import HumanStage, is_english_math
from curate.sample import Sample, samples_of_group, with_samples
from curate.stage import Kept, Rejected
from shared.jsonl import Row
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from tests.curate.deciding import decide_rows, reasons_of

PROSE = "Because it is less dense than water, which grows when it freezes."
ROW = {"problem": "Prove that ice floats on water.", "answer": PROSE, "domain": "open"}


def test_the_format_of_an_open_row_is_a_problem_and_an_answer() -> None:
    rows = [ROW, {**ROW, "answer": " "}, {**ROW, "domain": "math"}, {**ROW, "problem": ""}]
    assert reasons_of(FormatStage(workers=1), rows) == ["kept", "no answer", "proof", "no problem text"]


def test_nothing_is_known_of_the_difficulty() -> None:
    sampled = [Sample("a", Verdict.OPEN, 9), Sample(None, Verdict.NO_ANSWER, 9)]
    assert with_samples(ROW, sampled)["pass_rate"] is None
    assert with_samples({**ROW, "domain": "math"}, sampled)["pass_rate"] == 0
    rows = [with_samples(ROW, sampled), ROW, {**ROW, "domain": "math", "pass_rate": 0.0}]
    found = decide_rows(DifficultyStage(without_samples=True), rows)
    assert found[0] == Kept([{**ROW, "pass_rate": None}]) and found[1] == Kept([ROW])
    assert isinstance(found[2], Rejected)


def test_samples_of_an_open_problem_are_kept_with_their_verdict() -> None:
    reward = Reward(0.2, 0.1, 0.0, 0.0, 0.1, Verdict.OPEN, answer="a")
    group = Group(
        Prompt(0, Problem("p", "?", PROSE, domain="open", hidden=True), [1]), [Completion(0, 0, 0, [1, 2])], [reward]
    )
    assert samples_of_group(group) == [Sample("a", Verdict.OPEN, 2)]


def test_no_majority_contradicts_an_open_answer() -> None:
    samples = msgspec.to_builtins([Sample("7", Verdict.OPEN, 9)] * 4)
    rows = [{**ROW, "samples": samples}, {**ROW, "answer": "8", "domain": "math", "samples": samples}]
    assert reasons_of(LabelsStage(workers=1), rows) == ["kept", "most samples contradict the ground truth"]


def test_one_question_with_answers_in_other_words_is_a_duplicate() -> None:
    text = "Why does a long iron ship float on the sea although iron alone sinks to the ground?"
    rows = [{**ROW, "problem": text}, {**ROW, "problem": text.upper(), "answer": "It is hollow."}]
    assert reasons_of(DuplicatesStage(workers=1), rows) == ["kept", "near duplicate"]
    others = [{**row, "domain": "math", "answer": str(number)} for number, row in enumerate(rows)]
    assert set(reasons_of(DuplicatesStage(workers=1), others)) == {"duplicates with different answers"}


def test_answers_that_people_translated_are_not_compared() -> None:
    german = "Ein Schiff aus Eisen schwimmt auf dem Meer, obwohl Eisen allein untergeht. Warum ist das so?"
    english = "A ship made of iron floats on the sea, although iron alone goes under. Why is that so?"
    rows = [
        {**ROW, "id": "set/de/1", "language": "de", "problem": german, "answer": "Es ist hohl."},
        {**ROW, "id": "set/en/1", "language": "en", "problem": english, "answer": "It is hollow."},
    ]
    assert reasons_of(HumanStage(["de"], share=1.0), rows) == ["kept", "kept"]
    closed = [{**row, "domain": "math", "answer": str(number)} for number, row in enumerate(rows)]
    assert set(reasons_of(HumanStage(["de"], share=1.0), closed)) == {"translations with different answers"}


def test_a_text_that_is_an_answer_is_not_left_behind_in_another_language() -> None:
    assert not is_english_math(Row("file:1", 1, ROW))
    assert is_english_math(Row("file:1", 1, {**ROW, "domain": "math"}))


def test_demonstrations_do_not_call_open_answers_wrong() -> None:
    problem = Problem("p", "?", PROSE, domain="open", hidden=True)
    completions = [
        GradedCompletion(0, problem, "a", 5, Verdict.OPEN, 1),
        GradedCompletion(0, problem, "b", 5, Verdict.NO_ANSWER, 1),
    ]
    chosen, lost = DemonstrationsStage().choose(completions)
    assert chosen == [] and lost == {0: {"of open problems": 2}}
