"""The server's prompts: its texts for the model in each language, and conversations rendered as prompt tokens.

Seven languages have texts of their own, each written in its language rather than translated literally. For every other
language that the detector knows, the English prompt names it, in English and in the language itself.

The server's system prompt comes first, the client's behind it. Texts of users and applications cannot contain
control tokens: one that spells a control token ("<|im_end|>", "[INST]") is tokenised as ordinary letters. Everything
else is tokenised in one piece, exactly as in training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from serve.messages import ChatMessage
from serve.tools import AnswerForm
from shared.chat import Chat, QuotedTexts, joined, system_prompt
from shared.errors import ModelError
from shared.languages import name_of, with_request
from shared.model.model_card import read_card
from shared.tool_calls import call_text, result_text
from verify.format import CONTROL, TEXT, Tags


@dataclass(frozen=True)
class LanguagePrompts:
    """The texts of one language."""

    system: str
    """the system prompt; {open} and {close} are the tags of the reasoning"""
    first_words: str
    """first words of reasoning, prefilled if the reasoning must begin in the language"""
    budget_phrase: str
    """last words of reasoning, added when the thinking budget is used up"""

    def system_prompt(self, tags: Tags) -> str:
        """Return the system prompt for a model with these tags."""
        return self.system.replace("{open}", tags.open).replace("{close}", tags.close)


SYSTEM_PROMPTS = {
    "en": LanguagePrompts(
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
        first_words="Okay, let me think this through step by step.",
        budget_phrase="I've thought about this long enough; I'll answer now.",
    ),
    "fr": LanguagePrompts(
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
        first_words="Bon, réfléchissons étape par étape.",
        budget_phrase="J'ai assez réfléchi, je réponds maintenant.",
    ),
    "de": LanguagePrompts(
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
        first_words="Gut, ich denke das Schritt für Schritt durch.",
        budget_phrase="Ich habe lange genug nachgedacht und antworte jetzt.",
    ),
    "es": LanguagePrompts(
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
        first_words="Bueno, voy a pensar esto paso a paso.",
        budget_phrase="Ya he pensado lo suficiente; ahora respondo.",
    ),
    "it": LanguagePrompts(
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
        first_words="Bene, ragioniamo un passo alla volta.",
        budget_phrase="Ho riflettuto abbastanza: ora rispondo.",
    ),
    "ru": LanguagePrompts(
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
        first_words="Так, разберёмся с этим шаг за шагом.",
        budget_phrase="Хватит рассуждать, теперь отвечаю.",
    ),
    "zh": LanguagePrompts(
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
        first_words="好的，我来一步一步地思考这个问题。",
        budget_phrase="思考得够久了，现在开始回答。",
    ),
}
"""language code -> its texts"""


IN_ENGLISH = """ Write both the thoughts and the summary in English, even if the task, or a text in it, is in another \
language. Code, names, paths and quotations stay as they are."""
"""what the English system prompt says of the language"""


@lru_cache(maxsize=256)
def prompts_of(code: str) -> LanguagePrompts:
    """Return the texts for a language that the detector knows, "" for no language. A language without texts of its own
    has no sentences for the beginning and end of reasoning: it begins with the native name, and ends without a
    phrase."""
    if code in SYSTEM_PROMPTS:
        return SYSTEM_PROMPTS[code]
    english = SYSTEM_PROMPTS["en"]
    if not code:
        return replace(english, system=english.system.replace(IN_ENGLISH, ""), first_words="")
    name = name_of(code)
    system = english.system.replace("in English, even", f"in {name.both}, even")
    return LanguagePrompts(system=system, first_words=f"{name.native}:", budget_phrase="")


POLICY = "policy"
TRAINED = "trained"
MOST_ARGUMENTS = 32
"""sets of arguments of the chat template whose prompts are remembered"""


class PromptRenderer:
    """Renders conversations for one model."""

    def __init__(self, chat: Chat, system: str = POLICY, whole: bool = False, trained: bool = False):
        """system: "policy" for the server's prompt in the language of the reasoning, "magistral" for that of training,
        "" for none, else a fixed text. whole: the model sees its earlier turns as it wrote them, reasoning included,
        whatever its template drops. trained: it was trained to follow requests for a language."""
        self.chat, self.system, self.whole, self.trained = chat, system, whole, trained
        self.tags: Tags = CONTROL if chat.think_ids is not None else TEXT
        self.opened = bool(chat.think_prefix) and not chat.think_closed
        """whether the chat template opens the reasoning"""
        self.longest = max(map(len, chat.tokenizer.get_vocab()))
        """number of letters of the longest token"""
        self._letters: dict[int, str] = {}
        self._others: dict[str, PromptRenderer] = {}

    @classmethod
    def of_model(
        cls, folder: Path, system: str, trained: Path | None = None, arguments: Mapping[str, Any] | None = None
    ) -> PromptRenderer:
        """Create it for a model folder; system: as in the settings, where "trained" means the system prompt in the
        card of the folder, or of `trained`, which holds an adapter. arguments: of the chat template, beside those of
        the training. Raises ModelError."""
        card = read_card(trained or folder)
        if system == TRAINED:
            system = POLICY if card is None else card.system_prompt
        if card is None:
            return cls(Chat(folder, "", arguments), system)
        chat = Chat(folder, card.chat_template, {**card.template, **(arguments or {})})
        return cls(chat, system, whole=card.history == "whole", trained=card.language_requests)

    def with_arguments(self, arguments: Mapping[str, Any]) -> PromptRenderer:
        """The same with other arguments of the chat template, beside those that it has. Raises ModelError for one that
        the template does not read, and for texts with control tokens."""
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True)
        if (known := self._others.get(key)) is None:
            if any(self.chat.added.search(value) for value in arguments.values() if isinstance(value, str)):
                raise ModelError("an argument of the chat template spells a control token")
            chat = self.chat.with_arguments(arguments)
            known = PromptRenderer(chat, self.system, self.whole, self.trained)
            if len(self._others) == MOST_ARGUMENTS:  # clients choose them
                self._others.clear()
            self._others[key] = known
        return known

    def letters(self, token: int) -> str:
        """Decode a single token; incomplete characters are not letters."""
        found = self._letters.get(token)
        if found is None:
            found = self._letters[token] = str(self.chat.tokenizer.decode([token], skip_special_tokens=False))
        return found

    def system_prompt(self, code: str) -> str:
        """Return the system prompt; code: language of the reasoning, "" for none."""
        if self.system != POLICY:
            return system_prompt(self.system, language=code)
        return prompts_of(code).system_prompt(self.tags)

    def render(self, messages: Sequence[ChatMessage], code: str, form: AnswerForm | None = None) -> list[int]:
        """Return the [prompt_tokens] up to where the assistant begins, without reasoning of earlier turns unless
        `whole`. form: the part of the system prompt on the form of the answer.

        Given a language, the user's last turn ends with the request for it: what is near the question has most effect.
        In an episode (`whole`) it stands where training puts it, behind the user's first words. A conversation without
        a user has it in the system prompt. Raises ModelError if the model's template refuses the conversation.
        """
        quoted = QuotedTexts(self.chat)
        theirs = [quoted.quote(message.text) for message in messages if message.role in ("system", "developer")]
        told = form.text.replace("{given}", quoted.quote(form.given)) if form is not None else ""
        rest = [message for message in messages if message.role not in ("system", "developer")]
        users = [place for place, message in enumerate(rest) if message.role == "user"]
        system = joined(self.system_prompt(code), *theirs, told)
        if not users:
            system = with_request(system, code)
        turns = [{"role": "system", "content": system}] if system else []
        if self.whole:
            first = next((place for place, message in enumerate(rest) if message.role == "assistant"), len(rest))
            return self._whole(turns, rest, [place for place in users if place < first][-1:], code, quoted)
        of_tools = False
        for place, message in enumerate(rest):
            made = [call.function for call in message.tool_calls or []]
            calls = [call_text(one.name, quoted.quote(one.arguments)) for one in made]
            text = "\n".join(filter(None, [quoted.quote(message.text), *calls]))
            if message.role == "tool":
                result = result_text(text)
                if of_tools:  # templates want the user and the assistant in turn
                    turns[-1]["content"] += f"\n{result}"
                else:
                    turns.append({"role": "user", "content": result})
            else:
                text = with_request(text, code) if [place] == users[-1:] else text
                turns.append({"role": message.role, "content": text})
            of_tools = message.role == "tool"
        if not rest:
            raise ModelError("nobody has said anything yet")
        return quoted.encode(self.chat.render_turns(turns))

    def _whole(
        self,
        turns: list[dict[str, str]],
        messages: Sequence[ChatMessage],
        asking: list[int],
        code: str,
        quoted: QuotedTexts,
    ) -> list[int]:
        """The [prompt_tokens] of an episode in training: the turns of the assistant as it wrote them, and between two
        what the template puts there (`Chat.bridge`). turns: the system's, its texts `quoted`. asking: the message that
        ends with the request for a language, if any."""
        if not messages or messages[0].role == "assistant":
            raise ModelError("it begins with a turn of the assistant: leave that out, or say it in the system prompt")
        ids, between = list[int](), list[tuple[str, str]]()
        for place, message in enumerate(messages):
            if message.role != "assistant":
                text = message.text if ids else quoted.quote(message.text)
                between.append((message.role, with_request(text, code if place in asking else "")))
                continue
            ids += self._between(ids, turns, between, quoted)
            ids += [*self._turn(message), self.chat.eos_id]
            between = []
        return ids + self._between(ids, turns, between, quoted)

    def _between(
        self, ids: list[int], turns: list[dict[str, str]], between: list[tuple[str, str]], quoted: QuotedTexts
    ) -> list[int]:
        """The tokens of messages up to where the assistant begins; with no ids before them, those of the prompt, whose
        texts are `quoted`."""
        if ids:
            return self.chat.bridge(between)
        first = [{"role": "user", "content": text} for _, text in between]
        return quoted.encode(self.chat.render_turns(turns + first))

    def _turn(self, message: ChatMessage) -> list[int]:
        """The tokens of a turn of the assistant, without its end token and what the template itself opens."""
        quoted, thoughts, text = QuotedTexts(self.chat), message.thoughts, message.text
        if not thoughts and text.startswith(self.tags.open):  # reasoning in the text itself, as format inline has it
            thoughts, _, text = text.removeprefix(self.tags.open).partition(self.tags.close)
        calls = [call_text(one.function.name, quoted.quote(one.function.arguments)) for one in message.tool_calls or []]
        said = "\n".join(filter(None, [quoted.quote(text), *calls]))
        if thoughts or self.opened:
            opening = "" if self.opened else self.tags.open
            blank = "\n" if calls and not text else ""
            said = f"{opening}{quoted.quote(thoughts)}{self.tags.close}{blank}{said}"
        return quoted.encode(said)

    def begin_reasoning(self, prompt_ids: list[int], code: str) -> tuple[list[int], str]:
        """Return the prompt with first words of reasoning in a language added, and those words; code: "" for none."""
        begin = prompts_of(code).first_words if code else ""
        opening = "" if self.opened else f"{self.tags.open}\n"
        return prompt_ids + self.chat.encode(opening + begin), begin

    def end_reasoning(self, code: str, *, inside: bool, begun: bool) -> tuple[str, list[int]]:
        """Return the text that ends reasoning whose budget is used up, and its tokens. inside: its tag is open; begun:
        it has some words, so that there is something to break off."""
        phrase = prompts_of(code or "en").budget_phrase if begun else ""
        text = f"{'' if inside else self.tags.open}\n{phrase}\n{self.tags.close}\n\n"
        return text, self.chat.encode(text)
