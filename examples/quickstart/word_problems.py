r"""Arithmetic word problems in seven languages, and demonstrations of how *not quite* to solve them.

A word problem is a number of things and some gains and losses. Whether it is for training or validation is decided by a
hash of its sums ("12+3-4") alone, so no chain of sums that is trained on is ever evaluated, in any language or wording.

A word problem may ask for a language to reason in, its own or another one (`asked`).

Demonstrations have the form `<think>...12+3=15.</think>The answer is \boxed{15}.`, but most of them are bad on purpose
(`MANY_FLAWS`): most only guess, and many think in another language than they should.
A model that imitates them guesses in the wrong language when decoded greedily, yet now and then calculates, which is
what reinforcement learning needs to find something better than the demonstrations.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from importlib import resources

import msgspec

from shared.types import Problem

START = (2, 20)
"""smallest and largest number of things at first; as wide as MOST, so that every sum is part of many chains, and
keeping some chains for evaluation leaves no single sum untrained"""
CHANGE = (1, 5)
"""smallest and largest gain or loss"""
MOST = 20
"""a word problem never has more things than this: few enough that a tiny model learns all its sums in a minute"""
GUESSES = (25, 30, 40, 50, 100)
"""answers of demonstrations that do not calculate: never right, so that guessing is never worth imitating"""
VALIDATION_ONE_IN = 8
"""this share of all chains of sums is kept for evaluation"""

LEAN_TOWARDS = "en"
"""the language of most foreign reasoning, as with models that have read mostly this one"""


@dataclass(frozen=True)
class Thing:
    """A countable thing, as sentences about it in one language."""

    has: str
    """"{who} has {number} of it", with {owner} where the owner is in another case"""
    ask: str
    """"How many of it does {who} have now?\""""
    at_first: str
    """"In the beginning there are {number} of it." (the first sentence of the reasoning)"""
    unit: str = ""
    """measure word (Chinese)"""


@dataclass(frozen=True)
class Phrases:
    """All sentences of one language, as in phrases.toml."""

    people: tuple[tuple[str, str], ...]
    """(name, the owner's form of the name)"""
    things: tuple[Thing, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    add: str
    """sentence of the reasoning about a gain"""
    subtract: str
    """sentence of the reasoning about a loss"""
    guess: str
    """reasoning of a completion that does not calculate"""
    answer: str
    """sentence before the boxed answer"""
    space: str = " "
    """between sentences"""


PHRASES = msgspec.toml.decode(
    resources.files("examples.quickstart").joinpath("phrases.toml").read_bytes(), type=dict[str, Phrases]
)
"""Phrases of each language."""


@dataclass(frozen=True)
class Flaws:
    """Shares of demonstrations that have each kind of flaw."""

    foreign: float = 0.0
    """think in another language than the one asked for, or than the problem's where none is"""
    lean: float = 0.8
    """Share of foreign reasoning that is in LEAN_TOWARDS; the rest is in any language."""
    foreign_answer: float = 0.5
    """Share of foreign reasoning with an answer in that language too."""
    guess: float = 0.0
    """Share of reasoning in the right language that guesses without calculating."""
    foreign_guess: float = 0.0
    """Share of foreign reasoning that guesses without calculating."""
    slip: float = 0.0
    """Share of calculations with one mistake on the way, from which they go on."""
    broken: float = 0.0
    """forget to close the reasoning, or to box the answer"""


NO_FLAWS = Flaws()
MANY_FLAWS = Flaws(foreign=0.45, guess=0.5, foreign_guess=0.7, slip=0.03, broken=0.08)
"""the quickstart's demonstrations: about 0.4 are right, 0.5 are consistent in language, and the greedy habit is bad"""


@dataclass(frozen=True)
class WordProblem:
    """A word problem with what is needed to solve it."""

    language: str
    text: str
    start: int
    changes: tuple[int, ...]
    """gains (positive) and losses (negative), in order"""
    thing: int
    """index into the things of every language"""
    asked: str = ""
    """language that it asks to reason in, "" where it asks for none"""

    @property
    def wanted(self) -> str:
        """Language that reasoning and answer should be in."""
        return self.asked or self.language

    @property
    def answer(self) -> int:
        """Number of things at the end."""
        return self.start + sum(self.changes)

    def problem(self, identifier: str) -> Problem:
        """The same as a problem of a data file, with this id."""
        source = "stories"
        if self.asked:
            source += ", own language asked for" if self.asked == self.language else ", another language asked for"
        answer, asked = str(self.answer), self.asked
        return Problem(identifier, self.text, answer, self.language, "math", source, reasoning_language=asked)


def is_validation(start: int, changes: tuple[int, ...]) -> bool:
    """True for chains of sums that may only be evaluated: one in VALIDATION_ONE_IN, by a hash of the chain alone."""
    chain = str(start) + "".join(f"{change:+d}" for change in changes)
    return hashlib.blake2b(chain.encode(), digest_size=4).digest()[0] % VALIDATION_ONE_IN == 0


def make_word_problem(
    rng: random.Random, language: str, operations: tuple[int, int], validation: bool = False
) -> WordProblem:
    """Draw one of `operations` = (fewest, most) gains and losses, from the training or the validation side."""
    while True:
        start, changes = _draw_sums(rng, rng.randint(*operations))
        if is_validation(start, changes) == validation:
            return _tell(rng, language, start, changes)


def _draw_sums(rng: random.Random, count: int) -> tuple[int, tuple[int, ...]]:
    """A start and changes that keep the number of things within 1 .. MOST."""
    start = total = rng.randint(*START)
    changes: list[int] = []
    for _ in range(count):
        fitting = [change for size in range(CHANGE[0], CHANGE[1] + 1) for change in (size, -size)
                   if 1 <= total + change <= MOST]  # fmt: skip
        changes.append(rng.choice(fitting))
        total += changes[-1]
    return start, tuple(changes)


def _tell(rng: random.Random, language: str, start: int, changes: tuple[int, ...]) -> WordProblem:
    phrases = PHRASES[language]
    who, owner = rng.choice(phrases.people)
    number = rng.randrange(len(phrases.things))
    thing = phrases.things[number]
    sentences = [thing.has.format(who=who, owner=owner, number=start)]
    for change in changes:
        pattern = rng.choice(phrases.gains if change > 0 else phrases.losses)
        sentences.append(pattern.format(who=who, number=abs(change), unit=thing.unit))
    sentences.append(thing.ask.format(who=who, owner=owner))
    return WordProblem(language, phrases.space.join(sentences), start, changes, number)


def calculate(problem: WordProblem, language: str, slip_at: int = -1, slip: int = 0) -> tuple[str, int]:
    """Return the reasoning that works it out in `language`, and its result; `slip` is added to sum number `slip_at`."""
    phrases = PHRASES[language]
    total = problem.start
    sentences = [phrases.things[problem.thing].at_first.format(number=total)]
    for index, change in enumerate(problem.changes):
        before, total = total, total + change
        if index == slip_at:
            total = max(0, total + slip)
        pattern = phrases.add if change > 0 else phrases.subtract
        sentences.append(pattern.format(number=abs(change), before=before, after=total))
    return phrases.space.join(sentences), total


def complete(reasoning: str, language: str, answer: int) -> str:
    """Return a well-formed completion with this reasoning and this answer."""
    phrases = PHRASES[language]
    stop = "。" if language == "zh" else "."
    return rf"<think>{reasoning}</think>{phrases.answer}{phrases.space}\boxed{{{answer}}}{stop}"


def demonstrate(rng: random.Random, problem: WordProblem, languages: list[str], flaws: Flaws = MANY_FLAWS) -> str:
    """Return a completion for a word problem, as good as `flaws` allow; foreign reasoning is in one of `languages`."""
    spoken = answered = problem.wanted
    others = [language for language in languages if language != problem.wanted]
    if others and rng.random() < flaws.foreign:
        lean = LEAN_TOWARDS in others and rng.random() < flaws.lean
        spoken = LEAN_TOWARDS if lean else rng.choice(others)
        answered = spoken if rng.random() < flaws.foreign_answer else problem.wanted
    if rng.random() < (flaws.guess if spoken == problem.wanted else flaws.foreign_guess):
        reasoning, answer = PHRASES[spoken].guess, rng.choice(GUESSES)
    elif rng.random() < flaws.slip:
        slip = rng.choice((-10, -2, -1, 1, 2, 10))
        reasoning, answer = calculate(problem, spoken, rng.randrange(len(problem.changes)), slip)
    else:
        reasoning, answer = calculate(problem, spoken)
    completion = complete(reasoning, answered, answer)
    if rng.random() < flaws.broken:
        return _break(completion, rng.random() < 0.5)
    return completion


def estimate(rng: random.Random, problem: WordProblem) -> str:
    """Return a completion that does not calculate, and is right by chance: its answer is near the right one."""
    near = max(0, problem.answer + rng.choice((-2, -1, 0, 0, 1, 2)))
    return complete(PHRASES[problem.wanted].guess, problem.wanted, near)


def _break(completion: str, unclosed: bool) -> str:
    """Break the form of a completion: remove the end of its reasoning, or the box around the answer."""
    if unclosed:
        return completion.replace("</think>", " ")
    head, _, tail = completion.rpartition(r"\boxed{")
    return head + tail.replace("}", "")
