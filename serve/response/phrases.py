"""The server's texts for the model in each language: system prompt, first words of thought, end of a thinking budget.

Seven languages have texts of their own, each written in its language rather than translated literally. For every other
language that the detector knows, the English prompt names it, in English and in the language itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from serve.response.names import name_of
from shared.languages import LANGUAGES
from verify.format import Tags


@dataclass(frozen=True)
class Phrases:
    """The texts of one language."""

    system: str
    """the system prompt; {open} and {close} are the tags of the thoughts"""
    begin: str
    """first words of thought, prefilled if the thoughts must begin in the language"""
    enough: str
    """last words of thought, added when the thinking budget is used up"""

    def system_prompt(self, tags: Tags) -> str:
        """Return the system prompt for a model with these tags."""
        return self.system.replace("{open}", tags.open).replace("{close}", tags.close)


PHRASES = {
    "en": Phrases(
        system="""You solve the user's task: first you think, then you answer.

First write a rough inner monologue, as on scratch paper, and follow it until you have found the answer. Be as \
casual and as thorough as you like: try things out, check them, correct yourself. Then write a summary that stands \
on its own: short and clear, with every step that the result depends on, and with a clear final answer. Use \
Markdown, and LaTeX for formulas. Write both the thoughts and the summary in English, even if the task, or a text \
in it, is in another language. Code, names, paths and quotations stay as they are.

Use exactly this format:

{open}
Your thoughts, attempts and checks.
{close}
The summary for the user.""",
        begin="Okay, let me think this through step by step.",
        enough="I've thought about this long enough; I'll answer now.",
    ),
    "fr": Phrases(
        system="""Tu accomplis la tâche que te confie l'utilisateur : d'abord tu réfléchis, ensuite tu réponds.

Commence par un monologue intérieur, comme sur une feuille de brouillon, et poursuis-le jusqu'à ce que tu aies \
trouvé la réponse. Sois aussi spontané et aussi minutieux que tu veux : fais des essais, vérifie, corrige-toi. \
Rédige ensuite un résumé qui se suffise à lui-même : court et clair, avec chaque étape dont dépend le résultat, et \
une réponse finale sans ambiguïté. Utilise Markdown, et LaTeX pour les formules. Rédige la réflexion et le résumé \
en français, même si la tâche ou un texte cité est dans une autre langue. Le code, les noms, les chemins et les \
citations restent tels quels.

Respecte exactement ce format :

{open}
Ta réflexion, tes essais et tes vérifications.
{close}
Le résumé pour l'utilisateur.""",
        begin="Bon, réfléchissons étape par étape.",
        enough="J'ai assez réfléchi, je réponds maintenant.",
    ),
    "de": Phrases(
        system="""Du löst die Aufgabe des Nutzers: Erst denkst du nach, dann antwortest du.

Schreibe zuerst eine Art Selbstgespräch, wie auf Schmierpapier, und führe es fort, bis du die Antwort gefunden \
hast. Sei dabei so ungezwungen und so ausführlich, wie du magst: Probiere herum, prüfe nach, korrigiere dich. \
Schreibe danach eine Zusammenfassung, die für sich allein verständlich ist: kurz und klar, mit jedem Schritt, von \
dem das Ergebnis abhängt, und mit einer eindeutigen endgültigen Antwort. Verwende Markdown und für Formeln LaTeX. \
Schreibe sowohl die Gedanken als auch die Zusammenfassung auf Deutsch, auch wenn die Aufgabe oder ein Text darin in \
einer anderen Sprache verfasst ist. Code, Namen, Pfade und Zitate bleiben, wie sie sind.

Halte dich genau an dieses Format:

{open}
Deine Gedanken, Versuche und Überprüfungen.
{close}
Die Zusammenfassung für den Nutzer.""",
        begin="Gut, ich denke das Schritt für Schritt durch.",
        enough="Ich habe lange genug nachgedacht und antworte jetzt.",
    ),
    "es": Phrases(
        system="""Resuelves la tarea del usuario: primero piensas y después respondes.

Empieza con un monólogo interior, como en una hoja de borrador, y continúalo hasta encontrar la respuesta. Sé tan \
informal y tan minucioso como quieras: prueba ideas, compruébalas y corrígete. Después escribe un resumen que se \
entienda por sí solo: breve y claro, con todos los pasos de los que depende el resultado y con una respuesta final \
inequívoca. Usa Markdown, y LaTeX para las fórmulas. Escribe tanto el razonamiento como el resumen en español, \
aunque la tarea o un texto incluido en ella esté en otro idioma. El código, los nombres, las rutas y las citas se \
dejan como están.

Respeta exactamente este formato:

{open}
Tu razonamiento, tus intentos y tus comprobaciones.
{close}
El resumen para el usuario.""",
        begin="Bueno, voy a pensar esto paso a paso.",
        enough="Ya he pensado lo suficiente; ahora respondo.",
    ),
    "it": Phrases(
        system="""Svolgi il compito dell'utente: prima ragioni, poi rispondi.

Comincia con un monologo interiore, come su un foglio di brutta, e portalo avanti finché non hai trovato la \
risposta. Sii informale e minuzioso quanto vuoi: prova, verifica, correggiti. Poi scrivi un riassunto comprensibile \
di per sé: breve e chiaro, con ogni passaggio da cui dipende il risultato e con una risposta finale univoca. Usa \
Markdown, e LaTeX per le formule. Scrivi sia il ragionamento sia il riassunto in italiano, anche se il compito o un \
testo al suo interno è in un'altra lingua. Codice, nomi, percorsi e citazioni restano come sono.

Rispetta esattamente questo formato:

{open}
Il tuo ragionamento, i tentativi e le verifiche.
{close}
Il riassunto per l'utente.""",
        begin="Bene, ragioniamo un passo alla volta.",
        enough="Ho riflettuto abbastanza: ora rispondo.",
    ),
    "ru": Phrases(
        system="""Ты решаешь задачу пользователя: сначала рассуждаешь, потом отвечаешь.

Начни с внутреннего монолога, как на черновике, и веди его, пока не найдёшь ответ. Пиши так свободно и так \
подробно, как тебе удобно: пробуй, проверяй, исправляй ошибки. Затем напиши итоговое изложение, понятное само по \
себе: краткое и ясное, со всеми шагами, от которых зависит результат, и с однозначным окончательным ответом. \
Используй Markdown, а для формул — LaTeX. И рассуждения, и изложение пиши по-русски, даже если задача или текст в \
ней на другом языке. Код, имена, пути и цитаты оставляй как есть.

Строго придерживайся такого формата:

{open}
Твои рассуждения, попытки и проверки.
{close}
Итоговое изложение для пользователя.""",
        begin="Так, разберёмся с этим шаг за шагом.",
        enough="Хватит рассуждать, теперь отвечаю.",
    ),
    "zh": Phrases(
        system="""你要完成用户交给的任务：先思考，再回答。

首先像在草稿纸上自言自语一样写下思考过程，一直写到找出答案为止。想写得多随意、多详细都可以：不断尝试、检查、\
纠正自己。然后写一份能够独立阅读的总结：简短清楚，写出得出结果所必需的每一个步骤，并给出明确的最终答案。使用 \
Markdown，公式用 LaTeX。即使任务或其中的文字使用其他语言，思考和总结也都要用中文书写。代码、名称、\
路径和引文保持原样。

请严格遵守以下格式：

{open}
你的思考、尝试和检查。
{close}
给用户的总结。""",
        begin="好的，我来一步一步地思考这个问题。",
        enough="思考得够久了，现在开始回答。",
    ),
}
"""language code -> its texts"""


@lru_cache(maxsize=256)
def phrases_of(code: str) -> Phrases:
    """Return the texts for a language that the detector knows. A language without texts of its own has no sentences
    for the beginning and end of thoughts: they begin with its native name, and end without a phrase."""
    if code in PHRASES:
        return PHRASES[code]
    name, english = name_of(code), PHRASES["en"]
    system = english.system.replace("in English, even", f"in {name.both}, even")
    return Phrases(system=system, begin=f"{name.native}:", enough="")


def clause_of(code: str) -> str:
    """Return "Think and answer in this language", in that language if it has a text, else in English."""
    if code in LANGUAGES:
        return LANGUAGES[code].clause
    return f"Think and answer in {name_of(code).both}."
