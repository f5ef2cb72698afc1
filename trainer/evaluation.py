"""Evaluation on validation problems during training, which is not drained.

Completions take the engines' spare slots, and where there are none an eighth of all slots, so that an evaluation ends
soon after its version.

    pass@1        mean over problems of the share of right completions
    pass@k        share of problems that have a right one among their k completions
    maj@k         mean over problems of the chance that the most frequent answer of k is right (ties share it)

k is evaluate.samples, where that is above 1. All three, and the language consistency, are also given for each
language, domain and set (the row's "source") of the problems. Open problems are in none of the three: where all are
open there is no accuracy.

Results are the lines of evaluations.jsonl in the run folder, which also say which version was best.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from rollout.client import EngineClient
from shared.atomic_write import write_whole
from shared.config import Config
from shared.diversity import mean_diversity
from shared.json_reader import decode_json
from shared.statistics import majority_at_k, mean_and_half_width, pass_at_k
from shared.types import Completion, Problem, Prompt, Reward, TurnText, Verdict
from trainer.data.data_source import DataSource, completion_seed
from trainer.episodes import Episodes, failed_start, turns_of
from verify.plugins import Failed
from verify.scorer import RewardScorer
from verify.verifiers import verifier_for

FILE = "evaluations.jsonl"
GREEDY = 0.0
"""temperature of greedy decoding"""
SHOWN = 8
"""completions that an evaluation keeps to be shown"""
PARTS = {"language": "language", "asked": "reasoning_language", "domain": "domain", "set": "source"}
"""kind of a part -> field of a problem"""
LEAST_SHARE = 1 / 8
"""share of the engines' slots that evaluations take where training leaves none"""


class Sampled(msgspec.Struct, omit_defaults=True):
    """One evaluated completion: problem, text, reward and length in tokens."""

    problem: Problem
    text: str
    reward: Reward
    tokens: int
    turns: list[TurnText] = []
    """the texts of an episode, in order"""
    info: dict[str, float] = {}
    """numbers of the environment, each the mean over the turns that have it"""


class InfoMean(msgspec.Struct):
    """A number of the environment, over the episodes that have it."""

    mean: float
    half_width: float
    """half of its 95 % interval over problems (normal approximation)"""


class Breakdown(msgspec.Struct):
    """Means over some validation problems: all of them, or those of one language, domain or set."""

    problems: int
    accuracy: float | None
    """pass@1; None where all problems are open"""
    accuracy_half_width: float
    """half of the 95 % interval over problems (normal approximation)"""
    consistency: float | None
    """share of completions whose problem, reasoning and answer are in one language; None where environments grade"""
    majority: float | None = None
    """maj@k over problems with an answer; None for one completion a problem, for programs and for open problems"""
    pass_at_k: float | None = None
    """pass@k; None for one completion a problem, and for open problems"""


class Evaluation(Breakdown, kw_only=True):
    """Result of one evaluation: means over the validation problems, and over parts of them, and some completions."""

    temperature: float
    format: float | None
    """share of well-formed completions; None where environments grade"""
    reward: float
    tokens: float
    """mean completion length"""
    completions: int = 1
    """completions of each problem: the k of pass@k and maj@k"""
    distinct: float | None = None
    """different bigrams of a problem's completions over all of them; None for one completion a problem"""
    self_bleu: float | None = None
    """likeness of a problem's completions (shared/diversity.py); None for one completion a problem"""
    answers: float | None = None
    """different answers of a problem, right ones being one; as for `majority`"""
    parts: dict[str, Breakdown] = {}
    """"language/fr", "asked/de", "domain/code", "set/gsm8k": only kinds (`PARTS`) of which there are several"""
    info: dict[str, InfoMean] = {}
    """name -> mean of a number that environments gave"""
    samples: list[Sampled] = []


class Evaluator:
    """Samples and verifies completions of its problems during training; several evaluations may be under way."""

    def __init__(
        self, engines: EngineClient, scorer: RewardScorer, source: DataSource, problems: list[Problem],
        episodes: Episodes | None = None,
    ):  # fmt: skip
        """episodes: needed where a problem has an environment."""
        self.engines, self.scorer, self.source, self.episodes = engines, scorer, source, episodes
        self.problems = problems
        self._under_way = 0

    async def run(
        self, temperature: float, completions: int = 1, ended: Callable[[int, int], None] | None = None
    ) -> Evaluation:
        """Sample `completions` a problem (temperature 0 is greedy: one), verify, average. ended: called after each
        completion with the number that have ended, and that of all."""
        count = completions if temperature > 0 else 1
        total = len(self.problems) * count
        sampled = await self.sample(temperature, count, ended=lambda done: ended(done, total) if ended else None)
        return await asyncio.to_thread(summarise, temperature, sampled)  # long completions take seconds to compare

    async def sample(
        self, temperature: float, count: int, chosen: range | None = None,
        ended: Callable[[int], None] = lambda done: None,
    ) -> list[list[Sampled]]:  # fmt: skip
        """[problems][count] verified completions, of the problems at the places `chosen` (None for all). ended: called
        after each completion with the number that have ended."""
        gate, done = asyncio.Lock(), itertools.count(1)

        async def one(position: int, sample: int) -> Sampled:
            outcome = await self._one(position, self.problems[position], sample, temperature, gate)
            ended(next(done))
            return outcome

        places = range(len(self.problems)) if chosen is None else chosen
        sampled = await asyncio.gather(*(one(place, sample) for place in places for sample in range(count)))
        return [list(sampled[i : i + count]) for i in range(0, len(sampled), count)]

    async def _one(
        self, position: int, problem: Problem, sample: int, temperature: float, gate: asyncio.Lock
    ) -> Sampled:
        async with gate:
            while self.engines.spare() <= 0 and self._under_way >= self.engines.slots() * LEAST_SHARE:
                await asyncio.sleep(0.02)
        # submitted before the next await, so the next one in the queue counts it
        self._under_way += 1
        try:
            # other seeds than those of training, for environments
            prompt = self.source.render(problem, -1 - position if problem.environment else position)
            seed = completion_seed(self.source.seed, -1 - position, sample)
            if problem.environment:
                prompt, completion = await self._play(prompt, seed, temperature)
            else:
                [completion] = await self.engines.sample(prompt.token_ids, [seed], temperature)
        finally:
            self._under_way -= 1
        reward, text = await self.scorer.score(problem, completion)
        turns = turns_of(self.source.prompt_format, prompt, completion) if problem.environment else []
        info = _means([turn.info for turn in completion.turns])
        return Sampled(problem, text, reward, completion.sampled_tokens, turns, info)

    async def _play(self, prompt: Prompt, seed: int, temperature: float) -> tuple[Prompt, Completion]:
        """Sample one episode, as its environment begins it; where that fails it has no tokens and no grade."""
        completion, episodes = self.engines.episode(seed), self.episodes
        assert episodes is not None, "a problem has an environment, and nothing plays it"
        try:
            opened = await episodes.open(prompt)
        except Failed as failed:
            return prompt, failed_start(completion, failed)
        return opened, await episodes.play(
            opened, completion, lambda episode: self.engines.continue_turn(opened.token_ids, episode, temperature)
        )


def right(sample: Sampled) -> bool:
    """Whether the answer is right, or the program passed every test."""
    return sample.reward.verdict is Verdict.CORRECT


def wrong_answers(samples: Sequence[Sampled]) -> Counter[str]:
    """How often each wrong answer of one problem's completions was given, by its text without blanks."""
    return Counter(
        "".join(sample.reward.answer.split()).casefold()
        for sample in samples
        if not right(sample) and sample.reward.answer is not None
    )


def majority(samples: Sequence[Sampled]) -> float:
    """Chance that the most frequent answer of one problem's completions is right.

    Right answers count together, whatever their form; wrong ones by their text without blanks. With m answers equally
    frequent, one of them right, it is 1 / m. Completions without an answer do not vote; no votes give 0.
    """
    wrong = wrong_answers(samples)
    rights = sum(map(right, samples))
    silent = len(samples) - rights - wrong.total()
    return majority_at_k(rights, list(wrong.values()), silent, len(samples))


def part_of(problems: Sequence[Sequence[Sampled]]) -> Breakdown:
    """The means of some problems. problems: [problems][completions], none empty."""
    verified = [samples for samples in problems if samples[0].problem.verified]
    shares = [sum(map(right, samples)) / len(samples) for samples in verified]
    accuracy, half_width = mean_and_half_width(shares) if shares else (None, 0.0)
    several = [samples for samples in verified if len(samples) > 1]
    votes = [majority(samples) for samples in several if votes_on(samples)]
    solved = [pass_at_k(len(samples), sum(map(right, samples)), len(samples)) for samples in several]
    return Breakdown(
        problems=len(problems), accuracy=accuracy, accuracy_half_width=half_width,
        consistency=_share([bool(sample.reward.consistent) for sample in _formed(problems)]),
        majority=math.fsum(votes) / len(votes) if votes else None,
        pass_at_k=math.fsum(solved) / len(solved) if solved else None,
    )  # fmt: skip


def votes_on(samples: Sequence[Sampled]) -> bool:
    """Whether the completions of a problem have answers that can be compared."""
    return len(samples) > 1 and samples[0].problem.verified and verifier_for(samples[0].problem).answer_in == "box"


def _formed(problems: Sequence[Sequence[Sampled]]) -> list[Sampled]:
    return [sample for samples in problems for sample in samples if sample.reward.format is not None]


def _share(answers: list[bool]) -> float | None:
    return sum(answers) / len(answers) if answers else None


def parts_of(problems: Sequence[Sequence[Sampled]]) -> dict[str, Breakdown]:
    """`part_of` for each language, language asked for, domain and set of [problems][completions], if several."""
    breakdowns: dict[str, Breakdown] = {}
    for kind, name in PARTS.items():
        by_value: dict[str, list[Sequence[Sampled]]] = {}
        for samples in problems:
            by_value.setdefault(getattr(samples[0].problem, name) or "none", []).append(samples)
        if len(by_value) > 1:
            breakdowns |= {f"{kind}/{value}": part_of(members) for value, members in sorted(by_value.items())}
    return breakdowns


def info_of(problems: Sequence[Sequence[Sampled]]) -> dict[str, InfoMean]:
    """Each number that environments gave: mean over problems of its mean over a problem's episodes that have it."""
    means = [_means([sample.info for sample in samples]) for samples in problems]
    names = sorted({name for info in means for name in info})
    return {name: InfoMean(*mean_and_half_width([info[name] for info in means if name in info])) for name in names}


def _means(infos: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each number over those that have it."""
    numbers: dict[str, list[float]] = {}
    for name, value in (item for info in infos for item in info.items()):
        numbers.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in numbers.items()}


def summarise(temperature: float, problems: Sequence[Sequence[Sampled]]) -> Evaluation:
    """Means of the evaluated completions. problems: [problems][completions], none empty."""
    every = [sample for samples in problems for sample in samples]
    answers = [len(wrong_answers(one)) + any(map(right, one)) for one in problems if votes_on(one)]
    return Evaluation(
        **asdict(part_of(problems)) | mean_diversity([[sample.text for sample in samples] for samples in problems]),
        temperature=temperature, format=_share([(sample.reward.format or 0.0) > 0 for sample in _formed(problems)]),
        reward=sum(sample.reward.total for sample in every) / len(every),
        tokens=sum(sample.tokens for sample in every) / len(every), completions=len(problems[0]),
        answers=sum(answers) / len(answers) if answers else None, parts=parts_of(problems), info=info_of(problems),
        samples=[samples[0] for samples in problems[:SHOWN]],
    )  # fmt: skip


# ---- evaluations.jsonl -----------------------------------------------------------------------------------------------


class EvaluationRecord(msgspec.Struct):
    """A line of evaluations.jsonl."""

    version: int
    """policy version when it began; training goes on meanwhile, so later versions may have sampled a part of it"""
    seconds: float
    """training time when it ended"""
    evaluation: Evaluation


def read_evaluations(run_dir: Path) -> list[EvaluationRecord]:
    """Records of evaluations.jsonl by version, the last of each version and temperature; damaged lines are left out."""
    path = run_dir / FILE
    records: dict[tuple[int, float], EvaluationRecord] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = decode_json(line, EvaluationRecord)
        except ValueError:  # not JSON, or not UTF-8
            continue  # reported when a launch goes on: trainer.run_log.check_folder
        records[record.version, record.evaluation.temperature] = record
    return [records[key] for key in sorted(records)]


def forget_evaluations(run_dir: Path, version: int) -> None:
    """Drop the records of versions later than `version`, which will be made again."""
    path = run_dir / FILE
    if path.exists():
        kept = [record for record in read_evaluations(run_dir) if record.version <= version]
        write_whole(path, b"".join(msgspec.json.encode(record) + b"\n" for record in kept))


def at_temperature(records: list[EvaluationRecord], temperature: float) -> list[EvaluationRecord]:
    """The records of one sampling temperature (0 is greedy), by version."""
    return [record for record in records if record.evaluation.temperature == temperature]


def evaluation_due(config: Config, version: int) -> bool:
    """Whether validation problems are to be evaluated at this version: before and after training, and on the way."""
    every = config.evaluate.every
    return bool(config.data.validation) and (
        version in (0, config.last_version) or bool(every) and version % every == 0
    )


def was_evaluated(config: Config, version: int, temperature: float) -> bool:
    """Whether a version has a record at this temperature, also of an earlier launch."""
    records = at_temperature(read_evaluations(config.run_dir), temperature)
    return any(record.version == version for record in records)


def best_version(config: Config) -> int | None:
    """The first version that is highest in evaluate.best at rollout.temperature; None without any."""
    records = at_temperature(read_evaluations(config.run_dir), config.rollout.temperature)
    scores = {record.version: getattr(record.evaluation, config.evaluate.best) for record in records}
    known = {version: score for version, score in scores.items() if score is not None}
    return max(known, key=lambda version: (known[version], -version)) if known else None


def wanted_versions(config: Config) -> set[int]:
    """Versions whose checkpoints must stay whatever their age: the best, the last, and those still to be evaluated."""
    records = at_temperature(read_evaluations(config.run_dir), config.rollout.temperature)
    newest = max((record.version for record in records), default=-1)
    every = config.evaluate.every or config.last_version or 1
    pending = {version for version in range(0, config.last_version + 1, every) if version > newest}
    best = best_version(config)
    return {*pending, config.last_version, *([] if best is None else [best])} if config.data.validation else set()
