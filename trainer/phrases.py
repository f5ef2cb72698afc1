"""The sentences of the quickstart's word problems, in seven languages.

Numbers stand where no word has to agree with them ("У Ивана есть книги, всего 21", "ne compra 3 in più"), verbs are in
the present tense, which has no gender, and a thing carries its own question, so that every sentence is right for every
name, thing and number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thing:
    """A countable thing, as sentences about it in one language."""

    has: str
    """"{who} has {count} of it" in this language, with {owner} where the owner is in another case"""
    ask: str
    """"How many of it does {who} have now?\""""
    at_first: str
    """"In the beginning there are {count} of it." (the first thought)"""
    unit: str = ""
    """measure word (Chinese)"""


@dataclass(frozen=True)
class Phrases:
    """All sentences of one language. Fields: {who}, {owner}, {number}, {unit}, {before}, {after}."""

    people: tuple[tuple[str, str], ...]
    """(name, the owner's form of the name)"""
    things: tuple[Thing, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    add: str
    """thought about a gain"""
    subtract: str
    """thought about a loss"""
    guess: str
    """thought of a completion that does not calculate"""
    answer: str
    """sentence before the boxed answer"""
    space: str = " "
    """between sentences"""


def _same(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in names)


def _things(has: str, ask: str, at_first: str, *things: dict[str, str]) -> tuple[Thing, ...]:
    """Fill the things' own words (and what depends on them) into a language's patterns."""

    def fill(pattern: str, words: dict[str, str]) -> str:
        for word, value in words.items():
            pattern = pattern.replace(f"<{word}>", value)
        return pattern

    return tuple(
        Thing(fill(has, words), fill(ask, words), fill(at_first, words), words.get("unit", "")) for words in things
    )


PHRASES = {
    "en": Phrases(
        people=_same("Tom", "Anna", "Sam", "Lucy"),
        things=_things(
            "{who} has {number} <many>.",
            "How many <many> does {who} have now?",
            "In the beginning there are {number} <many>.",
            {"many": "apples"},
            {"many": "books"},
            {"many": "coins"},
            {"many": "stamps"},
        ),
        gains=("{who} buys {number} more.", "{who} finds {number} more.", "{who} is given {number} more."),
        losses=("{who} gives away {number}.", "{who} loses {number}.", "{who} sells {number}."),
        add="Then we add {number}: {before}+{number}={after}.",
        subtract="Then we take away {number}: {before}-{number}={after}.",
        guess="I do not want to calculate, so I will simply guess.",
        answer="The answer is",
    ),
    "fr": Phrases(
        people=_same("Paul", "Marie", "Luc", "Julie"),
        things=_things(
            "{who} a {number} <many>.",
            "Combien de <many> a maintenant {who} ?",
            "Au début il y a {number} <many>.",
            {"many": "pommes"},
            {"many": "livres"},
            {"many": "pièces"},
            {"many": "timbres"},
        ),
        gains=(
            "{who} en achète encore {number}.",
            "{who} en trouve encore {number}.",
            "{who} en reçoit encore {number}.",
        ),
        losses=("{who} en donne {number}.", "{who} en perd {number}.", "{who} en vend {number}."),
        add="Ensuite on ajoute {number} : {before}+{number}={after}.",
        subtract="Ensuite on enlève {number} : {before}-{number}={after}.",
        guess="Je ne veux pas calculer, alors je vais simplement deviner.",
        answer="La réponse est",
    ),
    "de": Phrases(
        people=_same("Hans", "Greta", "Jonas", "Lena"),
        things=_things(
            "{who} hat {number} <many>.",
            "Wie viele <many> hat {who} jetzt?",
            "Am Anfang sind es {number} <many>.",
            {"many": "Äpfel"},
            {"many": "Bücher"},
            {"many": "Münzen"},
            {"many": "Briefmarken"},
        ),
        gains=(
            "{who} kauft noch {number} dazu.",
            "{who} findet noch {number}.",
            "{who} bekommt noch {number} geschenkt.",
        ),
        losses=("{who} verschenkt {number} davon.", "{who} verliert {number} davon.", "{who} verkauft {number} davon."),
        add="Dann zählen wir {number} dazu: {before}+{number}={after}.",
        subtract="Dann ziehen wir {number} ab: {before}-{number}={after}.",
        guess="Ich möchte nicht rechnen, also rate ich einfach.",
        answer="Die Antwort ist",
    ),
    "es": Phrases(
        people=_same("Ana", "Diego", "Pablo", "Elena"),
        things=_things(
            "{who} tiene {number} <many>.",
            "¿<how> <many> tiene {who} ahora?",
            "Al principio hay {number} <many>.",
            {"many": "manzanas", "how": "Cuántas"},
            {"many": "libros", "how": "Cuántos"},
            {"many": "monedas", "how": "Cuántas"},
            {"many": "sellos", "how": "Cuántos"},
        ),
        gains=("{who} compra {number} más.", "{who} encuentra {number} más.", "{who} recibe {number} más."),
        losses=("{who} regala {number}.", "{who} pierde {number}.", "{who} vende {number}."),
        add="Luego sumamos {number}: {before}+{number}={after}.",
        subtract="Luego restamos {number}: {before}-{number}={after}.",
        guess="No quiero calcular, así que simplemente voy a adivinar.",
        answer="La respuesta es",
    ),
    "it": Phrases(
        people=_same("Marco", "Giulia", "Luca", "Sofia"),
        things=_things(
            "{who} ha {number} <many>.",
            "<how> <many> ha adesso {who}?",
            "All'inizio ci sono {number} <many>.",
            {"many": "mele", "how": "Quante"},
            {"many": "libri", "how": "Quanti"},
            {"many": "monete", "how": "Quante"},
            {"many": "francobolli", "how": "Quanti"},
        ),
        gains=(
            "{who} ne compra {number} in più.",
            "{who} ne trova {number} in più.",
            "{who} ne riceve {number} in più.",
        ),
        losses=("{who} ne regala {number}.", "{who} ne perde {number}.", "{who} ne vende {number}."),
        add="Poi aggiungiamo {number}: {before}+{number}={after}.",
        subtract="Poi togliamo {number}: {before}-{number}={after}.",
        guess="Non voglio fare calcoli, quindi provo semplicemente a indovinare.",
        answer="La risposta è",
    ),
    "ru": Phrases(
        people=(("Иван", "Ивана"), ("Олег", "Олега"), ("Анна", "Анны"), ("Мария", "Марии")),
        things=_things(
            "У {owner} есть <many>, всего {number}.",
            "Сколько <of> теперь у {owner}?",
            "Сначала есть <many>, всего {number}.",
            {"many": "яблоки", "of": "яблок"},
            {"many": "книги", "of": "книг"},
            {"many": "монеты", "of": "монет"},
            {"many": "марки", "of": "марок"},
        ),
        gains=("{who} покупает ещё {number}.", "{who} находит ещё {number}.", "{who} получает ещё {number}."),
        losses=("{who} отдаёт {number}.", "{who} теряет {number}.", "{who} продаёт {number}."),
        add="Затем прибавляем {number}: {before}+{number}={after}.",
        subtract="Затем вычитаем {number}: {before}-{number}={after}.",
        guess="Я не хочу считать, поэтому просто угадаю.",
        answer="Итак, ответ равен",
    ),
    "zh": Phrases(
        people=_same("小明", "小红", "小刚", "小丽"),
        things=_things(
            "{who}有{number}<unit><many>。",
            "{who}现在有多少<unit><many>？",
            "一开始有{number}<unit><many>。",
            {"many": "苹果", "unit": "个"},
            {"many": "书", "unit": "本"},
            {"many": "硬币", "unit": "枚"},
            {"many": "邮票", "unit": "张"},
        ),
        gains=("{who}又买了{number}{unit}。", "{who}又找到{number}{unit}。", "{who}又收到{number}{unit}。"),
        losses=("{who}送出了{number}{unit}。", "{who}弄丢了{number}{unit}。", "{who}卖掉了{number}{unit}。"),
        add="然后加上{number}：{before}+{number}={after}。",
        subtract="然后减去{number}：{before}-{number}={after}。",
        guess="我不想计算，所以直接猜一个数。",
        answer="答案是",
        space="",
    ),
}
"""language code -> its sentences"""
