r"""Detects responses that deny or doubt their own answer, or offer another beside it.

Only the words around the final box are examined: the clause before it, the words right behind it, and the sentences
next to it. All seven languages of the project are searched at once. A denying word counts only where it reaches the box
("is not \boxed{5}", "n'est pas \boxed{5}"), so "not 4 but \boxed{5}" is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from verify.stance import steps_back

_BEFORE, _AFTER = 400, 240
"""characters around the box that are read"""
_ANSWER, _OTHER = "\x01", "\x02"

_FILLERS = (
    "be been equal equals to the a an right correct actual true final possible answer answers value result solution "
    "case necessarily number it is was that simply just really actually exactly at all of x y n = : "
    "la le réponse solution résultat valeur égal égale égaux à exactement bonne correcte est de que "
    "die das der antwort lösung ergebnis zahl wert richtige korrekte gleich genau ist also "
    "respuesta resultado igual correcta correcto valor exactamente es el a "
    "risposta risultato uguale esatta corretta valore esattamente è il ad "
    "ответ ответом равен равна равно равняется является правильный правильным верный верным числу число это "
    "答案 等于 是 为 正确 的 值 结果 "
)
_FILLER = "(?:" + "|".join(sorted(map(re.escape, set(_FILLERS.split())), key=len, reverse=True)) + ")"
_NOT = (
    r"\b(?:not|never|neither|nor|cannot|ain't|\w+n['’]t|anything_but|far from|rather than|instead of"
    r"|other than|except"
    r"(?: for)?|unequal|different from|differs from|unlike"
    r"|(?:n['’e]\s*\w+\s+)?(?:pas|jamais|ni|plutôt que|sauf)|nicht|niemals|weder|noch nicht|keinesfalls|statt|außer"
    r"|(?:no|nunca|tampoco) (?:es|son|era|sea|sería|vale|puede ser|equivale)|en vez de|excepto"
    r"|(?:non|mai|neppure) (?:è|sono|era|sia|vale|fa|può essere|equivale)|invece di|tranne|anziché"
    r"|не|никак не|вряд ли|едва ли|вовсе не|отнюдь не|кроме|вместо)(?=[\s:=]|$)"
    r"|\b(?:ruled? out|refuted?|rejected?|excluded?|disproved?|écartée?|réfutée?|exclue?|ausgeschlossen|widerlegt"
    r"|descartad[oa]|refutad[oa]|esclus[oa]|confutat[oa]|исключен[оа]?|опровергнут[оа]?)\b"
    r"|≠|排除了?|推翻了?|不是|不等于|不为|并非|绝非|而非|不可能是|除了"
)
_DENIED = re.compile(rf"(?:{_NOT})(?:\s*{_FILLER}(?![^\W\d_])|\s*[\u4e00-\u9fff]{{1,4}}(?=\s*$)|[\s:=])*$")
_SUBORDINATE = re.compile(
    r"\b(?:that|which|who|where|when|if|qui|que|où)\b.*(?:\b(?:not|never|cannot)|n't)\s.*"
    r"\b(?:is|are|equals?)\s*[:=]?\s*$"
    r"|\bqu(?:i|e|['’]il|['’]elle)\b.*\b(?:pas|jamais) (?:est|sont|vaut)\s*(?:de|d['’])?\s*$"
)
"""a negation in a relative clause, as in "the number that is not possible is", which denies nothing of the answer"""
_WRONG = re.compile(
    r"(?<!probability of a )(?<!get a )(?<!gets a )(?<!gives a )"
    r"\b(?:wrong|incorrect|false|mistaken|fake) (?:answer|result|value|solution|claim|that)\b"
    r"|\bit is (?:false|wrong|untrue)"
    r"|\b(?:mauvaise|fausse) réponse|\bfalsche[sn]? (?:antwort|ergebnis)|\brespuesta (?:incorrecta|falsa|equivocada)"
    r"|\brisposta (?:sbagliata|errata|falsa)|\bнеправильный ответ|\bневерный ответ|错误(?:的)?答案|错误的是"
    r"|\b(?:one|you|some|somebody|someone|many|people)(?: people)? (?:might|may|could|would|will)? ?(?:say"
    r"|think|believe)"
    r"|\b(?:if|suppose|assume|assuming|imagine|pretend)(?: that)? (?:the answer|it) (?:were|was|is|be)\b"
    r"|\b(?:supposons|admettons|imaginons) que\b|\bnehmen wir an\b|\bangenommen\b|\bsupongamos\b"
    r"|\bsupponiamo\b|\bпредположим\b|假设|假如"
)
_HEDGED = re.compile(
    r"\b(?:it (?:may|might|could) be that|it is possible that|il (?:se peut|est possible) que|(?:puede"
    r"|es posible) que"
    r"|es (?:kann|könnte|mag) sein,? dass|es ist möglich,? dass|è possibile che|возможно,? что|maybe|perhaps"
    r"|possibly|probably|presumably|supposedly|allegedly|apparently not|who knows|qui sait|wer weiß"
    r"|quién sabe|chissà|кто знает|conceivably|i (?:would |'d )?(?:guess|suppose|bet|reckon)"
    r"|peut[- ]être|probablement|sans doute|possiblement|je (?:devine|suppose|parie)|vielleicht"
    r"|wahrscheinlich|vermutlich"
    r"|möglicherweise|eventuell|ich (?:rate|schätze|vermute|tippe)|quizás?|tal vez|a lo mejor|probablemente"
    r"|posiblemente"
    r"|supongo|acaso|forse|probabilmente|magari|può darsi|possibilmente|immagino|suppongo|наверное|наверно|может быть"
    r"|вероятно|пожалуй|видимо)\b|也许|或许|大概|我猜|估计|说不定|没准|恐怕"
)
_HEDGING = re.compile(
    rf"{_HEDGED.pattern}|возможно|möglich|(?:es |c'est )?posible|c'est possible|è possibile|it is possible"
)
"""matches a whole clause before the answer"""
_DISBELIEVED = re.compile(
    r"\b(?:not|never|nobody|n't|\w+n't|hardly)(?: \w+)? (?:think|believe|bet|say|trust|claim|expect|agree"
    r"|accept|convinced)\b"
    r"|\b(?:nobody|no one) (?:would|will|could|should)\b|\bi (?:doubt|refuse|deny)\b|\bhard to (?:say|tell)\b"
    r"|\b(?:one|a|another|small|slim|good|some|fair|only a) (?:possibility|option|candidate"
    r"|candidates) (?:is|would|could|that|of)\b|\bchance (?:would be|of it)\b"
    r"|\b(?:a|some|good|fair|decent|small|slim) chance (?:that|it)\b|\btoss[- ]?up\b"
    r"|\bguess(?:ing)?\b(?! (?:and check|is|was|that|of|in))|\bbetween (?:\x02|[-\d.]+) and\s*$"
    r"|\blet's (?:go with|say)\b"
    r"|\b(?:ne|n') ?(?:pense|crois|dirais) pas\b|\bje dirais\b|\bje (?:mise|penche)\b|\b(?:glaube|denke"
    r"|meine) (?:ich )?nicht\b"
    r"|\bwürde (?:ich )?(?:auf|sagen|tippen)\b|\bno (?:creo|pienso|diría)\b|\bdiría\b|\bapuesto\b"
    r"|\bnon (?:credo|penso|direi)\b|\bdirei\b"
    r"|\bscommetto\b|\bне (?:думаю|считаю|верю)\b|\bскорее всего\b|\bдумаю,? что\b|\bя бы сказал|\bпохоже\b"
    r"|\bi(?:'ll| will)? (?:choose|chose|pick(?:ed)?|select(?:ed)?|take|took)(?: (?:one|it))?"
    r" (?:at random|randomly|blindly)\W*$"
    r"|\b(?:at random|randomly|blindly),? i(?:'ll| will)? (?:choose|chose|pick|select|take)\W*$"
    r"|不认为|不觉得|不相信|有可能"
    r"|(?:^|\s)可能(?!的|性)|猜"
)
_MODAL = re.compile(
    rf"(?:\b(?:may|might|could)(?: well| also| just as well| possibly)? be|\blikely|\bseems to be"
    rf"|\b(?:pourrait|peut) être"
    rf"|\bserait|\bil se peut que ce soit|\b(?:könnten?|dürfte)|\bpodrían? ser|\bpuede (?:ser|que sea)"
    rf"|\bpotrebbe (?:\w+ )?(?:essere|trattarsi di)"
    rf"|\bpuò essere|^возможно|\bможет быть|(?<![不最有所])可能(?:就|会|还|也)?)(?:\s*(?!(?:is|was|ist|est|è"
    rf"|gives)\b){_FILLER}(?![^\W\d_])|[\s:=])*$"
)
_UNSURE = re.compile(
    r"\bi(?:'m| am| may| might| could)? (?:probably |possibly |perhaps |maybe |well )*(?:be )?(?:wrong"
    r"|mistaken)\b|\bsans certitude\b"
    r"|\bohne gewähr\b|\bsin certeza\b|\bsenza certezza\b|\bне точно\b|"
    r"\bi(?:'m| am)? (?:just |only |really |simply |still )*(?:guessing\b|guess\b|not (?:\w+ )?(?:sure"
    r"|certain)|unsure\b|uncertain\b"
    r"|(?:do not|don't) (?:really )?know\b|have no (?:idea|clue)|doubt\b|cannot (?:tell|say)\b|can't (?:tell|say)\b)"
    r"|(?<!not )(?<!no )\b(?:my|a|just a|wild|best|random|lucky|pure|educated) guess\b|\bhad to guess\b"
    r"|\bno idea\b|^\W*(?:not (?:\w+ )?sure|unsure)\b"
    r"|\bje ne (?:suis|sais) pas\b|\bau hasard\b|\baucune idée\b|\bje devine\b"
    r"|\bich (?:bin|weiß)(?: es| mir)? (?:\w+ )?nicht\b|\bkeine ahnung\b|\bgeraten\b|\bich rate\b"
    r"|\bno (?:estoy seguro|estoy segura|lo sé|sé)\b|\bni idea\b|\bal azar\b|\badivin(?:o|ando)\b"
    r"|\bnon (?:sono sicur[oa]|lo so|so)\b|\bnessuna idea\b|\ba caso\b|\btiro a indovinare\b"
    r"|\bя? ?не (?:уверен|уверена|знаю)\b|\bнаугад\b|\bугада(?:ю|л|ла)\b|\bпонятия не имею\b"
    r"|不(?:太)?确定|不知道|随便猜|瞎猜|猜的"
)
_RETRACTED = re.compile(
    r"^\W*(?:(?:no|but|wait|hmm|oh|sorry|actually|well|oops|mais|aber|pero|ma|но|但是?|不)\b[\s,.!]*)*"
    r"(?:(?:(?:and|but|which|that|this|it|the answer|cela|c['’]|ceci|ce|das|es|eso|esto|questo|ciò|это|这)\s*)?"
    r"(?:is|was|['’]s|isn['’]t|wasn['’]t|are|seems?|looks|may be|might be|could be|would be|n?['’]?est|ist|es"
    r"|è|no es|non è)?\s*"
    r"(?:not|n['’]t|pas|nicht|не|probably|certainly|obviously|clearly|completely|surely|just|only|simply|also)?\s*"
    r"(?:(?:wrong|incorrect|false)(?! (?:answers?|questions?|items?|guess(?:es)?|moves?|notes?|statements?)\b)"
    r"|mistaken|untrue|impossible|not (?:right|correct|true|it)|(?<=not )(?:right"
    r"|correct|true|it)\b"
    r"|(?<=n't )(?:right|correct|true|it)\b|(?:not )?the (?:wrong|incorrect) (?:answer|one)|(?<=not )(?:the"
    r"|my) answer"
    r"|(?<=n't )(?:the|my) answer|(?<!not )(?<!n't )a (?:wild |pure |lucky )?guess|faux\b|(?<=pas )(?:juste"
    r"|correct|exact|la réponse)|falsch"
    r"|(?<=nicht )(?:richtig|korrekt|die antwort)|incorrecto|(?:no es )?(?:falso|la respuesta)|sbagliato"
    r"|errato|неверно"
    r"|неправильно|(?<=не )(?:верно|ответ|правильно)|неправильный|不对|错|不是答案|不正确))"
)
_TAKEN_BACK = re.compile(
    r"^\W*(?:no,? wait|wait,? no|scratch that|never ?mind|just kidding|ignore (?:this|that|it)|disregard"
    r"|(?:or|ou|oder|o|или) (?:not|pas|non|nicht|no|нет)\b|or (?:maybe|perhaps)\b|or so\b|or something"
    r"|(?:\(\s*)?(?:maybe|perhaps|possibly|probably|i think|guess|peut-être|vielleicht|quizás?|forse|наверное"
    r"|可能|也许)\s*(?:not)?\s*[).!?]"
    r"|(?:а |или |and |but |or |et |ou |und |oder |y |o |e )?(?:может быть|возможно|maybe|perhaps|possibly|peut-être"
    r"|vielleicht|quizás?|tal vez|forse)\W+(?:и |also |even |aussi |auch |también |anche )?[-\d]"
    r"|i (?:do not|don't) (?:think|believe|trust)|sein könnte|吗|吧|么)"
)
_OR = r"(?:or|ou|oder|o|u|oppure|или|либо|或者?|还是|alternatively|otherwise|sinon|andernfalls|altrimenti|иначе|否则)"
_BOXES = re.compile(
    rf"{_OTHER}(?:\s|[,;.$)])*{_OR}\b[^{_OTHER}\n]{{0,120}}{_ANSWER}"
    rf"|{_OTHER}[^{_OTHER}.\n]{{0,80}}\b{_OR}\b[^{_OTHER}.\n]{{0,60}}{_ANSWER}"
)
_NUMBER = r"[-+]?\d[\d.,/]*"
_IS = (
    r"(?:^|[=:]|\b(?:either|is|be|are|equals|was|est|soit|vaut|ist|entweder|es|son|è|o|равно|равен|это|либо)\b|[是为])"
)
_BESIDE = re.compile(
    rf"{_IS}\s*({_NUMBER})\s*,?\s*(?:\b{_OR}\b)[\s:=]*{_ANSWER}"
    rf"|{_ANSWER}\s*,?\s*\b{_OR}\b\s+(?:\w+ )?({_NUMBER})(?![\w%])"
    rf"|{_ANSWER}\W*(?:an )?(?:alternative|another)(?: possible)? (?:answer|value|result)"
    rf"\s*(?:[:=]|is|could be)?\s*({_NUMBER})(?![\w%])"
)
_SENTENCE = re.compile(r"(?<!\d)[.](?!\w)|(?<=\d)[.](?=\s|$)|[!?。！？\n]")
_CLAUSE = re.compile(
    r"[,;，；()（）—–]|\s-\s|\b(?:so|therefore|thus|hence|consequently|because|since|but|donc|mais|car|also|daher"
    r"|aber|sondern|denn"
    r"|así que|pero|sino|quindi|dunque|perciò|ma|поэтому|значит|но|а)\b|所以|因此|但是?|而是"
)
_OPENING = re.compile(r"^(?:well|so|then|hm+)\W+")
_CONCLUDED = re.compile(
    r"\b(?:so|therefore|thus|hence|because|since|donc|car|also|daher|denn|por lo tanto|así que|quindi|dunque"
    r"|perciò|поэтому"
    r"|значит)\b|所以|因此|[:：]"
)
_OPEN_LINE = re.compile(r"(?<=[^\s.!?。！？])\s*\n\s*$")
"""matches the end of a line that continues in the box below"""
_BUT = re.compile(
    r"\b(?:but|however|yet|mais|cependant|pourtant|sondern|aber|doch|jedoch|sino|pero|sin embargo|ma|però|tuttavia"
    r"|bensì|но|однако|а)\b|而是|但是?|而"
)
_SO = re.compile(
    r"\b(?:so|therefore|thus|hence|donc|also|daher|por lo tanto|así que|quindi|dunque|perciò|поэтому|значит)\b"
    r"|所以|因此|故|则"
)
_WORD = re.compile(r"[\u4e00-\u9fff]|[^\W\d_]{2,}")
FEW_WORDS = 3
"""a sentence with fewer words before the box is read together with the one before it"""
_ASKED = re.compile(r"\W*[?？]")
_COLON = re.compile(r"[:：]")
_MARKUP = re.compile(
    r"\\(?:text|textbf|mathrm|mbox|textit|emph|bf)\b\s*|\\[,;!:()\[\]]|[$*{}]|(?<![a-z])_|_(?![a-z])"
    r"|\\(?:left|right|displaystyle|quad|qquad|Rightarrow|implies)\b"
)
_NOT_EQUAL = re.compile(r"\\(?:neq?|not\s*=)\b|\\not\s*=|(?<=\s)!=|≠")


def doubted(
    problem: str,
    response: str,
    spans: list[tuple[int, int]],
    others: list[tuple[int, int]],
    same: Callable[[str], bool],
) -> str:
    """Return in words what denies or doubts the answer; "" when the response stands by it.

    spans: the boxes of the answer, `others`: the other boxes, from command to closing brace. `same`: whether a number
    that is offered beside the answer is the same one in another spelling.
    """
    start, end = spans[0][0], spans[-1][1]
    first = max(0, start - _BEFORE)
    near = [(left - first, right - first) for left, right in others if first <= left and right <= start]
    head, tail = _plain(response[first:start], near), _plain(response[end : end + _AFTER], [])
    before = _SENTENCE.split(_OPEN_LINE.sub(" ", head))
    after = [sentence for sentence in _SENTENCE.split(tail) if sentence.strip()][:2]
    *earlier, clause = (clause.strip() for clause in _CLAUSE.split(before[-1]))
    if _DENIED.search(clause) and not _SUBORDINATE.search(clause):
        return "denied before it"
    if _WRONG.search(clause) or (earlier and _WRONG.search(earlier[-1]) and not _CONCLUDED.search(before[-1])):
        return "called wrong, or somebody else's"
    idle = not re.search(r"\w", clause) and any(_HEDGING.fullmatch(_OPENING.sub("", one)) for one in earlier)
    if (
        _HEDGED.search(clause)
        or _DISBELIEVED.search(clause)
        or _MODAL.search(_COLON.split(clause)[-1] or clause)
        or idle
    ):
        return "called a possibility"
    if _DISBELIEVED.search(before[-1]) and not _CONCLUDED.search(before[-1]):
        return "called a possibility"
    if any(_UNSURE.search(sentence) for sentence in (*before[-2:], *after)):
        return "called a guess"
    if _ASKED.match(tail):
        return "asked, not answered"
    if any(_RETRACTED.match(one) or _TAKEN_BACK.match(one) for one in after) or _TAKEN_BACK.match(tail):
        return "taken back behind it"
    if another := _another(head, tail, same):
        return another
    sentences = [sentence for sentence in before[:-1] if sentence.strip()]
    own = _SO.split(_BUT.split(before[-1])[-1])[-1]
    alone = len(_WORD.findall(before[-1])) < FEW_WORDS  # it has nothing to say by itself
    for said in (own, *(sentences[-1:] if alone else []), tail):
        if found := steps_back(said, problem.lower()):
            return f'not stood by: "{found}"'
    return ""


def _another(head: str, tail: str, same: Callable[[str], bool]) -> str:
    """Return "one of several" when another answer is offered beside this one, else ""."""
    text = f"{head}{_ANSWER}{tail}"
    if _BOXES.search(text):
        return "one of several"
    for found in _BESIDE.finditer(text):
        number = next(filter(None, found.groups())).rstrip(".,")
        if not same(number):
            return "one of several"
    return ""


def _plain(text: str, others: list[tuple[int, int]]) -> str:
    """Return the text in lower case without markup, each box of `others` replaced by the sign `_OTHER`."""
    for start, end in sorted(others, reverse=True):
        text = f"{text[:start]}{_OTHER}{text[end:]}"
    text = _NOT_EQUAL.sub(" ≠ ", text.replace("’", "'").replace("nything but", "nything_but"))
    return re.sub(r"[ \t]+", " ", _MARKUP.sub(" ", text)).lower()
