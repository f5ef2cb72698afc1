"""How often language detection and consistency are right.

mgsm: rows of {"problem", "language"} in several languages, the same problems in the same order in each (MGSM, 250 a
language). gsm8k: rows with an English "solution" of the same problems. Our own word problems stand in for
solutions in other languages, and for Italian. The yardstick of mixed texts is exact: foreign sentences are put in
until they hold the wanted share of the letters.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.report import table
from examples.quickstart.word_problems import calculate, make_word_problem
from shared.jsonl import read_rows
from verify.language import consistency, detect
from verify.text_cleaning import clean, letter_units

STORY_LANGUAGES = ("en", "fr", "de", "es", "it", "ru", "zh")
SHARES = ((0.1, 0.15), (0.15, 0.25), (0.25, 0.35), (0.35, 0.45), (0.45, 0.6))
"""letters of the foreign sentences, at least and at most"""
WORDS = re.compile(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+")
Texts = dict[str, list[str]]


def load(path: Path, key: str) -> Texts:
    """Read language -> texts, in the order of the file."""
    found: Texts = defaultdict(list)
    for _, _, row in read_rows(path):
        found[str(row.get("language", "en"))].append(str(row[key]))
    return dict(found)


def make_stories(count: int) -> tuple[Texts, Texts]:
    """Generate our problems and their calculated solutions."""
    problems: Texts = {}
    solutions: Texts = {}
    for language in STORY_LANGUAGES:
        rng = random.Random(f"stories {language}")
        stories = [make_word_problem(rng, language, (2, 3)) for _ in range(count)]
        problems[language] = [story.text for story in stories]
        solutions[language] = [calculate(story, language)[0] for story in stories]
    return problems, solutions


def sentences(text: str) -> list[str]:
    """Return the sentences of a problem."""
    return [part for part in re.split(r"(?<=[.!?。！？])\s*", text) if letter_units(clean(part))]


def first_words(text: str, count: int) -> str:
    """Return the beginning of a text; a Han character is half a word."""
    words = WORDS.findall(text)
    han = sum("\u4e00" <= word[0] <= "\u9fff" for word in words)
    if 2 * han > len(words):
        return "".join(words[: 2 * count])
    return " ".join(words[:count])


def right_share(texts: Iterable[str], language: str) -> str:
    """Format the share that is right and, if any, undetermined and wrong: "98.0 (1.6 undetermined, 0.4 wrong)"."""
    found = Counter(detect(text).language for text in texts)
    total = found.total()
    right, silent = found[language], found[""]
    cell = f"{100 * right / total:.1f}"
    if right == total:
        return "100"
    return f"{cell} ({100 * silent / total:.1f} / {100 * (total - right - silent) / total:.1f})"


def detection_rows(mgsm: Texts, stories: Texts, solutions: dict[str, Texts]) -> Iterator[list[str]]:
    """Yield the cells of each kind of text: how often `detect` is right in each language."""
    kinds: dict[str, Callable[[str], list[str]]] = {
        "whole problem": lambda text: [text],
        "sentence": sentences,
        "first 8 words": lambda text: [first_words(text, 8)],
        "first 5 words": lambda text: [first_words(text, 5)],
        "first 3 words": lambda text: [first_words(text, 3)],
        "first word": lambda text: [first_words(text, 1)],
    }
    for name, cut in kinds.items():
        cells = []
        for language in STORY_LANGUAGES:
            source = mgsm.get(language)
            pieces = [piece for text in source or stories[language] for piece in cut(text)]
            cells.append(right_share(pieces, language) + ("" if source else " *"))
        yield [f"MGSM, {name}", *cells]
    for name, texts in solutions.items():
        yield [name, *(right_share(texts[code], code) if code in texts else "-" for code in STORY_LANGUAGES)]


def mix(own: list[str], foreign: list[str], least: float, most: float, rng: random.Random) -> str | None:
    """Replace some sentences by the same ones in another language; None when no choice has such a share."""
    places = rng.sample(range(len(own)), len(own))
    chosen: set[int] = set()
    for place in places:
        chosen.add(place)
        parts = [foreign[i] if i in chosen else own[i] for i in range(len(own))]
        units = [letter_units(clean(part)) for part in parts]
        share = sum(units[i] for i in chosen) / sum(units)
        if share > most:
            chosen.discard(place)
        elif share >= least:
            return " ".join(parts)
    return None


def by_argmax(problem: str, thoughts: str, answer: str) -> bool:
    """Return what the plain rule says, for comparison: each determined part's most probable language is the same."""
    return len({detect(part).language for part in (problem, thoughts, answer)} - {""}) <= 1


def mixed_rows(mgsm: Texts) -> Iterator[list[str]]:
    """Yield the cells of `consistency` on texts of several problems with foreign sentences in them."""
    for language in sorted(mgsm):
        for others in (["en"], [code for code in sorted(mgsm) if code not in (language, "en")]):
            if others == [language]:
                continue
            counts = [mixed_counts(mgsm, language, others, share) for share in (None, *SHARES)]
            cells = [f"{100 * ours / n:.1f} ({100 * plain / n:.0f}), n = {n}" for ours, plain, n in counts if n]
            yield [language, "en" if others == ["en"] else "others", *cells]


def mixed_counts(
    mgsm: Texts, language: str, others: list[str], share: tuple[float, float] | None
) -> tuple[int, int, int]:
    """Count (consistent by us, by the plain rule, texts) with such a share of foreign letters; None: no mixing."""
    rng = random.Random(f"{language} {others} {share}")
    ours = plain = count = 0
    for index in range(0, 240, 2 if len(others) == 1 else 1):
        foreign = others[index % len(others)]
        parts = [index + 1, index + 2, index + 3]
        own_sentences = [sentence for i in parts for sentence in sentences(mgsm[language][i])]
        other_sentences = [sentence for i in parts for sentence in sentences(mgsm[foreign][i])]
        if share is None:
            text: str | None = " ".join(own_sentences)
        elif len(own_sentences) != len(other_sentences):
            continue
        else:
            text = mix(own_sentences, other_sentences, *share, rng)
        if text is None:
            continue
        problem, answer = mgsm[language][index], sentences(mgsm[language][index + 4])[0]
        ours += consistency(problem, text, answer).consistent
        plain += by_argmax(problem, text, answer)
        count += 1
    return ours, plain, count


def speed(mgsm: Texts) -> str:
    """Say how many microseconds take one detection and one consistency, fresh texts."""
    texts = [text + " ." for group in mgsm.values() for text in group]
    started = time.perf_counter()
    for text in texts:
        detect(text)
    each = (time.perf_counter() - started) / len(texts) * 1e6
    started = time.perf_counter()
    for text in texts:
        consistency(text + " !", text + " ?", text + " ...")
    both = (time.perf_counter() - started) / len(texts) * 1e6
    return f"One detection of a problem takes {each:.0f} µs, one consistency of three such texts {both:.0f} µs."


@benchmark(page="docs/language.md")
def language(quick: bool, mgsm: Path, gsm8k: Path | None = None) -> Iterator[Section]:
    """Measure detection, then consistency."""
    problems = load(mgsm, "problem")
    stories, calculated = make_stories(20 if quick else 250)
    solutions = {"generated solution": calculated}
    if gsm8k:
        solutions = {"GSM8K, human solution": {"en": load(gsm8k, "solution")["en"][:250]}, **solutions}
    heads = ["all own", *(f"{low:.0%} to {high:.0%}" for low, high in SHARES)]
    yield Section("\n".join([
        f"{measured_with('language')}. MGSM: 250 problems a language.", speed(problems), "",
        "Right, % (undetermined / wrong), of `detect`. An undetermined part gives and takes nothing.", "",
        table(["texts", *STORY_LANGUAGES], *detection_rows(problems, stories, solutions)),
        "\\* our generated problems: MGSM has no Italian.", "",
        "Called consistent, % (in brackets: by the plain rule, the likeliest language of each part). Thoughts of three",
        "problems, some sentences of which were replaced by the same in another language, by the share of letters.",
        "The first column should be 100, all others 0.", "",
        table(["problem in", "foreign", *heads], *mixed_rows(problems)),
    ]), mark="results")  # fmt: skip
