"""The chat format: turns problem text into prompt tokens, and completion tokens into text.

The only file that imports transformers (when a Chat is made, not before).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.atomic_write import write_whole
from shared.chat_template import ANSWER, MARK, QUESTION, REASONING_TAGS, ChatTemplate, turn
from shared.clean_text import clean_logs
from shared.errors import ModelError
from shared.languages import name_of
from shared.model.folder import check_tokenizer_files, read_json, token_ids
from shared.quoted_texts import QuotedTexts, spelled_tokens
from shared.reasoning_tags import CALL, FAMILIES, RETURN, tags_of_template
from shared.template_trial import try_template
from shared.tool_calls import result_text

if TYPE_CHECKING:
    from shared.config import Config
    from shared.progress import Progress

MAGISTRAL = r"""You solve the user's task by reasoning first and answering second.

First think: write a rough inner monologue, as on scratch paper, and follow it until you have found the answer. Be \
as casual and as long as you want; try things, check them, and correct yourself. Then write a summary that stands on \
its own: short and clear, with every step that matters for reaching the result, ending in {answer}. Use Markdown, and \
LaTeX for formulas. Write both the thoughts and the summary in {language}.

Keep exactly this form:

<think>
Your draft: thoughts, attempts, checks, as casual and as long as you want.
</think>
The summary for the user, ending in {form}.""".replace("\\\n", "")
"""the structure follows Magistral (Figure 2), the words are ours"""
TASK_LANGUAGE = "the language of the task"


class AnswerFormat(NamedTuple):
    """How answers to the problems of one domain are to be given, in the words of a system prompt."""

    summary: str
    """contents of the summary for the user"""
    ending: str
    """how the summary ends"""


BOXED_ANSWER = AnswerFormat(r"the final answer inside \boxed{}", r"\boxed{the final answer}")


def system_prompt(setting: str, form: AnswerFormat = BOXED_ANSWER, language: str = "") -> str:
    """The system prompt of a problem: "magistral" worded for the form of its answer and the language asked for ("" for
    that of the task), or the setting itself."""
    if setting != "magistral":
        return setting
    spoken = f"{name_of(language).both}, even if the task is in another language" if language else TASK_LANGUAGE
    words = {"{language}": spoken, "{answer}": form.summary, "{form}": form.ending}
    return reduce(lambda text, word: text.replace(*word), words.items(), MAGISTRAL)


def joined(*parts: str) -> str:
    """A system prompt of several parts, in training and serving alike: the run's or the server's own, what an
    application or an environment adds, tools. A blank line separates two; empty ones are left out."""
    return "\n\n".join(filter(None, parts))


MOST_PAIRS = 500
"""turns of the user and of the assistant in the conversation that a template must come to an end with"""
MOST_BRIDGES = 256
"""sequences of roles between two turns whose tokens are remembered"""
SWITCHES = ("enable_thinking", "thinking")
"""arguments by which templates are known to open or close the reasoning"""


class Chat:
    """Tokenizer and chat template of a model folder."""

    def __init__(
        self, folder: Path, template: str = "", arguments: Mapping[str, Any] | None = None, published: bool = False
    ):  # fmt: skip
        """template: takes the place of the folder's own, "" for that. arguments: further variables of the template.
        published: the model reasons in the form of its family rather than in the one that runs ask for.
        Raises ModelError when the folder has no usable tokenizer, or no template that returns what it is given."""
        from transformers import AutoTokenizer

        check_tokenizer_files(folder)
        clean_logs()  # transformers quotes what a folder says
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a damaged tokenizer raises whatever its parser raises
            if "trust_remote_code" in str(error):
                raise ModelError(
                    f"{folder}: its tokenizer needs code of the folder (auto_map), which is never run: take a folder "
                    "whose tokenizer_class transformers has, with a tokenizer.json"
                ) from error
            raise ModelError(f"{folder} has no usable tokenizer ({error}): fetch tokenizer.json again") from error
        self.tokenizer.model_max_length = 10**9  # transformers would warn of texts that are only measured here
        self.folder, self.replaced, self._published = folder, bool(template), published
        self.added = spelled_tokens(self.tokenizer)
        """finds what control tokens are spelled"""
        self.think_ids: tuple[int, int] | None = self._find_think_ids()
        """control tokens [THINK] and [/THINK], None when the tokenizer has none"""
        text, given = template or self._template_of_folder(), arguments or {}
        if not text:
            raise ModelError(
                f'{folder} has no chat template (a base model?): set model.chat_template = "plain" or to a file, or '
                "add chat_template.jinja to the folder, for instance that of the same family's instruct model"
            )
        try_template(f"{text}{given}", lambda: self._render_most(text, given), self._whose)
        self._use(text, given)

    def _template_of_folder(self) -> str:
        """The folder's default template, "" where it has none."""
        template = self.tokenizer.chat_template
        if isinstance(template, dict):  # with additional_chat_templates/, transformers ignores that of the file
            template = template.get("default") or read_json(self.folder / "tokenizer_config.json").get("chat_template")
        return template if isinstance(template, str) else ""

    @property
    def _whose(self) -> str:
        return "the template of model.chat_template" if self.replaced else f"{self.folder}: the chat template"

    def _render_most(self, text: str, arguments: Mapping[str, Any]) -> None:
        """Render all that `_use` does, and a conversation of as many turns as anybody has."""
        self._use(text, arguments)
        pair = [turn("user", QUESTION), turn("assistant", ANSWER)]
        self.template.applied(self.template.form.of([*pair * MOST_PAIRS, pair[0]]))

    @classmethod
    def of_run(cls, folder: Path, config: Config, progress: Progress | None = None) -> Chat:
        """The chat of a run's model, with its template and arguments; `progress` reports what they do. Raises
        ModelError, ConfigError."""
        model = config.with_template().model
        chat = cls(folder, model.chat_template, model.template)
        if progress is not None:
            progress.note(f"chat template: {chat.describe()}")
            for line in chat.warnings:
                progress.warning(line)
        return chat

    def complete(self, folder: Path) -> None:
        """Write into the model's folder what its files lack of the template and of the tokens that end a turn."""
        if self.replaced:
            (folder / "chat_template.jinja").write_text(self.template.text, encoding="utf-8")
        if self.adds_stop:
            path = folder / "generation_config.json"
            settings = read_json(path) if path.is_file() else {}
            write_whole(path, json.dumps(settings | {"eos_token_id": list(self.stop_ids)}, indent=2).encode())

    def with_arguments(self, arguments: Mapping[str, Any]) -> Chat:
        """The same chat with other arguments of the template, in addition to those that it has. Raises ModelError."""
        other, _ = copy(self), self._encode_letters  # made once for both
        other._use(self.template.text, {**self.template.arguments, **arguments})
        return other

    def _use(self, text: str, arguments: Mapping[str, Any]) -> None:
        self.template = ChatTemplate(self.tokenizer, text, arguments, self._whose)
        self.tags = tags_of_template(text, self.think_ids is not None, self._published, self._whose)
        """around the reasoning of this model's completions"""
        self._bridges: dict[tuple[str, ...], list[list[int]]] = {}
        declared = self._declared_stop_ids()
        followed, last = (self._token_of(self.template.behind_turn(followed)) for followed in (True, False))
        self.adds_stop = last is not None and followed == last and last not in declared
        """whether turns end with a token that the model's files do not name as an end"""
        self.stop_ids: tuple[int, ...] = (*declared, *([last] if last is not None and self.adds_stop else []))
        """tokens that end a completion"""
        if not self.stop_ids:
            raise ModelError(f"{self.folder} names no end-of-sequence token: set eos_token in tokenizer_config.json")
        ends = [token for token in (followed, last) if token in self.stop_ids]
        usual = self.tokenizer.eos_token_id
        self.eos_id: int = int([*ends, self.stop_ids[0] if usual is None else usual][0])
        """the token with which the model ends a turn: the one that the template puts after a turn of the assistant,
        else the tokenizer's end of sequence"""
        self.end_begins_next = self.eos_id == followed != last
        """whether that token is the beginning of the next turn (GLM: the marker of its role)"""
        known = REASONING_TAGS if self.tags in REASONING_TAGS else (self.tags,)
        self.think_prefix: str = self.template.begun_reasoning(known)
        """"<think>..." if the template itself opens the reasoning (the completion then starts inside it), with the
        closing tag too if it closes it, else "\""""
        self.think_closed = any(tags.close in self.think_prefix for tags in known)
        """whether the template closes the reasoning before the completion begins"""

    def _declared_stop_ids(self) -> tuple[int, ...]:
        ids = [self.tokenizer.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            ids += token_ids(path, "eos_token_id") if path.is_file() else []
        ids += map(self._token_of, (CALL, RETURN)) if self.tags.channels else []
        return tuple(dict.fromkeys(int(token) for token in ids if token is not None))

    def _token_of(self, text: str) -> int | None:
        """The control token that a text begins with."""
        match = self.added.match(text)
        return int(self.tokenizer.convert_tokens_to_ids(match.group())) if match else None

    def _find_think_ids(self) -> tuple[int, int] | None:
        known = {added.content: number for number, added in self.tokenizer.added_tokens_decoder.items()}
        return (known["[THINK]"], known["[/THINK]"]) if {"[THINK]", "[/THINK]"} <= known.keys() else None

    def _spelled(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def describe(self) -> str:
        """What the template does, in one line."""
        form, arguments = self.template.form, self.template.arguments
        whose = "model.chat_template" if self.replaced else "the model's own"
        given = ", ".join(f"{name} = {value!r}" for name, value in arguments.items())
        facts = [f"{whose} with {given}" if given else whose, f"a turn ends with {self._spelled(self.eos_id)}"]
        if self.think_prefix:
            does = "opens and closes" if self.think_closed else "opens"
            facts.append(f"it {does} the reasoning itself with {self.think_prefix!r}")
        if other := self.template.begun_reasoning(FAMILIES):
            facts.append(f"it ends the model's own form of reasoning with {other!r}, and completions reason after that")
        facts += ["it has no system role, so that the system prompt comes before the user's words"] * form.folded
        facts += ["turns of one role in a row are joined"] * bool(form.joined)
        return "; ".join(facts)

    @property
    def warnings(self) -> list[str]:
        """What of the template is probably not intended, one line each."""
        lines, behind, end = [], self.template.behind_turn(False), self._spelled(self.eos_id)
        if self.think_closed:
            opens = [name for name in SWITCHES if self.template.reads(name)]
            opens = [name for name in opens if not self.with_arguments({name: True}).think_closed]
            repair = f"set model.template = {{ {opens[0]} = true }}" if opens else "set model.chat_template"
            lines.append(
                f"the chat template closes the reasoning itself ({self.think_prefix!r}): completions are answers "
                f"alone, and reasoning in them breaks the format. To train reasoning, {repair}"
            )
        if self.adds_stop:
            lines.append(
                f"the chat template ends a turn with {end}, which the model's files do not name as an end: it is added "
                "to the tokens that end a completion"
            )
        elif behind and not behind.startswith(end) and self._token_of(behind) not in self.stop_ids:
            lines.append(
                f"the chat template ends a turn with {behind[:40]!r}, which is no token that ends a completion: turns "
                f"end with {end} instead"
            )
        return lines

    def _render_text(self, problem_text: str, system: str) -> str:
        return self.render_turns([*([turn("system", system)] if system else []), turn("user", problem_text)])

    def render_turns(self, messages: list[dict[str, str]]) -> str:
        """Text of a conversation of {"role", "content"} up to where the assistant begins. Raises ModelError where the
        template refuses it, or leaves out something of it."""
        return self.template.render(messages)

    # ---- several turns -------------------------------------------------------------------------------------------

    def bridge(
        self, messages: Sequence[tuple[str, str]], most_tokens: int = 1 << 20, ended: int | None = None
    ) -> list[int]:
        """[tokens] between a turn of the assistant and its next one: what the template puts after the first turn's end
        token, with (role, text) messages in it, up to where the assistant begins again. ended: the token that ended
        the turn, None for the template's own.

        Results of calls, of role "tool", are written as in serving. The texts are encoded by themselves and cannot
        spell control tokens; together they are cut to `most_tokens`.
        Nothing that was sampled is rendered. Raises ModelError for roles that the template does not know.
        """
        first, *between = self._around(tuple(role for role, _ in messages))
        marks_next = self.end_begins_next and ended not in (None, self.eos_id)
        ids = [self.eos_id, *first] if marks_next else list(first)
        for (_, text), behind in zip(messages, between, strict=True):
            text_ids = self.encode_plain(text[: most_tokens * self.longest_token])[:most_tokens]
            most_tokens -= len(text_ids)
            ids += text_ids + behind
        return ids

    def _around(self, roles: tuple[str, ...]) -> list[list[int]]:
        """[messages + 1][tokens] what the template puts before the first message, between two, and after the last."""
        if (bridge := self._bridges.get(roles)) is None:
            marks = [MARK.format(place) for place in range(len(roles) + 1)]
            turns = [turn("user", "?"), turn("assistant", marks[0])]
            for before, role, mark in zip(("assistant", *roles), roles, marks[1:], strict=False):
                if role == before == "tool":  # as in serving: results of calls are a turn of the user
                    turns[-1]["content"] += f"\n{result_text(mark)}"
                else:
                    turns.append(turn("user", result_text(mark)) if role == "tool" else turn(role, mark))
            rest = self.render_turns(turns)
            parts: list[str] = []
            for mark in marks:
                leading, there, rest = rest.partition(mark)
                if not there:
                    raise ModelError(f"{self.folder}: the chat template leaves out a message of role {roles}")
                parts.append(leading)
            behind, *others = [*parts[1:], rest]
            ends = map(self._spelled, (self.eos_id, *self.stop_ids))
            if end := next((end for end in ends if behind.lstrip().startswith(end)), ""):
                behind = behind.lstrip().removeprefix(end)
            elif self.template.behind_turn(False):
                raise ModelError(
                    f"{self.folder}: the chat template ends a turn of the assistant with {behind[:40]!r} where others "
                    f"follow, and the model with {self._spelled(self.eos_id)}: several turns cannot be trained. Set "
                    "model.chat_template to a template that ends every turn with the model's own token"
                )
            if len(self._bridges) == MOST_BRIDGES:  # clients of a server choose the roles
                self._bridges.clear()
            self._bridges[roles] = bridge = [self.encode(part) for part in (behind, *others)]
        return bridge

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
        opening, closing = self.tags[:2]
        turns = [*([turn("system", system)] if system else []), turn("user", "A question.")]
        opened = self.think_prefix or f"{opening}\n"
        thoughts = "" if self.think_closed else f"Some thoughts.\n{closing}\n\n"
        for _ in range(2):
            before = self.render_turns(turns)
            turns.append(turn("assistant", f"{opened}{thoughts}An answer."))
            turns.append(turn("user", "Another question."))
            after = self.render_turns(turns)
            if not after.startswith(before + turns[-2]["content"].removeprefix(self.think_prefix)):
                dropped = bool(thoughts) and after.count("Some thoughts.") < len(turns) // 2
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
        """[tokens] of text as it is: no begin or end token is added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest_token tokens."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode_plain(self, text: str) -> list[int]:
        """[tokens] of text in which nothing is a control token, whatever it spells."""
        ids: list[int] = []
        for number, piece in enumerate(self.added.split(text)):
            if number % 2 and len(piece) > 1:  # torn, since a tokenizer splits only those that it calls special
                ids += self.encode_plain(piece[0]) + self.encode_plain(piece[1:])
            elif piece:
                ids += self._encode_letters(piece)
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
        control = {number for number, one in self.tokenizer.added_tokens_decoder.items() if one.content.strip()}

        def encode(text: str) -> list[int]:
            ids = list(own.encode(text, add_special_tokens=False).ids)
            if len(text) < 2 or control.isdisjoint(ids):
                return ids
            return [number for letter in text for number in encode(letter)]  # it spells one once it is normalised

        return encode

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
