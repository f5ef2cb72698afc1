"""Inputs for tests that a programming problem lacks: those that its row proposes, and variants of those that it has.

Their outputs are what most solutions print (agreement.py). Source: Magistral (2506.10910), section 4.2, which generates
missing tests and vets them in this way, and does not say how inputs are proposed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from verify.code.tests import StdioTest

NUMBER = re.compile(r"(?<![\w.])-?\d{1,18}(?![\w.])")
CHANGED = 3
"""numbers of an input that a variant changes, at most"""
ATTEMPTS = 10
"""variants that are drawn for each one wanted, at most: many are alike"""


def variants(inputs: Sequence[str], count: int, seed: str) -> list[str]:
    """Up to `count` new inputs: one of `inputs` with one to CHANGED of its whole numbers drawn anew, between the least
    and the greatest of all inputs, so that the bounds of the problem hold; words, and how many there are, stay."""
    numbers = [int(found) for text in inputs for found in NUMBER.findall(text)]
    if not numbers:
        return []
    chance, found = random.Random(f"variants {seed}"), dict.fromkeys(inputs)
    for _ in range(ATTEMPTS * count):
        text = chance.choice(inputs)
        places = list(NUMBER.finditer(text))
        for place in sorted(
            chance.sample(places, min(chance.randint(1, CHANGED), len(places))), key=lambda m: -m.start()
        ):
            text = f"{text[: place.start()]}{chance.randint(min(numbers), max(numbers))}{text[place.end() :]}"
        found[text] = None
        if len(found) == len(set(inputs)) + count:
            break
    return list(found)[len(set(inputs)) :]


def proposed(tests: Sequence[StdioTest], inputs: Iterable[object], count: int, seed: str) -> list[StdioTest]:
    """Tests without an output: the texts among `inputs`, which somebody proposes, that no test has, then `count`
    variants."""
    known = [test.input for test in tests]
    own = [text for text in dict.fromkeys(one for one in inputs if isinstance(one, str)) if text not in known]
    like = tests[0] if tests else StdioTest("", "")
    return [StdioTest(text, "", like.tolerance, like.language) for text in own + variants(known + own, count, seed)]
