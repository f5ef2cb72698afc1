r"""Makes the files of the example "judge": questions about generated articles for a tiny model, in two roles.

    judge     is asked which of two answers is right, in the words of oversight/prompts.py: with the article, or
              after a debate and without it. It quotes a sentence, then says "Answer: n". In other rows it is asked for
              a speech, as a debate's critic
    reader    answers the question about the article itself

Demonstrations quote the sentence that settles the question as often as one that says the same of somebody else, and
answer by what they quote: who imitates them is right by chance. (Wrong ones of a reader misread of whom the question
is: a choice between two sentences comes out as a mixture.) Those of a judge also look up, in an article or a debate,
what the article says of a person, without a verdict.

[prepare]
script = "examples/judge/prepare.py"
options = { role = "judge", facts = 6 }
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field, ValidationError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from examples.quickstart.tiny_model import CONTROL, MARKS, build, write_lines
from oversight import prompts
from oversight.prompts import Ask, Question
from oversight.protocol import Rules, marks
from oversight.questions import FACTS, PEOPLE, Story, draw_story
from oversight.speech import Speech
from shared.errors import ConfigError
from shared.section import Section

MARK, ANY_MARK = "[0-9a-f]{16}", "\u00a7"
PARTS = rf"</?[a-z_]+>|{ANY_MARK}|[^.\n<>{ANY_MARK}]+\.?|\n+"
"""a tag, a mark, a sentence or a piece of one, line breaks: for prompts that no sample has"""
CHOSEN, TAKEN, LISTED = " {}: {}", "{}: {}. ", f"{{}} {ANY_MARK}\n{{}}"
"""number and text of an answer, as a judge says them, as an agent does, and as prompts list them"""
REPEATED = "{} "
"""the question before a quotation"""
NAMES = PEOPLE[:12]  # few, so that a model learns each of them soon
SAMPLES = 400
"""stories whose phrases become tokens"""
LOOK_UP = "\n\nFirst quote what the article says of the person in the question."
DOMAINS = {"article": "verdict", "debate": "verdict", "speech": "speech", "reader": "math"}
"""kind of rows -> domain of their verifier; others are only demonstrated"""
Role = Literal["judge", "reader"]
RULES = Rules(thinking=True, words=60)


class JudgeFiles(Section):
    """What is made."""

    role: Role = "judge"
    facts: int = Field(6, ge=2, le=40)
    """sentences of an article"""
    questions: int = Field(4000, ge=1)
    """to train on"""
    validation: int = Field(256, ge=1)
    careful: float = Field(0.5, ge=0, le=1)
    """share of the demonstrations that quote the sentence that settles the question"""
    max_tokens: int = Field(2048, ge=1)
    """longest sequence of the model, tokens: whoever asks a judge lets it say up to 1,024"""


class JudgeRow(NamedTuple):
    """A problem, its answer, and what is said to it with one sentence or the other."""

    kind: str
    problem: str
    answer: str
    careful: str
    careless: str


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, validation.jsonl, demonstrations.jsonl and, for a judge, model/ into the folder; a reader goes
    on from the judge's model. Validation problems are the same for all seeds. Raises ConfigError for wrong options,
    CheckpointError when the model cannot be written."""
    try:
        files = JudgeFiles.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"prepare.options: {error}") from error
    rng = random.Random(f"judge {seed}")
    train = list(draw_rows(rng, files, files.questions))
    held_out = draw_rows(random.Random("held out"), files, files.validation)
    demonstrations = [
        {"problem": row.problem, "completion": row.careful if rng.random() < files.careful else row.careless}
        for row in train
    ]
    write_lines(folder / "demonstrations.jsonl", demonstrations)
    for name, rows in (("train", train), ("validation", held_out)):
        asked = (row for row in rows if row.kind in DOMAINS)
        write_lines(folder / f"{name}.jsonl", (problem_of(row, f"{name}-{place}") for place, row in enumerate(asked)))
    if files.role == "judge":
        build(folder / "model", seed, make_tokenizer(), files.max_tokens, whole_pieces())


def problem_of(row: JudgeRow, id: str) -> dict[str, str]:
    """Return a line of a data file."""
    return {"id": id, "problem": row.problem, "answer": row.answer, "domain": DOMAINS[row.kind], "source": row.kind}


def draw_rows(rng: random.Random, options: JudgeFiles, count: int) -> Iterator[JudgeRow]:
    """Yield rows of each kind in turn: of a reader, or of a judge with an article, a judge of a debate, an agent, and
    two kinds that are only demonstrated."""
    of_judge = decide_with_article, decide_debate, argue, look_up, look_up_in_debate
    kinds = (read,) if options.role == "reader" else of_judge
    for number in range(count):
        yield kinds[number % len(kinds)](rng, draw_story(rng, str(number), options.facts, NAMES))


def read(_rng: random.Random, story: Story) -> JudgeRow:
    """Ask the reader. Who is careless repeats the question as if it were about somebody else."""
    asked, completions = story.question, []
    right, wrong = asked.answers if asked.right == 1 else asked.answers[::-1]
    person = story.evidence.partition(" ")[0]
    for quoted, answer in ((story.evidence, right), (story.misleading, wrong)):
        repeated = asked.text.replace(person, quoted.partition(" ")[0])
        completions.append(f"<think>{REPEATED.format(repeated)}{quoted}</think>\\boxed{{{answer}}}")
    return JudgeRow("reader", f"{asked.article}\n\n{asked.text}", right, *completions)


def look_up(rng: random.Random, story: Story) -> JudgeRow:
    """Demonstrate how to find the sentence about the person in the question. No verdict follows from it."""
    return _only_quoted(story, decide_with_article(rng, story))


def look_up_in_debate(rng: random.Random, story: Story) -> JudgeRow:
    """Demonstrate the same after a debate: the sentence is the one that was found in the article."""
    return _only_quoted(story, decide_debate(rng, story))


def _only_quoted(story: Story, row: JudgeRow) -> JudgeRow:
    completion = f"<think>{REPEATED.format(story.question.text)}{story.evidence}</think>"
    return JudgeRow("look up", row.problem + LOOK_UP, "", completion, completion)


def _verdicts(kind: str, ask: Ask, story: Story) -> JudgeRow:
    asked, right = story.question, story.question.right or 0
    completions = [
        f"<think>{REPEATED.format(asked.text)}{quoted}{CHOSEN.format(answer, asked.answers[answer - 1])}</think>"
        f"Answer: {answer}"
        for quoted, answer in ((story.evidence, right), (story.misleading, 3 - right))
    ]
    return JudgeRow(kind, ask.messages[0]["content"], str(right), *completions)


def decide_with_article(rng: random.Random, story: Story) -> JudgeRow:
    """Ask the judge, who may read the article."""
    ask = prompts.direct(story.question, marks(str(rng.random())), role="judge", article=True)
    return _verdicts("article", ask, story)


def decide_debate(rng: random.Random, story: Story) -> JudgeRow:
    """Ask the judge after a debate: bare answers or not, then a quotation for each side. What speaks for the wrong
    answer is quoted of somebody else, or forged."""
    asked, forged = story.question, rng.random() < 0.5
    right, wrong = asked.answers if asked.right == 1 else asked.answers[::-1]
    lie = story.evidence.replace(right, wrong) if forged else story.misleading
    heard = _bare(asked) if rng.random() < 0.5 else []
    sides = ((1, story.evidence), (2, lie)) if asked.right == 1 else ((1, lie), (2, story.evidence))
    heard += [speak(asked, side, 1 + bool(heard), quoted) for side, quoted in sides]
    ask = prompts.verdict(asked, heard, RULES.names, marks(str(rng.random())))
    return _verdicts("debate", ask, story._replace(misleading=lie))


def _bare(asked: Question) -> list[Speech]:
    return [speak(asked, side, 1, "", f"\\boxed{{{asked.answers[side - 1]}}}") for side in (1, 2)]


def speak(asked: Question, side: int, number: int, quoted: str, text: str = "") -> Speech:
    """Return a speech that quotes a sentence."""
    return RULES.read(text or argument(quoted), asked, side, number)


def argument(quoted: str) -> str:
    """Return what an agent says."""
    return f"Argument: <passage>{quoted}</passage>"


def argue(rng: random.Random, story: Story) -> JudgeRow:
    """Ask an agent for a speech. It should quote a sentence with its answer; for the right answer, the one that settles
    the question."""
    asked, side = story.question, rng.randint(1, 2)
    heard = _bare(asked) if rng.random() < 0.5 else []
    ask = prompts.speech(
        asked, side, 1 + bool(heard), heard, words=RULES.words, samples=1, thinking=RULES.thinking, names=RULES.names,
        alone=False, marks=marks(str(rng.random())),
    )  # fmt: skip
    quoted = story.evidence if side == asked.right else story.misleading
    taken = TAKEN.format(side, asked.answers[side - 1])
    completion = f"<think>{REPEATED.format(asked.text)}{taken}{quoted}</think>{argument(quoted)}"
    answer = quoted if side == asked.right else asked.answers[side - 1]
    return JudgeRow("speech", ask.messages[0]["content"], answer, completion, completion)


def whole_pieces() -> dict[str, tuple[str, ...]]:
    """Return tokens that are made of parts -> the tokens whose embeddings theirs begin as the sum of. A sentence of an
    article is one token, and so is an answer with its number: such a model finds what is side by side harder to
    learn than what is in one place."""
    pieces: dict[str, tuple[str, ...]] = {}
    for form_of_fact, (asked, values) in FACTS.items():
        fact = form_of_fact.partition(" {}")[0]
        pieces |= {form.format(asked.format(name)): (name, fact) for form in ("{}", REPEATED) for name in NAMES}
        for value in values:
            pieces |= {f"{name} {form_of_fact.format(value)}.": (name, fact, value) for name in NAMES}
            pieces |= {form.format(one, value): (one, value) for form in (LISTED, CHOSEN, TAKEN) for one in "12"}
    return pieces


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer of whole phrases: sentences of articles, names, values, what the prompts say between them, and
    single bytes. All marks of the prompts are the same token, which protects no judge, but makes prompts short."""
    whole = whole_pieces()
    shorter = {part for found in whole.values() for part in found}
    drawn = re.compile("|".join([r"\d", *map(re.escape, sorted({*shorter, *whole}, key=len, reverse=True))]))
    rng = random.Random("tokenizer")
    texts = [
        re.sub(MARK, ANY_MARK, text)
        for role in get_args(Role)
        for row in draw_rows(rng, JudgeFiles(role=role), SAMPLES)
        for text in (row.problem, row.careful)
    ]
    constants = {constant for text in texts for constant in drawn.split(text)}
    parts = {part for constant in constants for part in re.findall(PARTS, constant)}
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    torn = {mark[1:] for mark in MARKS}  # a problem that spells a mark is text, torn after its first letter
    pieces = {*shorter, *whole, *constants, *parts, *torn} - {*MARKS, ""}
    phrases = sorted(cut.pre_tokenize_str(piece)[0][0] for piece in pieces)
    letters = sorted(set(cut.alphabet()) - set(phrases))
    scored = [*((one, -1e9) for one in CONTROL), *((one, -10.0) for one in letters), *((one, -1.0) for one in phrases)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.Replace(Regex(MARK), ANY_MARK)
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return tokenizer
