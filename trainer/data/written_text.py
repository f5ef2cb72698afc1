"""Completions that people or other models wrote, as tokens: demonstrations and offline rows.

In such a text only the tags of the reasoning and those of tool calls may be control tokens. What else spells one is
text: a model that imitates its own end token in mid-answer learns to stop there. An end token at the end of a text is
left out, since the turn ends with one anyway. What a file has of this, and where it breaks the form that the reward
asks for (verify/format.py), is counted for its warnings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.chat import Chat
from shared.errors import ModelError
from shared.sections import RewardWeights
from shared.types import Problem
from verify.format import parts_of
from verify.language import spoken_in
from verify.refusals import refuse_format
from verify.verifiers import verifier_for

OPEN, CLOSE = "<think>", "</think>"
REFUSED = RewardWeights().refuse
MARKUP = re.compile(r"think|thought|channel|tool[_▁ ]?call|python_tag|\[ARGS\]|CALL_ID", re.I)
"""in the spelling of control tokens that a model samples inside a turn: its reasoning, and its calls of tools"""
HARMONY = ("<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
"""tokens of a turn of a model with channels (gpt-oss); only the assistant's messages begin with <|start|>"""
FOREIGN = re.compile(
    r"<\|/?[a-zA-Z][\w▁ ]*\|>|<｜[^｜\n]{1,40}｜>|</?(?:start|end)_of_turn>|</s>\s*\Z|<[be]os>|\[/?INST\]|<<SYS>>"
)
"""spellings of control tokens of other models"""
REASONING = re.compile(
    r"<\|?/?(?:begin_of_thought|end_of_thought|begin_of_solution|reasoning|thinking|thoughts?|thought_process|"
    r"scratchpad|analysis|reflection|seed:think|think|channel)\|?>|\[/?THINK\]|◁/?think▷",
    re.I,
)
"""spellings of tags around reasoning"""
MOST_HEARD = 1_000
"""rows that ask for a language whose own one is looked for; of long traces it takes a millisecond each"""
OTHER_LANGUAGE = "reason in another language than they ask for"


class WrittenTexts:
    """Encodes the texts of one file for a model, and remembers where which of them had to be read otherwise."""

    def __init__(self, chat: Chat):
        self.chat = chat
        self.doubts: dict[str, list[str]] = {}
        """what is doubtful -> where, with an example"""
        self._heard = 0
        added = chat.tokenizer.added_tokens_decoder
        ends = {added[number].content for number in {*chat.stop_ids, chat.eos_id} if number in added}
        channels = any(token.content == "<|channel|>" for token in added.values())
        inside = HARMONY if channels else ()
        special = {token.content for token in added.values() if token.special and token.content.strip()} | ends
        special |= set(chat.added.findall(_conversation(chat)))
        longest = sorted((one for one in special - {*inside} if not MARKUP.search(one)), key=len, reverse=True)
        letters = [*map(re.escape, longest), *([r"<\|start\|>(?!assistant\b)"] if channels else [])]
        self._letters = re.compile(f"({'|'.join(letters)})" if letters else "(?!)()")
        self._ends = tuple(ends - {*inside})
        self._known = {token.content for token in added.values()}

    def tokens(self, text: str, where: str) -> list[int]:
        """[tokens] of a completion or of one turn, without the token that ends it."""
        while end := next(filter(text.rstrip().endswith, self._ends), ""):
            self._note("end with the end token, which is put there anyway: it is left out", where, end)
            text = text.rstrip().removesuffix(end).rstrip()
        if control := self._letters.search(text):
            self._note("spell control tokens inside a text, which are letters there", where, control.group())
        if strange := next((one for one in FOREIGN.findall(text) if one not in self._known), None):
            self._note("spell control tokens of another model, which are imitated as text", where, strange)
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """[tokens] of a text as it is."""
        first, *others = self._letters.split(text)
        ids = self.chat.encode_completion(first)
        for number, piece in enumerate(others):
            ids += self.chat.encode_plain(piece) if number % 2 == 0 else self.chat.encode(piece)
        return ids

    def hold(self, ids: Sequence[int], problem: Problem, where: str) -> None:
        """Count a completion, [tokens] without its end token, that breaks the form which the format reward asks for, is
        refused by the usual `reward.refuse`, or reasons in another language than its row asks for."""
        parts = parts_of(self.chat, ids, verifier_for(problem))
        source = problem.source and f"; source: {problem.source[:80]}"
        if failed := parts.failed or refuse_format(problem, parts, REFUSED).failed:
            written = self.chat.think_prefix + self.chat.decode(ids)
            usual = {"[THINK]", "[/THINK]"} if self.chat.think_ids else {OPEN, CLOSE}
            tags = (tag for tag in REASONING.findall(written) if tag not in usual)
            if tag := next(tags, None):
                failed += f"; its reasoning stands in {tag}"
            what = "break the form that the format reward asks for, and a policy like them earns 0"
            self._note(what, where, failed + source)
        elif (asked := problem.reasoning_language) and self._heard < MOST_HEARD:
            self._heard += 1
            detection, match = spoken_in(parts.reasoning, asked)
            if match is False:
                heard = f"{detection.language or 'none'} instead of {asked}"
                self._note(OTHER_LANGUAGE, where, heard + source)

    def warnings(self, setting: str, count: int) -> list[str]:
        """One line for each doubt. setting: of the file. count: its rows."""
        asking = f"the first {self._heard:,} rows of the right form that ask for a language"
        rows = {what: asking if what == OTHER_LANGUAGE else f"{count:,} rows" for what in self.doubts}
        return [
            f"{setting}: {len(places):,} of {rows[what]} {what} (first: {places[0].removeprefix(f'{setting}: ')})"
            for what, places in self.doubts.items()
        ]

    def _note(self, what: str, where: str, example: str) -> None:
        places = self.doubts.setdefault(what, [])
        if not places or not places[-1].startswith(f"{where}: "):  # several turns are one row
            places.append(f"{where}: {example}")


def _conversation(chat: Chat) -> str:
    """What the template writes of a conversation: some families call the marks of its roles ordinary tokens."""
    turns = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    try:
        return chat.render_turns(turns)
    except ModelError:  # it knows single requests only
        return chat.render_turns(turns[:1])
