"""Finds scripts that do not belong to a language, and keeps combining marks through the cleaning of text.

`clean` (text_cleaning.py) keeps letters and drops signs; the vowel signs of Indic scripts, Thai tone marks and Hebrew
points are neither, and without them Hindi, Nepali and Thai look like other languages. `shelter` replaces each mark by
a letter of Tangut, a script that no model reasons in, and `restore` puts the marks back. Accents written as marks of
their own are joined with their letters first (NFC).
"""

from __future__ import annotations

import re
import unicodedata

from verify.text_cleaning import script_units

FOREIGN = 0.01
"""share of the letters in a foreign script that breaks a language"""
LATIN_AMONG_OTHERS = 0.25
"""Latin words are common in every script (names, units, variables): only this share breaks one"""
LEAST_LATIN = 12
LEAST_LATIN_SENTENCE = 18
LATIN_WORDS = 4
LATIN_NAMES = 0.85
"""share of the letters in Latin script that breaks another script even where all of them are names"""

_CYRILLIC_CODES = "av ba be bg bxr ce cv kk krc kv ky mhr mk mn mrj myv os ru rue sah sr tg tt tyv udm uk xal ab"
CYRILLIC = frozenset(_CYRILLIC_CODES.split())
HAN = frozenset(("zh", "wuu", "yue", "ja", "ko"))
_WRITERS = (
    "KANA ja, HANGUL ko, ARABIC ar arz azb ckb fa glk mzn pnb ps sd ug ur, DEVANAGARI hi mr ne new mai bh gom sa, "
    "BENGALI bn as bpy, HEBREW he yi, GREEK el, ARMENIAN hy, GEORGIAN ka xmf, ETHIOPIC am, GURMUKHI pa, GUJARATI gu, "
    "ORIYA or, TAMIL ta, TELUGU te, KANNADA kn, MALAYALAM ml, SINHALA si, THAI th, LAO lo, MYANMAR my, KHMER km, "
    "TIBETAN bo dz, THAANA dv"
)
WRITTEN_IN = {"CYRILLIC": CYRILLIC, "CJK": HAN} | {
    script: frozenset(codes) for script, *codes in map(str.split, _WRITERS.split(","))
}
"""script, as the Unicode names of its letters begin -> codes of the languages that are written in it"""
NOT_LATIN = frozenset[str]().union(*WRITTEN_IN.values()) - {"sr", "kk", "tt"}
LEAST_ALPHABET = 4
"""letters of an alphabet that say which script a text is in: fewer may be names of points and variables"""

_MARKS = [chr(code) for code in range(0x300, 0x10000) if unicodedata.category(chr(code)) in ("Mn", "Mc")]
_STANDS_IN = 0x17000
_SHELTER = {ord(mark): chr(_STANDS_IN + index) for index, mark in enumerate(_MARKS)}
_RESTORE = {ord(letter): chr(mark) for mark, letter in _SHELTER.items()}
_ANY_MARK = re.compile("[" + "".join(_MARKS) + "]")
assert _STANDS_IN + len(_MARKS) < 0x187F8  # within the Tangut block


_SIGNS = str.maketrans({"？": "? ", "！": "! ", "．": ". ", "؟": "? ", "।": ". ", "۔": ". ", "։": ". "})
_NAMES = re.compile(r"[A-Za-z\u00c0-\u024f][A-Za-z\u00c0-\u024f'’.-]*+(?:[ ]++[A-Za-z\u00c0-\u024f'’.-]++)*+")
_SPACES = re.compile(r"[ ]+|(?<=\w)-(?=\w)")
_CHINESE = re.compile("[是这這那們们你您她它个嗎吗呢吧很沒从麼么还于於给]|所以|因此|除以|乘以|加上|首先|然後|我有")
_NOT_HAN = re.compile(r"[^\u3400-\u9fff]")
_LATIN_RUN = re.compile(r"(?<![^\W\d_])(?:[A-Za-z\u00c0-\u024f'’-]++[ ,;:]++){3,}+[A-Za-z\u00c0-\u024f'’-]*+")


def plain_signs(text: str) -> str:
    """Replace the signs that end a sentence in other scripts by those of ASCII, with a space after them."""
    return text if text.isascii() else text.translate(_SIGNS)


def apart(prose: str, language: str) -> str:
    """Put four or more Latin words in a row on a line of their own, where `language` is not written in Latin letters.

    Models switch to English in the middle of a Chinese sentence; that part is recognised only on its own.
    """
    return _LATIN_RUN.sub(_on_a_line, prose) if language in NOT_LATIN else prose


def _on_a_line(run: re.Match[str]) -> str:
    return f"\n{run.group()}\n" if len(run.group().split()) >= LATIN_WORDS else run.group()


def is_latin_among_others(prose: str, language: str) -> bool:
    """Return whether a sentence is mostly Latin words, as many as make a sentence, in a language of another script."""
    if language not in NOT_LATIN:
        return False
    units = script_units(without_names(prose))
    return 2 * units["latin"] > units["all"] and units["latin"] >= LEAST_LATIN_SENTENCE


def without_names(prose: str) -> str:
    """Return the prose without Latin names (Harry Potter, iPhone) and units (km) that stand among another script.

    A name has a capital letter, and at most three of them stand in a row: more are a sentence.
    """
    return _NAMES.sub(_drop_names, prose)


def _drop_names(run: re.Match[str]) -> str:
    words = _SPACES.split(run.group())
    names = [word for word in words if len(word) <= 2 or word.lower() != word]
    few = len(words) < LATIN_WORDS or max(map(len, words)) <= 2
    return " " if few and len(names) == len(words) else run.group()


def script_of(prose: str) -> str:
    """Return the script, of `WRITTEN_IN`, that all letters of prose are in, Latin names aside; "" for none of them, for
    Latin, for several, and for fewer than four letters of an alphabet."""
    signs = [sign for sign in without_names(prose) if sign.isalpha() or _ANY_MARK.match(sign)]
    names = {re.split("[ -]", unicodedata.name(sign, ""), maxsplit=1)[0] for sign in signs}
    kana = names & {"HIRAGANA", "KATAKANA"} and names <= {"HIRAGANA", "KATAKANA", "CJK"}
    script = "KANA" if kana else names.pop() if len(names) == 1 else ""
    enough = script in ("CJK", "KANA", "HANGUL") or len(signs) >= LEAST_ALPHABET
    return script if script in WRITTEN_IN and enough else ""


def only_writer(prose: str) -> str:
    """Return the language that the script of a short text shows by itself, "" for none; Han alone is Chinese."""
    writers = WRITTEN_IN.get(script := script_of(prose), frozenset())
    return "zh" if script == "CJK" else next(iter(writers)) if len(writers) == 1 and script != "GREEK" else ""


def written_in(prose: str, language: str, likely: bool) -> bool | None:
    """Return whether the script of a short text shows that it is in `language`, or in another one; None if neither.

    likely: whether the classifier takes `language` for the likeliest of those that share the script.
    """
    script = script_of(prose)
    writers = WRITTEN_IN.get(script, frozenset())
    if language in writers:
        return len(writers) == 1 or likely or (language == "ja" and may_be_japanese(prose)) or None
    return False if writers and script != "GREEK" else None  # Greek letters are signs of mathematics too


def may_be_japanese(prose: str) -> bool:
    """Return whether a text of Han characters alone may be Japanese: none of them is written in Chinese only."""
    han = _NOT_HAN.sub("", prose)
    return not _CHINESE.search(prose) and han.encode("cp932", "ignore").decode("cp932") == han


def shelter(text: str) -> str:
    """Return the text with accents joined to their letters, and every other combining mark replaced by a letter."""
    if text.isascii() or not _ANY_MARK.search(text):
        return text
    return unicodedata.normalize("NFC", text).translate(_SHELTER)


def restore(text: str) -> str:
    """Undo `shelter`, accents aside."""
    return text.translate(_RESTORE) if not text.isascii() else text


def foreign_script(units: dict[str, int], language: str, prose: str) -> str:
    """Return the script that does not belong to `language`, "" when there is none. units: `script_units` of prose."""
    total = units["all"]
    if language not in HAN and units["han"] > FOREIGN * total:
        return "Han"
    if language != "ja" and units["kana"] > FOREIGN * total:
        return "Kana"
    if language not in CYRILLIC and units["cyrillic"] > FOREIGN * total:
        return "Cyrillic"
    if language in NOT_LATIN and units["latin"] > LATIN_AMONG_OTHERS * total and units["latin"] >= LEAST_LATIN:
        latin = script_units(without_names(prose))["latin"]
        words = latin > LATIN_AMONG_OTHERS * total and latin >= LEAST_LATIN
        return "Latin" if words or units["latin"] > LATIN_NAMES * total else ""
    return ""
