r"""What may come next in reasoning in one language: no words in a script that is not the language's, letter by letter.

Free are signs, digits, single letters (Greek ones in every language), what is in `$...$`, `$$...$$`, `\(...\)`,
`\[...\]`, environments, `\boxed{...}` and code, and macros; but in `$...$` no two long words in a row, which are prose
between two prices. Among words of another script than Latin, free are also names (capitals, iPhone): at most three in
a row, and then one after each number (Anna: 5, Bob: 7); two small letters after a number or a sign of operations
(5 km, 2ab), and after a word in scripts without blanks (速度是km). That is narrower than what `foreign_script`
(verify/scripts.py) forgives. Bold, circled and other styled letters are the letters that they stand for.

A language has the scripts that the Unicode CLDR says, and those that the detector allows. vllm_parts.py makes a mask of
tokens out of it.
"""

from __future__ import annotations

import json
import unicodedata
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import langcodes
import numpy as np
import regex

from serve.engine import Constraint
from shared.chat import Chat
from shared.languages import TAGS
from shared.reasoning_tags import Tags
from verify.scripts import CYRILLIC, HAN, NOT_LATIN

MOST_NAMES = 3
MOST_HUMPS = 2
"""changes from a small letter to a capital within a name (LaTeX): more are a sentence without blanks"""
ASCII = 128
MARK = "// letters "
"""begins the grammar that stands for a mask"""
_SCRIPTS = {
    "Hans": ("Hani", "Bopo"),
    "Hant": ("Hani", "Bopo"),
    "Jpan": ("Hani", "Hira", "Kana"),
    "Kore": ("Hang", "Hani"),
}
"""codes for several scripts -> codes of Unicode's scripts"""
NO_BLANKS = frozenset(("Hani", "Hira", "Kana", "Hang", "Thai", "Laoo", "Khmr", "Mymr", "Tibt", "Grek"))
"""scripts in which a unit may follow a word without a blank, and Greek, whose letters are variables too"""


@lru_cache(maxsize=256)
def scripts_of(code: str) -> frozenset[str]:
    """Return the scripts, as Unicode abbreviates them, that a language of the detector is written in."""
    usual = langcodes.Language.get(TAGS.get(code, code), normalize=False).maximize().script or "Latn"
    scripts = {*_SCRIPTS.get(usual, (usual,)), *(("Cyrl",) * (code in CYRILLIC)), *(("Hani",) * (code in HAN))}
    return frozenset(scripts - {"Latn"} if code in NOT_LATIN else scripts | {"Latn"})


def has_letters_of_its_own(code: str) -> bool:
    """Return whether a language is written in another script than Latin, so that the mask keeps English words out."""
    return "Latn" not in scripts_of(code)


class MaskRequest(NamedTuple):
    """What a mask is made for."""

    scripts: list[str]
    """Scripts of the language: languages of the same scripts share a mask."""
    tags: Tags
    begin: list[tuple[int, int]]
    """tokens that are the opening tag, or begin it, and their letters"""
    close_ids: list[int]
    end_ids: list[int]
    """tokens that end the completion"""
    spelled: bool
    """whether the letters of the tags are tags too"""
    opened: bool
    """whether the reasoning has begun; else the completion may begin it, or be an answer at once"""

    @classmethod
    def read(cls, grammar: str) -> MaskRequest | None:
        """Return the request in a grammar, None for another grammar."""
        if not grammar.startswith(MARK):
            return None
        values = json.loads(grammar.partition("\n")[0].removeprefix(MARK))
        return cls(**{**values, "tags": Tags(*values["tags"])})


def reasoning_mask(code: str, chat: Chat, tags: Tags, *, opened: bool) -> Constraint:
    """Return the constraint of a completion with reasoning in the letters of a language, and a free answer."""
    added = chat.tokenizer.added_tokens_decoder
    begin = [(number, len(token.content)) for number, token in added.items() if tags.open.startswith(token.content)]
    close = [number for number, token in added.items() if token.content == tags.close]
    pair, scripts = Tags(tags.open, tags.close), sorted(scripts_of(code))
    request = MaskRequest(scripts, pair, begin, close, list(chat.stop_ids), chat.think_ids is None, opened)
    return Constraint("grammar", f"{MARK}{json.dumps(request._asdict())}\nstart: /(?s:.*)/")


class Kind(IntEnum):
    """The kinds of characters in prose."""

    FOREIGN = 0
    OWN = 1
    """a letter of the language's scripts"""
    CAPITAL = 2
    """a Latin capital, where Latin is not one of these"""
    SMALL = 3
    GREEK = 4
    DIGIT = 5
    SIGN = 6
    OPERATOR = 7
    BLANK = 8


@lru_cache(maxsize=16)
def kinds_of(scripts: frozenset[str]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the kind of every character of Unicode, by its code point."""
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
    points = np.r_[0:0xD800, 0xE000:0x110000]
    kinds = np.zeros(0x110000, np.uint8)
    letters = "".join(rf"\p{{sc={script}}}" for script in sorted(scripts))
    for kind, pattern in (
        (Kind.SIGN, r"[\p{sc=Zyyy}\p{sc=Zinh}]+"), (Kind.GREEK, r"\p{sc=Grek}+"), (Kind.SMALL, r"\p{sc=Latn}+"),
        (Kind.CAPITAL, r"(?V1)[\p{sc=Latn}&&\p{Lu}]+"), (Kind.DIGIT, r"\p{Nd}+"),
        (Kind.OWN, rf"(?V1)[[{letters}]--\p{{Nd}}]+"),
        (Kind.OPERATOR, r"[=+*/^(<>_−·×÷-]"), (Kind.BLANK, r"[ \t]+"),
    ):  # fmt: skip
        for match in regex.finditer(pattern, every):
            kinds[points[match.start() : match.end()]] = kind
    for match in regex.finditer(r"(?V1)[\p{sc=Zyyy}&&[\p{L}\p{So}]]", every):  # letters in another style: bold, circled
        plain = unicodedata.normalize("NFKC", match.group())
        if len(plain) == 1 and kinds[ord(plain)] != Kind.FOREIGN:
            kinds[ord(match.group())] = kinds[ord(plain)]
    return kinds


class MaskState(NamedTuple):
    """Where a completion is."""

    mode: str = "prose"
    """prose; before: the reasoning; done: after it; tag: in the closing tag and nothing else; until: its `end`; box:
    braces of it; or the character, or beginning of a macro, that decides the mode"""
    last: str = "sign"
    """in prose: own, sign, number (or operator), or of Latin and Greek letters"""
    names: int = 0
    """since the last word of the language"""
    end: str = ""
    matched: int = 0
    """characters of `end`; open braces of a box; of a formula see there"""
    tag: int = 0
    """characters of the closing tag, of the opening one before the reasoning"""


DONE, START, BEFORE = MaskState("done"), MaskState(), MaskState("before")


class LetterMask:
    """The characters that may follow, state by state. Symbols: ASCII, and after it the kinds of other characters."""

    def __init__(self, request: MaskRequest):
        self.request, self.kinds = request, kinds_of(frozenset(request.scripts))
        letters = sorted(set(filter(lambda letter: not letter.isascii(), "".join(request.tags[:2]))))
        self._signs = {ord(letter): number for number, letter in enumerate(letters)}
        """letters of the tags beyond ASCII -> control characters that stand for them"""
        self._open, self._close = (tag.translate(self._signs) for tag in request.tags[:2])
        self.start = START if request.opened else BEFORE
        self._touches = not NO_BLANKS.isdisjoint(request.scripts)
        self._modes = {
            "prose": self._prose, "$": self._dollar, "formula": self._formula, "`": self._tick, "``": self._ticks,
            "until": self._until, "box": self._box, "\\": self._backslash, "macro": self._macro,
        }  # fmt: skip

    def symbol(self, character: str) -> int:
        """Return the symbol of a character."""
        point = ord(character)
        return point if point < ASCII else self._signs.get(point, ASCII + int(self.kinds[point]))

    def step(self, state: MaskState, symbol: int) -> MaskState | None:
        """Return the state after one more character, None where it may not come."""
        if state.mode == "done":
            return state
        character = chr(symbol) if symbol < ASCII else ""
        kind = Kind(int(self.kinds[symbol]) if character else symbol - ASCII)
        if state.mode == "before":
            return self._before(state, character)
        tag, close = 0, self._close
        if self.request.spelled and character:
            tag = state.tag + 1 if close[state.tag] == character else int(close[0] == character and state.mode != "tag")
        if tag == len(close):
            return DONE
        after = self._modes[state.mode](state, kind, character) if state.mode != "tag" else None
        if after is None:
            return MaskState("tag", tag=tag) if tag else None
        return after._replace(tag=tag)

    def _before(self, state: MaskState, character: str) -> MaskState:
        if not state.tag and character.isspace():
            return state
        opening = self._open
        if not self.request.spelled or opening[state.tag] != character:
            return DONE
        return START if state.tag + 1 == len(opening) else state._replace(tag=state.tag + 1)

    def _prose(self, state: MaskState, kind: Kind, character: str) -> MaskState | None:
        if character and character in "$`\\":
            return MaskState(character, names=state.names)
        latin = state.last not in ("own", "sign", "number", "behind")
        if kind is Kind.FOREIGN:
            return None
        if kind is Kind.OWN:
            return MaskState(last="own")
        if kind is Kind.BLANK:
            last = "behind" if latin else "sign" if state.last == "own" else state.last
            return MaskState(last=last, names=state.names)
        if kind is Kind.SIGN:
            return MaskState(last="sign", names=state.names)
        if kind in (Kind.DIGIT, Kind.OPERATOR):
            names = min(state.names, MOST_NAMES - 1) if kind is Kind.DIGIT else state.names
            return MaskState(last="number", names=names)
        if kind is Kind.GREEK:
            greek = state.last.removeprefix("greek") if state.last.startswith("greek") else "0"
            return MaskState(last=f"greek{int(greek) + 1}", names=state.names) if greek < "3" else None
        return self._letter(state, kind) if latin else self._word(state, kind)

    def _word(self, state: MaskState, kind: Kind) -> MaskState | None:
        """The first letter of a Latin word; after another one and a blank it counts as a name."""
        names = state.names + (state.last == "behind")
        if names > MOST_NAMES:
            return None
        counted = "counted" if state.last == "behind" else ""
        if kind is Kind.CAPITAL:
            return MaskState(last=f"capital {counted}", names=names)
        unit = state.last == "number" or (state.last == "own" and self._touches)
        return MaskState(last="unit" if unit else f"letter {counted}", names=names)

    @staticmethod
    def _letter(state: MaskState, kind: Kind) -> MaskState | None:
        """A further letter of a Latin word: a name, a unit, or none that is allowed."""
        last = state.last
        if last.startswith("name"):
            humps = int(last[-1]) + (kind is Kind.CAPITAL and last.startswith("name small"))
            size = "small" if kind is Kind.SMALL else "capital"
            return state._replace(last=f"name {size} {humps}") if humps <= MOST_HUMPS else None
        if last.startswith("capital") or (kind is Kind.CAPITAL and last.startswith(("letter", "unit"))):
            names = state.names + (not last.endswith("counted"))
            size = "small" if kind is Kind.SMALL else "capital"
            return MaskState(last=f"name {size} 0", names=names) if names <= MOST_NAMES else None
        if last == "unit" or last.startswith("greek"):
            return MaskState(last="pair", names=state.names)
        return None

    def _dollar(self, state: MaskState, kind: Kind, character: str) -> MaskState | None:
        """Behind a dollar: a price, or a formula."""
        if character == "$":
            return MaskState("until", names=state.names, end="$$")
        if kind in (Kind.OWN, Kind.DIGIT, Kind.BLANK) or (character and character in "\n.,;:)<"):
            return self._prose(MaskState(names=state.names), kind, character)
        return self._formula(MaskState("formula", names=state.names), kind, character)

    @staticmethod
    def _formula(state: MaskState, kind: Kind, character: str) -> MaskState | None:
        """In a formula, before its first macro; matched: letters of a word, 4: blank after three, 5: letter again."""
        if character == "$":
            return MaskState(names=state.names)
        if character == "\\":
            return MaskState("until", names=state.names, end="$")
        if character == "\n":
            return None
        if kind in (Kind.DIGIT, Kind.SIGN, Kind.OPERATOR, Kind.BLANK):
            return state._replace(matched=4 if kind is Kind.BLANK and state.matched in (3, 4) else 0)
        return None if state.matched == 5 else state._replace(matched=(1, 2, 3, 3, 5)[state.matched])

    def _tick(self, state: MaskState, kind: Kind, character: str) -> MaskState | None:
        if character == "`":
            return MaskState("``", names=state.names)
        return None if character == "\n" else MaskState("until", names=state.names, end="`")

    def _ticks(self, state: MaskState, kind: Kind, character: str) -> MaskState | None:
        if character == "`":
            return MaskState("until", names=state.names, end="```")
        return self._prose(MaskState(names=state.names), kind, character)

    @staticmethod
    def _until(state: MaskState, kind: Kind, character: str) -> MaskState | None:
        end, matched = state.end, state.matched
        if character == "\n" and end in ("$", "`"):
            return None
        matched = matched + 1 if end[matched] == character else int(end[0] == character)
        if matched < len(end):
            return state._replace(matched=matched)
        return MaskState("until", names=state.names, end="}") if end == "\\end{" else MaskState(names=state.names)

    @staticmethod
    def _box(state: MaskState, kind: Kind, character: str) -> MaskState | None:
        braces = state.matched + (character == "{") - (character == "}")
        return state._replace(matched=min(braces, 8)) if braces else MaskState(names=state.names)

    def _backslash(self, state: MaskState, kind: Kind, character: str) -> MaskState | None:
        if character and character in "([":
            return MaskState("until", names=state.names, end="\\)" if character == "(" else "\\]")
        if character.isalpha():
            return self._macro(MaskState("macro", names=state.names), kind, character)
        return MaskState(names=state.names)

    def _macro(self, state: MaskState, kind: Kind, character: str) -> MaskState | None:
        if character.isalpha():
            name = state.end + character
            return state._replace(end=name if "boxed".startswith(name) or "begin".startswith(name) else "-")
        if character == "{" and state.end == "boxed":
            return MaskState("box", names=state.names, matched=1)
        if character == "{" and state.end == "begin":
            return MaskState("until", names=state.names, end="\\end{")
        return self._prose(MaskState(names=state.names), kind, character)
