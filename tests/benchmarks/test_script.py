"""Scripted engines and trainers keep to their script."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.speed.script import Script, ScriptedEngine, ScriptedTrainer, Seat, length_table
from shared.types import Completion, VersionSpan


def engine(tokens: list[int], **script: float) -> ScriptedEngine:
    """Completion with seed i has tokens[i] tokens."""
    return ScriptedEngine(Script(token_s=1.0, **script), tokens)  # type: ignore[arg-type]


def seats(count: int) -> list[Seat]:
    return [Seat(group=0, index=number, seed=number) for number in range(count)]


def ended(found: ScriptedEngine, now: float) -> list[tuple[int, list[VersionSpan]]]:
    return [(completion.index, completion.spans) for completion in found.ended(now)]


def test_completions_end_after_their_tokens_and_give_their_places_to_those_that_wait() -> None:
    scripted = engine([4, 2, 3], seats=2)
    scripted.submit(10.0, seats(3))
    assert scripted.due() == 12.0
    assert [number for number, _ in ended(scripted, 12.0)] == [1]
    assert scripted.due() == 14.0
    assert [number for number, _ in ended(scripted, 20.0)] == [0, 2], "the third began at 12, however late one looks"
    assert scripted.due() is None


def test_an_update_stops_decoding_and_labels_the_tokens_after_it() -> None:
    scripted = engine([4], seats=1, update_s=5.0)
    scripted.submit(0.0, seats(1))
    assert scripted.update(1.5, 1) == 6.5
    assert scripted.due() == 9.0
    assert ended(scripted, 8.9) == []
    assert ended(scripted, 9.0) == [(0, [VersionSpan(0, 0, 2), VersionSpan(1, 2, 4)])], "two tokens began before 1.5"


def test_what_is_submitted_during_an_update_begins_after_it() -> None:
    scripted = engine([2], seats=1, update_s=5.0)
    scripted.update(1.0, 1)
    scripted.submit(3.0, seats(1))
    assert scripted.due() == 8.0
    assert ended(scripted, 8.0) == [(0, [VersionSpan(1, 0, 2)])]


def test_two_updates_give_three_spans_and_an_empty_one_none() -> None:
    scripted = engine([6], seats=1)
    scripted.submit(0.0, seats(1))
    for now, version in ((1.5, 1), (1.7, 2), (4.0, 3)):
        scripted.update(now, version)
    ((_, spans),) = ended(scripted, 6.0)
    assert spans == [VersionSpan(0, 0, 2), VersionSpan(2, 2, 4), VersionSpan(3, 4, 6)]


def test_without_a_decode_time_everything_ends_at_once_with_the_version_held() -> None:
    scripted = ScriptedEngine(Script(seats=10), [3])
    scripted.update(1.0, 7)
    scripted.submit(1.0, seats(1))
    (completion,) = scripted.ended(1.0)
    assert completion == Completion(0, 0, 0, [1] * 3, [-1.0] * 3, [VersionSpan(7, 0, 3)], "stop")


def test_given_replies_go_by_the_evenness_of_the_index() -> None:
    scripted = ScriptedEngine(Script(seats=10, replies=[[5], [6, 6]]), [9])
    scripted.submit(0.0, seats(3))
    assert [completion.token_ids for completion in scripted.ended(0.0)] == [[5], [6, 6], [5]]


def test_a_trainer_does_one_call_after_the_other() -> None:
    trainer = ScriptedTrainer()
    assert (trainer.work(1.0, 2.0), trainer.work(1.5, 1.0), trainer.work(9.0, 0.5)) == (3.0, 4.0, 9.5)


def test_lengths_have_the_mean_and_the_cut_that_were_asked_for() -> None:
    assert set(length_table(Script(mean_tokens=32))) == {32}
    lengths = length_table(Script(mean_tokens=200, sigma=0.5, longest=4))
    assert statistics.fmean(lengths) == pytest.approx(200, rel=0.05)
    assert max(lengths) <= 800 and max(lengths) > 600
