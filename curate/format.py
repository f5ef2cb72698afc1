"""The stage `format`: keeps problems whose answer a program can check. Source: Magistral (2506.10910), section 4.1."""

from __future__ import annotations

import re
from dataclasses import dataclass

from curate.choices import Choices, asks_for_option, find_choices, letter_of, needs_options, position_of
from curate.phrases import compile_phrases
from curate.stage import Decision, Fields, Kept, Rejected, VerifyingStage, at_least, is_open, option
from curate.statements import asks_proof, missing_figure, several_parts
from shared.errors import DataError
from shared.jsonl import Row
from shared.types import Verdict
from verify.ground_truth import may_be_placeholder, not_an_answer
from verify.published import lacking, to_native
from verify.text_cleaning import clean
from verify.verifiers import read_problem, verifier_of

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
    words: int = option(MOST_WORDS, "an answer of more words than this is prose (default %(default)s)", at_least(1))

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
