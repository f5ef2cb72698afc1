"""The protocols as generators: direct questions, consultancy and debate. They yield requests and receive replies.

    answer        a model answers by itself, with or without the article
    vote          a judge answers by itself many times, until it has spent a number of tokens; the majority counts
    consultancy   an agent argues for the answer that it was assigned, the judge asks one question a round
    debate        two agents argue for one answer each, at the same time or in turn
    decide        the judge's verdict on what was said

Open consultancy and open debate are no games of their own: they are those games in which the assigned answer is the
agent's own. Nothing here speaks to a model or reads a clock: `players` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oversight import prompts
from oversight.prompts import JudgeVerdict, Play, PlayerReply, Question, Role
from oversight.speech import Speech, clean, end_of_words, read_speech

VOTES = 4
"""replies that a voting judge is asked for at a time"""
MOST_VOTES = 64
JUDGE_WORDS = 60


class Rules(NamedTuple):
    """How a debate or a consultancy is held; the defaults are the paper's, but for best_of, which is 4 there."""

    rounds: int = 3
    simultaneous: bool = True
    """whether a debater hears earlier rounds only; else the first speech of a round, too"""
    best_of: int = 1
    """drafts of each speech, of which the speaker's model chooses the most persuasive"""
    words: int = 150
    """limit of a speech"""
    thinking: bool = True
    """whether speakers may think where nobody reads it"""
    names: tuple[str, str] = ("Alice", "Bob")
    """who argues for answer 1 and 2"""

    def read(self, reply: str, question: Question, side: int, number: int, longer: int = 1) -> Speech:
        """Return the speech for a side in a round; it may be `longer` times as long as the limit."""
        return read_speech(
            reply, longer * self.words, question.article, speaker=self.names[side - 1], answer=side, round=number
        )


def marks(secret: str) -> Iterator[str]:
    """Yield marks that nobody can guess who does not know `secret`; the same secret gives the same ones."""
    number = 0
    while True:
        yield hashlib.blake2b(f"{secret}\0{number}".encode(), digest_size=8).hexdigest()
        number += 1


def verdict_of(reply: PlayerReply) -> JudgeVerdict:
    """Return what a reply decides."""
    return JudgeVerdict(prompts.read_verdict(reply.text), reply.probability, reply.text)


def answer(question: Question, secret: str, *, role: Role = "judge", article: bool) -> Play[JudgeVerdict]:
    """Ask judge or agent directly."""
    replies = yield [prompts.direct(question, marks(secret), role=role, article=article)]
    return verdict_of(replies[0][0])


def vote(question: Question, secret: str, tokens: int) -> Play[JudgeVerdict]:
    """Ask the judge directly, with reasons, until its replies have `tokens` tokens; `probability` is the share of votes
    for answer 1. With as many votes for both there is no verdict."""
    source, votes, spent, asked = marks(secret), [0, 0, 0], 0, 0
    while asked == 0 or (spent < tokens and asked < MOST_VOTES):
        replies = yield [prompts.direct(question, source, role="judge", article=False, samples=VOTES)]
        for reply in replies[0]:
            votes[prompts.read_verdict(reply.text) or 0] += 1
            spent += reply.tokens
        asked += VOTES
    invalid, first, second = votes
    summary = f"{first} votes for answer 1, {second} for answer 2, {invalid} for none"
    if first == second:
        return JudgeVerdict(None, 0.5, summary)
    return JudgeVerdict(1 if first > second else 2, first / (first + second), summary)


def debate(question: Question, rules: Rules, secret: str) -> Play[list[Speech]]:
    """Hold a debate. In each round the speech for answer 1 stands first."""
    source = marks(secret)
    speeches: list[Speech] = []
    for number in range(1, rules.rounds + 1):
        for sides in [(1, 2)] if rules.simultaneous else [(1,), (2,)]:
            speeches += yield from speak(question, sides, number, tuple(speeches), rules, source)
    return speeches


def consultancy(question: Question, assigned: int, rules: Rules, secret: str) -> Play[list[Speech]]:
    """Hold a consultancy: before each round but the first the judge asks a question."""
    source = marks(secret)
    speeches: list[Speech] = []
    for number in range(1, rules.rounds + 1):
        if speeches:
            replies = yield [prompts.inquiry(question, speeches, JUDGE_WORDS, source)]
            text = clean(replies[0][0].text)
            asked = text[: end_of_words(text, JUDGE_WORDS)]
            speeches.append(Speech(speaker="Judge", answer=0, round=number, argument=asked))
        speeches += yield from speak(question, (assigned,), number, tuple(speeches), rules, source, alone=True)
    return speeches


def decide(question: Question, speeches: Sequence[Speech], rules: Rules, secret: str) -> Play[JudgeVerdict]:
    """Ask the judge for its verdict on what was said."""
    replies = yield [prompts.verdict(question, speeches, rules.names, marks(f"{secret}\0verdict"))]
    return verdict_of(replies[0][0])


def speak(
    question: Question, sides: Sequence[int], number: int, heard: Sequence[Speech], rules: Rules,
    source: Iterator[str], *, alone: bool = False,
) -> Play[list[Speech]]:  # fmt: skip
    """Return one speech for each of the sides."""
    replies = yield [
        prompts.speech(
            question, side, number, heard, words=rules.words, samples=rules.best_of, thinking=rules.thinking,
            names=rules.names, alone=alone, marks=source,
        )
        for side in sides
    ]  # fmt: skip
    drafts = [
        [rules.read(reply.text, question, side, number) for reply in of_side]
        for side, of_side in zip(sides, replies, strict=True)
    ]
    if rules.best_of == 1:
        return [of_side[0] for of_side in drafts]
    replies = yield [
        prompts.choice(question, side, [draft.argument for draft in of_side], source)
        for side, of_side in zip(sides, drafts, strict=True)
    ]
    return [
        of_side[prompts.read_choice(chosen[0].text, len(of_side))]
        for chosen, of_side in zip(replies, drafts, strict=True)
    ]
