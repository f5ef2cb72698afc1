r"""Detects in a problem's statement requests for proofs, several parts, and missing figures. Seven languages.

The phrases are tuned for precision in what they reject: a request is an imperative ("Prove that"), not every use of
its verb ("will the census show that"). Drawings in the text ([asy], tikz) are blanked first. The phrases of all stages
are in phrases.toml.
"""

from __future__ import annotations

import re
import tomllib
from importlib import resources

PHRASES: dict[str, dict[str, list[str]]] = tomllib.loads(
    resources.files("curate").joinpath("phrases.toml").read_text(encoding="utf-8")
)
"""kind of phrase -> language -> phrases"""


def compile_phrases(kind: str, form: str = "(?:{})", before: str = "", after: str = "") -> re.Pattern[str]:
    """Compile all phrases of a kind into one pattern without regard to case, in the order of the file.

    form: the whole pattern, {} for the phrases. before, after: what surrounds a phrase that is not Chinese.
    """
    phrases = [
        phrase if language == "zh" else f"{before}(?:{phrase}){after}"
        for language, words in PHRASES[kind].items()
        for phrase in words
    ]
    return re.compile(form.replace("{}", "|".join(phrases)), re.IGNORECASE)


_DRAWING = re.compile(
    r"\[asy\].*?(?:\[/asy\]|\Z)|\\begin\{(asy|tikzpicture|picture)\}.*?(?:\\end\{\1\}|\Z)|```asy.*?(?:```|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_TABLE = re.compile(r"\\begin\{(?:tabular|array|matrix|[pbvB]matrix|longtable)|\|\s*-{3,}|<table", re.IGNORECASE)
_DISPLAY = re.compile(
    r"\\\[|\$\$|\\begin\{(?:align|equation|gather|cases|eqnarray)|\n[ \t]*(?:[-*•]|\\bullet|\$\\bullet)"
)
_PICTURE_FILE = re.compile(r"!\[[^\]\n]{0,200}\]\([^)\n]{1,300}\)|\\includegraphics|<img\b|\[img\]", re.IGNORECASE)
_FIGURE, _SHOWN = compile_phrases("figure"), compile_phrases("shown")

_PROOF = compile_phrases("proof", before=r"(?<![^\W_])")
_BEFORE = compile_phrases(
    "conjunction",
    r"(?:\A|[.!?:;,。！？：；，、\n)\]$]|\\\]|\\\)|\b(?:{})\b)[\s$*]*(?:\(?(?:[a-h]|i{1,3}|iv|v|\d{1,2})[.)]\s*)?\Z",
)
"""text that may precede an imperative: the end of a sentence or clause, a comma, "and", a label"""
_AROUND = 60
"""number of characters before a verb that are examined"""
_PROVED, _BESIDE = compile_phrases("proved"), compile_phrases("beside")

_REQUEST = compile_phrases("request", before=r"\b", after=r"\b")
_CLAUSE = re.compile(r"(?<=[.!;,:。；，：$\])])\s+(?i:then\s+|also\s+)?|(?<=[\])$.,。，])(?=[A-ZА-Я一-鿿])")
_OPERATION = compile_phrases("operation")

_NUMBERINGS = ("abcdefgh", "абвгде", "一二三四", ("i", "ii", "iii", "iv", "v", "vi"))
_LEAD = r"(?:\\(?:textbf|mathbf|mathrm|text|textrm|textit|bf|rm|item)\s*[{\[]?\s*|\*\*|\$){0,4}"
_LABELS = (
    re.compile(rf"(?<![\w\\)]){_LEAD}[(（]\s*([a-hа-е]|[ivIV]{{1,3}}|\d{{1,2}})\s*[)）]"),
    re.compile(
        rf"(?:^|\n|\\\\|\\item|(?<=[.?!;:。？；：])\s)[ \t]*{_LEAD}"
        r"([a-hа-е]|[ivIV]{1,3}|\d{1,2})[).．、](?=[\s*$}\\])"
    ),
    compile_phrases("part", r"(?:^|(?<=[\s(]))\**(?:{})\s*[(:]?\s*([a-h]|[ivIV]{1,3}|\d{1,2}|[一二三四])\b"),
)
_MARKED = re.compile(
    r"^\W*[(（]?\s*(?:a|i|1|а)\s*[)）.:]\s*\S.*?[\s,;][(（]?\s*(?:b|ii|2|б)\s*[)）.:]\s*\S", re.DOTALL | re.IGNORECASE
)


def without_drawings(text: str) -> str:
    """Return the text with every drawing ([asy], tikz) blanked, all other characters in their place."""
    return _DRAWING.sub(lambda match: " " * len(match.group()), text)


def drawings(text: str) -> list[str]:
    """Return the drawings of a text, in order."""
    return [match.group() for match in _DRAWING.finditer(text)]


def has_request(text: str) -> bool:
    """Whether a text asks for something: a question mark, or a word such as "find" or "сколько"."""
    return _REQUEST.search(text) is not None


def asks_proof(text: str) -> str:
    """Return the words that ask for a proof, "" if none do.

    "To show that ..." and "Provide a proof" next to another request do not count: the answer to that one is checked.
    """
    text = without_drawings(text)
    for match in _PROOF.finditer(text):
        before = text[max(0, match.start() - _AROUND) : match.start()]
        chinese = match.group()[0] > "\u3000"
        clause = _BEFORE.search(before if match.start() <= _AROUND else f"x{before}")
        if not chinese and clause is None:
            continue
        if _PROVED.search(text[max(0, match.start() - 2) : match.end() + 2]):
            continue
        words = (clause.group() if clause and not chinese else "") + match.group()
        rest = text[: match.start()] + " . " + text[match.end() :]
        if _BESIDE.search(words) and has_request(rest):
            continue
        return re.sub(r"\s+", " ", words).strip(" .,:;$*)]\\。，")[:60]
    return ""


def several_parts(text: str, answer: str = "") -> str:
    """Return why a problem counts as asking for several things, "" if it does not: two labelled parts with a request
    each, or an answer with labelled parts. Labelled conditions are not parts."""
    text = without_drawings(text)
    for labels in _LABELS:
        asking = _count_requests(_segments(text, labels))
        if asking > 1:
            return f"{asking} labelled parts ask something"
    return "the answer has labelled parts" if _MARKED.match(answer) else ""


def _segments(text: str, labels: re.Pattern[str]) -> list[str]:
    """Return the pieces that begin at labels 1, 2, ... in this order; [] if there is no second label."""
    starts: list[int] = []
    for match in labels.finditer(text):
        label, position = match.group(1).lower(), len(starts)
        counted = [numbering[position] for numbering in _NUMBERINGS if position < len(numbering)]
        if label in counted or (label.isdigit() and int(label) == position + 1):
            starts.append(match.end())
    if len(starts) < 2:
        return []
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _count_requests(pieces: list[str]) -> int:
    """Count the pieces that ask something.

    After the last one the text may continue with the problem's only question, so only its first line counts unless an
    earlier piece asks too.
    """
    if not pieces:
        return 0
    before = sum(map(_is_request, pieces[:-1]))
    last = pieces[-1] if before else pieces[-1].strip().partition("\n")[0]
    return before + _is_request(last)


def _is_request(piece: str) -> bool:
    """Whether a labelled piece is a question of its own: a question mark, or a request that begins a clause."""
    if re.search(r"[?？]", piece):
        return True
    clauses = [clause.lstrip(" \t\n$*{}\\:.)]") for clause in _CLAUSE.split(piece)]
    return any(_REQUEST.match(clause) and not _OPERATION.match(clause) for clause in clauses)


def missing_figure(text: str) -> str:
    """Return the words that refer to a figure which the text does not contain, "" if none do."""
    if match := _PICTURE_FILE.search(text):
        return match.group()[:60]
    if _DRAWING.search(text) or _TABLE.search(text):
        return ""
    match = _FIGURE.search(text)
    if match is None and not _DISPLAY.search(text):
        match = _SHOWN.search(text)
    return re.sub(r"\s+", " ", match.group())[:60] if match else ""
