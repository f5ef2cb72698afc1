"""Reads what a debater says: hidden thinking, the argument within its limit, and passages checked against the article.

A debater may say anything to win, so nothing of the form is left to it:

    thinking            text under "Thinking:", before the first "Argument:", or in think tags, closed or not, is hidden
    length              an argument is cut at the word limit; scripts without blanks count every character, and no
                        word counts for more than `WORD_CHARACTERS` characters
    <passage>...        becomes <v_passage> if the article holds it and it has `LEAST_WORDS` words, else <u_passage>
    other passage tags  are removed, also in disguise (entities, invisible or foreign letters, tags in tags)
"""

from __future__ import annotations

import html
import re
import unicodedata

import msgspec

from shared.reasoning_tags import CONTROL, TEXT

LEAST_WORDS = 4
WORD_CHARACTERS = 12
TAG_CHARACTERS = 60
MORE = 8
"""no more than so many times the allowed characters are looked at"""
_HEADING = re.compile(r"^[ \t*_#>]*(thinking|argument)[ \t*_]*:[ \t*_]*", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_PASSAGE = re.compile(r"<passage>(.*?)(?:</passage>|(?=<passage>)|$)", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(rf"<[^<>\n]{{0,{TAG_CHARACTERS}}}>|<[^a-z<>]{{0,9}}[vu]?[^a-z<>]{{0,9}}passage", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_PLAIN = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201a": "'", "\u201b": "'", "\u00b4": "'", "`": "'", "\u201c": '"', "\u201d": '"',
    "\u201e": '"', "\u00ab": '"', "\u00bb": '"', "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-",
    "\u2014": "-", "\u2212": "-",
})  # fmt: skip
_BRACKETS = str.maketrans("\u2039\u203a\u27e8\u27e9\u3008\u3009\uff1c\uff1e\ufe64\ufe65", "<><><><><>")
_ALIKE = str.maketrans("\u0430\u03b1\u02514@\u0435\u03b53\u04555$\u0440\u03c1\u0261\u0581\u050d", "aaaaaeeesssppggg")
"""letters of other scripts, and digits, that look like those of "passage\""""


class Passage(msgspec.Struct, frozen=True):
    """A quotation in a speech."""

    text: str
    verified: bool
    """whether the article holds it word for word"""


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a debate or a consultancy."""

    speaker: str
    answer: int
    """1 or 2, the answer that the speaker argues for; 0 for a question of the judge"""
    round: int
    """counted from 1"""
    argument: str
    """the text for opponent and judge, with <v_passage> and <u_passage>"""
    thinking: str = ""
    """hidden from everybody else"""
    passages: tuple[Passage, ...] = ()
    cut: bool = False
    """whether it was longer than allowed"""


def read_speech(
    text: str, words: int, article: str = "", *, speaker: str = "", answer: int = 0, round: int = 1
) -> Speech:
    """Return the speech that a debater's reply holds. words: limit of the argument."""
    thinking, argument = split_thinking(text)
    most = MORE * words * WORD_CHARACTERS
    shown = clean(argument[:most])
    end = end_of_words(shown, words)
    marked, passages = mark_passages(shown[:end], article)
    cut = len(argument) > most or end < len(shown.rstrip())
    return Speech(speaker=speaker, answer=answer, round=round, argument=marked, thinking=thinking, passages=passages,
                  cut=cut)  # fmt: skip


def strip_reasoning(text: str) -> tuple[str, str]:
    """Return the text in think tags and the text outside of them; a tag without its partner hides all on its side."""
    hidden = []
    for tags in (TEXT, CONTROL):
        if tags.open not in text and tags.close not in text:
            continue
        inside, close, rest = text.rpartition(tags.close)
        if close:
            hidden.append(inside.replace(tags.open, "").replace(tags.close, ""))
            text = rest
        text, opened, rest = text.partition(tags.open)
        if opened:
            hidden.append(rest)
    return "\n".join(hidden).strip(), text.strip()


def split_thinking(text: str) -> tuple[str, str]:
    """Return thinking and argument of a speech. Without the heading "Argument:" all is argument, or all is thinking
    where there is a heading "Thinking:"."""
    thinking, text = strip_reasoning(text)
    headings = list(_HEADING.finditer(text))
    if not headings:
        return thinking, text
    shown: list[str] = []
    hidden = [thinking, text[: headings[0].start()]]
    for number, heading in enumerate(headings):
        end = headings[number + 1].start() if number + 1 < len(headings) else len(text)
        (shown if heading.group(1).lower() == "argument" else hidden).append(text[heading.end() : end].strip())
    return "\n".join(filter(None, (part.strip() for part in hidden))), "\n".join(filter(None, shown))


def clean(text: str) -> str:
    """Remove invisible characters, and every tag that is or looks like a passage's but <passage> and </passage>."""
    text = _CONTROL.sub("", html.unescape(text))
    if not text.isascii():
        text = "".join(one for one in text if one in "\n\t" or unicodedata.category(one)[0] != "C")
        text = text.translate(_BRACKETS)
    while (shorter := _TAG.sub(_keep, text)) != text:
        text = shorter
    return text


def _keep(tag: re.Match[str]) -> str:
    text = tag.group()
    if text.lower() in ("<passage>", "</passage>"):
        return text.lower()
    spelt = unicodedata.normalize("NFKD", text).lower().translate(_ALIKE)
    return "" if "pass" in "".join(filter(str.isalpha, spelt)) else text


def end_of_words(text: str, words: int) -> int:
    """Return where the word limit ends in a text, at most `WORD_CHARACTERS` characters a word; its length if it has
    no more."""
    most = words * WORD_CHARACTERS
    end = len(text)
    for number, word in enumerate(_WORD.finditer(text[:most])):
        if number == words:
            end = word.start()
            break
    return len(text[: min(end, most)].rstrip())


def plain(text: str) -> str:
    """Return a text as passages are compared: blanks, quotation marks and dashes of one kind."""
    return " ".join(unicodedata.normalize("NFKC", text).translate(_PLAIN).split())


def mark_passages(argument: str, article: str) -> tuple[str, tuple[Passage, ...]]:
    """Return an argument whose passages are marked as verified or not, and the passages."""
    passages: list[Passage] = []
    source = f" {plain(article)} "

    def mark(match: re.Match[str]) -> str:
        text = match.group(1).replace("</passage>", "").strip()
        quoted = plain(text)
        verified = len(_WORD.findall(quoted)) >= LEAST_WORDS and _holds(source, quoted)
        passages.append(Passage(text, verified))
        name = "v_passage" if verified else "u_passage"
        return f"<{name}>{text}</{name}>"

    marked = _PASSAGE.sub(mark, argument).replace("</passage>", "").replace("<passage>", "")
    return marked.strip(), tuple(passages)


def _holds(source: str, quoted: str) -> bool:
    """Whether an article holds a passage that neither begins nor ends inside of a word."""
    start = source.find(quoted)
    while start >= 0:
        around = source[start - 1], source[start + len(quoted)]
        if not (around[0].isalnum() and quoted[0].isalnum()) and not (around[1].isalnum() and quoted[-1].isalnum()):
            return True
        start = source.find(quoted, start + 1)
    return False
