"""The games of an evaluation: which there are, their records in a folder that a stopped run goes on from, and playing.

    oversight.json   what all games have in common, and the secret that the marks in prompts are made of
    games.jsonl      one `GameRecord` a line, on the disk before the next one

A game that is there is not played again; judges, agents, questions and protocols may be added. A debate is held once
for all judges; a consultancy once for each, since it asks the questions.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from evaluation.samples import REPAIR
from oversight import protocol
from oversight.players import Game, ModelPlayer, hold
from oversight.prompts import Ask, JudgeVerdict, Question, Role
from oversight.protocol import Rules
from oversight.settings import OversightSettings
from oversight.speech import Speech
from shared.chat_endpoint import FAILURES
from shared.errors import ConfigError, RunError
from shared.journal import Journal
from verify.records import fingerprint

IDENTITY, GAMES, FORMAT = "oversight.json", "games.jsonl", 1
COMMON = ("rounds", "simultaneous", "best_of", "words", "thinking", "temperature", "max_tokens", "judge_tokens", "seed")
"""names of the settings that change games"""
MOST_FAILURES = 20
"""games in a row that may fail before the run ends, beyond those under way"""


class GameKey(NamedTuple):
    """Identifies a game."""

    task: str
    id: str
    """the question's id"""
    order: int
    """1: the answers as the task gives them; 2: the other way round"""
    protocol: str
    """one of the settings'; "agent": the agent answers by itself; "elo": a debate of one round between two agents"""
    assigned: int = 0
    """the answer that the consultant was told to argue for, 1 or 2 of this order"""
    agent: str = ""
    """who argues, for answer 1 in a debate"""
    opponent: str = ""
    """who argues for answer 2"""
    judge: str = ""


class GameRecord(msgspec.Struct, kw_only=True):
    """One game: what was said and decided; nothing in it depends on when it was played."""

    key: GameKey
    question: str
    """fingerprint of the question in this order"""
    right: int | None
    """the right answer of this order"""
    speeches: list[Speech] = []
    verdict: JudgeVerdict
    tokens: int = 0
    """sampled by all players, with the speeches"""
    prompt_tokens: int = 0
    calls: int = 0
    spoken: tuple[int, int, int] = (0, 0, 0)
    """tokens, prompt tokens and calls that the speeches took, for other judges of the same debate"""


def mark_of(question: Question) -> str:
    """Return a fingerprint of a question."""
    return fingerprint(json.dumps(msgspec.to_builtins(question), sort_keys=True))


class OversightFolder(Journal[GameKey, GameRecord]):
    """The folder of an evaluation, locked by its launch: `with OversightFolder(settings, weights) as folder: ...`."""

    def __init__(self, settings: OversightSettings, weights: dict[str, str]):
        """Models may be added later. weights: model -> name of its weights, "" if its server reports none. Raises
        ConfigError if the folder was made with other settings or is in use, and DataError."""
        self.folder = Path(settings.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        identity = {"format": FORMAT, **{name: getattr(settings, name) for name in COMMON}, "weights": weights}
        super().__init__(
            self.folder / GAMES, GameRecord, attrgetter("key"), identity, REPAIR, where=f"out = {self.folder}",
            header=self.folder / IDENTITY, grows=("weights",), once={"secret": secrets.token_hex(16)},
        )  # fmt: skip


class GameJob(NamedTuple):
    """Games that share their speeches: one, or a debate before several judges."""

    question: Question
    """in the order of the key"""
    keys: list[GameKey]


def jobs_of(
    tasks: dict[str, list[Question]], settings: OversightSettings, agents: list[str], judges: list[str]
) -> Iterator[GameJob]:
    """Yield all jobs; those that need the length of a debate come last."""
    chosen = settings.protocols
    asked = [
        (GameKey(task, question.id, order, ""), question if order == 1 else question.swapped())
        for task, questions in tasks.items()
        for question in questions
        for order in (1, 2)
    ]
    for base, question in asked:
        if "debate" in chosen or "consultancy" in chosen:
            for agent in agents:
                yield GameJob(question, [base._replace(protocol="agent", agent=agent)])
        for judge in judges:
            for name in ("qa", "qa_article"):
                if name in chosen and (name == "qa" or question.article):
                    yield GameJob(question, [base._replace(protocol=name, judge=judge)])
        for agent in agents:
            if "consultancy" in chosen:
                for judge in judges:
                    for assigned in (1, 2):
                        key = base._replace(protocol="consultancy", assigned=assigned, agent=agent, judge=judge)
                        yield GameJob(question, [key])
            if "debate" in chosen:
                yield _debate(base._replace(protocol="debate", agent=agent, opponent=agent), question, judges)
    rng = random.Random(f"{settings.seed} elo")
    for base, question in [rng.choice(asked) for _ in range(settings.elo_games)]:
        first, second = rng.choice(agents), rng.choice(agents)
        yield _debate(base._replace(protocol="elo", agent=first, opponent=second), question, judges)
    if "votes" in chosen:
        for base, question in asked:
            for judge in judges:
                yield GameJob(question, [base._replace(protocol="votes", agent=agents[0], judge=judge)])


def _debate(base: GameKey, question: Question, judges: list[str]) -> GameJob:
    return GameJob(question, [base._replace(judge=judge) for judge in judges])


class GamePlayer:
    """Plays the missing games of a folder."""

    def __init__(
        self, settings: OversightSettings, folder: OversightFolder, agents: dict[str, ModelPlayer],
        judges: dict[str, ModelPlayer],
    ):  # fmt: skip
        self.settings, self.folder, self.agents, self.judges = settings, folder, agents, judges
        self.failed: list[str] = []
        self._in_a_row = 0

    def missing(self, job: GameJob) -> list[GameKey]:
        """Return the games of a job that are not there. Raises ConfigError if one is there about another question."""
        for key in job.keys:
            record = self.folder.rows.get(key)
            if record is not None and record.question != mark_of(job.question):
                raise ConfigError(
                    f"{self.folder.folder}: the question {key.id} of {key.task} has changed: give another --out"
                )
        return [key for key in job.keys if self.folder.lacks(key)]

    async def work(self, job: GameJob) -> None:
        """Play what is missing of a job. Raises RunError if nothing works any more."""
        try:
            await self._play(job)
            self._in_a_row = 0
        except FAILURES as error:
            self._in_a_row += 1
            self.failed.append(f"{job.keys[0].protocol} of {job.keys[0].id}: {type(error).__name__}: {error}")
            if self._in_a_row >= MOST_FAILURES + self.settings.concurrency:
                raise RunError(
                    f"{self._in_a_row} games in a row failed, the last one: {self.failed[-1]}. What is there is kept: "
                    "look at the servers, then give the same command again"
                ) from None

    async def _play(self, job: GameJob) -> None:
        """Play what is missing of a job and record it. Raises one of FAILURES."""
        keys, question = self.missing(job), job.question
        if not keys:
            return
        speeches: Game[list[Speech]] = Game([])
        if keys[0].protocol in ("debate", "elo"):
            speeches = self._recorded(job) or await self._argue(keys[0]._replace(judge=""), question)
        for key in keys:
            if key.protocol == "consultancy":
                speeches = await self._argue(key, question)
            verdict = await self._decide(key, question, speeches.result)
            spoken = (speeches.tokens, speeches.prompt_tokens, speeches.calls)
            self.folder.add(GameRecord(
                key=key, question=mark_of(question), right=question.right, speeches=speeches.result,
                verdict=verdict.result, tokens=spoken[0] + verdict.tokens, spoken=spoken,
                prompt_tokens=spoken[1] + verdict.prompt_tokens, calls=spoken[2] + verdict.calls,
            ))  # fmt: skip

    def _recorded(self, job: GameJob) -> Game[list[Speech]] | None:
        """Return the speeches of a debate that another judge has decided."""
        for record in filter(None, map(self.folder.rows.get, job.keys)):
            return Game(record.speeches, *record.spoken)
        return None

    async def _argue(self, key: GameKey, question: Question) -> Game[list[Speech]]:
        rules, secret = self.settings.rules(), _seed(self.folder.identity["secret"], key)
        if key.protocol == "consultancy":
            play = protocol.consultancy(question, key.assigned, rules, secret)
        else:
            play = protocol.debate(question, rules._replace(rounds=1) if key.protocol == "elo" else rules, secret)
        return await hold(play, self._choose(key), _seed(self.settings.seed, key))

    async def _decide(self, key: GameKey, question: Question, speeches: list[Speech]) -> Game[JudgeVerdict]:
        secret = _seed(self.folder.identity["secret"], key)
        if key.protocol == "votes":
            debate = self.folder.rows.get(key._replace(protocol="debate", opponent=key.agent))
            if debate is None:
                raise ValueError("the debate whose tokens it may spend has failed")
            play = protocol.vote(question, secret, debate.tokens)
        elif speeches:
            play = protocol.decide(question, speeches, Rules(), secret)
        else:
            role: Role = "agent" if key.protocol == "agent" else "judge"
            play = protocol.answer(question, secret, role=role, article=key.protocol in ("agent", "qa_article"))
        return await hold(play, self._choose(key), f"{_seed(self.settings.seed, key)}\0verdict")

    def _choose(self, key: GameKey) -> Callable[[Ask], ModelPlayer]:
        def choose(ask: Ask) -> ModelPlayer:
            if ask.role == "judge":
                return self.judges[key.judge]
            return self.agents[key.opponent if ask.answer == 2 and key.opponent else key.agent]

        return choose


def _seed(secret: str | int, key: GameKey) -> str:
    return "\0".join(map(str, (secret, *key)))
