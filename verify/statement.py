r"""Checks that the answer is a last line of its own: "Answer: \boxed{5}", "**\boxed{5}**", "$x = \boxed{5}$ cm".

Such a line cannot deny or doubt the answer in any language or words, which `doubt.py` can only search for.
The rule suits models whose prompt asks for such a line: most write a sentence around the box, and are refused.
"""

from __future__ import annotations

import re

from verify.math.unit import is_known

_ANSWER = (
    r"(?:(?:the |my |our )?(?:final |correct )?(?:answer|result|solution)(?: is| equals)?"
    r"|(?:la |ma |notre )?(?:réponse|solution)(?: finale)?(?: est)?|(?:le |mon )?résultat(?: final)?(?: est)?"
    r"|(?:die |meine )?(?:endgültige )?(?:antwort|lösung)(?: ist| lautet)?|(?:das )?(?:end)?ergebnis(?: ist| lautet)?"
    r"|(?:la |mi )?(?:respuesta|solución)(?: final)?(?: es)?|(?:el )?resultado(?: final)?(?: es)?"
    r"|(?:la |mia )?(?:risposta|soluzione)(?: finale)?(?: è)?|(?:il )?risultato(?: finale)?(?: è)?"
    r"|(?:окончательный |правильный )?(?:ответ|результат)|最终答案|答案|结果)\s*(?:是|为)?"
)
_SO = (
    r"(?:so|thus|therefore|hence|donc|ainsi|also|somit|daher|por lo tanto|así que|luego|quindi|dunque|perciò|итак"
    r"|значит|поэтому|следовательно|所以|因此|故)"
)
_MARKUP = re.compile(r"\\[,;!:()\[\]]|\\(?:quad|qquad|displaystyle|textbf|mathbf|bf|left|right)\b|[$*_#>{}`]")
_NAME = r"(?:[a-z]|\\[a-z]+)(?:\s?\d+)?(?:\([a-z]\))?"
_LEAD = re.compile(
    rf"\W*(?:{_SO}\W*)?(?:(?:ist|lautet|est|es|è)\s)?(?:{_ANSWER})?\W*(?:{_NAME}\s*=)?\s*", re.IGNORECASE
)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")


def stated(response: str, boxes: list[tuple[int, int]]) -> bool:
    """Return whether the last line holds the answer, and besides it only words that announce it and a unit.

    boxes: the places of the answer in the response, in their order, from command to closing brace.
    """
    start, end = boxes[0][0], boxes[-1][1]
    before, after = response[:start].rpartition("\n")[2], response[end:]
    unit = _MARKUP.sub(" ", _TEXT.sub(r"\1", after)).strip(" \t\n.。,;")
    between = [response[left:right] for (_, left), (right, _) in zip(boxes, boxes[1:], strict=False)]
    return (
        _LEAD.fullmatch(_MARKUP.sub("", before)) is not None
        and (not unit or is_known(unit))
        and not any(re.search(r"[^\W\d_]{4,}|\n", part) for part in between)
    )
