"""Faults for the data pipeline, planted into real problems, the same in every run.

Each function returns rows whose ids begin with PLANTED; `curate.py` looks what the stages make of them.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

Fields = dict[str, Any]
PLANTED = "planted/"
"""ids of all faults begin so"""
PROOFS = (
    "Prove that the answer is ${}$.", "Show that this value equals ${}$.", "Please prove that it is ${}$.",
    "Démontrer que le résultat est ${}$.", "Montrez que l'on obtient ${}$.", "Zeigen Sie, dass sich ${}$ ergibt.",
    "Beweise, dass das Ergebnis ${}$ ist.", "Demuestra que el resultado es ${}$.", "Probar que se obtiene ${}$.",
    "Dimostrare che il risultato è ${}$.", "Si dimostri che vale ${}$.", "Докажите, что ответ равен ${}$.",
    "Покажите, что получится ${}$.", "求证：答案是 ${}$。", "请证明结果为 ${}$。",
)  # fmt: skip
OPTION_STYLES = (
    ("\n", "$\\textbf{{({})}}\\ {}$", " \\qquad ", ""), ("\n", "({}) ${}$", "\n", ""), ("\n\n", "{}. ${}$", "\n\n", ""),
    (" ", "({}) {}", " ", ""), ("\n", "{}) {}", "\n", "\nEnter the letter."),
)  # fmt: skip
"""what stands before the options, one option, what stands between and behind them"""
FOLLOWING = (
    "Which of the following numbers is the largest?", "Which one of these is a prime number?",
    "Laquelle des valeurs suivantes est un nombre premier ?", "Welche der folgenden Zahlen ist eine Primzahl?",
    "下列哪个数是质数？",
)  # fmt: skip
NO_ANSWERS = (
    "see solution", "\\frac{{{}", "{} \\times", "it depends on the value of the parameter that is chosen here",
    "Answers may vary.", "x^{{", "proof",
)  # fmt: skip
SYNONYMS = {
    "Find": "Determine", "What is": "Compute", "Compute": "Calculate", "How many": "Find how many", "Let": "Suppose",
    "Determine": "Find", "such that": "so that", "Express your answer": "Give the answer", "the value of": "",
}  # fmt: skip
_ASY = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_POINTS = re.compile(r"\b(diagram|figure|shown|shaded)\b", re.IGNORECASE)
_INTEGER = re.compile(r"\d{1,4}")


def _options(style: int, options: Sequence[Any]) -> str:
    before, one, between, behind = OPTION_STYLES[style % len(OPTION_STYLES)]
    listed = [one.format(letter, option) for letter, option in zip("ABCDE", options, strict=False)]
    return before + between.join(listed) + behind


def _row(kind: str, number: int, **fields: Any) -> Fields:
    return {"id": f"{PLANTED}{kind}/{number}", "domain": "math", "language": "en", **fields}


def plain(rows: Sequence[Fields]) -> list[Fields]:
    """Return rows with a whole number as answer, no drawing and no options: something to plant faults into."""
    return [
        row
        for row in rows
        if _INTEGER.fullmatch(row["answer"]) and "[asy]" not in row["problem"] and "(A)" not in row["problem"]
        and "\n\nA." not in row["problem"]
    ]  # fmt: skip


def proofs(rows: Sequence[Fields], count: int, rng: random.Random) -> list[Fields]:
    """Turn the last sentence into the request for a proof, in seven languages."""
    found = []
    for number, row in enumerate(rng.sample(list(rows), count)):
        head = re.split(r"(?<=[.?!])\s+", row["problem"].strip())[:-1]
        text = " ".join([*head, PROOFS[number % len(PROOFS)].format(row["answer"])])
        found.append(_row("proof", number, problem=text, answer=row["answer"]))
    return found


def parts(rows: Sequence[Fields], count: int, rng: random.Random) -> list[Fields]:
    """Join two problems as the parts of one, labelled in six ways."""
    labels = (("(a)", "(b)"), ("i)", "ii)"), ("Part 1:", "Part 2:"), ("1.", "2."), ("\\textbf{(a)}", "\\textbf{(b)}"),
              ("a)", "b)"))  # fmt: skip
    drawn = rng.sample(list(rows), 2 * count)
    found = []
    for number in range(count):
        one, other = drawn[2 * number], drawn[2 * number + 1]
        first, second = labels[number % len(labels)]
        text = f"{first} {one['problem'].strip()}\n{second} {other['problem'].strip()}"
        found.append(_row("parts", number, problem=text, answer=f"{one['answer']}, {other['answer']}"))
    return found


def open_choices(rows: Sequence[Fields], count: int, rng: random.Random) -> tuple[list[Fields], dict[str, Fields]]:
    """Return problems with five options added and a letter as answer; and what each should become again."""
    found, wanted = [], {}
    asking = [row for row in rows if row["problem"].rstrip().endswith("?")]
    for number, row in enumerate(rng.sample(asking, count)):
        right = int(row["answer"])
        options = [right, right + 1, right + 2, 2 * right + 3, right + 10]
        rng.shuffle(options)
        text = row["problem"].rstrip() + _options(number, options)
        letter = "ABCDE"[options.index(right)]
        answer = (letter, f"({letter})", f"\\text{{({letter})}}")[number % 3]
        made = _row("choice", number, problem=text, answer=answer)
        found.append(made)
        wanted[made["id"]] = row
    return found, wanted


def closed_choices(rows: Sequence[Fields], count: int, rng: random.Random) -> list[Fields]:
    """Return multiple choice problems that says nothing without its options."""
    found = []
    for number, row in enumerate(rng.sample(list(rows), count)):
        options: list[Any] = rng.sample(range(2, 400), 4)
        if number % 6 == 5:
            text, letter = row["problem"].rstrip(), "D"
            options[3] = "\\text{none of the above}"
        else:
            text, letter = FOLLOWING[number % 6], "B"
        text += _options(number, options)
        found.append(_row("closed", number, problem=text, answer=letter))
    return found


def uncheckable(rows: Sequence[Fields], count: int, rng: random.Random) -> list[Fields]:
    """Return answers that are cut, prose, or none."""
    found = []
    for number, row in enumerate(rng.sample(list(rows), count)):
        answer = NO_ANSWERS[number % len(NO_ANSWERS)].format(row["answer"])
        found.append(_row("unchecked", number, problem=row["problem"], answer=answer))
    return found


def lost_figures(rows: Sequence[Fields], count: int, rng: random.Random) -> list[Fields]:
    """Return problems that speak of their drawing, without it."""
    drawn = [row for row in rows if _ASY.search(row["problem"]) and _POINTS.search(_ASY.sub("", row["problem"]))
             and "tabular" not in row["problem"] and "array" not in row["problem"]
             and not re.search(r"\(A\)|\nA\.", row["problem"])]  # fmt: skip
    return [
        _row("figure", number, problem=_ASY.sub("", row["problem"]).strip(), answer=row["answer"])
        for number, row in enumerate(rng.sample(drawn, min(count, len(drawn))))
    ]


def _loud(text: str, rng: random.Random) -> str:
    """Change the case, LaTeX commands left alone."""
    return re.sub(r"\\[A-Za-z]+|[a-z]+", lambda word: word[0] if word[0][0] == "\\" else word[0].upper(), text)


def _punctuated(text: str, rng: random.Random) -> str:
    return re.sub(r"(?<!\d)[,.;:](?=\s|$)", lambda found: rng.choice([" ,", ";", " .", ""]), text).replace("?", " ?")


def _spaced(text: str, rng: random.Random) -> str:
    """Set LaTeX another way."""
    text = text.replace("\\frac", "\\dfrac").replace("$", "\\,$").replace("\\,$", "$", 1).replace("\\le ", "\\leq ")
    return re.sub(r"([+=])", r" \1\\, ", text).replace("\\left(", "(").replace("\\right)", ")")


def reworded(text: str, rng: random.Random) -> str:
    """Return a text with a few words changed, dropped or added; numbers and formulas stay."""
    for old, new in SYNONYMS.items():
        if old in text:
            text = text.replace(old, new, 1)
            break
    words = text.split(" ")
    small = [place for place, word in enumerate(words) if word in ("the", "a", "an", "then", "that", "of", "all")]
    for place in sorted(rng.sample(small, min(2, len(small))), reverse=True):
        del words[place]
    return " ".join(words) + rng.choice(["", " Simplify your answer.", " Justify briefly."])


EDITS: dict[str, Callable[[str, random.Random], str]] = {
    "case": _loud, "punctuation": _punctuated, "LaTeX spacing": _spaced, "a few words": reworded,
}  # fmt: skip


def copies(rows: Sequence[Fields], edit: str, count: int, rng: random.Random, name: str) -> list[Fields]:
    """Return copies of rows, edited; "of" names the original."""
    return [
        {**row, "id": f"{PLANTED}{name}/{number}", "problem": EDITS[edit](row["problem"], rng), "of": row["id"]}
        for number, row in enumerate(rng.sample(list(rows), count))
    ]


def renumbered(rows: Sequence[Fields], count: int, rng: random.Random) -> list[Fields]:
    """Return texts with one other number: another problem."""
    found = []
    for number, row in enumerate(rng.sample([row for row in rows if _INTEGER.search(row["problem"])], count)):
        text = renumber(row["problem"], rng)
        found.append({**row, "id": f"{PLANTED}numbers/{number}", "problem": text, "answer": str(rng.randrange(10**6))})
    return found


def renumber(text: str, rng: random.Random) -> str:
    """Make one number of a text larger; the text itself where it has none."""
    places = list(_INTEGER.finditer(text))
    if not places:
        return text
    place = rng.choice(places)
    return text[: place.start()] + str(int(place.group()) + 3) + text[place.end() :]


def embedded(rows: Sequence[Fields], count: int, rng: random.Random, name: str) -> list[Fields]:
    """Put evaluation items inside longer texts."""
    frame = "During a contest the following question was asked, and nobody found an answer in time. {} Take your time."
    drawn = rng.sample([row for row in rows if len(row["problem"].split()) > 25], count)
    return [
        {**row, "id": f"{PLANTED}{name}/{number}", "problem": frame.format(row["problem"])}
        for number, row in enumerate(drawn)
    ]


def other_value(value: Any) -> Any:
    """Return a value of the same type that is not equal; None where none is known."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, (list, tuple)) and value:
        return value[:-1] if len(value) > 1 else value + value
    return None


def mutants(source: str, rng: random.Random) -> list[str]:
    """Return programs with one operator, constant or comparison changed, in a random order."""
    swaps: dict[type, type] = {
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
        ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And, ast.Mod: ast.FloorDiv,
    }  # fmt: skip
    found = []
    for place in range(sum(1 for _ in ast.walk(ast.parse(source)))):
        tree = ast.parse(source)
        node = list(ast.walk(tree))[place]
        if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in swaps:
            node.op = swaps[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in swaps:
            node.ops[0] = swaps[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        else:
            continue
        found.append(ast.unparse(tree))
    rng.shuffle(found)
    return found


def rewritten(source: str) -> list[str]:
    """Return the same Python program in three other spellings."""
    plain_source = ast.unparse(ast.parse(source))
    return [source, plain_source, f"import sys\n{plain_source}", f"{plain_source}\n\nDONE = True\n"]
