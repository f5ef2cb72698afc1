"""Four kinds of small problems out of reasoning-gym, with worked steps: what a model of 135 M parameters partly solves.

Problems, answers and the facts behind them come from the package (Apache-2.0); the steps are written from these facts.
Problems are in English. One in three asks for reasoning in English, one in another language (`WORDS`), one for none.
No problem of one file is in another, nor the same numbers in other words; the same call makes the same files, and
`python -m benchmarks.easy_problems FOLDER` writes them.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from examples.quickstart.word_problems import PHRASES
from shared.atomic_write import beside

KINDS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9},
    "leg_counting": {"min_animals": 2, "max_animals": 2, "min_instances": 1, "max_instances": 6},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 80},
}
COUNTS = {"demonstrations": 200, "train": 600, "validation": 100}
"""problems of each kind in each file"""
AT_ONCE_SHARE = 0.5
"""half of the demonstrations are of people who do not write down how they get there: imitated, that is the worse habit,
and reinforcement learning can find out which of the two pays"""
WORDS = {
    "en": {
        "at_once": "I can see the answer at once.",
        "chain_sum": "I calculate from left to right",
        "simple_equations": "I isolate the unknown number",
        "leg_counting": "I count the legs of each kind of animal",
        "gcd": "I divide with remainder until nothing is left",
    },
    "fr": {
        "at_once": "Je vois la réponse tout de suite.",
        "chain_sum": "Je calcule de gauche à droite",
        "simple_equations": "J'isole le nombre inconnu",
        "leg_counting": "Je compte les pattes de chaque espèce d'animal",
        "gcd": "Je divise avec reste jusqu'à ce qu'il ne reste rien",
    },
    "de": {
        "at_once": "Ich sehe die Antwort sofort.",
        "chain_sum": "Ich rechne von links nach rechts",
        "simple_equations": "Ich löse nach der unbekannten Zahl auf",
        "leg_counting": "Ich zähle die Beine jeder Tierart",
        "gcd": "Ich teile mit Rest, bis nichts mehr übrig ist",
    },
    "es": {
        "at_once": "Veo la respuesta enseguida.",
        "chain_sum": "Calculo de izquierda a derecha",
        "simple_equations": "Despejo el número desconocido",
        "leg_counting": "Cuento las patas de cada clase de animal",
        "gcd": "Divido con resto hasta que no queda nada",
    },
    "it": {
        "at_once": "Vedo subito la risposta giusta.",
        "chain_sum": "Calcolo da sinistra a destra",
        "simple_equations": "Isolo il numero sconosciuto",
        "leg_counting": "Conto le zampe di ogni specie di animale",
        "gcd": "Divido con il resto finché non rimane nulla",
    },
    "ru": {
        "at_once": "Я сразу вижу ответ.",
        "chain_sum": "Я считаю слева направо",
        "simple_equations": "Я нахожу неизвестное число",
        "leg_counting": "Я считаю ноги у каждого вида животных",
        "gcd": "Я делю с остатком, пока ничего не останется",
    },
    "zh": {
        "at_once": "我一眼就看出了答案。",
        "chain_sum": "我从左到右依次计算",
        "simple_equations": "我求出这个未知数",
        "leg_counting": "我数一数每种动物的腿",
        "gcd": "我反复做带余数的除法，直到没有余数",
    },
}
"""language -> what reasoning in it says before its steps; not checked by native speakers"""
MOST_STEPS = 4
SEED = 20260101


class Solved(NamedTuple):
    """A problem with its worked steps."""

    text: str
    steps: str
    answer: str


def chain_sum(facts: dict[str, Any]) -> tuple[list[str], int]:
    """Work 3 + 4 - 2 out: one step a term."""
    parts = facts["expression"].split()
    total, steps = int(parts[0]), []
    for sign, term in zip(parts[1::2], parts[2::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total}{sign}{term}={after}")
        total = after
    return steps, total


def simple_equations(facts: dict[str, Any]) -> tuple[list[str], int]:
    """Solve a*x + b = c, or b - a*x = c: the term with x alone, then x."""
    left, right = facts["equation"].split(" = ")
    name, value = facts["variable"], int(right)
    if found := re.fullmatch(rf"(?:(\d+)\*)?{name} ([+-]) (\d+)", left):
        factor, sign, term = int(found[1] or 1), found[2], int(found[3])
        rest = value - term if sign == "+" else value + term
        step = f"{factor}*{name}={value}{'-' if sign == '+' else '+'}{term}={rest}"
    elif found := re.fullmatch(rf"(\d+) ([+-]) (?:(\d+)\*)?{name}", left):
        term, sign, factor = int(found[1]), found[2], int(found[3] or 1)
        rest = value - term if sign == "+" else term - value
        step = f"{factor}*{name}={value}-{term}={rest}" if sign == "+" else f"{factor}*{name}={term}-{value}={rest}"
    else:
        raise ValueError(f"an equation of another form: {facts['equation']}")
    return [step.replace("--", "+"), f"{name}={rest}/{factor}={rest // factor}"], rest // factor


def leg_counting(facts: dict[str, Any]) -> tuple[list[str], int]:
    """Count the legs of each animal, then their sum."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    legs = {animal: count * ANIMALS[animal] for animal, count in facts["animals"].items()}
    steps = [f"{n}*{ANIMALS[animal]}={legs[animal]}" for animal, n in facts["animals"].items()]
    return [*steps, "+".join(map(str, legs.values())) + f"={sum(legs.values())}"], sum(legs.values())


def gcd(facts: dict[str, Any]) -> tuple[list[str], int]:
    """Follow Euclid's algorithm. Raises ValueError where the answer is 1, which would pay for guessing."""
    small, large = sorted(facts["numbers"])
    steps = []
    while small:
        steps.append(f"{large} mod {small}={large % small}")
        large, small = small, large % small
    if large == 1:
        raise ValueError("the greatest common divisor is 1")
    return steps, large


def numbers_of(kind: str, text: str) -> tuple[str, ...]:
    """Return what makes a problem: numbers, signs and animals; the rest is wording, the letter of x, and the order
    where it does not matter."""
    core = re.findall(r"[-+*]|\d+|\b[a-z]{3,}s\b", text)
    return tuple(sorted(core) if kind in ("leg_counting", "gcd") else core)


SOLVERS: dict[str, Callable[[dict[str, Any]], tuple[list[str], int]]] = {
    "chain_sum": chain_sum,
    "simple_equations": simple_equations,
    "leg_counting": leg_counting,
    "gcd": gcd,
}


def solve(kind: str, item: dict[str, Any]) -> Solved | None:
    """Return the worked problem of a reasoning-gym item; None where it takes too many steps or has another form.

    Raises ValueError when the steps end in another answer than the package's.
    """
    try:
        steps, answer = SOLVERS[kind](item["metadata"])
    except ValueError:
        return None
    if str(answer) != item["answer"]:
        raise ValueError(f"{kind}: the steps give {answer}, reasoning-gym says {item['answer']}: {item['question']}")
    return Solved(item["question"].strip(), ", ".join(steps), item["answer"]) if len(steps) <= MOST_STEPS else None


def draw(kind: str, count: int) -> list[Solved]:
    """Return `count` different worked problems of a kind, shuffled. Raises ValueError when there are not so many."""
    import reasoning_gym

    found: dict[tuple[str, ...], Solved] = {}
    for item in reasoning_gym.create_dataset(kind, size=30 * count, seed=SEED, **KINDS[kind]):
        if (worked := solve(kind, item)) is not None:
            found.setdefault(numbers_of(kind, worked.text), worked)
        if len(found) == count:
            chosen = list(found.values())
            random.Random(kind).shuffle(chosen)
            return chosen
    raise ValueError(f"{kind}: only {len(found)} of {count} different problems")


def write_files(folder: Path) -> None:
    """Write demonstrations.jsonl, train.jsonl and validation.jsonl into `folder`, unless they are there."""
    if all((folder / f"{name}.jsonl").is_file() for name in COUNTS):
        return
    files: dict[str, list[dict[str, str]]] = {name: [] for name in COUNTS}
    for kind in KINDS:
        problems = draw(kind, sum(COUNTS.values()))
        for name, count in COUNTS.items():
            chosen, problems = problems[:count], problems[count:]
            files[name] += [row_of(name, kind, number, problem) for number, problem in enumerate(chosen)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        random.Random(name).shuffle(rows)
        with beside(folder / f"{name}.jsonl") as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def row_of(file: str, kind: str, number: int, problem: Solved) -> dict[str, str]:
    """Make one line of a file: a demonstration, or a problem with its answer."""
    row = {"id": f"{kind}/{file}/{number}", "source": kind, "language": "en", "problem": problem.text}
    if asked := asked_of(number):
        row["reasoning_language"] = asked
    if file == "demonstrations":
        words, phrases = WORDS[asked or "en"], PHRASES[asked or "en"]
        steps = f"{words[kind]}: {problem.steps}."
        thoughts = words["at_once"] if number < AT_ONCE_SHARE * COUNTS[file] else steps
        answer = f"{phrases.answer}{phrases.space}\\boxed{{{problem.answer}}}."
        return row | {"completion": f"<think>{thoughts}</think>{answer}"}
    return row | {"answer": problem.answer}


def asked_of(number: int) -> str:
    """Return the language that row `number` of a kind asks for: none, English, another one, and so on in turn."""
    others = [code for code in WORDS if code != "en"]
    return ("", "en", others[number // 3 % len(others)])[number % 3]


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
