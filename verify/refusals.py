r"""Refuses completions that Magistral's rules would reward but should not, each rule by its name in `reward.refuse`.

    empty         nothing in the box                                                    -> format broken
    thoughtless   no reasoning, one word, one thing again and again, the problem copied,
                  letters or numbers in their order, the answer alone                   -> format broken
    hidden        boxes in comments, in code or struck out are not seen                 -> format broken, or another box
    several       another answer is offered with it ("4 or")                            -> answer wrong
    unstated      the answer's line is not the last one, or holds more than it     -> answer wrong; off by default
    restated      a computation that is still to be done, for a plain number            -> answer wrong
    foreign       words in \text{}, code and boxes count for the language               -> no language bonus

The rules on answers hold for problems whose answer is compared. Of the rules on the format, answers that stand in
no box (programs) are checked only for "thoughtless", all others also for "empty" and "hidden". A row with tests of its
own is not checked for "restated", one with a checker is given the box as it stands, which may hold signs alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache

from shared.types import Problem, Verdict
from verify.code_block import spans
from verify.extract import extract_answer, find_answer, find_boxes
from verify.format import Parts, broken
from verify.math.plain import decide
from verify.math.unit import is_known
from verify.text_cleaning import brace_end, is_recital
from verify.unworked import unworked
from verify.verifiers import verifier_for

_BLANK = re.compile(
    r"\\(?:text\w*|math\w+|operatorname|mbox|displaystyle|left|right|q?quad|[lc]?dots|[hv]?phantom\s*\{[^{}]*\}"
    r"|[hv]space\*?\s*\{[^{}]*\}|boxed|ldots|cdots|hfill|null|relax)(?![A-Za-z])|\\[,;:! ]"
)
_CONTENT = re.compile(r"[^\W_]|[∅∞πθφ⊥⊤]|\\[A-Za-z]|\\[{]\s*\\[}]|[+]|[<>=≤≥]")
LEAST = 3
"""least number of different words, numbers or signs"""
LEAST_BESIDE_A_COPY = 5
"""the same where the problem was copied and nothing is calculated"""
SIGNS = frozenset("+*/=<>^×·÷−→√-")
MOST_ANNOUNCED = 12
"""number of words up to which reasoning may be the answer alone"""
COPIED_RUN = 6
"""this many words in a row that also stand in the problem are copied from it"""
_REASONING_MARKUP = re.compile(r"<[^<>]{0,80}>|\\[A-Za-z]+|[\u200b-\u200f\u2060\ufeff]")
_REASONING_TOKEN = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|\d+|[^\W\d_]+|[+*/=<>^×·÷−→√%]|(?<=[\d\s])-(?=[\d\s])"
)
_IDEOGRAM = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
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
_ONLY_ANSWER = re.compile(
    rf"\W*(?:{_SO}\W*)?{_ANSWER}[\W_]*(?:[a-z]\s*=\s*)?"
    r"(?:\d[\d.,/]*|[^\W\d_\u3040-\u9fff]+|[\u4e00-\u9fff]{1,3})(?:\s[^\W\d_\u3040-\u9fff]+)?[\W_]*",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\\[,;!:()\[\]]|\\(?:quad|qquad|displaystyle|textbf|mathbf|bf|left|right)\b|[$*_#>{}`]")
_NAME = r"(?:[a-z]|\\[a-z]+)(?:\s?\d+)?(?:\([a-z]\))?"
_LEAD = re.compile(
    rf"\W*(?:{_SO}\W*)?(?:(?:ist|lautet|est|es|è)\s)?(?:{_ANSWER})?\W*(?:{_NAME}\s*=)?\s*", re.IGNORECASE
)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")

AROUND_BEFORE, AROUND_AFTER = 400, 240
"""characters around the box that are read"""
_OWN_BOX, _OTHER_BOX = "\x01", "\x02"
_OR = r"(?:or|ou|oder|o|u|oppure|или|либо|或者?|还是|alternatively|otherwise|sinon|andernfalls|altrimenti|иначе|否则)"
_TWO_BOXES = re.compile(
    rf"{_OTHER_BOX}(?:\s|[,;.$)])*{_OR}\b[^{_OTHER_BOX}\n]{{0,120}}{_OWN_BOX}"
    rf"|{_OTHER_BOX}[^{_OTHER_BOX}.\n]{{0,80}}\b{_OR}\b[^{_OTHER_BOX}.\n]{{0,60}}{_OWN_BOX}"
)
_NUMBER = r"[-+]?\d[\d.,/]*"
_IS = (
    r"(?:^|[=:]|\b(?:either|is|be|are|equals|was|est|soit|vaut|ist|entweder|es|son|è|o|равно|равен|это|либо)\b|[是为])"
)
_BOX_OR_NUMBER = re.compile(
    rf"{_IS}\s*({_NUMBER})\s*,?\s*(?:\b{_OR}\b)[\s:=]*{_OWN_BOX}"
    rf"|{_OWN_BOX}\s*,?\s*\b{_OR}\b\s+(?:\w+ )?({_NUMBER})(?![\w%])"
    rf"|{_OWN_BOX}\W*(?:an )?(?:alternative|another)(?: possible)? (?:answer|value|result)"
    rf"\s*(?:[:=]|is|could be)?\s*({_NUMBER})(?![\w%])"
)
_PLAIN_MARKUP = re.compile(
    r"\\(?:text|textbf|mathrm|mbox|textit|emph|bf)\b\s*|\\[,;!:()\[\]]|[$*{}]|(?<![a-z])_|_(?![a-z])"
    r"|\\(?:left|right|displaystyle|quad|qquad|Rightarrow|implies)\b"
)
_NOT_EQUAL = re.compile(r"\\(?:neq?|not\s*=)\b|\\not\s*=|(?<=\s)!=|≠")
_HIDDEN = re.compile(
    r"<!--.*?(?:-->|\Z)"
    r"|\\begin\s*\{(comment|verbatim\*?|Verbatim|lstlisting|minted|filecontents\*?)\}.*?(?:\\end\s*\{\1\}|\Z)"
    r"|\\iffalse\b.*?(?:\\fi\b|\Z)"
    r"|\\(?:verb|lstinline)\*?([^A-Za-z\s*{])[^\n]{0,400}?\2"
    r"|<(code|pre|script|style|template|del|strike|s)(?:\s+[a-z-]+=[^<>\n]{0,200})?>.*?(?:</\3\s*>|\Z)"
    r"|<([a-z]{1,10})\s[^<>\n]{0,200}?(?:\bhidden\b|display\s*:\s*none)[^<>\n]{0,200}>.*?(?:</\4\s*>|\Z)"
    r"|(?<!~)~~(?![~\s])[^~\n]{1,400}~~(?!~)"
    r"|^[ ]{0,3}\[[^\]\n]{1,80}\]:[^\n]*",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_INVISIBLE = re.compile(
    r"\\(?:[hv]?phantom|[xb]?cancel|sout|st|texttt|lstinline|mintinline|invisible|gobble|hidden)\s*(?=\{)"
)
_RUN = re.compile(r"`+")
_MATH = re.compile(
    r"\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)"
    r"|\\begin\{((?:equation|align|aligned|gather|cases|array|multline|split)\*?)\}.*?\\end\{\1\}|\$[^$\n]{1,300}\$",
    re.DOTALL,
)
_SEEN = re.compile(r"[^\n]")
_PERCENT = re.compile(r"(?<!\\)%")


def refuse_format(problem: Problem, parts: Parts, rules: Collection[str]) -> Parts:
    """Return the parts of a well-formed completion after these rules: as they are, with another answer, or broken."""
    if "thoughtless" in rules and (why := thoughtless(problem.text, parts.reasoning)):
        return broken(f"the reasoning {why}")
    if verifier_for(problem).answer_in != "box":
        return parts
    answer = parts.answer or ""
    if "hidden" in rules:
        seen = extract_answer(visible(parts.response))
        if seen is None:
            return broken("the box stands only in a comment, in code or struck out")
        answer = answer if problem.checker else seen
    if "empty" in rules and not (answer.strip() if problem.checker else _CONTENT.search(_BLANK.sub("", answer))):
        return broken("the box is empty")
    return parts._replace(answer=answer)


def refuse_answer(problem: Problem, parts: Parts, rules: Collection[str]) -> str:
    """Return why the answer of a well-formed completion is wrong, whatever it equals; "" when it is to be compared."""
    answer = parts.answer or ""
    if verifier_for(problem).answer_in != "box" or not problem.verified:
        return ""
    if "several" in rules or "unstated" in rules:
        response = visible(parts.response) if "hidden" in rules else parts.response
        own, others = answer_boxes(response)
        if "several" in rules and own and one_of_several(response, own, others, answer):
            return "the answer is one of several"
        if "unstated" in rules and own and not stated(response, own):
            return "the answer is not a last line of its own"
    if "restated" in rules and problem.tests is None and unworked(problem.text, problem.answer, answer):
        return "the answer is still to be computed"
    return ""


def thoughtless(problem: str, reasoning: str) -> str:
    """Return why this does not count as reasoning, "" when it does. Linear in both texts.

    It needs three different words, numbers or signs of its own: what is copied from the problem in runs does not count,
    and a text that is one piece said three times counts as that piece. "2+3=5" is enough, an alphabet or "The answer is
    five." is not. A Han or kana character is a word.
    """
    words = _words(reasoning)
    if not words:
        return "is empty"
    piece = _period(words)
    if len(words) >= 3 * piece and len(words) > 3:
        return "says the same again and again"
    if len(set(words)) < LEAST:
        return "is a word or two"
    if is_recital(reasoning):
        return "is letters or numbers in their order"
    if len(words) <= MOST_ANNOUNCED and _ONLY_ANSWER.fullmatch(_MARKUP.sub("", reasoning)):
        return "only states the answer"
    own = _own(words, _words(problem))
    if len(own) < len(words) and len(set(own)) < (LEAST if set(own) & SIGNS else LEAST_BESIDE_A_COPY):
        return "copies the problem"
    return ""


def _words(text: str) -> list[str]:
    return _REASONING_TOKEN.findall(_REASONING_MARKUP.sub(" ", text).lower()) if text.strip() else []


def _period(words: list[str]) -> int:
    """Return the length of the shortest piece that the words repeat, the last repetition perhaps cut off."""
    border = [0] * len(words)
    for index in range(1, len(words)):
        length = border[index - 1]
        while length and words[index] != words[length]:
            length = border[length - 1]
        border[index] = length + (words[index] == words[length])
    return len(words) - border[-1]


def _own(words: list[str], problem: list[str]) -> list[str]:
    """Return the words outside of runs copied from the problem. Numbers and signs alone are not a copy."""
    size = min(COPIED_RUN, len(problem), len(words))
    if size == 0:
        return words
    known = {tuple(problem[at : at + size]) for at in range(len(problem) - size + 1)}
    copied = [False] * len(words)
    for at in range(len(words) - size + 1):
        run = tuple(words[at : at + size])
        if run in known and sum(
            word.isalpha() and (len(word) > 1 or bool(_IDEOGRAM.match(word))) for word in run
        ) >= min(3, size):
            copied[at : at + size] = [True] * size
    return [word for word, known_word in zip(words, copied, strict=True) if not known_word]


def stated(response: str, boxes: list[tuple[int, int]]) -> bool:
    r"""Return whether the last line holds the answer, and otherwise only words that announce it and a unit.

    Such a line ("Answer: \boxed{5}", "**\boxed{5}**") cannot deny or doubt the answer in any language or words. Most
    models write a sentence around the box, and are refused.
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


def one_of_several(response: str, boxes: list[tuple[int, int]], others: list[tuple[int, int]], answer: str) -> bool:
    """Return whether the response offers another answer with this one: another box or number, joined by "or".

    boxes: those of the answer, `others`: the other boxes, from command to closing brace. A number that equals the
    answer is no other one.
    """
    text = _OWN_BOX.join(around(response, boxes, others))
    if _TWO_BOXES.search(text):
        return True
    numbers = (next(filter(None, match.groups())).rstrip(".,") for match in _BOX_OR_NUMBER.finditer(text))
    return any(decide(answer, number) is not Verdict.CORRECT for number in numbers)


def answer_boxes(response: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the boxes of the answer, and the other boxes, from command to closing brace."""
    ends = {end for _, end in find_answer(response)}
    boxes = find_boxes(response)
    return [box for box in boxes if box[1] - 1 in ends], [box for box in boxes if box[1] - 1 not in ends]


def around(response: str, boxes: list[tuple[int, int]], others: list[tuple[int, int]]) -> tuple[str, str]:
    """Return the plain text before the boxes of the answer and after them, other boxes replaced by a sign."""
    start, end = boxes[0][0], boxes[-1][1]
    first = max(0, start - AROUND_BEFORE)
    near = [(left - first, right - first) for left, right in others if first <= left and right <= start]
    return plain(response[first:start], near), plain(response[end : end + AROUND_AFTER], [])


def plain(text: str, boxes: list[tuple[int, int]]) -> str:
    r"""Return the text in lower case without markup, each of `boxes` replaced by the sign \x02."""
    for start, end in sorted(boxes, reverse=True):
        text = f"{text[:start]}{_OTHER_BOX}{text[end:]}"
    text = _NOT_EQUAL.sub(" ≠ ", text.replace("’", "'"))
    return re.sub(r"[ \t]+", " ", _PLAIN_MARKUP.sub(" ", text)).lower()


@lru_cache(maxsize=8)
def visible(text: str) -> str:
    r"""Return the text with every character that a reader does not see replaced by a space; line breaks stay.

    Hidden are fenced and inline code, comments of HTML, LaTeX and Markdown, `verbatim`, `\verb`, `\phantom`,
    `\iffalse`, and what is struck out. A percent sign after a number is no comment. Indented blocks are not taken for
    code: responses indent their formulas. Linear in the text.
    """
    text = _blank_all(text, spans(text))
    if "`" in text:
        text = _blank_all(text, _inline_code(text))
    if "<" in text or "\\" in text or "~~" in text or "]:" in text:
        text = _blank_all(text, ((match.start(), match.end()) for match in _HIDDEN.finditer(text)))
        text = _blank_all(text, _invisible(text))
    return _blank_all(text, _comments(text)) if "%" in text else text


def _blank_all(text: str, regions: Iterable[tuple[int, int]]) -> str:
    """Blank regions, given in order and without overlap."""
    kept: list[str] = []
    position = 0
    for start, end in regions:
        region = text[start:end]
        kept += text[position:start], _SEEN.sub(" ", region) if "\n" in region else " " * len(region)
        position = end
    return "".join(kept) + text[position:]


def _inline_code(text: str) -> Iterator[tuple[int, int]]:
    """Yield inline code: a run of backticks, up to the next run of the same length in the same paragraph."""
    runs = [(match.start(), match.end()) for match in _RUN.finditer(text)]
    later: dict[int, list[int]] = defaultdict(list)
    for index in range(len(runs) - 1, -1, -1):
        later[runs[index][1] - runs[index][0]].append(index)
    index = 0
    while index < len(runs):
        start, opened = runs[index]
        same = later[opened - start]
        while same and same[-1] <= index:
            same.pop()
        if same and "\n\n" not in text[opened : min(runs[same[-1]][0], opened + 4_000)]:
            index = same[-1]
            yield start, runs[index][1]
        index += 1


def _invisible(text: str) -> Iterator[tuple[int, int]]:
    """Yield commands whose argument is not shown, or not meant to be believed."""
    position = 0
    while match := _INVISIBLE.search(text, position):
        position = brace_end(text, match.end())
        yield match.start(), position


def _comments(text: str) -> Iterator[tuple[int, int]]:
    """Yield comments: from a percent sign that is not a percentage to the end of its line, or of its formula."""
    regions = [match.span() for match in _MATH.finditer(text)]
    at = done = 0
    for sign in _PERCENT.finditer(text):
        start = sign.start()
        if start < done:
            continue
        while at < len(regions) and regions[at][1] <= start:
            at += 1
        formula = regions[at] if at < len(regions) and regions[at][0] <= start else None
        before = text[max(0, start - 40) : start]
        before = before if formula else before.rstrip(" \t")
        if before and (before[-1].isalnum() or before[-1] in "})]$|°'\"\\*"):
            continue
        line = text.find("\n", start)
        done = min(len(text) if line < 0 else line, formula[1] if formula else len(text))
        yield start, done
