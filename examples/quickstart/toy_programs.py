"""Toy programs for the tiny model: small functions described in words, and flawed demonstrations of them.

A toy program is a rule of a few steps with special cases ("add 3, then multiply by 2. For negative x the result is
7."). One in `options.cpp_one_in` asks for a C++ program that reads x and prints, the others for a Python function.
Whether a rule is for training or validation is decided by a hash of the function alone (2x+6 is one function however it
is said): no function that is trained on is ever evaluated, in either language of programs. The words are English,
whatever the languages of the word problems.

Demonstrations have the form `<think>...</think>` and a fenced program, but most of them are bad on purpose
(`MANY_BLUNDERS`): above all, special cases are forgotten, each on its own, so that a wrong program passes some of its
tests. Reinforcement learning can find that nothing need be forgotten, by all-or-nothing or by proportional reward.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from shared.types import Problem

VALIDATION_ONE_IN = 8
"""this share of all rules is kept for evaluation"""
CASES = (1, 3)
"""fewest and most special cases of a rule; all are apart, so that their order does not matter"""
LIMITS = range(10, 100, 10)
"""values above which x can be a special case"""
FARTHEST = 999
"""largest |x| in a test"""

ADD, SUBTRACT, MULTIPLY = "+", "-", "*"
STEP_WORDS = {ADD: "add {number}", SUBTRACT: "subtract {number}", MULTIPLY: "multiply by {number}"}
"""one digit each; sums and products take turns, so that steps in the wrong order never come to the same"""

NEGATIVE, ZERO, LARGE = "negative", "zero", "large"
CASE_WORDS = {
    NEGATIVE: "For negative x the result is {result}.",
    ZERO: "For x equal to zero the result is {result}.",
    LARGE: "For x above {limit} the result is {result}.",
}
REASONING_WORDS = {
    NEGATIVE: "When x is negative, it is {result}.",
    ZERO: "When x is zero, it is {result}.",
    LARGE: "When x is above {limit}, it is {result}.",
}
CONDITIONS = {NEGATIVE: "x < 0", ZERO: "x == 0", LARGE: "x > {limit}"}

Code = Literal["python", "cpp"]
ASKING: dict[Code, str] = {
    "python": "Write a Python function f(x) for this rule: ",
    "cpp": "Write a C++ program that reads x and prints the result of this rule: ",
}
SOURCES: dict[Code, str] = {"python": "tasks in Python", "cpp": "tasks in C++"}
"""`source` of the problems, by which evaluations distinguish the languages of programs"""
CPP_MAIN = 'int main() {\n    int x;\n    scanf("%d", &x);\n    printf("%d", f(x));\n}'
"""<cstdio> compiles five times as fast as <iostream>"""


@dataclass(frozen=True)
class Blunders:
    """Shares of demonstrations, or of their special cases, that have each kind of blunder."""

    forget: float = 0.0
    """Share of special cases, each on its own, that are left out of reasoning and program."""
    swap: float = 0.0
    """take two steps that follow each other in the wrong order"""
    slip: float = 0.0
    """write another digit than the task's in one step or special case"""
    python: float = 0.0
    """Share of the tasks in C++ that get the Python function."""
    broken: float = 0.0
    """forget to close the reasoning, or to name the program's language after the fence"""


NO_BLUNDERS = Blunders()
MANY_BLUNDERS = Blunders(forget=0.53, swap=0.07, slip=0.03, python=0.2, broken=0.05)
"""the quickstart's demonstrations: about 0.24 are right, 0.67 of the tests are passed, and the greedy habit is bad"""


class Step(NamedTuple):
    """One operation on x."""

    sign: str
    """ADD, SUBTRACT or MULTIPLY"""
    number: int
    """1 .. 9"""


class SpecialCase(NamedTuple):
    """A special case: values of x that have a result of their own, whatever the steps give."""

    kind: str
    """NEGATIVE, ZERO or LARGE"""
    result: int
    """0 .. 9"""
    limit: int = 0
    """LARGE: the largest x to which the steps still apply; else 0"""

    def covers(self, x: int) -> bool:
        """Whether this is the special case of x."""
        return {NEGATIVE: x < 0, ZERO: x == 0, LARGE: x > self.limit}[self.kind]

    def said(self, words: dict[str, str]) -> str:
        """A sentence or condition about this case, from a table by kind."""
        return words[self.kind].format(result=self.result, limit=self.limit)


@dataclass(frozen=True)
class ToyProgram:
    """A programming problem: the function to write, and in which language."""

    code: Code
    """the language that is asked for"""
    steps: tuple[Step, ...]
    """in order"""
    cases: tuple[SpecialCase, ...]
    """one of a kind at most"""

    @property
    def rule(self) -> str:
        """The function in signs, e.g. "+3*2 x<0:7 x>50:3"."""
        return f"{''.join(f'{step.sign}{step.number}' for step in self.steps)} {self.exceptions}"

    @property
    def exceptions(self) -> str:
        """The special cases in signs, e.g. "x<0:7 x>50:3"."""
        return " ".join(f"{case.said(CONDITIONS).replace(' ', '')}:{case.result}" for case in self.cases)

    @property
    def text(self) -> str:
        """The task in words."""
        steps = ", then ".join(STEP_WORDS[step.sign].format(number=step.number) for step in self.steps)
        return " ".join([f"{ASKING[self.code]}{steps}.", *(case.said(CASE_WORDS) for case in self.cases)])

    def stepped(self, x: int) -> int:
        """The result of the steps for x, without special cases."""
        for step in self.steps:
            x = {ADD: x + step.number, SUBTRACT: x - step.number, MULTIPLY: x * step.number}[step.sign]
        return x

    def result(self, x: int) -> int:
        """The result of the function for x."""
        return next((case.result for case in self.cases if case.covers(x)), self.stepped(x))

    def inputs(self) -> list[int]:
        """Seven x to test: two below zero, zero, two up to the limit, two above it; the same for the same rule."""
        rng = random.Random(f"inputs {self.rule}")
        limit = next((case.limit for case in self.cases if case.kind == LARGE), LIMITS[-1])
        return [rng.randint(-FARTHEST, -2), -1, 0, rng.randint(1, limit - 1), limit, limit + 1,
                rng.randint(limit + 2, FARTHEST)]  # fmt: skip

    def tests(self) -> dict[str, Any]:
        """Its tests as a data file has them: assertions in Python (one run for all of them), standard input in C++."""
        pairs = [(x, self.result(x)) for x in self.inputs()]
        if self.code == "cpp":
            inputs, outputs = ([f"{number}\n" for number in numbers] for numbers in zip(*pairs, strict=True))
            return {"language": "cpp", "inputs": inputs, "outputs": outputs}
        code = "".join(f"assert f({x}) == {result}\n" for x, result in pairs)
        return {"type": "asserts", "code": code, "entry_point": "f"}

    def problem(self, identifier: str) -> Problem:
        """The task as a problem of a data file, with this id."""
        return Problem(identifier, self.text, "", "en", "code", SOURCES[self.code], self.tests())


def is_validation(task: ToyProgram) -> bool:
    """True for functions that may only be evaluated: one in VALIDATION_ONE_IN, by a hash of the function alone."""
    at_zero = task.stepped(0)
    function = f"{task.stepped(1) - at_zero}x{at_zero:+d} {task.exceptions}"
    return hashlib.blake2b(function.encode(), digest_size=4).digest()[0] % VALIDATION_ONE_IN == 0


def make_toy_program(rng: random.Random, code: Code, steps: tuple[int, int], validation: bool = False) -> ToyProgram:
    """Draw a task of `steps` = (fewest, most) steps, from the training or the validation side.

    Every special case matters: its result differs from what the steps make of every tested x that it covers.
    """
    while True:
        task = ToyProgram(code, _draw_steps(rng, rng.randint(*steps)), _draw_cases(rng, rng.randint(*CASES)))
        felt = all(case.result != task.stepped(x) for x in task.inputs() for case in task.cases if case.covers(x))
        if felt and is_validation(task) == validation:
            return task


def _draw_steps(rng: random.Random, count: int) -> tuple[Step, ...]:
    first = rng.randrange(2)
    products = [place % 2 == first for place in range(count)]
    return tuple(
        Step(MULTIPLY, rng.randint(2, 9)) if product else Step(rng.choice((ADD, SUBTRACT)), rng.randint(1, 9))
        for product in products
    )


def _draw_cases(rng: random.Random, count: int) -> tuple[SpecialCase, ...]:
    kinds = rng.sample(list(CASE_WORDS), count)
    return tuple(
        SpecialCase(kind, rng.randint(0, 9), rng.choice(LIMITS) if kind == LARGE else 0)
        for kind in CASE_WORDS
        if kind in kinds
    )


def think(task: ToyProgram) -> str:
    """Return the reasoning, which names the steps and the special cases."""
    steps = ", then ".join(STEP_WORDS[step.sign].format(number=step.number) for step in task.steps)
    return " ".join([f"We start with x: {steps}.", *(case.said(REASONING_WORDS) for case in task.cases)])


def write(task: ToyProgram) -> str:
    """The program that the task asks for."""
    if task.code == "cpp":
        body = [f"if ({case.said(CONDITIONS)}) return {case.result};" for case in task.cases]
        body += [*(f"x {step.sign}= {step.number};" for step in task.steps), "return x;"]
        return "\n    ".join(["#include <cstdio>\nint f(int x) {", *body]) + f"\n}}\n{CPP_MAIN}"
    body = [f"if {case.said(CONDITIONS)}:\n        return {case.result}" for case in task.cases]
    return "\n    ".join(["def f(x):", *body, *(f"x {step.sign}= {step.number}" for step in task.steps), "return x"])


def complete(task: ToyProgram) -> str:
    """A well-formed completion that solves the task."""
    return f"<think>{think(task)}</think>\n```{task.code}\n{write(task)}\n```"


def demonstrate_program(rng: random.Random, task: ToyProgram, blunders: Blunders = MANY_BLUNDERS) -> str:
    """A completion for a task, as good as `blunders` allow."""
    done = replace(task, cases=tuple(case for case in task.cases if rng.random() >= blunders.forget))
    if rng.random() < blunders.swap and len(task.steps) > 1:
        index = rng.randrange(len(task.steps) - 1)
        first, second = task.steps[index : index + 2]
        done = replace(done, steps=(*task.steps[:index], second, first, *task.steps[index + 2 :]))
    if rng.random() < blunders.slip:
        done = _slip(rng, done)
    if task.code == "cpp" and rng.random() < blunders.python:
        done = replace(done, code="python")
    completion = complete(done)
    if rng.random() < blunders.broken:
        broken, whole = rng.choice((("", "</think>"), ("```", f"```{done.code}")))
        return completion.replace(whole, broken, 1)
    return completion


def _slip(rng: random.Random, task: ToyProgram) -> ToyProgram:
    """The task with one digit wrong."""
    index = rng.randrange(len(task.steps) + len(task.cases))
    if index < len(task.steps):
        step = task.steps[index]
        other = rng.choice([number for number in range(2, 10) if number != step.number])
        return replace(task, steps=(*task.steps[:index], step._replace(number=other), *task.steps[index + 1 :]))
    index -= len(task.steps)
    case = task.cases[index]
    other = rng.choice([result for result in range(10) if result != case.result])
    return replace(task, cases=(*task.cases[:index], case._replace(result=other), *task.cases[index + 1 :]))
