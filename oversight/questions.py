"""The questions: generated articles and chains of rules, programs against mutants, responses of an evaluation, files.

The order of the two answers is drawn by the seed; every question is asked in both orders anyway.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.samples import SAMPLES, read_samples
from oversight.prompts import Question
from oversight.settings import OversightSettings
from shared.errors import ConfigError, DataError
from shared.jsonl import check_text, read_rows, spread, text_of
from shared.types import Verdict
from verify.code.runner import run_tests

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
"""sentence -> the question about it, and the words that may stand in it"""
NAMES = tuple(f"{name} {family}" for name in PEOPLE for family in ("Berg", "Costa", "Dahl"))
KINDS = ("wumpus", "yumpus", "zumpus", "dumpus", "rompus", "numpus", "tumpus", "vumpus", "impus", "jompus", "lorpus",
         "gorpus", "shumpus", "sterpus", "grimpus", "brimpus", "lempus", "rorpus")  # fmt: skip
HOPS = 5
SWAPS: dict[type[Any], type[Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""operator -> what a mutant has in its place"""


def read_tasks(settings: OversightSettings) -> dict[str, list[Question]]:
    """Return task -> its questions. Raises ConfigError, DataError."""
    tasks: dict[str, list[Question]] = {}
    for task in settings.tasks:
        path = Path(task)
        count, seed = settings.questions, settings.seed
        if task == "stories":
            name, questions = task, list(make_stories(seed, count, settings.facts))
        elif task == "logic":
            name, questions = task, [make_logic(seed, number) for number in range(count)]
        elif task == "programs":
            files = [Path(settings.data) / f"mbpp.jsonl{suffix}" for suffix in ("", ".gz")]
            name, questions = task, read_programs(files[files[1].is_file()], count, seed)
        elif (Path(task.partition(":")[0]) / SAMPLES).is_file():
            folder, _, rows = task.partition(":")
            name, questions = Path(rows).stem, spread(list(read_responses(Path(folder), Path(rows), seed)), count)
        elif path.is_file():
            name, questions = path.name.removesuffix(".gz").removesuffix(".jsonl"), spread(read_file(path, seed), count)
        else:
            raise ConfigError(f'"{task}" is no task (stories, logic, programs), no JSONL file, no evaluation\'s folder')
        if not questions:
            raise DataError(f"{task} gives no question: there is none with a right and a wrong answer")
        if name in tasks or len({question.id for question in questions}) < len(questions):
            raise ConfigError(f"{task}: the task, or the id of one of its questions, is there twice")
        tasks[name] = questions
    return tasks


def _drawn(seed: int, id: str) -> random.Random:
    return random.Random(f"{seed} {id}")


class Story(NamedTuple):
    """A question about an article, and what is quoted for its answers."""

    question: Question
    evidence: str
    """the sentence that makes the right answer right"""
    misleading: str
    """the sentence that says the wrong answer of somebody else"""


def ordered(rng: random.Random, id: str, text: str, right: str, wrong: str, article: str = "") -> Question:
    """Return a question with its answers in a random order."""
    number = rng.randint(1, 2)
    return Question(id=id, text=text, answers=(right, wrong) if number == 1 else (wrong, right), right=number,
                    article=article)  # fmt: skip


def draw_story(rng: random.Random, id: str, facts: int, names: Sequence[str] = NAMES) -> Story:
    """Draw an article of at least two sentences about people with these names, and a question about one; the wrong
    answer is true of somebody else in it."""
    form = rng.choice(list(FACTS))
    person, other = rng.sample(names, 2)
    right, wrong = rng.sample(FACTS[form][1], 2)
    sentences = [f"{person} {form.format(right)}.", f"{other} {form.format(wrong)}."]
    pairs = [(name, fact) for name in names for fact in FACTS if fact != form or name not in (person, other)]
    for name, fact in rng.sample(pairs, min(facts - 2, len(pairs))):
        sentences.append(f"{name} {fact.format(rng.choice(FACTS[fact][1]))}.")
    article = " ".join(rng.sample(sentences, len(sentences)))
    question = ordered(rng, id, FACTS[form][0].format(person), right, wrong, article)
    return Story(question, sentences[0], sentences[1])


def make_stories(seed: int, count: int, facts: int) -> Iterator[Question]:
    """Yield questions about one sentence of an article of their own."""
    for id in (f"story {number}" for number in range(count)):
        yield draw_story(_drawn(seed, id), id, facts).question


def make_logic(seed: int, number: int) -> Question:
    """Return a chain of rules in shuffled order, and two derivations that end in contrary answers, as PrOntoQA."""
    rng = _drawn(seed, f"logic {number}")
    chain, other = rng.sample(KINDS, HOPS + 1), rng.choice(KINDS)
    negated = rng.random() < 0.5
    name, mood = rng.choice(PEOPLE), rng.choice(("shy", "loud", "calm", "blue", "small", "kind"))
    rules = [f"Every {one} is a {next_one}." for one, next_one in zip(chain, chain[1:], strict=False)]
    rules.append(f"Every {chain[-1]} is {'not ' if negated else ''}{mood}.")
    if other not in chain:
        rules.append(f"Every {other} is {'' if negated else 'not '}{mood}.")
    rng.shuffle(rules)
    steps = " ".join(f"{name} is a {kind}." for kind in chain[1:])
    ends = [f"{steps} So {name} is {word}{mood}." for word in ("", "not ")]
    text = f"{' '.join(rules)} {name} is a {chain[0]}. Is {name} {mood} or not?"
    return ordered(rng, f"logic {number}", text, ends[negated], ends[not negated])


def read_programs(path: Path, count: int, seed: int) -> list[Question]:
    """Return programming problems whose solution passes its tests and a mutant fails them, in a sandbox."""
    questions: list[Question] = []
    rows = list(read_rows(path, "data"))
    _drawn(seed, "programs").shuffle(rows)
    for row in rows:
        solution = row.fields.get("solution") or row.fields.get("code")
        if len(questions) == count or not isinstance(solution, str) or not row.fields.get("tests"):
            continue
        id = text_of(row.fields, "id", row.where, f"line {row.number}")
        rng = _drawn(seed, id)
        tests = row.fields["tests"]
        if run_tests(solution, "python", tests).verdict is not Verdict.CORRECT:
            continue
        for mutant in mutants(solution, rng):
            if run_tests(mutant, "python", tests).verdict is Verdict.WRONG:
                text = f"{text_of(row.fields, 'problem', row.where)}\n\nWhich program is right?"
                questions.append(ordered(rng, id, text, ast.unparse(ast.parse(solution)), mutant))
                break
    return questions


def mutants(source: str, rng: random.Random) -> Iterator[str]:
    """Yield the program with one operator or one number changed, in random order; written as Python unparses it."""
    try:
        numbers = [number for number, node in enumerate(ast.walk(ast.parse(source))) if _mutable(node)]
    except (SyntaxError, ValueError, RecursionError):
        return
    for number in rng.sample(numbers, len(numbers)):
        tree = ast.parse(source)
        node: Any = list(ast.walk(tree))[number]
        if isinstance(node, ast.Constant):
            node.value = int(str(node.value)) + rng.choice((-1, 1))
        elif isinstance(node, ast.Compare):
            node.ops[0] = SWAPS[type(node.ops[0])]()
        else:
            node.op = SWAPS[type(node.op)]()
        yield ast.unparse(tree)


def _mutable(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    return isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS


def read_responses(folder: Path, rows: Path, seed: int) -> Iterator[Question]:
    """Yield a question for every problem to which an evaluation's records hold a right and a wrong response.

    rows: the file of the problems. Raises DataError.
    """
    responses: dict[str, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    for record in read_samples(folder).values():
        if record.correct is not None and record.answer.strip():
            responses[record.id][record.correct].append(record.answer)
    for row in read_rows(rows, f"tasks: {folder}:ROWS.jsonl"):
        id = text_of(row.fields, "id", row.where, f"line {row.number}")
        if responses[id][True] and responses[id][False]:
            rng = _drawn(seed, id)
            right, wrong = (rng.choice(responses[id][correct]) for correct in (True, False))
            yield ordered(rng, id, text_of(row.fields, "problem", row.where), right, wrong)


def read_file(path: Path, seed: int) -> list[Question]:
    """Return the questions of a JSONL file; of several wrong answers one is drawn. Raises DataError."""
    questions = []
    for row in read_rows(path, "tasks"):
        id = text_of(row.fields, "id", row.where, f"line {row.number}")
        text = text_of(row.fields, "question" if "question" in row.fields else "problem", row.where)
        article = text_of(row.fields, "article", row.where, "")
        answers, right = row.fields.get("answers"), row.fields.get("right")
        if not isinstance(answers, list) or not all(isinstance(one, str) and one.strip() for one in answers):
            raise DataError(f"{row.where} lacks 'answers': a list of texts, at least two")
        if type(right) is not int or not 1 <= right <= len(answers) or len(set(answers)) < 2:
            raise DataError(f"{row.where}: 'right' must say which of the answers is right, counted from 1")
        for answer in answers:
            check_text(answer, "answers", row.where)
        truth = answers[right - 1]
        rng = _drawn(seed, id)
        wrong = rng.choice([answer for answer in answers if answer != truth])
        questions.append(ordered(rng, id, text, truth, wrong, article))
    return questions
