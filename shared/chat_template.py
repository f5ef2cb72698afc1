"""A model's chat template, asked in the form in which it returns all that it is given.

Templates differ in what they take: some know no system role, some want the roles in turn, some want contents as lists
of parts, and what does not fit they refuse, or leave out without a word. The form is found once, by a conversation of
known texts. What was given is looked for in each rendered prompt too, since a template may leave out by conditions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import product
from os.path import commonprefix
from typing import Any, NamedTuple

from shared.errors import ModelError
from shared.reasoning_tags import CONTROL, TEXT, Tags

Turns = Sequence[Mapping[str, str]]
"""messages with "role" and "content" each"""
SYSTEM, QUESTION = 'The Rule of <All> & "Each":\nbox it.', "What is <6> * 'Seven' & so on,\nin Words?"
ANSWER, AGAIN = 'It is <42> & "no" less,\nI Think.', "And why <Is> that & 'not' 43,\nor Less?"
"""texts that a template changes if it cuts, escapes or folds any"""
MARK = "MARK{}MARK"
"""a text in the place of a message, by number"""
READY = {
    "plain": "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}:\n{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
}
"""templates for models without one, by the name that model.chat_template gives"""
REASONING_TAGS = (TEXT, CONTROL)
"""those that runs ask for"""
CLOSED = re.compile(r"[^>\]\s]*$")
"""the end of a text, after its last mark, bracket or blank"""
REASONED = re.compile(r"</think>|\[/THINK\]|<channel\|>")
"""tags that close reasoning: the text before them in earlier turns may be left out"""
NAMES = {"system": "the system prompt", "user": "what the user says", "assistant": "earlier turns of the assistant"}


def turn(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}


class TemplateForm(NamedTuple):
    """How the template takes messages."""

    folded: bool = False
    """the system prompt comes before the user's first words"""
    listed: bool = False
    """contents are lists of one part"""
    joined: frozenset[str] = frozenset()
    """roles of which several turns in a row become one"""

    def of(self, messages: Turns) -> list[dict[str, Any]]:
        """The messages in this form."""
        turns = [dict(message) for message in messages]
        if self.folded and turns[0]["role"] == "system":
            system = turns.pop(0)["content"]
            if turns and turns[0]["role"] == "user":
                system, turns = f"{system}\n\n{turns[0]['content']}", turns[1:]
            turns = [turn("user", system), *turns]
        joined: list[dict[str, Any]] = []
        for message in turns:
            if joined and message["role"] == joined[-1]["role"] in self.joined:
                joined[-1]["content"] += f"\n\n{message['content']}"
            else:
                joined.append(message)
        if self.listed:
            joined = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in joined]
        return joined


class ChatTemplate:
    """A template with its arguments, and the form that it wants."""

    def __init__(self, tokenizer: Any, text: str, arguments: Mapping[str, Any], where: str):
        """arguments: further variables of the template. where: whose template it is, for errors. Raises ModelError for
        a template that loses what it is given in every form, and for arguments that it does not read."""
        self.tokenizer, self.text, self.arguments, self.where = tokenizer, text, dict(arguments), where
        self._check_arguments()
        self.form = TemplateForm()
        self.form = self._find_form()
        for role, messages in (("user", ["user", "user"]), ("assistant", ["user", "assistant", "assistant", "user"])):
            given = [turn(name, f"Text {place}.") for place, name in enumerate(messages)]
            joining = self.form._replace(joined=self.form.joined | {role})
            if self._fault(self.form, given) and not self._fault(joining, given):
                self.form = joining

    def _check_arguments(self) -> None:
        taken = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, *self.tokenizer.special_tokens_map}
        for name in self.arguments:
            if name in taken or name == "messages" or not self.reads(name):
                raise ModelError(f"{self.where} reads no argument {name[:60]!r}: leave it out, or correct its name")

    def reads(self, name: str) -> bool:
        """Whether the template has an argument of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

    def _find_form(self) -> TemplateForm:
        short = [turn("system", SYSTEM), turn("user", QUESTION)]
        long = [*short, turn("assistant", ANSWER), turn("user", AGAIN)]
        faults: list[str | Exception] = []
        for listed, folded in product((False, True), repeat=2):
            form = TemplateForm(folded, listed)
            fault = self._fault(form, short)
            if not fault:
                later = self._fault(form, long)
                if not isinstance(later, str) or not later:  # some take one turn only, and say so
                    return form
                faults.insert(0, later)
            faults.append(fault)
        if lost := next((fault for fault in faults if fault and isinstance(fault, str)), ""):
            raise ModelError(self._losing(lost))
        raise ModelError(f"{self.where} fails: {faults[0]}")

    def _losing(self, what: str) -> str:
        return (
            f"{self.where} loses or changes {what}, which would not be in the prompt as given: correct it, or give "
            "another one (model.chat_template, or chat_template.jinja in the model's folder)"
        )

    def _fault(self, form: TemplateForm, messages: Turns) -> str | Exception:
        """What is wrong with messages in a form: an error, or what is lost in words; "" for nothing."""
        try:
            return missing(self.applied(form.of(messages)), messages)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program, and raises what it likes
            return error

    def applied(self, messages: Sequence[Mapping[str, Any]], prompt: bool = True) -> str:
        """What the template makes of messages as they are. Raises whatever it raises."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, chat_template=self.text, **self.arguments
        )
        return str(text)

    def render(self, messages: Turns, prompt: bool = True) -> str:
        """The text of a conversation, with `prompt` up to where the assistant begins. Raises ModelError where the
        template refuses it, or where something that was given is not in it."""
        forms = [self.form] if self.form.folded else [self.form, self.form._replace(folded=True)]
        first: Exception | None = None
        lost = ""
        for form in forms if messages[0]["role"] == "system" else forms[:1]:
            try:
                text = self.applied(form.of(messages), prompt)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                first = first or error
                continue
            if not (now := missing(text, messages)):
                return text
            lost = lost or now
        if lost:
            raise ModelError(self._losing(lost))
        roles = [message["role"] for message in messages if message["role"] != "system"]
        if roles[:1] == ["assistant"]:
            raise ModelError(
                f"the first turn is the assistant's, and {self.where} wants the user's first ({first}): leave that "
                "turn out, or say it in the system prompt"
            ) from first
        raise ModelError(f"{self.where} fails: {first}") from first

    def behind_turn(self, followed: bool) -> str:
        """What comes after a turn of the assistant that another one follows, or none; "" if nothing."""
        turns = [turn("user", "?"), turn("assistant", MARK.format(0)), turn("user", MARK.format(1))]
        try:
            before = self._behind(turns, prompt=False)
            last = self._behind(turns[:2], prompt=False)
            if last and last == self._behind(turns[:2], prompt=True):  # the beginning of the next turn is in it always
                last = CLOSED.sub("", commonprefix([last, before]))
        except ModelError:  # it takes a single turn
            return ""
        return before if followed else last

    def _behind(self, turns: Turns, prompt: bool) -> str:
        text = self.render(turns, prompt)
        return text.partition(MARK.format(0))[2].partition(MARK.format(1))[0].lstrip()

    def begun_reasoning(self, tags: Sequence[Tags]) -> str:
        """Reasoning with which the template begins a turn of the assistant, from its opening tag on; with both tags
        where it closes it too, and "" for none."""
        turns = [turn("user", MARK.format(0))]
        text, without = self.render(turns), self.render(turns, prompt=False)
        added = text.removeprefix(without) if text.startswith(without) else ""
        begun = added or text.rpartition(MARK.format(0))[2]
        for opening, closing in ((pair.open.rstrip(), pair.close) for pair in tags):
            opens, closes = begun.rfind(opening), begun.rfind(closing)
            if begun.rstrip().endswith(closing):
                return begun[opens:] if 0 <= opens < closes else opening + begun[closes:]
            if begun.rstrip().endswith(opening) or (added and opens > closes):
                return begun[opens:]
        return ""


def missing(text: str, messages: Turns) -> str:
    """Whose words a rendered text does not hold in their order, in words; "" where all is there. Blanks around them
    do not count, nor does the reasoning of earlier turns."""
    here, lost = 0, dict[str, None]()
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if role == "assistant":
            content = REASONED.split(content)[-1].strip()
        start = text.find(content, 0 if role == "system" else here)
        if start < 0:
            lost[NAMES.get(role, f"messages of role {role}")] = None
        elif role != "system":
            here = start + len(content)
    *names, last = lost or [""]
    return f"{', '.join(names)} and {last}" if names else last
