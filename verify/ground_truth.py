r"""Ground truths that no completion can equal, found once per row before a run.

Placeholders ("see solution", "notfound", "[INVALID]"), sentences, whole boxes, and values with more around them than
`verify/math/dress.py` takes away ("5 (2 marks)", pictures, a table in HTML). The checker reads such a text as words, so
that nothing fails: every completion of the problem would be graded wrong for a whole run, without a warning.
"""

from __future__ import annotations

import re
from html.entities import html5

from verify.math.brackets import without_text
from verify.math.dress import undressed
from verify.math.plain import prepared
from verify.math.words import words_of

SENTENCE_WORDS = 6
"""this many words in a row, without a comma between them, are a sentence and not a value"""
SENTENCE_HAN = 12
"""this many Chinese characters in a row are a sentence"""
DOUBTFUL_WORDS = 3
"""this many words in a row may be a value ("the empty set"), which a completion must spell alike"""

_EDGES = " \t\r\n.,!:;?\"'`()[]{}<>*$#"
_STYLE = re.compile(
    r"\\(?:text|mathrm|textrm|textbf|mathbf|textit|mathit|emph|mbox|operatorname|texttt)\s*\{([^{}]*)\}"
)
_PLACEHOLDER = re.compile(
    r"n\s?/\s?a|n\.a|nan|null|nonetype|q\.?\s?e\.?\s?d|tbd|todo|to be determined|omitted|missing|proofs?|proved|proven"
    r"|see\s.*|(?:shown |as |given )?(?:above|below)|same as above|as required|verified|placeholder|object object"
    r"|not\s?(?:available|applicable|given|provided|found|answered|solved|parsed|extracted)|none?\s?found|unanswered"
    r"|no\s?(?:final\s?)?answer\b.*|answers? (?:(?:may|will|can) )?(?:vary|varies)|answer not .*"
    r"|(?:insert |enter )?(?:the |your )?(?:final |correct )?answers?(?: here)?|ref|value|name|div/0"
    r"|(?:voir|siehe|vedi|véase|vea)\b.*|ver (?:la )?(?:solución|demostración|explicación|respuesta)\b.*|см\b.*"
    r"|(?:la |une )?(?:preuve|démonstration)|(?:der )?beweis|(?:la )?(?:demostración|dimostrazione)|доказательство"
    r"|sans réponse|keine antwort|sin respuesta|нет ответа"
    r"|证明|证明略|略|(?:解答|答案|图)?略|(?:答案|解答|解)?(?:如|见).*|无答案|没有答案|暂无(?:答案)?",
    re.DOTALL,
)
_SIGNS_BETWEEN = re.compile(r"[\W_]+")
_MARKED_TEXTS = (
    "nosolutiongiven answernotfound noanswerfound cannotparse parseerror parsingerror unparsable unparseable"
    " extractionfailed noresult noresponse nullvalue tba tbc fixme pending wip missingvalue redacted deleted removed"
    " notspecified unspecified unavailable seesolution seeabove seebelow seeproof seeimage seefigure seeattached"
    " youranswer finalanswer groundtruth groundtruthanswer theproof proofproblem openended openendedquestion"
    " lefttothereader inconnu unbekannt desconocido desconocida sconosciuto неизвестно нетответа ответанет ненайдено"
    " aucuneréponse pasderéponse nontrouvé keineangabe nichtgefunden noencontrado nessunarisposta nontrovato"
    " 答案缺失 缺失 未找到 答案未知"
)
"""without signs and blanks, what data sets write where an answer is missing"""
_MARKERS = frozenset(_MARKED_TEXTS.split())
_STAND_IN = re.compile(r"none|nil|unknown|error|errors?|invalid|failed|failure|unsolved|未知|无|ошибка")
"""stand for a missing answer in many sets, and are the answer of some problems"""
_MARKED = re.compile(r"\s*(?:\[|<|\{\{)")
_TELLING = re.compile(
    r"\b(?:answers?|solution|because|therefore|hence|thus|proofs?|prove[ds]?|explanation|we|réponse|preuve|antwort|beweis"
    r"|respuesta|risposta|ответ|доказать|докажем"
    r"|see (?:the|above|below|figure|graph|solution|explanation|image|picture))\b"
)
_NOTHING = re.compile(r"[-–—?.…_*/\\\s]*")
_SIGNS = ("<", ">", "$<$", "$>$")
"""answers of a comparison"""
_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_PICTURE = re.compile(
    r"\\includegraphics|<img\b|!\[|\[asy\]|\\begin\{(?:tikzpicture|asy)|\.(?:png|jpe?g|gif|svg)\b", re.I
)
_HTML = re.compile(
    r"</?(?:[abiupq]|em|strong|br|hr|su[bp]|span|div|math|m[nior]|mrow|mfrac|msup|table|t[rdh]|[uo]l|li|font|code|pre"
    r"|h[1-6]|center|small|big|img)(?:\s[^<>]*)?/?>|<!--|&#x?[0-9a-f]+;",
    re.IGNORECASE,
)
_ENTITY = re.compile(r"&([A-Za-z]{2,}[0-9]*;)")
_DOUBLED = re.compile(r"(?<!\\)\\\\[A-Za-z]{2,}")
_ESCAPED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]|\t(?=ext|imes|an|heta|o\b|riangle)|\n(?=eq|abla)|\r(?=ight|ho)")
_QUOTED = re.compile(r"[\[(]\s*(['\"])[^'\"]*\1,?\s*[\])]|\{\s*['\"].*['\"]\s*:.*\}", re.DOTALL)
_REMARK = re.compile(
    r"[(\[]\s*(?:approx|rounded\b|correct to\b|to (?:the )?(?:nearest|\d|one|two|three)\b|\d+ ?(?:s\.?f|d\.?p|sig)\b"
    r"|\d+ (?:marks?|points?|pts)\b|accept\b|optional\b|or equivalent|est(?:imated?)?\b|ungefähr|environ|约)"
    r"|\A(?:about|approximately|approx\.?|roughly|around|circa|nearly|almost|ungefähr|etwa|environ|около|примерно|大?约)"
    r"\s*[-$\\\d]|\d\S* or so\Z|\d.*\b(?:because|since|therefore|hence|thus)\b"
)
_WORDS = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*(?:\s+[^\W\d_]+(?:['’-][^\W\d_]+)*)*")
_JOINED = re.compile(r"\\[A-Za-z]+|\b(?:and|or)\b")
"""matches what joins two parts of an answer, each with words of its own"""
_HAN = re.compile(rf"[\u4e00-\u9fff]{{{SENTENCE_HAN},}}")
_VALUES = frozenset({"no solution", "no solutions", "there is no solution", "there are no solutions"})


def not_an_answer(ground_truth: str) -> str:
    """Return in a few words what a ground truth is instead of a value, expression or name; "" where it may be one.

    Example: not_an_answer("See solution.") == "a placeholder"
    """
    plain = _bare(ground_truth)
    if plain == "" and ground_truth.strip() in _SIGNS:
        return ""
    if _NOTHING.fullmatch(plain) or _is_marker(plain):
        return "a placeholder"
    if _STAND_IN.fullmatch(plain) and _MARKED.match(ground_truth):
        return "a placeholder"
    if ground_truth.lstrip().startswith("####"):
        return "marked with ####, which is no part of it"
    if _BOX.search(ground_truth):
        return "in a box, whose content is the answer"
    if wrapping := _wrapping(ground_truth):
        return wrapping
    longest = _longest_words(ground_truth)
    if longest >= SENTENCE_WORDS or longest > 1 and _TELLING.search(plain) and words_of(plain) not in _VALUES:
        return "a sentence"
    return ""


def _is_marker(plain: str) -> bool:
    return _PLACEHOLDER.fullmatch(plain.replace("_", " ").replace("\\", "")) is not None or (
        _SIGNS_BETWEEN.sub("", plain) in _MARKERS
    )


def may_be_placeholder(ground_truth: str) -> bool:
    """Return whether an answer is a word such as "None" or "unknown", which many data sets write where they have no
    answer, and which is the answer of some problems."""
    return bool(_STAND_IN.fullmatch(_bare(ground_truth)))


def is_doubtful(ground_truth: str) -> bool:
    """Return whether an answer has several words, so that only a completion with the same words can equal it."""
    return _longest_words(ground_truth) >= DOUBTFUL_WORDS


def _bare(ground_truth: str) -> str:
    """Return the text in lower case, without styles, brackets and punctuation around it."""
    text = undressed(ground_truth)
    for _ in range(3):  # one in another
        text = _STYLE.sub(r" \1 ", text)
    return " ".join(text.split()).strip(_EDGES).casefold()


def _wrapping(ground_truth: str) -> str:
    """Return in a few words what stands around the value, "" for a value alone."""
    text = undressed(ground_truth).strip()
    if _PICTURE.search(text):
        return "a picture"
    if _HTML.search(text) or any(name in html5 for name in _ENTITY.findall(text)):
        return "written in HTML"
    if _ESCAPED.search(ground_truth):
        return "damaged: a backslash and the letter after it were read as one control character"
    if _DOUBLED.search(text) and not re.search(r"(?<!\\)\\begin", text):
        return "written with doubled backslashes"
    if _QUOTED.fullmatch(text):
        return "the text of a Python or JSON value"
    if _REMARK.search(" ".join(without_text(text).split()).casefold()):
        return "a value with a remark beside it"
    return ""


def _longest_words(ground_truth: str) -> int:
    """Return the most words in a row in an answer that the verifier reads as words; 0 for one that it computes."""
    if "\\begin" in ground_truth or words_of(prepared(ground_truth)) is None:
        return 0
    plain = _JOINED.sub(",", without_text(ground_truth))
    if _HAN.search(plain):
        return SENTENCE_WORDS
    return max((len(found.group().split()) for found in _WORDS.finditer(plain)), default=0)
