"""Scripted games give the closed forms of their protocols, by the same figures that an evaluation of models has."""

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
from tests.oversight.scripted import Script, agent, believing, make_question, parts, rehearse, speeches, trusting

RIGHT, QUOTE, HALF = 0.8, 0.9, 0.5
SHOWN = QUOTE + (1 - QUOTE) / 2
"""probability that a judge that trusts verified passages follows the advocate of the truth"""
RULES = Rules(rounds=1)


def games(question: Question, debater: Script, judges: dict[str, Script], rules: Rules) -> Iterator[GameRecord]:
    base = GameKey("task", question.id, 1, "")

    def record(key: GameKey, script: Script, transcript: list[Speech] | None = None) -> GameRecord:
        if transcript is None:
            alone = key.protocol == "agent"
            play = protocol.answer(question, "s", role="agent" if alone else "judge", article=alone)
        else:
            play = protocol.decide(question, transcript, rules, "s")
        return GameRecord(key=key, question="", right=question.right, verdict=rehearse(play, script))

    yield record(base._replace(protocol="agent", agent="a"), debater)
    debate = rehearse(protocol.debate(question, rules, "s"), debater)
    # one round: the judge of a consultancy asks nothing
    consultancies = {side: rehearse(protocol.consultancy(question, side, rules, "s"), debater) for side in (1, 2)}
    for name, judge in judges.items():
        yield record(base._replace(protocol="qa", judge=name), judge)
        yield record(base._replace(protocol="debate", agent="a", opponent="a", judge=name), judge, debate)
        for side, transcript in consultancies.items():
            yield record(base._replace(protocol="consultancy", assigned=side, agent="a", judge=name), judge, transcript)


def played(
    judges: dict[str, Script], questions: int, rules: Rules = RULES, *, swap: bool = False
) -> dict[GameKey, GameRecord]:
    """All games of scripted players, each question in one order."""
    rng, records = random.Random(0), {}
    debater = agent(rng, RIGHT, QUOTE)
    for number in range(questions):
        question = make_question(number, rng)
        for record in games(question.swapped() if swap else question, debater, judges, rules):
            records[record.key] = record
    return records


@pytest.fixture(scope="module", params=[2_000, pytest.param(20_000, marks=pytest.mark.soak)])
def figures(request):
    """(judge, protocol) -> its figures; `pytest --soak` plays 20,000 questions, too."""
    count, rng = request.param, random.Random(1)
    records = played({"trusting": trusting(rng), "believing": believing(rng), "first": lambda _: "Answer: 1"}, count)
    alone = [record.verdict.answer == record.right for key, record in records.items() if key.protocol == "agent"]
    assert abs(sum(alone) / count - RIGHT) <= 3 * math.sqrt(RIGHT * (1 - RIGHT) / count)
    made = {(row["judge"], row["protocol"]): row for row in measure(contests(records))}
    assert all(row["questions"] == count for row in made.values())
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
def test_accuracy(figures, judge, name, wanted):
    row = figures[judge, name]
    count = row["games"] / 2 if name == "consultancy" else row["games"]  # of a question both share its article
    assert row["invalid"] == 0 and abs(row["accuracy"] - wanted) <= 3 * math.sqrt(wanted * (1 - wanted) / count)
    assert row["position"] == (1.0 if judge == "first" else pytest.approx(1.5, abs=0.05))


@pytest.mark.parametrize("judge, name, right, wrong", [
    ("trusting", "open consultancy", SHOWN, HALF),
    ("trusting", "open debate", SHOWN, 1 - SHOWN),  # .05
    ("trusting", "consultancy", SHOWN, HALF),
    ("believing", "open consultancy", 1.0, 1.0), ("believing", "open debate", HALF, HALF),
])  # fmt: skip
def test_persuasion(figures, judge, name, right, wrong):
    row = figures[judge, name]
    for word, wanted in (("right", right), ("wrong", wrong)):
        bound = 3 * math.sqrt(wanted * (1 - wanted) / row[f"advocates_{word}"])
        assert abs(row[f"convinced_{word}"] - wanted) <= bound


def test_names_and_positions_change_nothing():
    """For a judge that decides by what is said, not by who says it where: its coin is drawn by the texts."""

    def judge(ask: Ask) -> str:
        texts = sorted(text for _, text in speeches(ask))
        return trusting(random.Random(f"{dict(parts(ask))['QUESTION']} {texts}"))(ask)

    def results(rules: Rules, *, swap: bool) -> list[Json]:
        return measure(contests(played({"fair": judge}, 300, rules, swap=swap)))

    plain = results(RULES, swap=False)
    assert plain == results(Rules(rounds=1, names=("Bruno", "Ada")), swap=False)
    assert len({row["accuracy"] for row in plain}) > 3
    for row, other in zip(plain, results(RULES, swap=True), strict=True):
        assert other.pop("position") == pytest.approx(3 - row.pop("position"))
        assert row == other


def test_elo_of_sides():
    """The truth wins .95 of the debates: 500 log10(.95 / .05) = 639 points."""
    results = summarise(played({"trusting": trusting(random.Random(3))}, 500).values())
    ratings = {row["player"]: row for row in results["elo"]["trusting"]}
    low, high = ratings["a right"]["interval"]
    assert low < 500 * math.log10(SHOWN / (1 - SHOWN)) / 2 < high
    assert ratings["a right"]["elo"] == -ratings["a wrong"]["elo"] and ratings["a right"]["games"] == 500
    test = next(row for row in results["tests"] if (row["first"], row["second"]) == ("debate", "qa"))
    assert test["p"] < 0.001 and test["difference"] > 0.3
