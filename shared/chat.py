"""The chat format: turns problem text into prompt tokens, and completion tokens into text.

The only file that imports transformers (when a Chat is made, not before).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import ModelError
from shared.tool_calls import result_text

MAGISTRAL = r"""You solve the user's task by reasoning first and answering second.

First think: write a rough inner monologue, as on scratch paper, and follow it until you have found the answer. Be \
as casual and as long as you want; try things, check them, and correct yourself. Then write a summary that stands on \
its own: short and clear, with every step that matters for reaching the result, ending in {answer}. Use Markdown, and \
LaTeX for formulas. Write both the thoughts and the summary in the language of the task.

Keep exactly this form:

<think>
Your draft: thoughts, attempts, checks, as casual and as long as you want.
</think>
The summary for the user, ending in {form}.""".replace("\\\n", "")
"""the structure follows Magistral (Figure 2), the words are ours"""


class AnswerFormat(NamedTuple):
    """How answers to the problems of one domain are to be given, in the words of a system prompt."""

    summary: str
    """what the summary for the user holds"""
    ending: str
    """what it ends in"""


BOXED_ANSWER = AnswerFormat(r"the final answer inside \boxed{}", r"\boxed{the final answer}")


def system_prompt(setting: str, form: AnswerFormat = BOXED_ANSWER) -> str:
    """The system prompt of a problem: "magistral" worded for the form of its answer, or the setting itself."""
    if setting != "magistral":
        return setting
    return MAGISTRAL.replace("{answer}", form.summary).replace("{form}", form.ending)


def joined(*parts: str) -> str:
    """A system prompt of several parts, in training and serving alike: the run's or the server's own, what an
    application or an environment adds, tools. A blank line stands between two; empty ones are left out."""
    return "\n\n".join(filter(None, parts))


MOST_BRIDGES = 256
"""sequences of roles between two turns whose tokens are remembered"""


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Chat:
    """Tokenizer and chat template of a model folder."""

    def __init__(self, folder: Path):
        """Raises ModelError when the folder has no usable tokenizer or chat template."""
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # a damaged tokenizer raises whatever its parser raises
            raise ModelError(f"{folder} has no usable tokenizer ({error}): fetch tokenizer.json again") from error
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"{folder} has no chat template (a base model?): add chat_template.jinja to the folder, for instance "
                "that of the same family's instruct model"
            )
        self.stop_ids: tuple[int, ...] = self._find_stop_ids(folder)
        """tokens that end a completion"""
        if not self.stop_ids:
            raise ModelError(f"{folder} names no end-of-sequence token: set eos_token in tokenizer_config.json")
        own = self.tokenizer.eos_token_id
        self.eos_id: int = self.stop_ids[0] if own is None else int(own)
        self.think_prefix: str = self._find_think_prefix()
        """"<think>..." if the template itself opens the reasoning (the completion then starts inside them), else "\""""
        added = (one.content for one in self.tokenizer.added_tokens_decoder.values())
        known = sorted(filter(str.strip, added), key=len, reverse=True)  # some families add blank lines and blanks
        self.added = re.compile(f"({'|'.join(map(re.escape, known))})" if known else "(?!)()")
        """finds what control tokens are spelled"""
        self._bridges: dict[tuple[str, ...], list[list[int]]] = {}
        self.folder = folder
        self.think_ids: tuple[int, int] | None = self._find_think_ids()
        """control tokens [THINK] and [/THINK], None when the tokenizer has none"""

    def _find_stop_ids(self, folder: Path) -> tuple[int, ...]:
        ids = [self.tokenizer.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            path = folder / name
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
            ids += found if isinstance(found, list) else [found]
        return tuple(dict.fromkeys(int(token) for token in ids if token is not None))

    def _find_think_prefix(self) -> str:
        text = self._render_text("?", "")
        for tag in ("<think>", "[THINK]"):
            if text.rstrip().endswith(tag):
                return text[text.rindex(tag) :]
        return ""

    def _find_think_ids(self) -> tuple[int, int] | None:
        known = {added.content: number for number, added in self.tokenizer.added_tokens_decoder.items()}
        return (known["[THINK]"], known["[/THINK]"]) if {"[THINK]", "[/THINK]"} <= known.keys() else None

    def _render_text(self, problem_text: str, system: str) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": problem_text})
        return self.render_turns(messages)

    def render_turns(self, messages: list[dict[str, str]]) -> str:
        """Text of a conversation of {"role", "content"} up to where the assistant begins. Raises ModelError."""
        from jinja2.exceptions import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            if len(messages) == 1 or messages[0]["role"] != "system":
                raise ModelError(f"the model's chat template fails: {error}") from error
            # some templates know no system role: put it before the user's words
            joined = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            return self.render_turns([{**messages[1], "content": joined}, *messages[2:]])
        return str(text)

    # ---- several turns -------------------------------------------------------------------------------------------

    def bridge(self, messages: Sequence[tuple[str, str]], most_tokens: int = 1 << 20) -> list[int]:
        """[tokens] between a turn of the assistant and its next one: what the template puts behind the first turn's end
        token, with (role, text) messages in it, up to where the assistant begins again.

        Results of calls, of role "tool", are written as in serving. The texts are encoded by themselves and cannot
        spell control tokens; together they are cut to `most_tokens`.
        Nothing that was sampled is rendered. Raises ModelError for roles that the template does not know.
        """
        first, *between = self._around(tuple(role for role, _ in messages))
        ids = list(first)
        for (_, text), behind in zip(messages, between, strict=True):
            said = self.encode_plain(text[: most_tokens * self.longest_token])[:most_tokens]
            most_tokens -= len(said)
            ids += said + behind
        return ids

    def _around(self, roles: tuple[str, ...]) -> list[list[int]]:
        """[messages + 1][tokens] what the template puts before the first message, between two, and behind the last."""
        if (found := self._bridges.get(roles)) is None:
            marks = [f"MARK{place}MARK" for place in range(len(roles) + 1)]
            turns = [_message("user", "?"), _message("assistant", marks[0])]
            for before, role, mark in zip(("assistant", *roles), roles, marks[1:], strict=False):
                if role == before == "tool":  # as in serving: results of calls are a turn of the user
                    turns[-1]["content"] += f"\n{result_text(mark)}"
                else:
                    turns.append(_message("user", result_text(mark)) if role == "tool" else _message(role, mark))
            rest = self.render_turns(turns)
            parts: list[str] = []
            for mark in marks:
                part, there, rest = rest.partition(mark)
                if not there:
                    raise ModelError(f"{self.folder}: the chat template leaves out a message of role {roles}")
                parts.append(part)
            ends = [str(self.tokenizer.convert_ids_to_tokens(number)) for number in self.stop_ids]
            parts = [*parts[1:], rest]
            end = next((end for end in ends if parts[0].startswith(end)), None)
            if end is None:
                raise ModelError(
                    f"{self.folder}: the chat template ends a turn of the assistant with {parts[0][:40]!r}, and the "
                    f"model with {' or '.join(ends)}: name the template's token in generation_config.json"
                )
            if len(self._bridges) == MOST_BRIDGES:  # clients of a server choose the roles
                self._bridges.clear()
            self._bridges[roles] = found = [self.encode(part) for part in (parts[0].removeprefix(end), *parts[1:])]
        return found

    def decode_bridge(self, ids: Sequence[int]) -> str:
        """Text of the tokens between two turns, without what the template puts around it where `bridge` has made such
        ones of a single message before."""
        for before, *others in self._bridges.values():
            end = len(ids) - len(others[-1])
            if len(others) == 1 and len(before) <= end and [*ids[: len(before)], *ids[end:]] == before + others[0]:
                return self.decode(ids[len(before) : end])
        return self.decode(ids)

    def check_history(self, system: str = "") -> None:
        """Raise ModelError if the template changes earlier turns when another follows, as where it drops reasoning: a
        server that renders the history would then show the model other tokens than it was trained on."""
        opening, closing = ("[THINK]", "[/THINK]") if self.think_ids else ("<think>", "</think>")
        turns = [*([_message("system", system)] if system else []), _message("user", "A question.")]
        opened = self.think_prefix or f"{opening}\n"
        for _ in range(2):
            before = self.render_turns(turns)
            turns.append(_message("assistant", f"{opened}Some thoughts.\n{closing}\n\nAn answer."))
            turns.append(_message("user", "Another question."))
            after = self.render_turns(turns)
            if not after.startswith(before + turns[-2]["content"].removeprefix(self.think_prefix)):
                dropped = after.count("Some thoughts.") < len(turns) // 2
                what = "drops the reasoning of" if dropped else "changes what it wrote before or in"
                raise ModelError(
                    f"{self.folder}: the chat template rewrites its history: it {what} earlier turns. "
                    'environment.history = "whole" trains on the whole history as it was sampled, and then a server '
                    "must keep it too; or give the folder a template that keeps it"
                )

    # ---- tokens and text -----------------------------------------------------------------------------------------

    def render(self, problem_text: str, system: str, quoted: QuotedTexts | None = None) -> list[int]:
        """[prompt_tokens] of one user turn, up to where the assistant begins; system "" leaves it to the template.
        quoted: the parts of both that are never control tokens. Raises ModelError."""
        return (quoted or QuotedTexts(self)).encode(self._render_text(problem_text, system))

    def encode(self, text: str) -> list[int]:
        """[tokens] of text as it stands: no begin or end token is added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest_token tokens."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode_plain(self, text: str) -> list[int]:
        """[tokens] of text in which nothing is a control token, whatever it spells."""
        ids: list[int] = []
        for place, part in enumerate(self.added.split(text)):
            if place % 2 and len(part) > 1:  # torn, since a tokenizer splits only those that it calls special
                ids += self.encode_plain(part[0]) + self.encode_plain(part[1:])
            elif part:
                ids += self._encode_letters(part)
        return ids

    @cached_property
    def _encode_letters(self) -> Callable[[str], list[int]]:
        """[tokens] of text in which what is called special is text too. By a tokenizer of its own: transformers would
        set a flag of the one that other threads use, and wait, with all of Python, until they have ended."""
        shared = getattr(self.tokenizer, "backend_tokenizer", None)
        if shared is None:
            return partial(self.tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
        from tokenizers import Tokenizer

        own = Tokenizer.from_str(shared.to_str())
        own.encode_special_tokens = True
        own.no_truncation()
        own.no_padding()
        return lambda text: list(own.encode(text, add_special_tokens=False).ids)

    def encode_completion(self, text: str) -> list[int]:
        """[tokens] of a completion as people read it: reasoning that the template itself opens is not opened again."""
        opened = self.think_prefix.rstrip()
        if opened and text.startswith(opened):
            whole = text.startswith(self.think_prefix)
            text = text.removeprefix(self.think_prefix if whole else opened)
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion: special tokens such as <think> stay visible, a final end-of-sequence token does not."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text: str = self.tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")


class QuotedTexts:
    """Texts in one prompt that problems or clients wrote. One that spells a control token is replaced by a placeholder
    until tokenisation, and is text then."""

    def __init__(self, chat: Chat):
        self._chat = chat
        self._quoted: list[str] = []

    def quote(self, text: str) -> str:
        """Return the text itself or, if it spells a control token, a placeholder."""
        if PLACEHOLDER.search(text) or self._chat.added.search(text):
            self._quoted.append(text)
            return f"\ue000{len(self._quoted) - 1}\ue001"
        return text

    def encode(self, rendered: str) -> list[int]:
        """Return the [tokens] of a rendered prompt, quoted texts as plain text. Raises ModelError if one is lost."""
        parts = PLACEHOLDER.split(rendered)
        if sorted(parts[1::2]) != sorted(str(number) for number in range(len(self._quoted))):
            raise ModelError("the chat template changes what users write, and control tokens cannot be kept out of it")
        ids: list[int] = []
        for place, part in enumerate(parts):
            ids += self._chat.encode_plain(self._quoted[int(part)]) if place % 2 else self._chat.encode(part)
        return ids
