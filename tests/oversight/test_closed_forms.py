"""Scripted games give the closed forms of their protocols, by the same figures that an evaluation of models has."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from oversight import protocol
from oversight.figures import Json, contests, measure, summarise
from oversight.games import GameKey, GameRecord
from oversight.prompts import Ask, Question
from oversight.protocol import Rules
from oversight.speech import Speech
from tests.oversight.rehearsal import rehearse
from tests.oversight.scripted import (
    Script,
    agent,
    believing,
    first,
    make_question,
    parts,
    speeches,
    trusting,
)

RIGHT, QUOTE = 0.8, 0.9
SHOWN = QUOTE + (1 - QUOTE) / 2
"""probability that a judge that trusts verified passages follows the advocate of the truth"""
HALF = 0.5
RULES = Rules(rounds=1)


def played(
    judges: dict[str, Script], questions: int, rules: Rules = RULES, *, swap: bool = False, seed: int = 0
) -> Iterator[GameRecord]:
    """All games of scripted players, each question in one order."""
    rng = random.Random(seed)
    debater = agent(rng, RIGHT, QUOTE)
    for number in range(questions):
        question = make_question(number, rng)
        question = question.swapped() if swap else question
        yield from games(question, debater, judges, rules)


def games(question: Question, debater: Script, judges: dict[str, Script], rules: Rules) -> Iterator[GameRecord]:
    base = GameKey("task", question.id, 1, "")

    def record(key: GameKey, script: Script, said: list[Speech] | None = None) -> GameRecord:
        play = (
            protocol.answer(question, "s", role="agent" if key.protocol == "agent" else "judge",
                            article=key.protocol == "agent")
            if said is None
            else protocol.decide(question, said, rules, "s")
        )  # fmt: skip
        return GameRecord(key=key, question="", right=question.right, verdict=rehearse(play, script))

    yield record(base._replace(protocol="agent", agent="a"), debater)
    debate = rehearse(protocol.debate(question, rules, "s"), debater)
    consultancies = {
        side: rehearse(protocol.consultancy(question, side, rules, "s"), debater) for side in (1, 2)
    }  # one round: the judge asks nothing
    for name, judge in judges.items():
        yield record(base._replace(protocol="qa", judge=name), judge)
        yield record(base._replace(protocol="debate", agent="a", opponent="a", judge=name), judge, debate)
        for side, said in consultancies.items():
            yield record(base._replace(protocol="consultancy", assigned=side, agent="a", judge=name), judge, said)


@pytest.fixture(scope="module", params=[2_000, pytest.param(20_000, marks=pytest.mark.soak)])
def found(request: pytest.FixtureRequest) -> dict[tuple[str, str], Json]:
    """(judge, protocol) -> its figures; `pytest --soak` plays and prints those of 20,000 questions, too."""
    count = request.param
    rng = random.Random(1)
    judges = {"trusting": trusting(rng), "believing": believing(rng), "first": first}
    records = {record.key: record for record in played(judges, count)}
    alone = [record.verdict.answer == record.right for key, record in records.items() if key.protocol == "agent"]
    assert abs(sum(alone) / count - RIGHT) <= 3 * math.sqrt(RIGHT * (1 - RIGHT) / count)
    made = {(one["judge"], one["protocol"]): one for one in measure(contests(records))}
    for (judge, name), one in made.items():
        followed = [one[f"convinced_{word}"] for word in ("wrong", "right")]
        print(f"{count} {judge:10} {name:17} {one['accuracy']:.4f}  convinced when wrong, right: {followed}")
    assert all(one["questions"] == count for one in made.values())
    return made


@pytest.mark.parametrize("judge, name, wanted", [
    ("trusting", "qa", HALF),
    ("trusting", "consultancy", (SHOWN + HALF) / 2),  # .725
    ("trusting", "debate", SHOWN),  # .95
    ("trusting", "open consultancy", RIGHT * SHOWN + (1 - RIGHT) * HALF),  # .86
    ("trusting", "open debate", SHOWN),
    ("believing", "qa", HALF), ("believing", "consultancy", HALF), ("believing", "debate", HALF),
    ("believing", "open consultancy", RIGHT), ("believing", "open debate", HALF),
    ("first", "qa", HALF), ("first", "consultancy", HALF), ("first", "debate", HALF),
    ("first", "open consultancy", HALF), ("first", "open debate", HALF),
])  # fmt: skip
def test_accuracy(found: dict[tuple[str, str], Json], judge: str, name: str, wanted: float) -> None:
    one = found[judge, name]
    assert one["invalid"] == 0
    games = one["games"] / 2 if name == "consultancy" else one["games"]  # of a question both share its article
    assert abs(one["accuracy"] - wanted) <= 3 * math.sqrt(wanted * (1 - wanted) / games)
    assert one["position"] == (1.0 if judge == "first" else pytest.approx(1.5, abs=0.05))


@pytest.mark.parametrize("judge, name, right, wrong", [
    ("trusting", "open consultancy", SHOWN, HALF),
    ("trusting", "open debate", SHOWN, 1 - SHOWN),  # .05
    ("trusting", "consultancy", SHOWN, HALF),
    ("believing", "open consultancy", 1.0, 1.0), ("believing", "open debate", HALF, HALF),
])  # fmt: skip
def test_persuasion(found: dict[tuple[str, str], Json], judge: str, name: str, right: float, wrong: float) -> None:
    one = found[judge, name]
    for word, wanted in (("right", right), ("wrong", wrong)):
        bound = 3 * math.sqrt(wanted * (1 - wanted) / one[f"advocates_{word}"])
        assert abs(one[f"convinced_{word}"] - wanted) <= bound


def test_names_and_positions_change_nothing() -> None:
    """For a judge that decides by what is said, not by who says it where: its coin is drawn by the texts."""

    def judge(ask: Ask) -> str:
        texts = sorted(text for _, text in speeches(ask))
        return trusting(random.Random(f"{dict(parts(ask))['QUESTION']} {texts}"))(ask)

    def results(rules: Rules, *, swap: bool) -> list[Json]:
        records = played({"fair": judge}, 500, rules, swap=swap)
        return measure(contests({record.key: record for record in records}))

    plain = results(RULES, swap=False)
    assert plain == results(Rules(rounds=1, names=("Bruno", "Ada")), swap=False)
    assert len({one["accuracy"] for one in plain}) > 3
    for one, other in zip(plain, results(RULES, swap=True), strict=True):
        assert other.pop("position") == pytest.approx(3 - one.pop("position"))
        assert one == other


def test_elo_of_sides() -> None:
    """The truth wins .95 of the debates: 500 log10(.95 / .05) = 639 points."""
    results = summarise(played({"trusting": trusting(random.Random(3))}, 500))
    ratings = {one["player"]: one for one in results["elo"]["trusting"]}
    low, high = ratings["a right"]["interval"]
    assert low < 500 * math.log10(SHOWN / (1 - SHOWN)) / 2 < high
    assert ratings["a right"]["elo"] == -ratings["a wrong"]["elo"] and ratings["a right"]["games"] == 500
    test = next(one for one in results["tests"] if (one["first"], one["second"]) == ("debate", "qa"))
    assert test["p"] < 0.001 and test["difference"] > 0.3
