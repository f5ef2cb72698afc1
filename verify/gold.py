r"""Can completions be compared with this true answer? Asked of every row before a run, not of every completion in it.

`not_an_answer` is cheap: a placeholder ("see solution", "N/A", "nan", "proof"), a sentence, a whole box. Such a text is
understood (as words), so that nothing ever fails, and equals no answer that a model gives: the problem grades every
completion wrong, for a whole run, without a word. `Pool.grade` finds the others: answers that the verifier does not
understand are no grade.
"""

from __future__ import annotations

import re

from verify.math.brackets import without_text
from verify.math.plain import prepared
from verify.math.words import words_of

SENTENCE_WORDS = 6
"""so many words in a row, without a comma between, are a sentence and no value"""
SENTENCE_HAN = 12
"""so many Chinese characters in a row"""
DOUBTFUL_WORDS = 3
"""so many words in a row may be a value ("the empty set"), which a completion must spell alike"""

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
"""what two parts of an answer are joined by, each with words of its own"""
_HAN = re.compile(rf"[\u4e00-\u9fff]{{{SENTENCE_HAN},}}")


def not_an_answer(gold: str) -> str:
    """What a true answer is instead of a value, an expression or a name, in a few words; "" where it may be one.

    Example: not_an_answer("See solution.") == "a placeholder"
    """
    plain = without_text(gold).strip(" \t\r\n.!:;\"'()[]{}*$").casefold()
    if _NOTHING.fullmatch(plain) or _PLACEHOLDER.fullmatch(plain):
        return "a placeholder"
    if gold.lstrip().startswith("####"):
        return "marked with ####, which is no part of it"
    if _BOX.search(gold):
        return "in a box, whose content is the answer"
    longest = _longest_words(gold)
    if longest >= SENTENCE_WORDS or longest > 1 and _TELLING.search(plain) and words_of(plain) not in _VALUES:
        return "a sentence"
    return ""


def is_doubtful(gold: str) -> bool:
    """True for answers of several words, which only a completion with the same words can equal."""
    return _longest_words(gold) >= DOUBTFUL_WORDS


_VALUES = frozenset({"no solution", "no solutions", "there is no solution", "there are no solutions"})


def _longest_words(gold: str) -> int:
    """Words in the longest row of them, in an answer that the verifier takes for words; 0 in one that it computes."""
    if "\\begin" in gold or words_of(prepared(gold)) is None:
        return 0
    plain = _JOINED.sub(",", without_text(gold))
    if _HAN.search(plain):
        return SENTENCE_WORDS
    return max((len(found.group().split()) for found in _WORDS.finditer(plain)), default=0)
