"""The server's prompts: its texts for the model in each language, and conversations rendered as prompt tokens.

The languages of system_prompts.toml have texts of their own. For every other language that the detector knows, the
English prompt names it, in English and in the language itself.

The server's system prompt comes first, then the client's. Texts of users and applications cannot contain
control tokens: one that spells a control token ("<|im_end|>", "[INST]") is tokenised as ordinary letters. Everything
else is tokenised in one piece, exactly as in training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from serve.messages import ChatMessage
from serve.reasoning import Splitter
from serve.tools import AnswerForm
from shared.chat import Chat, joined, system_prompt
from shared.errors import ModelError
from shared.languages import name_of, request_for, with_request
from shared.model.model_card import USUAL_BLANKS, read_card
from shared.quoted_texts import QuotedTexts
from shared.reasoning_tags import CHANNEL, CONTROL, END, KNOWN, MARKS, MESSAGE, START, TEXT, Tags
from shared.tool_calls import CLOSE, OPEN, call_text, result_text


class LanguagePrompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The texts of one language, as in system_prompts.toml."""

    system: str
    """the system prompt; {open} and {close} are the tags of the reasoning, {language} the place of the next text"""
    language: str
    """Words of the system prompt about the language; {name} is that of a language without texts of its own."""
    first_words: str
    """first words of reasoning, prefilled if the reasoning must begin in the language"""
    budget_phrase: str
    """last words of reasoning, added when the thinking budget is used up"""

    def system_prompt(self, tags: Tags) -> str:
        """Return the system prompt for a model with these tags."""
        words = {"{language}": self.language, "{open}": tags.open.rstrip(), "{close}": tags.close}
        system = self.system
        if tags.channels:  # the template itself says how they are written
            system = system.partition("\n\n{open}")[0].rpartition("\n\n")[0]
        return reduce(lambda text, word: text.replace(*word), words.items(), system)


SYSTEM_PROMPTS = msgspec.toml.decode(
    resources.files("serve").joinpath("system_prompts.toml").read_bytes(), type=dict[str, LanguagePrompts]
)
"""language code -> its texts"""


@lru_cache(maxsize=256)
def prompts_of(code: str) -> LanguagePrompts:
    """Return the texts for a language that the detector knows, "" for no language. A language without texts of its own
    has no sentences for the beginning and end of reasoning: it begins with the native name, and ends without a
    phrase."""
    if code in SYSTEM_PROMPTS and code != "en":
        return SYSTEM_PROMPTS[code]
    english = SYSTEM_PROMPTS["en"]
    if not code:
        return replace(english, language="", first_words="")
    name = name_of(code)
    named = replace(english, language=english.language.replace("{name}", name.both))
    return named if code == "en" else replace(named, first_words=f"{name.native}:", budget_phrase="")


POLICY = "policy"
TRAINED = "trained"
MOST_ARGUMENTS = 32
"""sets of arguments of the chat template whose prompts are remembered"""


class PromptRenderer:
    """Renders conversations for one model."""

    def __init__(
        self,
        chat: Chat,
        system: str = POLICY,
        whole: bool = False,
        trained: bool = False,
        blanks: tuple[str, str, str] = USUAL_BLANKS,
        bare: bool = False,
    ):
        """system: "policy" for the server's prompt in the language of the reasoning, "magistral" for that of training,
        "" for none, else a fixed text. whole: the model sees its earlier turns as it wrote them, reasoning included,
        whatever its template drops. trained: it was trained to follow requests for a language. blanks: around its tags,
        see `ModelCard.tag_blanks`. bare: its training had neither a system prompt nor requests for a language, so that
        only a language that a client or the server's settings name is asked for."""
        self.chat, self.system, self.whole, self.trained, self.blanks = chat, system, whole, trained, blanks
        self.bare = bare
        self.tags = chat.tags
        self.shown: Tags = self.tags if self.tags in (TEXT, CONTROL) else TEXT
        """those around reasoning that clients get in the text itself"""
        decoder = chat.tokenizer.added_tokens_decoder
        known = {added.content: number for number, added in decoder.items()}
        special = (added.content for added in decoder.values() if added.special)
        marks = {*special, *KNOWN, self.tags.open.strip(), self.tags.close, OPEN, CLOSE} - {""}
        self.markup = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        """finds tags and control tokens in a text of the model"""
        self.control = [known.get(mark, -1) for mark in MARKS] if self.tags.channels else chat.think_ids
        """token ids of the tags, if they are control tokens"""
        if lost := [mark for mark in (START, CHANNEL, MESSAGE, END) if self.tags.channels and mark not in known]:
            raise ModelError(
                f"{chat.folder}: the chat template writes channels, and the tokenizer lacks their control tokens "
                f"({', '.join(lost)}): fetch tokenizer.json and tokenizer_config.json again"
            )
        closing = None if self.control is None else self.control[1]
        self.through = (MESSAGE, known[MESSAGE]) if self.tags.channels else (self.tags.close, closing)
        """up to where reasoning is sampled before a constrained answer, and its token id, if it is a control token"""
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
        card of the folder, or of `trained`, which holds an adapter. arguments: of the chat template, added to those of
        the training. Raises ModelError."""
        card = read_card(trained or folder)
        if system == TRAINED:
            system = POLICY if card is None else card.system_prompt
        if card is None:
            return cls(Chat(folder, "", arguments, published=True), system)
        chat = Chat(folder, card.chat_template, {**card.template, **(arguments or {})})
        bare = not (system or card.language_requests)
        return cls(chat, system, card.history == "whole", card.language_requests, card.tag_blanks, bare)

    @property
    def warning(self) -> str:
        """Why the model may not follow requests for a language, and what to do, in one line; "" for nothing."""
        if self.trained:
            return ""
        closed = (
            "its chat template closes the reasoning, so that answers alone are asked for; " * self.chat.think_closed
        )
        return (
            f"{closed}it was not trained to follow requests for a language, and may reason in another than prompts ask "
            "for: measure how often (python -m benchmarks enforcement), train it on rows with reasoning_language "
            "(docs/data.md), or enforce the language (reasoning_language_enforcement, docs/serving.md)"
        )

    def with_arguments(self, arguments: Mapping[str, Any]) -> PromptRenderer:
        """The same with other arguments of the chat template, added to those that it has. Raises ModelError for one
        that the template does not read, and for texts with control tokens."""
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True)
        if (known := self._others.get(key)) is None:
            if any(self.chat.added.search(value) for value in arguments.values() if isinstance(value, str)):
                raise ModelError("an argument of the chat template spells a control token")
            chat = self.chat.with_arguments(arguments)
            known = PromptRenderer(chat, self.system, self.whole, self.trained, self.blanks, self.bare)
            if len(self._others) == MOST_ARGUMENTS:  # clients choose them
                self._others.clear()
            self._others[key] = known
        return known

    def letters(self, token: int) -> str:
        """Decode a single token; incomplete characters are not letters."""
        text = self._letters.get(token)
        if text is None:
            text = self._letters[token] = str(self.chat.tokenizer.decode([token], skip_special_tokens=False))
        return text

    def system_prompt(self, code: str) -> str:
        """Return the system prompt; code: language of the reasoning, "" for none."""
        if self.system != POLICY:
            return system_prompt(self.system, language=code)
        return prompts_of(code).system_prompt(self.tags)

    def render(self, messages: Sequence[ChatMessage], code: str, form: AnswerForm | None = None) -> list[int]:
        """Return the [prompt_tokens] up to where the assistant begins, without reasoning of earlier turns unless
        `whole`. form: the part of the system prompt on the form of the answer.

        Given a language, the user's last turn ends with the request for it: what is near the question has most effect.
        In an episode (`whole`) it is where training puts it, after the user's first words. A conversation without
        a user has it in the system prompt. Raises ModelError if the model's template refuses the conversation.
        """
        quoted = QuotedTexts(self.chat)
        theirs = [quoted.quote_system(message.text) for message in messages if message.role in ("system", "developer")]
        form_text = "" if form is None else form.text
        if form is not None and form.given:
            form_text = form_text.replace("{given}", quoted.quote(form.given))
        rest = [message for message in messages if message.role not in ("system", "developer")]
        first = next((number for number, message in enumerate(rest) if message.role == "assistant"), len(rest))
        before = rest[:first] if self.whole else rest
        asking = [number for number, message in enumerate(before) if message.role == "user"][-1:]
        request = request_for(code) if code and not asking else ""
        system = joined(self.system_prompt(code), *theirs, form_text, request)
        turns = [{"role": "system", "content": system}] if system else []
        if self.whole:
            return self._whole(turns, rest, asking, code, quoted)
        of_tools = False
        for number, message in enumerate(rest):
            made = [call.function for call in message.tool_calls or []]
            calls = [call_text(function.name, quoted.quote(function.arguments)) for function in made]
            words = message.text
            if message.role == "assistant" and self.tags != self.shown and words.startswith(self.shown.open):
                words = words.partition(self.shown.close)[2].lstrip()  # templates drop only their own family's form
            text = "\n".join(filter(None, [quoted.quote(words), *calls]))
            if message.role == "tool":
                result = result_text(text)
                if of_tools:  # templates want the user and the assistant in turn
                    turns[-1]["content"] += f"\n{result}"
                else:
                    turns.append({"role": "user", "content": result})
            else:
                text = with_request(text, code if number in asking else "")
                turns.append({"role": message.role, "content": text})
            of_tools = message.role == "tool"
        if not rest:
            raise ModelError("nobody has said anything yet")
        return quoted.encode(self.chat.render_turns(turns))

    def _whole(
        self, turns: list[dict[str, str]], messages: Sequence[ChatMessage], asking: list[int], code: str,
        quoted: QuotedTexts,
    ) -> list[int]:  # fmt: skip
        """The [prompt_tokens] of an episode in training: the turns of the assistant as it wrote them, and between two
        what the template puts there (`Chat.bridge`). turns: the system's, its texts `quoted`. asking: the message that
        ends with the request for a language, if any."""
        if not messages or messages[0].role == "assistant":
            raise ModelError("it begins with a turn of the assistant: leave that out, or say it in the system prompt")
        ids, between = list[int](), list[tuple[str, str]]()
        for number, message in enumerate(messages):
            if message.role != "assistant":
                text = message.text if ids else quoted.quote(message.text)
                between.append((message.role, with_request(text, code if number in asking else "")))
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
        calls = [
            call_text(call.function.name, quoted.quote(call.function.arguments)) for call in message.tool_calls or []
        ]
        turn = "\n".join(filter(None, [quoted.quote(text), *calls]))
        if thoughts or self.opened:
            opening = "" if self.opened else self.tags.open
            blank = "\n" if calls and not text else ""
            turn = f"{opening}{quoted.quote(thoughts)}{self.tags.close}{blank}{turn}"
        return quoted.encode(turn)

    def begin_reasoning(self, prompt_ids: list[int], code: str) -> tuple[list[int], str]:
        """Return the prompt with first words of reasoning in a language added, and those words; code: "" for none."""
        begin = prompts_of(code).first_words if code else ""
        tag = self.tags.open if self.tags.channels else f"{self.tags.open.rstrip()}{self.blanks[0]}"
        opening = "" if self.opened else tag
        return prompt_ids + self.chat.encode(opening + begin), begin

    def end_reasoning(self, code: str, splitter: Splitter, *, begun: bool) -> tuple[str, list[int]]:
        """Return the text that ends reasoning whose budget is used up, and its tokens. splitter: has read it so far;
        begun: it has some words, so that there is something to break off."""
        text = splitter.ending(prompts_of(code or "en").budget_phrase if begun else "", self.blanks)
        return text, self.chat.encode(text)
