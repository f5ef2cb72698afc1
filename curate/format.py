r"""The stage `format`: keeps problems whose answer a program can check.

Multiple choice: it finds the options in the text, and restates the problem without them.
Options have labels A, B, C, ... (or a, b, c; А, Б, В) in order to the end of the text: "(A) 5", "\textbf{(B)}\ 7
\qquad", "C. 9" and "D) 11" at the beginning of lines. Problems that cannot be asked without their options ("which of
the following", "none of the above", "closest to") are recognised.

Source: Magistral (2506.10910), section 4.1.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from curate.stage import Decision, Fields, Kept, Rejected, VerifyingStage, is_open
from curate.statements import (
    asks_proof,
    compile_phrases,
    drawings,
    has_request,
    missing_figure,
    several_parts,
    without_drawings,
)
from shared.errors import DataError
from shared.jsonl import Row
from shared.types import Verdict
from verify.ground_truth import may_be_placeholder, not_an_answer
from verify.published import lacking, to_native
from verify.text_cleaning import clean
from verify.verifiers import read_problem, verifier_of

_WRAP = r"(?:\$|\*\*|\\(?:textbf|mathbf|mathrm|text|textrm|textit|bf|rm|mbox)\s*\{?\s*|\{\s*){0,4}"
_STYLES = (
    re.compile(rf"(?<![\w\\)]){_WRAP}[(（]\s*([A-J]|[А-Е])\s*[)）]"),
    re.compile(r"(?:^|\n|\\\\|\\qquad|\\quad)[ \t]*" + _WRAP + r"([A-J]|[А-Е])\s*[.)．、:：](?=[\s$\\*}\d-]|[^\W\d_])"),
    re.compile(rf"(?:(?<=\s)|^){_WRAP}([A-J]|[А-Е])\s*[)）](?=[\s$\\}}])"),
    re.compile(rf"(?<![\w\\)]){_WRAP}[(（]\s*([a-j]|[а-е])\s*[)）]"),
    re.compile(r"(?:^|\n)[ \t]*" + _WRAP + r"([a-j]|[а-е])\s*[.)．、](?=[\s$\\*}])"),
)
_ALPHABETS = ("ABCDEFGHIJ", "АБВГДЕ", "abcdefghij", "абвгде")
_LETTER = re.compile(
    r"^[\s$*]*(?:\\(?:text|textbf|mathrm|mathbf|textrm|mbox"
    r"|boxed)\s*\{\s*)*[(（]?\s*([A-Ja-jА-Еа-е])\s*[)）]?[\s.}$*]*$"
)
_LABELLED = re.compile(
    r"^[\s$*]*(?:\\(?:text|textbf|mathrm|mathbf|textrm"
    r"|mbox)\s*\{\s*)*[(（]?\s*([A-JА-Е])\s*[)）.:]\s*\}?\s*(?:\\\s|~)?\s*\S"
)

_WHICH, _CLOSEST = compile_phrases("which_option"), compile_phrases("closest")
_NONE_OR_ALL, _INSTRUCTION = compile_phrases("none_or_all"), compile_phrases("choose")
_UNFINISHED = compile_phrases("unfinished", r"(?:{})\s*\$?\s*$", before=r"\b")
_SPACING = r"(?:\\q?quad|\\indent|\\hfill|\\hspace\*?\s*\{[^{}]*\}|\\[ ,;!~]|~|\\\\|&|\s)"
_LISTS = r"(?:enumerate|itemize|tasks|choices|oneparchoices|multicols|center|align|aligned|gather)"
_BEGIN = re.compile(rf"^(?:{_SPACING}|[:：])+")
_END = re.compile(
    rf"(?:{_SPACING}|[,;.；。，]|\\item|\\end\{{{_LISTS}\*?\}}"
    r"|\*\*|\\(?:textbf|mathbf|mathrm|text|textrm)\s*\{?|\\)+$"
)
_THEN = re.compile(r"[,\s]+(?:and then|and|then)$")
_AND = re.compile(r",?\s+(?:and|or|und|oder|et|ou|y|o|e|и|или)$")
_OUTER_BRACES = re.compile(r"^\{((?:\\.|[^{}\\]|\{[^{}]*\})*)\}$")
_SEVERAL_LETTERS = re.compile(r"^[\s$]*(?:\\text\{)?\s*[A-J](?:\s*(?:,|and|&)\s*[A-J])+\s*\}?[\s.$]*$")
_STEM_END = re.compile(
    rf"(?:{_SPACING}|[:：(（]|\$|\\\[|\\\(|\*\*|\\begin\{{\w+\*?\}}(?:\{{[^{{}}]*\}}|\[[^\]]*\])?|\\item"
    r"|\\(?:textbf|mathbf|mathrm|text|textrm)\s*\{?|\{)+$"
)
_MOST_LABELS, _TAIL = 200, 300
"""number of labels of a text, and of characters at the end of one, that are looked at"""
MOST_WORDS = 6
"""largest number of words of an answer; the longest in MATH has four"""
PROBES = (r"q\sqrt{7919}+1", "3:07 p.m.")
"""An expression and a time of day, which no answer equals. An answer equals itself by its spelling alone, which proves
nothing; one that the verifier understands is found different from one of these."""
_NO_ANSWER = compile_phrases("no_answer", r"^\W*(?:{})\W*$")
_WORD = re.compile(r"[^\W\d_]{2,}")
_HAN = re.compile(r"[\u4e00-\u9fff]")


@dataclass
class FormatStage(VerifyingStage):
    """Keep problems with one checkable answer; multiple choice loses its options.

    rejected, with its reason: proofs ("prove that", "montrer que", "докажите", ...), several parts ("(a) Find ... (b)
    Find ..."), text that points to a figure and holds none ([asy], tikz, tables count as there), answers that the
    verifier does not understand or that are prose, programming problems whose tests are not readable.
    Rows with "domain": "open" only need a problem and an answer: nothing is to be checked there.
    Multiple choice loses its options: a letter is replaced by its option's content. Where that makes no sense ("which
    of the following", "none of the above", "is closest to") it is rejected.
    Languages of these words: en fr de es it ru zh.

    examples:
      python -m curate format raw.jsonl.gz --out formatted.jsonl
      python -m curate format a.jsonl b.jsonl --out formatted.jsonl --words=3
    """

    name = "format"
    concurrency = 64
    words: int = Field(default=MOST_WORDS, ge=1, description="an answer of more words than this is prose")

    async def decide(self, index: int, row: Row) -> Decision:
        """Keep, rewrite or reject a row by its own content."""
        fields = row.fields
        if not isinstance(fields.get("problem"), str) or not fields["problem"].strip():
            try:
                to_native(fields, "the row")
            except DataError as error:
                return Rejected("shape not readable", str(error))
            return Rejected("no problem text", f"'problem' is missing or empty{lacking(fields)}")
        if verifier_of(fields.get("domain")).ground_truth == "tests":
            try:
                read_problem(fields, "the row")
            except DataError as error:
                return Rejected("tests not readable", str(error))
            return Kept([fields])
        answer = fields.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            return Rejected("no answer", "'answer' is missing or empty")
        if is_open(fields):
            return Kept([fields])
        return await self._decide_math(fields, fields["problem"], str(answer).strip())

    async def _decide_math(self, fields: Fields, text: str, answer: str) -> Decision:
        if words := asks_proof(text):
            return Rejected("proof", words)
        choices = find_choices(text, answer)
        if choices is None and letter_of(answer) and asks_for_option(text):
            return Rejected("multiple choice: options not readable", f"the answer is {answer}")
        if choices is not None:
            content = await self._without_options(choices, answer)
            if isinstance(content, Rejected):
                return content
            text, answer = choices.stem, content
        if why := several_parts(text, answer):
            return Rejected("several parts", why)
        if words := missing_figure(text):
            return Rejected("missing figure", words)
        if why := await self._why_not_checkable(answer):
            return Rejected("answer not checkable", f"{answer[:80]}: {why}")
        if choices is None:
            return Kept([fields])
        rewritten = {**fields, "problem": text, "answer": answer, "options": choices.options}
        return Kept([rewritten], {"multiple choice rewritten": 1})

    async def _without_options(self, choices: Choices, answer: str) -> str | Rejected:
        """Return the answer of the problem without its options: the content of the option that a letter names; or a
        rejection, if the problem needs its options or the answer is none of them."""
        position = position_of(choices, answer)
        content = choices.options[position] if position >= 0 else answer
        if why := needs_options(choices, content):
            return Rejected(f"multiple choice: {why}", f"the answer is {answer}")
        if position >= 0:
            return content
        for content in choices.options:
            if content and await self.compare(content, answer) is Verdict.CORRECT:
                return answer
        return Rejected("multiple choice: answer is no option", f"{answer} is none of {choices.options}"[:300])

    async def _why_not_checkable(self, answer: str) -> str:
        """Return why answers cannot be graded against this one, "" if they can."""
        if _NO_ANSWER.match(answer) or may_be_placeholder(answer):
            return "it stands for an answer and is none"
        if what := not_an_answer(answer):
            return what
        words = count_words(answer)
        if words > self.words:
            return f"{words} words of prose"
        verdict = await self.compare(answer, answer)
        if verdict is not Verdict.CORRECT:
            return f"compared with itself: {verdict}"
        for probe in PROBES:
            verdict = await self.compare(answer, probe)
            if verdict is Verdict.WRONG:
                return ""
        return f"compared with another answer: {verdict}"


def count_words(answer: str) -> int:
    """Count words of prose, of two letters or more, outside of formulas; two Chinese characters count as one."""
    prose = clean(answer)
    han = len(_HAN.findall(prose))
    return len(_WORD.findall(_HAN.sub(" ", prose))) + (han + 1) // 2


class Choices(NamedTuple):
    """A multiple-choice problem, split into stem and options."""

    stem: str
    """the text before the options, without instructions such as "choose the letter", with drawings"""
    options: list[str]
    """contents of the options, in order"""
    labels: str
    """their letters, in order"""


def find_choices(text: str, answer: str) -> Choices | None:
    """Separate a problem from its options; None if it has none.

    Small letters, or only two labels, count as options only if the answer is such a letter, since they often label
    conditions.
    """
    masked = without_drawings(text)
    letter = letter_of(answer)
    for style in _STYLES:
        run = _longest_run(list(style.finditer(masked)))
        if len(run) < 2:
            continue
        labels = "".join(found.group(1) for found in run)
        certain = bool(letter) and letter.lower() in labels.lower()
        if not certain and (len(run) < 3 or labels[0].islower()):
            continue
        ends = [found.start() for found in run[1:]] + [len(text)]
        contents = [masked[found.end() : end] for found, end in zip(run, ends, strict=True)]
        contents[-1], tail = _cut_last(contents[-1], certain)
        if has_request(_INSTRUCTION.sub(" ", tail)) or contents[-1].rstrip().endswith(("?", "？")):
            continue  # the text goes on to ask something: the labels were conditions
        before = text[: run[0].start()]
        added = drawings(text[run[0].start() :])
        return Choices(_stem(before, added), [_content(content) for content in contents], labels)
    return None


def _longest_run(labels: list[re.Match[str]]) -> list[re.Match[str]]:
    """Return the longest series of labels from the beginning of an alphabet; the last one if several are equal."""
    labels = labels[-_MOST_LABELS:]
    best: list[re.Match[str]] = []
    for start, first in enumerate(labels):
        alphabet = next((letters for letters in _ALPHABETS if letters[0] == first.group(1)), "")
        if not alphabet:
            continue
        run = [first]
        for other in labels[start + 1 :]:
            if len(run) < len(alphabet) and other.group(1) == alphabet[len(run)]:
                run.append(other)
        if len(run) >= len(best):
            best = run
    return best


def _cut_last(content: str, certain: bool) -> tuple[str, str]:
    """Split the last option from the text after it: an instruction, or a separate paragraph."""
    instruction = _INSTRUCTION.search(content)
    cut = instruction.start() if instruction else len(content)
    paragraph = re.search(r"\S[^\n]*(\n)\s*\S" if not certain else r"\S[^\n]*(\n\s*\n)\s*\S", content)
    if paragraph:
        cut = min(cut, paragraph.start(1))
    return content[:cut], content[cut:]


def _content(text: str) -> str:
    """Return an option without the spacing, wrapping and punctuation around it."""
    before = None
    while before != text:
        before = text
        text = _without_loose_dollars(_without_loose_braces(_trim(_BEGIN.sub("", text), _END)))
        text = _OUTER_BRACES.sub(r"\1", text)
        for opening, closing in ((r"\[", r"\]"), (r"\(", r"\)")):
            if text.endswith(closing) and text.count(closing) > text.count(opening):
                text = text[:-2]
    return _trim(text, _AND).strip()


def _trim(text: str, end: re.Pattern[str]) -> str:
    """Remove what matches `end` at the end of the text; only the last characters are searched."""
    text = text.rstrip()
    kept = max(0, len(text) - _TAIL)
    return text[:kept] + end.sub("", text[kept:])


def _without_loose_braces(text: str) -> str:
    """Drop closing braces that nothing opened, and opening ones at the end."""
    kept, level = [], 0
    for position, sign in enumerate(text):
        escaped = position and text[position - 1] == "\\"
        if sign == "{" and not escaped:
            level += 1
        elif sign == "}" and not escaped:
            if not level:
                continue
            level -= 1
        kept.append(sign)
    return re.sub(r"(?:\\\w+\s*)?\{\s*$", "", "".join(kept)) if level else "".join(kept)


def _without_loose_dollars(text: str) -> str:
    """Remove enclosing dollars, "$5$" -> "5"; of an odd number of dollars, the one at an end."""
    signs = len(re.findall(r"(?<!\\)\$", text))
    if signs % 2 == 1:
        if text.endswith("$") and not text.endswith(r"\$"):
            return text[:-1].rstrip()
        return text[1:].lstrip() if text.startswith("$") else text
    if signs == 2 and text.startswith("$") and text.endswith("$"):
        return text[1:-1].strip()
    inner = re.match(r"^\\[(\[](.*)\\[)\]]$", text, re.DOTALL)
    return inner.group(1).strip() if inner and "\\)" not in inner.group(1) else text


def _stem(before: str, added: list[str]) -> str:
    """Return the statement without its options: words that introduce them are removed, an unfinished end gets a blank.

    Drawings after the statement stay there, followed by those among the options.
    """
    masked = without_drawings(before).rstrip()
    added = [before[len(masked) :].strip(), *added] if before[len(masked) :].strip() else added
    text = _INSTRUCTION.sub(" ", _trim(before[: len(masked)], _STEM_END)).strip()
    text = _trim(_trim(text, _STEM_END), _THEN)
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 1:
        text += "$"  # it belonged to a formula, not to the options
    if _UNFINISHED.search(text.rstrip("$")):
        text += " ____."
    elif text and text[-1] not in ".?!。？！$)}]":
        text += "."
    return "\n".join([text, *added])


def letter_of(answer: str) -> str:
    r"""Return the letter of an answer such as "B", "(B)", "\text{(B)}" or "B) 5"; "" if it has none."""
    match = _LETTER.match(answer) or _LABELLED.match(answer)
    return match.group(1) if match else ""


def asks_for_option(text: str) -> bool:
    """Whether a text asks to choose: "Which of the following", "Choose the correct letter"."""
    instructions = (found.group() for found in _INSTRUCTION.finditer(text))
    return _WHICH.search(text) is not None or any(re.search(r"[^\W\d_]", words) for words in instructions)


def position_of(choices: Choices, answer: str) -> int:
    """Return the index of the option that an answer names by its letter, from 0; -1 if it names none."""
    letter = letter_of(answer)
    return choices.labels.lower().find(letter.lower()) if letter else -1


def needs_options(choices: Choices, option: str) -> str:
    """Return why the problem cannot be asked without its options, "" if it can. `option`: the right one's content."""
    if _SEVERAL_LETTERS.match(option):
        return "several options are right"
    if _WHICH.search(choices.stem):
        return "which of the following"
    if _NONE_OR_ALL.search(option):
        return "none or all of the above"
    question = re.sub(r"____\.?", "", without_drawings(choices.stem)).strip()
    if _CLOSEST.search(question):
        return "closest of the options"
    if not option:
        return "options without text"
    if not has_request(question) and "____" not in choices.stem:
        return "no question without its options"
    return ""
