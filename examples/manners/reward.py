r"""A reward for responses that stand by their answer: 0 where one denies, doubts or takes back what is in its box.

Only the words around the final box are read: the clause before it, the words right after it, and the sentences next to
it, in English, French, German, Spanish, Italian, Russian and Chinese. A denying word counts only where it reaches the
box ("is not \boxed{5}"), so "not 4 but \boxed{5}" is accepted. The words are in words.toml, and README.md says how
often such lists fail. Every search takes time linear in the response.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from verify.plugins import Case, reward
from verify.refusals import answer_boxes, around, visible

FEW_WORDS = 3
"""a sentence with fewer words before the box is read together with the one before it"""
SHORTEST = 4
"""letters; words that the problem uses too do not count, unless they are shorter"""

WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
FILLER = "(?:" + "|".join(sorted(map(re.escape, set(WORDS["fillers"].split())), key=len, reverse=True)) + ")"


def alternatives(lines: str) -> str:
    """Return one pattern made of the lines of words.toml."""
    return "|".join(lines.strip("\n").split("\n"))


PATTERNS = {name: re.compile(alternatives(lines)) for name, lines in WORDS["patterns"].items()}
DENIED = re.compile(
    rf"(?:{PATTERNS['not'].pattern})(?:\s*{FILLER}(?![^\W\d_])|\s*[\u4e00-\u9fff]{{1,4}}(?=\s*$)|[\s:=])*$"
)
POSSIBLE_CLAUSE = re.compile(f"{PATTERNS['hedged'].pattern}|{PATTERNS['hedging'].pattern}")
MODAL = re.compile(
    rf"(?:{PATTERNS['modal'].pattern})(?:\s*(?!(?:is|was|ist|est|è|gives)\b){FILLER}(?![^\W\d_])|[\s:=])*$"
)
STEPS_BACK = re.compile(
    r"(?<!\w)(?:"
    + "|".join(word for text in WORDS["steps_back"].values() for word in " ".join(text.split()).split(", "))
    + rf")(?!\w)|{alternatives(WORDS['steps_back_chinese'])}"
)
SENTENCE = re.compile(r"(?<!\d)[.](?!\w)|(?<=\d)[.](?=\s|$)|[!?。！？\n]")
OPEN_LINE = re.compile(r"(?<=[^\s.!?。！？])\s*\n\s*$")
"""the end of a line that continues in the box below it"""
OPENING = re.compile(r"^(?:well|so|then|hm+)\W+")
WORD = re.compile(r"[\u4e00-\u9fff]|[^\W\d_]{2,}")
LETTERS = re.compile(r"[^\W\d_]+")
QUESTION = re.compile(r"\W*[?？]")
COLON = re.compile(r"[:：]")


@reward("manners")
def manners(case: Case) -> float:
    """1 where the response stands by its answer, else 0."""
    return 0.0 if doubt(case.problem.text, case.response) else 1.0


def doubt(problem: str, response: str) -> str:
    """Return in words what denies or doubts the answer, "" where nothing does."""
    response = visible(response)
    answer, others = answer_boxes(response)
    if not answer:
        return ""
    head, tail = (text.replace("nything but", "nything_but") for text in around(response, answer, others))
    return _doubted_before(head) or _doubted_after(head, tail) or _stepped_back(head, tail, problem.lower())


def _sentences(head: str) -> list[str]:
    """Return the sentences up to the box, of which the last one holds it."""
    return SENTENCE.split(OPEN_LINE.sub(" ", head))


def _doubted_before(head: str) -> str:
    """Return what the clause of the answer, or the one before it, denies or doubts."""
    sentence = _sentences(head)[-1]
    *earlier, clause = (text.strip() for text in PATTERNS["clause"].split(sentence))
    concluded = PATTERNS["concluded"].search(sentence)
    if DENIED.search(clause) and not PATTERNS["subordinate"].search(clause):
        return "denied before it"
    if PATTERNS["wrong"].search(clause) or (earlier and PATTERNS["wrong"].search(earlier[-1]) and not concluded):
        return "called wrong, or somebody else's"
    empty = not re.search(r"\w", clause)
    if (
        PATTERNS["hedged"].search(clause)
        or PATTERNS["disbelieved"].search(clause)
        or MODAL.search(COLON.split(clause)[-1] or clause)
        or (empty and any(POSSIBLE_CLAUSE.fullmatch(OPENING.sub("", text)) for text in earlier))
        or (PATTERNS["disbelieved"].search(sentence) and not concluded)
    ):
        return "called a possibility"
    return ""


def _doubted_after(head: str, tail: str) -> str:
    """Return what the sentences next to the answer say against it."""
    after = [sentence for sentence in SENTENCE.split(tail) if sentence.strip()][:2]
    if any(PATTERNS["unsure"].search(sentence) for sentence in (*_sentences(head)[-2:], *after)):
        return "called a guess"
    if QUESTION.match(tail):
        return "asked, not answered"
    if any(PATTERNS[name].match(text) for name in ("retracted", "taken_back") for text in after):
        return "taken back after it"
    return "taken back after it" if PATTERNS["taken_back"].match(tail) else ""


def _stepped_back(head: str, tail: str, problem: str) -> str:
    """Return the words by which the writer steps back from the answer: it is taken back, mocked, unchecked, heard from
    somebody else, or left to the reader to choose."""
    *earlier, sentence = _sentences(head)
    earlier = [text for text in earlier if text.strip()]
    clause = PATTERNS["so"].split(PATTERNS["but"].split(sentence)[-1])[-1]
    has_little_to_say = len(WORD.findall(sentence)) < FEW_WORDS
    known = set(LETTERS.findall(problem))
    for text in (clause, *(earlier[-1:] if has_little_to_say else []), tail):
        for match in STEPS_BACK.finditer(text):
            words = [word for word in LETTERS.findall(match.group()) if len(word) >= SHORTEST]
            if not words or not known.issuperset(words):
                return f'not stood by: "{match.group()}"'
    return ""
