r"""The domain "math": an answer means the same as the ground truth (`verify/answer_checker.py`).

`not_an_answer` finds ground truths that no completion can equal, once per row before a run: placeholders ("see
solution", "N/A", "nan", "proof"), sentences and whole boxes. The checker reads such a text as words, so that nothing
fails: every completion of the problem would be graded wrong for a whole run, without a warning. The others, which the
checker does not understand, are not graded.
"""

from __future__ import annotations

import re

from shared.types import Verdict
from verify.answer_checker import AnswerChecker
from verify.math.brackets import without_text
from verify.math.dress import has_markup, undressed
from verify.math.plain import prepared
from verify.math.words import words_of
from verify.verifiers import Answer, Finding, verifier

REASONS = {
    Verdict.CORRECT: "answer is right",
    Verdict.WRONG: "answer differs from the true one",
    Verdict.TIMEOUT: "verifier killed at its deadline",
    Verdict.CRASH: "verifier process died",
    Verdict.UNVERIFIABLE: "the ground truth is not understood",
}

PLACEHOLDER = "a placeholder"
SENTENCE_WORDS = 6
"""this many words in a row, without a comma between them, are a sentence and not a value"""
SENTENCE_HAN = 12
"""this many Chinese characters in a row are a sentence"""
DOUBTFUL_WORDS = 3
"""this many words in a row may be a value ("the empty set"), which a completion must spell alike"""

_PLACEHOLDER = re.compile(
    r"n\s?/\s?a|#n/a|n\.a|nan|null|q\.?\s?e\.?\s?d|tbd|todo|to be determined|omitted|missing|proof|proofs|proved|proven"
    r"|see\s.*|(?:shown |as |given )?(?:above|below)|same as above|not (?:available|applicable|given|provided|found)"
    r"|no (?:final )?answer\b.*|answers? (?:(?:may|will|can) )?(?:vary|varies)|answer not .*"
    r"|(?:voir|siehe|vedi|véase|vea)\b.*|ver (?:la )?(?:solución|demostración|explicación|respuesta)\b.*|см\b.*"
    r"|(?:la |une )?(?:preuve|démonstration)|(?:der )?beweis|(?:la )?(?:demostración|dimostrazione)|доказательство"
    r"|证明|证明略|略|解答略|答案略|见解析|见解答|见证明|见答案",
    re.DOTALL,
)
_TELLING = re.compile(
    r"\b(?:answers?|solution|because|therefore|hence|thus|proofs?|prove[ds]?|explanation|we|réponse|preuve|antwort|beweis"
    r"|respuesta|risposta|ответ|доказать|докажем"
    r"|see (?:the|above|below|figure|graph|solution|explanation|image|picture))\b"
)
_MARKER_TEXTS = (
    "notfound noanswer nosolutiongiven answernotfound noanswerfound nofinalanswer cannotparse parseerror parsingerror"
    " unparsable unparseable extractionfailed noresult noresponse null nullvalue nan nonetype tbd tba tbc todo fixme"
    " placeholder pending wip omitted missing missingvalue redacted deleted removed notavailable notapplicable"
    " notprovided notgiven notspecified unspecified unavailable unanswered unsolved seesolution seeabove seebelow"
    " seeproof seeimage seefigure seeattached youranswer youranswerhere finalanswer theanswer theanswerhere answer"
    " answerhere groundtruth groundtruthanswer solution thesolution theproof proof proofs proved proven"
    " proofproblem openended openendedquestion lefttothereader inconnu unbekannt desconocido"
    " desconocida sconosciuto неизвестно неизвестен нетответа ответанет ненайдено нетданных aucuneréponse pasderéponse"
    " nontrouvé nonrenseigné keineantwort keineangabe nichtgefunden sinrespuesta"
    " noencontrado nessunarisposta nontrovato"
    " 无答案 没有答案 暂无答案 暂无 答案缺失 缺失 未找到 未知 答案未知"
)
_MARKERS = frozenset(_MARKER_TEXTS.split())
"""texts without signs and blanks that stand in data sets where an answer is missing"""
_PERHAPS_TEXTS = (
    "none nil void undefined undef unknown error err invalid blank failed failure fail exception timeout skip"
    " skipped unclear undetermined indeterminate uncertain default dummy na 无 无解答"
)
_PERHAPS = frozenset(_PERHAPS_TEXTS.split())
"""such texts that may also be an honest answer: none of them, undefined, unknown"""
_SPREADSHEET = re.compile(r"#(?:n/?a|ref|value|div/0|name|null|num)[!?]?", re.IGNORECASE)
_MARKED = re.compile(r"^\s*(?:\[[^\[\]]{2,40}\]|<[^<>]{2,40}>|\{\{?[^{}]{2,40}\}?\})\s*$")
_BRACKETED_TEXTS = "unk mask pad eos empty answer text image number value result"
_IN_BRACKETS = frozenset(_BRACKETED_TEXTS.split())
_FONT = re.compile(r"\\(?:text(?:bf|it|rm|tt|sf)|math(?:rm|bf|it|sf|tt)|mbox|operatorname|boldsymbol|emph)\b")
_SIGNS = re.compile(r"[\W_]+")
_LOST = re.compile(r"[\x07\x08\x0b\x0c]|\t(?:ext|imes|heta|an|frac)|\r(?:ight|ho)")
_NOTHING = re.compile(r"[-–—?.…_*/\\\s]*")
_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_WORDS = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*(?:\s+[^\W\d_]+(?:['’-][^\W\d_]+)*)*")
_JOINED = re.compile(r"\\[A-Za-z]+|\b(?:and|or)\b")
"""matches what joins two parts of an answer, each with words of its own"""
_HAN = re.compile(rf"[\u4e00-\u9fff]{{{SENTENCE_HAN},}}")


@verifier("math", needs="answer checker")
async def means_the_same(answer: Answer, checker: AnswerChecker) -> Finding:
    """Compare the answer with the problem's."""
    verdict = await checker.check(answer.problem.answer, answer.text)
    return Finding(verdict, float(verdict is Verdict.CORRECT), REASONS[verdict])


def not_an_answer(ground_truth: str) -> str:
    """Return in a few words what a ground truth is instead of a value, expression or name; "" where it may be one.

    Example: not_an_answer("See solution.") == "a placeholder"
    """
    if _LOST.search(ground_truth):
        return "without its backslashes, which were read as control characters"
    plain = _plain(ground_truth)
    if _NOTHING.fullmatch(plain) or _PLACEHOLDER.fullmatch(plain) or _is_marker(ground_truth):
        return PLACEHOLDER
    if ground_truth.lstrip().startswith("####"):
        return "marked with ####, which is no part of it"
    if _BOX.search(ground_truth):
        return "in a box, whose content is the answer"
    if has_markup(ground_truth):
        return "in HTML that is not read: write the value in LaTeX"
    longest = _longest_words(ground_truth)
    if longest >= SENTENCE_WORDS or longest > 1 and _TELLING.search(plain) and words_of(plain) not in _VALUES:
        return "a sentence"
    return ""


def _plain(ground_truth: str) -> str:
    text = without_text(_BOX.sub("", _FONT.sub("", undressed(ground_truth))))
    return text.strip(" \t\r\n.,!:;\"'`()[]{}<>*_$").casefold()


def _is_marker(ground_truth: str) -> bool:
    """Return whether a text, whatever stands around it, says that an answer is missing."""
    if _SPREADSHEET.fullmatch(ground_truth.strip()):
        return True
    key = _SIGNS.sub("", _plain(ground_truth))
    return key in _MARKERS or (_MARKED.match(ground_truth) is not None and (key in _PERHAPS or key in _IN_BRACKETS))


def may_be_missing(ground_truth: str) -> bool:
    """Return whether an answer may stand for a missing one: "None" and "unknown" are answers of some problems."""
    return _SIGNS.sub("", _plain(ground_truth)) in _PERHAPS


def is_doubtful(ground_truth: str) -> bool:
    """Return whether an answer has several words, so that only a completion with the same words can equal it."""
    return _longest_words(ground_truth) >= DOUBTFUL_WORDS


_VALUES = frozenset({"no solution", "no solutions", "there is no solution", "there are no solutions"})


def _longest_words(ground_truth: str) -> int:
    """Return the most words in a row in an answer that the verifier reads as words; 0 for one that it computes."""
    if "\\begin" in ground_truth or words_of(prepared(ground_truth)) is None:
        return 0
    plain = _JOINED.sub(",", without_text(ground_truth))
    if _HAN.search(plain):
        return SENTENCE_WORDS
    return max((len(found.group().split()) for found in _WORDS.finditer(plain)), default=0)
