r"""Detects in a problem's wording requests for proofs, several parts, and missing figures. English and six languages.

Patterns of phrases, tuned for precision in what they reject: a request is an imperative ("Prove that"), not every use
of its verb ("will the census show that"). Drawings in the text ([asy], tikz) are blanked first.
"""

from __future__ import annotations

import re

_DRAWING = re.compile(
    r"\[asy\].*?(?:\[/asy\]|\Z)|\\begin\{(asy|tikzpicture|picture)\}.*?(?:\\end\{\1\}|\Z)|```asy.*?(?:```|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_TABLE = re.compile(r"\\begin\{(?:tabular|array|matrix|[pbvB]matrix|longtable)|\|\s*-{3,}|<table", re.IGNORECASE)
_DISPLAY = re.compile(
    r"\\\[|\$\$|\\begin\{(?:align|equation|gather|cases|eqnarray)|\n[ \t]*(?:[-*•]|\\bullet|\$\\bullet)"
)
_PICTURE_FILE = re.compile(r"!\[[^\]\n]{0,200}\]\([^)\n]{1,300}\)|\\includegraphics|<img\b|\[img\]", re.IGNORECASE)

_PROOFS = (
    r"(?:please\s+)?(?:prove|disprove|show)\s*(?:(?:\w+ly\s+)?that|using|,|:|\(|\\\(|\$|the\b|this\b|if\b"
    r"|or\s+disprove|by\b|there\b|for\b)",
    r"(?:give|write|provide|find|construct)\s+(?:a|an|the|your)\s+(?:\w+\s+){0,2}proof\b",
    r"d[ée]montre[rz]?\b|prouve[rz]?\b|(?:montre[rz]?|[ée]tabli[rs]s?e?z?|justifie[rz]?"
    r"|v[ée]rifie[rz]?)\s+(?:que|qu['’])",
    r"beweisen?\b|(?:man\s+)?(?:zeigen?|beweise|begründen?)\s*(?:sie|man)?\s*,?\s*dass\b|weisen?\s+sie\s+nach",
    r"demu[eé]str[ae](?:n|d)?\b|demostrar\b|(?:muestr[ae]n?|mostrar|prueb[ae]n?|probar|justifi(?:ca|que)"
    r"|verifi(?:ca|que))\s+que\b",
    r"dimostra(?:re|te)?\b|(?:mostra(?:re|te)?|prova(?:re|te)?|si\s+(?:dimostri|provi)|verifica(?:re"
    r"|te)?)\s+che\b|si\s+dimostri",
    r"докажи(?:те)?\b|доказать\b|(?:покажи(?:те)?|показать|убедитесь|обоснуйте)\s*,?\s+что\b",
    r"(?:试|請|请|并|求)?(?:证明|證明)(?=[\s:：,，$\\(（]|[^\W\d_])|求证|求證|试证|試證",
)
_PROOF = re.compile("|".join([*(rf"(?<![^\W_])(?:{pattern})" for pattern in _PROOFS[:-1]), _PROOFS[-1]]), re.IGNORECASE)
_BEFORE = re.compile(
    r"(?:\A|[.!?:;,。！？：；，、\n)\]$]|\\\]|\\\)|\b(?:and|then|also|or|to|must|et|puis|und|dann|y|luego|e|poi|и)\b)"
    r"[\s$*]*(?:\(?(?:[a-h]|i{1,3}|iv|v|\d{1,2})[.)]\s*)?\Z",
    re.IGNORECASE,
)
"""text that may precede an imperative: the end of a sentence or clause, a comma, "and", a label"""
_AROUND = 60
"""number of characters before a verb that are examined"""
_PROVED = re.compile(r"(?:被|已|已经|可以|曾|所|能|来|可)(?:证明|證明)|(?:证明|證明)(?:了|过|的|过程|书)")
_BESIDE = re.compile(
    r"\bto[\s$*]*(?:prove|disprove|show|demostrar|probar|dimostrare)|(?:give|write|provide|find|construct)\s",
    re.IGNORECASE,
)

_REQUEST = re.compile(
    r"[?？]|\b(?:find|determine|compute|calculate|evaluate|what|how\s+(?:many|much|long|far|old|fast)|which|who"
    r"|solve|"
    r"simplify|express|enter|factor|estimate|state|sketch|prove|show|list|give|write|name|count|identify|explain"
    r"|choose|select|"
    r"trouver?z?|d[ée]terminer?z?|calculer?z?|quel(?:le)?s?|combien|r[ée]soudre|r[ée]solvez|simplifier?z?|donner?z?|"
    r"montrer?z?|d[ée]montrer?z?|exprimer?z?|"
    r"finden?|bestimmen?|berechnen?|wie\s*viele?|welche[rsnm]?|löse|lösen|vereinfachen?|zeigen?|beweisen?|geben|gib|"
    r"encuentr[ae]|encontrar|hall[ae]r?|determin[ae]r?|calcul[ae]r?|cu[aá]l(?:es)?|cu[aá]nt[oa]s?|qu[eé]|"
    r"resuelv[ae]|simplifi(?:ca|que)|demuestr[ae]|expres[ae]|"
    r"trova(?:re|te)?|determinare|calcola(?:re|te)?|quant[oiea]|qual[ei]?|risolv(?:i|ere|ete)|semplifica(?:re)?|"
    r"dimostra(?:re|te)?|"
    r"найдите|найти|определите|вычислите|сколько|чему|как(?:ой|ая|ое|ов|ова|ую|ие)|решите|упростите|докажите"
    r"|покажите)\b|"
    r"求|计算|計算|多少|什么|什麼|证明|證明|写出|寫出|确定|確定|哪|几",
    re.IGNORECASE,
)

_CLAUSE = re.compile(r"(?<=[.!;,:。；，：$\])])\s+(?i:then\s+|also\s+)?|(?<=[\])$.,。，])(?=[A-ZА-Я一-鿿])")
_OPERATION = re.compile(r"choose|select|which|who|name|count|list|write", re.IGNORECASE)
"""words that may begin a step of a procedure or a condition as well as a question"""

_LATIN, _CYRILLIC, _ROMAN = "abcdefgh", "абвгде", ("i", "ii", "iii", "iv", "v", "vi")
_LEAD = r"(?:\\(?:textbf|mathbf|mathrm|text|textrm|textit|bf|rm|item)\s*[{\[]?\s*|\*\*|\$){0,4}"
_PART_WORD = r"(?:part|teil(?:aufgabe)?|aufgabenteil|partie|question|parte|apartado|часть|пункт|第)"
_LABELS = (
    re.compile(rf"(?<![\w\\)]){_LEAD}[(（]\s*([a-hа-е]|[ivIV]{{1,3}}|\d{{1,2}})\s*[)）]"),
    re.compile(
        rf"(?:^|\n|\\\\|\\item|(?<=[.?!;:。？；：])\s)[ \t]*{_LEAD}"
        r"([a-hа-е]|[ivIV]{1,3}|\d{1,2})[).．、](?=[\s*$}\\])"
    ),
    re.compile(
        rf"(?:^|(?<=[\s(]))\**{_PART_WORD}\s*[(:]?\s*([a-h]|[ivIV]{{1,3}}|\d{{1,2}}|[一二三四])\b", re.IGNORECASE
    ),
)
_MARKED = re.compile(
    r"^\W*[(（]?\s*(?:a|i|1|а)\s*[)）.:]\s*\S.*?[\s,;][(（]?\s*(?:b|ii|2|б)\s*[)）.:]\s*\S", re.DOTALL | re.IGNORECASE
)

_NOUN = r"(?:figures?|diagrams?|pictures?|drawings?|sketch(?:es)?|illustrations?|images?|graphs?|charts?|maps?)"
_SHAPE = (
    r"triangle|square|rectangle|circle|hexagon|pentagon|octagon|polygon|quadrilateral|parallelogram|trapezoid|rhombus|"
    r"region|solid|cube|cone|cylinder|pyramid|prism|sector|semicircle|grid|field|segment|angle|arc|spinner|figure"
)
_FIGURES = re.compile(
    r"\b(?:in|see|from|on|consider|refer\s+to|use|using|study|examine|according\s+to)\s+(?:the|this|these|each)\s+"
    rf"(?:(?:adjoining|accompanying|following|above|given|attached|first|second|two|next)\s+)*(?:figures?"
    rf"|diagrams?|drawings?|sketch(?:es)?|illustrations?)\b(?!\s+(?:formed|created|that|whose|bounded|which"
    rf"|obtained|with|of\s+speech))"
    rf"|\b{_NOUN}\s+(?:is\s+|are\s+)?(?:shown|pictured|drawn|given)?\s*(?:below|above|at\s+(?:the\s+)?(?:right"
    rf"|left)|(?:to|on)\s+the\s+(?:right|left)|shown)\b"
    r"|\b(?:figure|diagram|picture|sketch|illustration)\s+(?:shows|indicates|depicts|illustrates|represents)\b"
    r"|\b(?:see|cf\.?)\s+(?:the\s+)?(?:figure|diagram)\b|\bfig(?:ure|\.)\s*\d\b"
    rf"|\b(?:{_SHAPE})s?\s+(?:\$[^$]{{1,20}}\$\s+)?(?:is\s+|are\s+)?shown\b(?!\s+(?:on|when|that|how|by|to))"
    r"|\baccording\s+to\s+(?:the|this)\s+(?:graph|chart)\b|\bin\s+(?:the|this)\s+(?:pie|bar)\s+chart\b"
    rf"|\b(?:{_SHAPE}|balance|scale)s?\s+below\b"
    r"|\bthe\s+shaded\s+(?:region|area|portion|part|figure|section|sector)s?\b"
    r"|(?:figure|figura|schéma|dessin|croquis|graphique|diagramme|disegno|grafico|diagramma|diagrama|dibujo"
    r"|gráfico|gráfica|imagen|immagine)\s+(?:ci-(?:dessous|dessus|contre)|suivante?|a\s+continuación|adjunt[oa]"
    r"|siguiente|de\s+abajo|anterior|qui\s+sotto|sottostante|seguente|accanto|in\s+basso)"
    r"|\b(?:sur|dans|en|nel|nella|sulla|in)\s+(?:la\s+|le\s+|el\s+|il\s+|cette\s+|questa\s+|esta\s+)?(?:figure"
    r"|figura|schéma|diagrama|diagramma|dibujo|disegno|immagine|imagen)\b(?!\s+(?:formée|formada|formata))"
    r"|\b(?:im|in|siehe|aus)\s+(?:der|die|dem|das|dieser)?\s*(?:\w+en\s+)?(?:abbildung|skizze|zeichnung|diagramm"
    r"|figur|bild)\b|\b(?:abbildung|skizze|zeichnung|figur)\s+(?:unten|oben|rechts|links|zeigt)"
    r"|\bна\s+(?:рисунке|чертеже|диаграмме|схеме)\b|\bсм\.?\s+рис|\bрисун(?:ок|ке)\s+(?:ниже|показывает)"
    r"|如(?:下|上|右|左)?[图圖]|[下上右左][图圖]|[图圖](?:中|所示)|示意[图圖]|阴影部分|陰影部分",
    re.IGNORECASE,
)  # fmt: skip
_SHOWN = re.compile(
    r"\bas\s+(?:shown|pictured|illustrated|depicted|drawn)\b(?!\s+(?:in|by|on|from)\s+(?:the\s+"
    r"|this\s+)?(?:table|chart|list|equation|formula|example|text))"
    r"|\b(?:is|are|shown|pictured|depicted|illustrated)\s+(?:shown|pictured|depicted|illustrated"
    r"|drawn)\s+(?:below|above|here)\b"
    r"|\b(?:pictured|depicted|shown)\s+(?:in\s+\w+\s+)?(?:below|above|here)\b",
    re.IGNORECASE,
)


def without_drawings(text: str) -> str:
    """Return the text with every drawing ([asy], tikz) blanked, all other characters in their place."""
    return _DRAWING.sub(lambda found: " " * len(found.group()), text)


def drawings(text: str) -> list[str]:
    """Return the drawings of a text, in order."""
    return [found.group() for found in _DRAWING.finditer(text)]


def has_request(text: str) -> bool:
    """Whether a text asks for something: a question mark, or a word such as "find" or "сколько"."""
    return _REQUEST.search(text) is not None


def _asks_itself(piece: str) -> bool:
    """Whether a labelled piece is a question of its own: a question mark, or a request that begins a clause."""
    if re.search(r"[?？]", piece):
        return True
    clauses = [clause.lstrip(" \t\n$*{}\\:.)]") for clause in _CLAUSE.split(piece)]
    return any(_REQUEST.match(clause) and not _OPERATION.match(clause) for clause in clauses)


def asks_proof(text: str) -> str:
    """Return the words that ask for a proof, "" if none do.

    "To show that ..." and "Provide a proof" beside another request do not count: the answer to that one is checked.
    """
    text = without_drawings(text)
    for found in _PROOF.finditer(text):
        before = text[max(0, found.start() - _AROUND) : found.start()]
        chinese = found.group()[0] > "\u3000"
        clause = _BEFORE.search(before if found.start() <= _AROUND else f"x{before}")
        if not chinese and clause is None:
            continue
        if _PROVED.search(text[max(0, found.start() - 2) : found.end() + 2]):
            continue
        words = (clause.group() if clause and not chinese else "") + found.group()
        rest = text[: found.start()] + " . " + text[found.end() :]
        if _BESIDE.search(words) and has_request(rest):
            continue
        return re.sub(r"\s+", " ", words).strip(" .,:;$*)]\\。，")[:60]
    return ""


def _order(label: str) -> list[int]:
    """Return the positions that a label may stand for, from 0: as a digit, a letter, a Roman or a Chinese numeral."""
    label = label.lower()
    places = [int(label) - 1] if label.isdigit() else []
    places += [_LATIN.index(label)] if len(label) == 1 and label in _LATIN else []
    places += [_CYRILLIC.index(label)] if len(label) == 1 and label in _CYRILLIC else []
    places += [_ROMAN.index(label)] if label in _ROMAN else []
    places += ["一二三四".index(label)] if label and label in "一二三四" else []
    return places


def _segments(text: str, labels: re.Pattern[str]) -> list[str]:
    """Return the pieces that begin at labels 1, 2, ... in this order; [] if there is no second label."""
    starts: list[int] = []
    for found in labels.finditer(text):
        if len(starts) in _order(found.group(1)):
            starts.append(found.end())
    if len(starts) < 2:
        return []
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _asking(pieces: list[str]) -> int:
    """Count the pieces that ask something.

    After the last one the text may continue with the problem's only question, so only its first line counts unless an
    earlier piece asks too.
    """
    if not pieces:
        return 0
    before = sum(map(_asks_itself, pieces[:-1]))
    last = pieces[-1] if before else pieces[-1].strip().partition("\n")[0]
    return before + _asks_itself(last)


def several_parts(text: str, answer: str = "") -> str:
    """Return why a problem counts as asking for several things, "" if it does not: two labelled parts with a request
    each, or an answer with labelled parts. Labelled conditions are not parts."""
    text = without_drawings(text)
    for labels in _LABELS:
        asking = _asking(_segments(text, labels))
        if asking > 1:
            return f"{asking} labelled parts ask something"
    return "the answer has labelled parts" if _MARKED.match(answer) else ""


def missing_figure(text: str) -> str:
    """Return the words that refer to a figure which the text does not contain, "" if none do."""
    if found := _PICTURE_FILE.search(text):
        return found.group()[:60]
    if _DRAWING.search(text) or _TABLE.search(text):
        return ""
    found = _FIGURES.search(text)
    if found is None and not _DISPLAY.search(text):
        found = _SHOWN.search(text)
    return re.sub(r"\s+", " ", found.group())[:60] if found else ""
