"""The domain "instructions": an answer follows instructions that a program can verify, the 25 kinds of IFEval.

`tests` of a row: {"instruction_id_list": [names], "kwargs": [values of each]}. All must be followed, strictly.

Strict checks the answer as it stands. Loose accepts any of its eight forms, with and without its first line, its last
line and its asterisks, since models like to add an introduction, an ending and bold print.
Every pattern here takes time linear in the answer, which is untrusted.
Differences from the published checkers: sentences are split by this project's own rules, languages are detected by
lid.176 (`verify/language.py`), and a text with too few words for a language counts as being in the language asked for.
Source: Zhou et al. 2023 (2311.07911), table 1 and section 2.2.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from shared.errors import DataError
from shared.json_reader import parse_json
from shared.types import Problem, Verdict
from verify.language import detect
from verify.verifiers import FORMS, Answer, Finding, verifier

Given = Mapping[str, Any]
Check = Callable[[str, Given], bool]

_WORD = re.compile(r"\w+")
_WHOLE_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
_SENTENCE_END = re.compile(r"(?<![.!?؟])[.!?؟]++[\"'”’)\]*]*+(?=\s|$)|[。！？।]")
_NO_END = re.compile(
    r"(?:^|[\s(])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|e\.g|i\.e|No|Inc|Ltd|Co|approx)\.$", re.IGNORECASE
)
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_BOLD = re.compile(r"\*\*([^\n*]*)\*\*")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
_FENCE = re.compile(r"^```(?:json)?|```$", re.IGNORECASE)
_AFTER_WORD = re.compile(r"[.,?!'\"].*", re.DOTALL)
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class Followed(NamedTuple):
    """For each instruction, whether an answer follows it: two lists of shape [instructions]."""

    strict: list[bool]
    loose: list[bool]


def _validate(problem: Problem) -> None:
    try:
        follow("a", problem.tests["instruction_id_list"], problem.tests["kwargs"])
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise DataError(f"its tests are not understood: {error}") from error


@verifier("instructions", ground_truth="tests", answer_in="response", form=FORMS["response"], validate=_validate)
async def follows_all(answer: Answer) -> Finding:
    """Check every instruction strictly, in a thread: an answer may be long."""
    names, values = answer.problem.tests["instruction_id_list"], answer.problem.tests["kwargs"]
    followed = await asyncio.to_thread(follow, answer.text, names, values)
    if not answer.text.strip():
        return Finding(Verdict.NO_ANSWER, 0.0, "no answer")
    broken = ", ".join(name for name, kept in zip(names, followed.strict, strict=True) if not kept)
    share = sum(followed.strict) / max(len(followed.strict), 1)
    if broken:
        return Finding(Verdict.WRONG, share, f"not followed: {broken}")
    return Finding(Verdict.CORRECT, 1.0, "every instruction is followed")


def follow(answer: str, names: Iterable[str], given: Iterable[Given]) -> Followed:
    """Check every instruction: `names` as in IFEval ("punctuation:no_comma"), `given` the values of each.

    Raises DataError for a name that is not known or values that are missing.
    """
    tasks = list(zip(names, given, strict=True))
    return Followed(
        [_follows(answer, name, values) for name, values in tasks],
        [any(_follows(form, name, values) for form in loose_forms(answer)) for name, values in tasks],
    )


def loose_forms(answer: str) -> list[str]:
    """Return the different forms of an answer with and without its first line, last line and asterisks."""
    lines = answer.split("\n")
    forms = []
    for first, last, stars in itertools.product((0, 1), (0, 1), (False, True)):
        text = "\n".join(lines[first : len(lines) - last]).strip() if first or last else answer
        forms.append(text.replace("*", "") if stars else text)
    return list(dict.fromkeys(forms))


def _follows(answer: str, name: str, values: Given) -> bool:
    if name not in CHECKS:
        raise DataError(f'the instruction "{name}" is not known: {", ".join(CHECKS)} are')
    try:
        return bool(answer.strip()) and CHECKS[name](answer, values)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f'the instruction "{name}" lacks a value, or has a wrong one: {error!r}') from error


def _compared(count: int, relation: str, bound: int) -> bool:
    """Compare a count with a bound by a relation of IFEval: "at least" or "less than". Raises DataError for others."""
    if relation not in ("at least", "less than"):
        raise DataError(f'the relation "{relation}" is not known: "at least" and "less than" are')
    return count >= bound if relation == "at least" else count < bound


def _is_in(text: str, language: str) -> bool:
    spoken = detect(text).language
    return not spoken or spoken == language


# ---- keywords, language ------------------------------------------------------------------------------------------


def _existence(answer: str, given: Given) -> bool:
    return all(word.casefold() in answer.casefold() for word in given["keywords"])


def _frequency(answer: str, given: Given) -> bool:
    count = answer.casefold().count(given["keyword"].strip().casefold())
    return _compared(count, given["relation"], given["frequency"])


def _no_forbidden_words(answer: str, given: Given) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) for word in given["forbidden_words"])


def _letter_frequency(answer: str, given: Given) -> bool:
    return _compared(answer.lower().count(given["letter"].lower()), given["let_relation"], given["let_frequency"])


def _response_language(answer: str, given: Given) -> bool:
    return _is_in(answer, given["language"])


# ---- lengths -----------------------------------------------------------------------------------------------------


def sentence_count(text: str) -> int:
    """Count the sentences: split after . ! ? before a blank, but not after initials and common abbreviations."""
    count, begin = 0, 0
    for end in _SENTENCE_END.finditer(text):
        if not _NO_END.search(text[max(begin, end.start() - 12) : end.start() + 1]):
            count += bool(_WORD.search(text, begin, end.start()))
            begin = end.end()
    return count + bool(_WORD.search(text, begin))


def _number_sentences(answer: str, given: Given) -> bool:
    return _compared(sentence_count(answer), given["relation"], given["num_sentences"])


def _number_words(answer: str, given: Given) -> bool:
    return _compared(len(_WORD.findall(answer)), given["relation"], given["num_words"])


def _number_paragraphs(answer: str, given: Given) -> bool:
    parts = _between(answer, "***")
    return all(parts) and len(parts) == given["num_paragraphs"]


def _nth_paragraph_first_word(answer: str, given: Given) -> bool:
    paragraphs = [part.strip() for part in answer.split("\n\n") if part.strip()]
    nth = given["nth_paragraph"]
    if len(paragraphs) != given["num_paragraphs"] or nth > len(paragraphs):
        return False
    word = _AFTER_WORD.sub("", paragraphs[nth - 1].split()[0].lstrip("'\""))
    return bool(word.lower() == given["first_word"].lower())


def _between(text: str, divider: str) -> list[str]:
    """Split a text at `divider` into stripped parts; a divider at the very beginning or end separates nothing."""
    parts = [part.strip() for part in text.split(divider)]
    begin, end = int(not parts[0]), len(parts) - int(len(parts) > 1 and not parts[-1])
    return parts[begin:end]


# ---- content and format ------------------------------------------------------------------------------------------


def _number_placeholders(answer: str, given: Given) -> bool:
    return bool(len(_PLACEHOLDER.findall(answer)) >= given["num_placeholders"])


def _postscript(answer: str, given: Given) -> bool:
    marker = given["postscript_marker"].strip()
    pattern = _POSTSCRIPTS.get(marker)
    return bool(pattern.search(answer.lower())) if pattern else marker.lower() in answer.lower()


def _number_bullet_lists(answer: str, given: Given) -> bool:
    lines = [line.strip() for line in answer.split("\n")]
    bullets = [line for line in lines if line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("", "*"))]
    return bool(len(bullets) == given["num_bullets"])


def _constrained_response(answer: str, given: Given) -> bool:
    return any(option in answer for option in _CONSTRAINED)


def _number_highlights(answer: str, given: Given) -> bool:
    single = sum(bool(found.strip("*").strip()) for found in _HIGHLIGHT.findall(answer))
    double = sum(bool(found.strip()) for found in _BOLD.findall(answer))
    return bool(single + double >= given["num_highlights"])


def _multiple_sections(answer: str, given: Given) -> bool:
    heads = re.findall(rf"{re.escape(given['section_spliter'].strip())}\s?\d+", answer)
    return bool(len(heads) >= given["num_sections"])


def _json_format(answer: str, given: Given) -> bool:
    try:
        parse_json(_FENCE.sub("", answer.strip()).strip())
    except ValueError:
        return False
    return True


def _title(answer: str, given: Given) -> bool:
    return any(found.strip() for found in _TITLE.findall(answer))


# ---- combinations, beginnings and ends, case, punctuation --------------------------------------------------------


def _two_responses(answer: str, given: Given) -> bool:
    parts = _between(answer, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeat_prompt(answer: str, given: Given) -> bool:
    return answer.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())


def _end_checker(answer: str, given: Given) -> bool:
    return answer.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


def _quotation(answer: str, given: Given) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_word_frequency(answer: str, given: Given) -> bool:
    count = sum(word.isupper() for word in _WHOLE_WORD.findall(answer))
    return _compared(count, given["capital_relation"], given["capital_frequency"])


def _english_capital(answer: str, given: Given) -> bool:
    return answer.isupper() and _is_in(answer.lower(), "en")


def _english_lowercase(answer: str, given: Given) -> bool:
    return answer.islower() and _is_in(answer, "en")


def _no_comma(answer: str, given: Given) -> bool:
    return "," not in answer


CHECKS: dict[str, Check] = {
    "keywords:existence": _existence, "keywords:frequency": _frequency,
    "keywords:forbidden_words": _no_forbidden_words, "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language, "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_words": _number_words, "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders, "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _number_highlights,
    "detectable_format:multiple_sections": _multiple_sections, "detectable_format:json_format": _json_format,
    "detectable_format:title": _title, "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt, "startend:end_checker": _end_checker,
    "startend:quotation": _quotation, "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _english_capital, "change_case:english_lowercase": _english_lowercase,
    "punctuation:no_comma": _no_comma,
}  # fmt: skip
"""name of an instruction in IFEval's rows -> its check"""
