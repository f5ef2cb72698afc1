"""Renders a conversation as prompt tokens: the server's system prompt first, with the client's inside it.

Texts of users and applications cannot contain control tokens: one that spells a control token ("<|im_end|>", "[INST]")
is tokenised as ordinary letters. Everything else is tokenised in one piece, exactly as in training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from serve.api.schemas import Message
from serve.response.phrases import clause_of, phrases_of
from serve.response.tools import RESULT_CLOSE, RESULT_OPEN, Form, call_text
from shared.chat import Chat
from shared.errors import ModelError
from shared.model.card import read_card
from verify.format import CONTROL, TEXT, Tags

OF_THE_APPLICATION = "The application adds:\n\n{text}"
POLICY = "policy"
MAGISTRAL = "magistral"
"""the same prompt as it is called in training, in English"""
TRAINED = "trained"
MARK = re.compile("\ue000(\\d+)\ue001")


class Words:
    """The client's texts in one prompt. One that spells a control token is replaced by a mark until tokenisation."""

    def __init__(self, control: re.Pattern[str] | None):
        self._control = control
        self._marked: list[str] = []

    def quote(self, text: str) -> str:
        """Return the text itself or, if it spells a control token, a mark that stands for it."""
        if MARK.search(text) or (self._control is not None and self._control.search(text)):
            self._marked.append(text)
            return f"\ue000{len(self._marked) - 1}\ue001"
        return text

    def encode(self, chat: Chat, rendered: str) -> list[int]:
        """Return the [tokens] of a rendered prompt, marked texts as plain text. Raises ModelError if a mark is lost."""
        parts = MARK.split(rendered)
        if sorted(parts[1::2]) != sorted(str(number) for number in range(len(self._marked))):
            raise ModelError("the chat template changes what users write, and control tokens cannot be kept out of it")
        ids: list[int] = []
        for place, part in enumerate(parts):
            ids += chat.encode_plain(self._marked[int(part)]) if place % 2 else chat.encode(part)
        return ids


class Prompts:
    """Renders conversations for one model."""

    def __init__(self, chat: Chat, system: str = POLICY):
        """system: "policy" for the server's prompt in the language of the thoughts, "" for none, else a fixed text."""
        self.chat, self.system = chat, POLICY if system == MAGISTRAL else system
        self.tags: Tags = CONTROL if chat.think_ids is not None else TEXT
        self.opened = bool(chat.think_prefix)
        """whether the chat template opens the thoughts"""
        self.longest = max(map(len, chat.tokenizer.get_vocab()))
        """number of letters of the longest token"""
        self._letters: dict[int, str] = {}
        known = sorted({one.content for one in chat.tokenizer.added_tokens_decoder.values()}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, known))) if known else None

    @classmethod
    def of_model(cls, folder: Path, system: str) -> Prompts:
        """Create it for a model folder; system: as in the settings, where "trained" means the system prompt in the
        folder's card. Raises ModelError."""
        if system == TRAINED:
            card = read_card(folder)
            system = POLICY if card is None else card.system_prompt
        return cls(Chat(folder), system)

    def letters(self, token: int) -> str:
        """Decode a single token; incomplete characters are not letters."""
        found = self._letters.get(token)
        if found is None:
            found = self._letters[token] = str(self.chat.tokenizer.decode([token], skip_special_tokens=False))
        return found

    def system_prompt(self, code: str) -> str:
        """Return the system prompt; code: language of the thoughts, "" for none."""
        if self.system != POLICY:
            return self.system
        return phrases_of(code or "en").system_prompt(self.tags)

    def render(self, messages: Sequence[Message], code: str, form: Form | None = None) -> list[int]:
        """Return the [prompt_tokens] up to where the assistant begins, without thoughts of earlier turns. form: the
        part of the system prompt on the form of the answer.

        Given a language, the last turn ends with the request for it, in that language: what is near the question has
        most effect. Raises ModelError if the model's template refuses the conversation.
        """
        words = Words(self._control)
        told = "\n\n".join(words.quote(message.text) for message in messages if message.role in ("system", "developer"))
        system = self.system_prompt(code)
        if told:
            system = f"{system}\n\n{OF_THE_APPLICATION.format(text=told)}" if system else told
        if form is not None:
            system = "\n\n".join(filter(None, [system, form.text.replace("{given}", words.quote(form.given))]))
        turns = [{"role": "system", "content": system}] if system else []
        of_tools = False
        for message in messages:
            made = [call.function for call in message.tool_calls or []]
            calls = [call_text(one.name, words.quote(one.arguments)) for one in made]
            text = "\n".join(filter(None, [words.quote(message.text), *calls]))
            if message.role == "tool":
                result = f"{RESULT_OPEN}\n{text}\n{RESULT_CLOSE}"
                if of_tools:  # templates want the user and the assistant in turn
                    turns[-1]["content"] += f"\n{result}"
                else:
                    turns.append({"role": "user", "content": result})
            elif message.role not in ("system", "developer"):
                turns.append({"role": message.role, "content": text})
            of_tools = message.role == "tool"
        if not turns or turns[-1]["role"] == "system":
            raise ModelError("nobody has said anything yet")
        if code and self.system == POLICY and turns[-1]["role"] == "user":
            turns[-1]["content"] += f"\n\n{clause_of(code)}"
        return words.encode(self.chat, self.chat.render_turns(turns))

    def begin_thoughts(self, prompt_ids: list[int], code: str) -> tuple[list[int], str]:
        """Return the prompt with first words of thought in a language appended, and those words; code: "" for none."""
        begin = phrases_of(code).begin if code else ""
        opening = "" if self.opened else f"{self.tags.open}\n"
        return prompt_ids + self.chat.encode(opening + begin), begin

    def end_thoughts(self, code: str, *, inside: bool, begun: bool) -> tuple[str, list[int]]:
        """Return the text that ends thoughts whose budget is used up, and its tokens. inside: their tag is open; begun:
        they have some words, so that there is something to break off."""
        enough = phrases_of(code or "en").enough if begun else ""
        text = f"{'' if inside else self.tags.open}\n{enough}\n{self.tags.close}\n\n"
        return text, self.chat.encode(text)
