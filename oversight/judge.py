"""A judge of debates: responses of a group with different answers against each other, a critic arguing for both.

    round 1     the two responses as they are
    round 2     the critic's rebuttal for each side, written with both responses at hand
    verdict     the judge decides which answer is right

Each pair debates twice, once in each order.
The reward of a response is the mean over its debates of the probability that the judge gives to its side: the rewards
of the two sides of a debate add up to 1. Responses with the same answer never meet, so a group with one answer teaches
nothing. A judge of "answers" decides in both orders without responses and rebuttals: what debates are compared with.
Source: Kenton et al. 2024 (2407.04622), debate; that a critic speaks instead of the policy itself is ours.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence

from oversight.players import Game, ModelPlayer, hold
from oversight.prompts import JudgeVerdict, Play, Question, Result
from oversight.protocol import Rules, answer, decide, marks, speak
from oversight.speech import Speech, plain
from shared.chat_endpoint import FAILURES, key_headers
from shared.errors import ConfigError
from shared.judge_settings import Judge
from shared.types import Verdict
from verify.llm_judge import ATTEMPTS, Endpoint, is_measured
from verify.plugins import JUDGES, Case, Failed

LONGER = 8
"""a response may have so many times the words of a rebuttal"""


def answers_alike(left: Case, right: Case) -> bool:
    """Return whether two responses give the same answer: as the verifier says where it judged them right or wrong (two
    right ones do), else word for word."""
    if Verdict.CORRECT in (left.verdict, right.verdict):
        return left.verdict is right.verdict
    return plain(left.answer or left.response) == plain(right.answer or right.response)


def draw_pairs(cases: Sequence[Case], opponents: int) -> list[tuple[int, int]]:
    """Draw who debates with whom: places of responses with different answers, at most `opponents` debates for each.

    The same for the same problem, group and responses' answers.
    """
    first = cases[0]
    pairs = [(i, j) for j in range(len(cases)) for i in range(j) if not answers_alike(cases[i], cases[j])]
    random.Random(f"debates {first.group} {first.problem.id}").shuffle(pairs)
    debates, drawn = [0] * len(cases), []
    for i, j in pairs:
        if debates[i] < opponents and debates[j] < opponents:
            debates[i], debates[j] = debates[i] + 1, debates[j] + 1
            drawn.append((i, j))
    return drawn


def posed(left: Case, right: Case, rules: Rules, article: bool) -> Question:
    """Return what two responses to a problem disagree about. article: whether its text up to its last blank line is
    one."""
    texts = [case.answer or f"the response of {name}" for case, name in zip((left, right), rules.names, strict=True)]
    before, _, asked = left.problem.text.rpartition("\n\n") if article else ("", "", left.problem.text)
    return Question(id=left.problem.id, text=asked, answers=(texts[0], texts[1]), right=None, article=before)


def debate(left: Case, right: Case, question: Question, rules: Rules, secret: str) -> Play[list[Speech]]:
    """Hold a debate between two responses, the first of which stands first: asks for two rebuttals, and returns all
    speeches."""
    speeches = [rules.read(case.response, question, side, 1, LONGER) for side, case in ((1, left), (2, right))]
    return speeches + (yield from speak(question, (1, 2), 2, speeches, rules, marks(secret)))


def probability(verdict: JudgeVerdict) -> float:
    """Return the probability of answer 1 that a verdict stands for; 1/2 where it names none."""
    return verdict.score(1) if verdict.probability is None else verdict.probability


class DebateEndpoint(Endpoint):
    """Asks a critic and a judge about the responses of a group."""

    def __init__(self, name: str, judge: Judge, where: str):
        """where: the section of the settings. Raises ConfigError when an address or a model is missing, or a key's
        variable is not set."""
        super().__init__(name, judge, where)
        critic = judge.critic
        self.debates = judge.asks == "debate"
        if judge.api != "chat":
            raise ConfigError(f'{where}.api = "{judge.api}": a judge of debates must be a language model: "chat"')
        if self.debates and judge.article == "shown":
            raise ConfigError(f'{where}.article = "shown": the judge of a debate never sees it: "hidden", or none')
        if self.debates and not (critic.url.startswith(("http://", "https://")) and critic.model):
            raise ConfigError(
                f'{where}.asks = "debate" needs {where}.critic.url (is "{critic.url}"), an address such as '
                f'"http://127.0.0.1:8000/v1", and {where}.critic.model (is "{critic.model}")'
            )
        headers = key_headers(critic.key_variable, f"{where}.critic.key_variable")

        def player(url: str, model: str, headers: dict[str, str]) -> ModelPlayer:
            return ModelPlayer(
                url, model, headers, judge.deadline_s, concurrent=self.endpoint.concurrent, tries=ATTEMPTS,
                temperature=1.0, max_tokens=judge.max_tokens,
            )  # fmt: skip

        self.players = {
            "agent": player(critic.url, critic.model, headers), "judge": player(judge.url, judge.model, self.headers)
        }  # fmt: skip
        self.rules = Rules(rounds=2, words=critic.words)

    def calls(self, completions: int) -> int:
        """Return how many requests a group takes at most: a verdict in each order, and two rebuttals before it in a
        debate."""
        return (6 if self.debates else 2) * (completions * min(self.judge.opponents, completions - 1) // 2)

    async def prefer(self, cases: Sequence[Case]) -> list[float]:
        """Return [completions] the mean probability that the judge gives to each one's answer, in [0, 1]; 1/2 for one
        that met no other answer. Raises Failed when a player does not answer."""
        pairs = draw_pairs(cases, self.judge.opponents)
        shares = await asyncio.gather(*(self._share(cases[i], cases[j]) for i, j in pairs))
        won: list[list[float]] = [[] for _ in cases]
        for (i, j), share in zip(pairs, shares, strict=True):
            won[i].append(share)
            won[j].append(1 - share)
        return [sum(shares) / len(shares) if shares else 0.5 for shares in won]

    async def _share(self, left: Case, right: Case) -> float:
        """Return the probability of the left one's answer: the mean of two debates, one in each order."""
        try:
            first, second = await asyncio.gather(self._verdict(left, right), self._verdict(right, left))
        except FAILURES as error:
            reason = f"reward {self.name}: a debate failed with {type(error).__name__}: {error}"
            raise Failed(Verdict.CRASH, reason[:500]) from None
        self.measurement.first += [first.score(1), second.score(1)]
        self.measurement.agreed.append(float(first.answer is not None and first.answer == 3 - (second.answer or 0)))
        share = (probability(first) + 1 - probability(second)) / 2
        if is_measured(self.judge, left) and {left.verdict, right.verdict} == {Verdict.CORRECT, Verdict.WRONG}:
            of_right = share if left.verdict is Verdict.CORRECT else 1 - share
            self.measurement.right.append(0.5 if of_right == 0.5 else float(of_right > 0.5))
        return share

    async def _verdict(self, left: Case, right: Case) -> JudgeVerdict:
        question, secret = posed(left, right, self.rules, bool(self.judge.article)), secrets.token_hex(16)
        if self.debates:
            speeches = await self._play(debate(left, right, question, self.rules, secret))
            play = decide(question, speeches.result, self.rules, secret)
        else:
            play = answer(question, secret, article=self.judge.article == "shown")
        game = await self._play(play)
        self.measurement.tokens.append(game.tokens + game.prompt_tokens)
        return game.result

    async def _play(self, play: Play[Result]) -> Game[Result]:
        return await hold(play, lambda ask: self.players[ask.role], secrets.token_hex(8))


JUDGES.update(debate=DebateEndpoint, answers=DebateEndpoint)
