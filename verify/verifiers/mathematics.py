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
    plain = without_text(ground_truth).strip(" \t\r\n.!:;\"'()[]{}*$").casefold()
    if _NOTHING.fullmatch(plain) or _PLACEHOLDER.fullmatch(plain):
        return "a placeholder"
    if ground_truth.lstrip().startswith("####"):
        return "marked with ####, which is no part of it"
    if _BOX.search(ground_truth):
        return "in a box, whose content is the answer"
    longest = _longest_words(ground_truth)
    if longest >= SENTENCE_WORDS or longest > 1 and _TELLING.search(plain) and words_of(plain) not in _VALUES:
        return "a sentence"
    return ""


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
