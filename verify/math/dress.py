r"""Removes what data sets and pages put around an answer: HTML, Python's quotes, doubled backslashes, "=", "(approx)".

What is removed never carries the value: `dress_of` names it, so that a reader of problems can tell how many there are.
"""

from __future__ import annotations

import html
import re

_BYTES = re.compile(r"""^\s*b(['"])(.*)\1\s*$""", re.DOTALL)
_QUOTED = re.compile(r"""^\s*(?:"([^"]*)"|'([^']*)'|``([^`']*)'')\s*$""", re.DOTALL)
_ENTITY = re.compile(r"&(?:[A-Za-z]{2,8}\d{0,2}|#\d{1,6}|#x[0-9A-Fa-f]{1,5});")
_POWERS = re.compile(r"<(sup|sub)(?:\s[^<>]*)?>([^<>]*)</\1\s*>", re.IGNORECASE)
_TAG = re.compile(
    r"<(b|strong|i|em|u|p|div|span|font|small|big|tt|code|pre|center|mark|h[1-6]|li|ul|ol|td|tr|body|html|answer)"
    r"(?:\s[^<>]*)?>(?=.*</\1\s*>)|</(?:b|strong|i|em|u|p|div|span|font|small|big|tt|code|pre|center|mark|h[1-6]|li|ul"
    r"|ol|td|tr|body|html|answer)\s*>|<(?:br|hr|wbr)\s*/?>|^\s*<p>",
    re.IGNORECASE | re.DOTALL,
)
_MARKUP = re.compile(r"</[A-Za-z][\w-]*\s*>|<[A-Za-z][\w-]*(?:\s[^<>]*)?/>")
_BACKSLASHES = re.compile(r"\\+")
_DOUBLED = re.compile(
    r"(?<!\\)\\\\(?:[dtc]?frac|sqrt|pi|text|math[a-z]+|cdot|times|left|right|circ|infty|begin|end|boxed|sin|cos|tan|ln|log"
    r"|leq?|geq?|neq?|in|cup|cap|pm|theta|alpha|beta|binom|overline|vec|angle|emptyset|operatorname|displaystyle)"
    r"(?![A-Za-z])"
)
_BOLD = re.compile(r"(?:(?<=\s)|^)\*\*([^*\s](?:[^*]*[^*\s])?)\*\*(?=$|[\s.,;:])")
_EQUALS = re.compile(r"^\s*(?:=\s*)+(?=[^=\s])")
_APPROXIMATE = r"approx(?:imate(?:ly)?|\.)?|rounded|ungefähr|environ|aproximadamente|circa|приблизительно|примерно|约"
_NEARLY = re.compile(
    rf"\s*(?:\\text\s*\{{\s*)?(?:\(\s*(?:{_APPROXIMATE})\s*\)|(?<=[\d\s}}])approx(?:imately|\.)?)(?:\s*\}})?\s*[.]?\s*$",
    re.IGNORECASE,
)
_NEARLY_BEFORE = re.compile(
    r"^\s*(?:\\text\s*\{\s*)?(?:approx(?:imately|\.)?|\(approx\.?\))(?:\s*\})?\s*(?=[-$\d\\])|^\s*(?:~|\\sim)\s*(?=-?\d)",
    re.IGNORECASE,
)
_DRESSED = re.compile(r"[<&\"'*=~]|\\\\|approx|\\sim|rounded|ungef|environ|aprox|circa|пр|约", re.IGNORECASE)


def undressed(text: str) -> str:
    r"""Return an answer without what stands around it: "<b>5</b>" -> "5", "b'5'" -> "5", "= 5" -> "5"."""
    if not _DRESSED.search(text):
        return text
    for _, remove in _LAYERS:
        text = remove(text)
    return text


def dress_of(text: str) -> str:
    """Return in words what `undressed` removes from an answer; "" for nothing."""
    names = []
    for name, remove in _LAYERS:
        plain = remove(text)
        if name and plain.strip() != text.strip():
            names.append(name)
        text = plain
    return " and ".join(names)


def has_markup(text: str) -> bool:
    """Return whether tags are left that `undressed` does not read, as those of a table or of MathML."""
    return _MARKUP.search(undressed(text)) is not None


def _without_quotes(text: str) -> str:
    quoted = _QUOTED.match(text)
    return (quoted[quoted.lastindex] if quoted.lastindex else "") if quoted else text


def _without_bytes(text: str) -> str:
    return _BYTES.sub(r"\2", text)


def _without_html(text: str) -> str:
    if "&" in text:
        text = _ENTITY.sub(lambda match: html.unescape(match.group()), text)
    if "<" not in text:
        return text
    text = _POWERS.sub(lambda match: f"{'^' if match.group(1).casefold() == 'sup' else '_'}{{{match.group(2)}}}", text)
    return _TAG.sub(" ", text)


def _single_backslashes(text: str) -> str:
    if not _DOUBLED.search(text) or any(len(run) % 2 for run in _BACKSLASHES.findall(text)):
        return text
    return _BACKSLASHES.sub(lambda run: run.group()[: len(run.group()) // 2], text)


def _without_bold(text: str) -> str:
    return _BOLD.sub(r"\1", text)


def _without_equals(text: str) -> str:
    return _EQUALS.sub("", text)


def _without_nearly(text: str) -> str:
    return _NEARLY_BEFORE.sub("", _NEARLY.sub("", text))


_LAYERS = (
    ("Python's b'...' of bytes", _without_bytes), ("quotation marks", _without_quotes), ("HTML", _without_html),
    ("doubled backslashes", _single_backslashes), ("", _without_bold), ('"=" before it', _without_equals),
    ('"approximately"', _without_nearly),
)  # fmt: skip
