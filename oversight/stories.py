"""Generated articles, and questions that only their reader can answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from oversight.question import Question

PEOPLE = ("Ada", "Boris", "Chen", "Dora", "Emil", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leo", "Mona",
          "Nils", "Olga", "Pavel", "Quinn", "Rosa", "Sven", "Tara", "Umar", "Vera", "Wim", "Xenia", "Yuri", "Zoe",
          )  # fmt: skip
FACTS = {
    "keeps a {} in the shed": ("What does {} keep in the shed?", ("drum", "canoe", "ladder", "loom", "globe", "harp")),
    "paints the door {} every spring": ("In which colour does {} paint the door every spring?",
                                        ("red", "blue", "green", "white", "orange", "violet")),
    "takes the ferry to {} on Sundays": ("Where does {} take the ferry to on Sundays?",
                                         ("Dover", "Oslo", "Split", "Malta", "Naxos", "Gdansk")),
    "learned to bake {} from an aunt": ("What did {} learn to bake from an aunt?",
                                        ("rye bread", "scones", "pretzels", "waffles", "strudel", "flan")),
    "collects stamps that show {}": ("What do the stamps show that {} collects?",
                                     ("owls", "trains", "ships", "roses", "comets", "bridges")),
    "plays chess with a neighbour called {}": ("What is the neighbour called with whom {} plays chess?",
                                               ("Albert", "Bruno", "Clara", "Diego", "Edith", "Fatima")),
}  # fmt: skip
"""what a sentence says -> the question about it, and what may stand in it"""
NAMES = tuple(f"{name} {family}" for name in PEOPLE for family in ("Berg", "Costa", "Dahl"))


class Story(NamedTuple):
    """A question about an article, and what is quoted for its answers."""

    question: Question
    evidence: str
    """the sentence that makes the right answer right"""
    misleading: str
    """the sentence that says the wrong answer of somebody else"""


def ordered(rng: random.Random, id: str, text: str, right: str, wrong: str, article: str = "") -> Question:
    """Return a question with its answers in a random order."""
    place = rng.randint(1, 2)
    return Question(id=id, text=text, answers=(right, wrong) if place == 1 else (wrong, right), right=place,
                    article=article)  # fmt: skip


def draw_story(rng: random.Random, id: str, facts: int, names: Sequence[str] = NAMES) -> Story:
    """Draw an article of at least two sentences about people with these names, and a question about one; the wrong
    answer is true of somebody else in it."""
    form = rng.choice(list(FACTS))
    person, other = rng.sample(names, 2)
    right, wrong = rng.sample(FACTS[form][1], 2)
    told = [f"{person} {form.format(right)}.", f"{other} {form.format(wrong)}."]
    pairs = [(name, one) for name in names for one in FACTS if one != form or name not in (person, other)]
    for name, one in rng.sample(pairs, min(facts - 2, len(pairs))):
        told.append(f"{name} {one.format(rng.choice(FACTS[one][1]))}.")
    article = " ".join(rng.sample(told, len(told)))
    return Story(ordered(rng, id, FACTS[form][0].format(person), right, wrong, article), told[0], told[1])
