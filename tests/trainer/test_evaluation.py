"""Evaluation: means over problems, pass@k, votes, parts by language, domain and set; which version was best; open
problems are neither right nor wrong in any of it."""

import asyncio
import io
import json
import math
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.runs import clearly_above
from benchmarks.runs import table as page_table
from lab.ablate.results import evaluated_parts
from lab.analyse import surface
from shared.config import Config
from shared.metrics import MetricsLog
from shared.progress import Progress, plain
from shared.types import Completion, Group, Problem, Prompt, Reward, Turn, Verdict, VersionSpan
from tests.tables import read_table
from trainer.data.data_source import completion_seed
from trainer.evaluation import (
    Evaluation,
    EvaluationRecord,
    Evaluator,
    Sampled,
    best_version,
    evaluation_due,
    forget_evaluations,
    majority,
    read_evaluations,
    summarise,
    wanted_versions,
    was_evaluated,
)
from trainer.ledger import Ledger
from trainer.plot import write_plot
from trainer.report import before_after_table
from trainer.run_log import RunLogger
from trainer.stages import Stages
from trainer.step_metrics import rollout_metrics
from trainer.timing import PhaseTimer

RIGHT, WRONG, OPEN, NONE = Verdict.CORRECT, Verdict.WRONG, Verdict.OPEN, Verdict.NO_ANSWER


def reward_for(verdict: Verdict, answer: str | None = "1") -> Reward:
    formed, right = 0.1 * (verdict is not NONE), 0.9 * (verdict is RIGHT)
    given = answer if formed else None
    return Reward(formed + right, formed, right, 0.0, 0.0, verdict, consistent=bool(formed), answer=given)


def sampled(verdict: Verdict, answer: str = "1", **of: Any) -> Sampled:
    problem = Problem("p", "?", "1", hidden=of.get("domain") == "open", **of)
    return Sampled(problem, "text", reward_for(verdict, answer), 10)


def logger_of(folder: Path, stream: io.StringIO, version: int = 0, prompts: Any = None, **sections: Any) -> RunLogger:
    """Of a run named "run" in this folder of runs; its lines go to the stream."""
    ledger = Ledger(Stages(Config.model_validate({"runs_dir": str(folder), "name": "run", **sections})))
    ledger.version = version
    return RunLogger(PhaseTimer(), Progress(stream), None, None, ledger, list, prompts=prompts)


def test_a_last_step_that_needed_no_sampling_has_no_speed_of_it(tmp_path):
    """Its completions were there before: 0 tokens/s would be a wrong figure of the engines. Within a run 0 is right."""
    logger = logger_of(tmp_path, io.StringIO(), steps=3)
    logger.engines = SimpleNamespace(generated_tokens=0)  # type: ignore[assignment]
    speeds = []
    for version, generated in ((1, 100), (2, 100), (3, 100), (3, 300)):
        logger.engines.generated_tokens = generated
        speeds.append(logger._sampling_metrics(2.0, version).get("tokens/generated_per_s"))
    assert speeds == [50.0, 0.0, None, 100.0]


@pytest.mark.parametrize("case", read_table("trainer/cases", of="votes"), ids=itemgetter("name"))
def test_majority_of_one_problem(case):
    votes = [sampled(RIGHT if each == "1" else WRONG, each) if each else sampled(NONE) for each in case["answers"]]
    assert majority(votes) == pytest.approx(case["majority"], abs=1e-6)


def test_right_answers_vote_together_whatever_their_form():
    assert majority([sampled(RIGHT, "1/2"), sampled(RIGHT, "0.5"), sampled(WRONG, "2"), sampled(WRONG, "3")]) == 1.0


def test_the_interval_is_over_problems_not_completions():
    # every completion of a problem alike: as wide as with one completion each
    problems = [[sampled(RIGHT if number % 2 else WRONG)] * 4 for number in range(10)]
    assert summarise(1.0, problems).accuracy_half_width == pytest.approx(1.96 * math.sqrt(2.5 / 9 / 10))


def test_parts_are_given_where_there_are_several_kinds():
    score = summarise(1.0, [
        [sampled(RIGHT, language="fr"), sampled(WRONG, "2", language="fr")],
        [sampled(RIGHT, language="de"), sampled(RIGHT, language="de")],
        [sampled(WRONG, "2", language="de", domain="code"), sampled(RIGHT, language="de", domain="code")],
    ])  # fmt: skip
    assert score.accuracy == pytest.approx(4 / 6) and score.completions == 2 and score.problems == 3
    assert score.parts.keys() == {"language/de", "language/fr", "domain/code", "domain/math"}, "one set: no part of it"
    assert score.parts["language/de"].accuracy == 0.75 and score.parts["language/de"].problems == 2
    assert score.parts["domain/code"].majority is None, "programs do not vote"
    assert score.majority == pytest.approx((0.5 + 1.0) / 2)


def test_pass_at_k_is_the_share_of_problems_with_a_right_completion():
    score = summarise(1.0, [
        [sampled(RIGHT), sampled(WRONG, "2"), sampled(NONE)],
        [sampled(WRONG, "2"), sampled(WRONG, "3"), sampled(NONE)],
        [sampled(RIGHT), sampled(RIGHT), sampled(RIGHT)],
        [sampled(WRONG, "2", domain="code"), sampled(WRONG, "2", domain="code"), sampled(RIGHT, domain="code")],
    ])  # fmt: skip
    assert score.completions == 3 and score.pass_at_k == 3 / 4
    assert score.accuracy == pytest.approx((1 / 3 + 0 + 1 + 1 / 3) / 4)
    assert score.parts["domain/code"].pass_at_k == 1.0, "programs need not vote"
    assert score.parts["domain/math"].pass_at_k == pytest.approx(2 / 3)
    assert score.answers == (2 + 2 + 1) / 3, "of those with answers"
    assert score.self_bleu == pytest.approx(1.0), "all texts are alike"
    single = summarise(0.0, [[sampled(RIGHT)], [sampled(WRONG)]])
    assert {single.majority, single.pass_at_k, single.distinct, single.self_bleu, single.answers} == {None}


def test_an_evaluation_from_before_pass_at_k_can_be_read():
    score = summarise(1.0, [[sampled(RIGHT), sampled(WRONG)], [sampled(RIGHT, language="fr"), sampled(WRONG)]])
    record = msgspec.to_builtins(EvaluationRecord(3, 1.0, score))
    for part in (record["evaluation"], *record["evaluation"]["parts"].values()):
        assert part.pop("pass_at_k") == 1.0
    old = msgspec.json.decode(msgspec.json.encode(record), type=EvaluationRecord).evaluation
    assert old.pass_at_k is None and old.parts["language/fr"].pass_at_k is None and old.accuracy == score.accuracy


def test_an_evaluation_is_written_down_and_told(tmp_path):
    stream = io.StringIO()
    logger, problems = logger_of(tmp_path, stream), [[sampled(WRONG, "2"), sampled(RIGHT)], [sampled(WRONG, "2")] * 2]
    logger.evaluation(0, summarise(1.0, problems))
    logger.evaluation(0, summarise(0.0, [samples[:1] for samples in problems]))
    config = logger.ledger.stages.config
    due = [was_evaluated(config, version, heat) for version, heat in ((0, 1.0), (0, 0.0), (1, 0.0))]
    assert due == [True, True, False]
    rows = [json.loads(row) for row in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    sampling, greedy = ({k: v for k, v in row.items() if k.startswith("evaluation/")} for row in rows)
    assert sampling["evaluation/pass_at_k"] == 0.5 and sampling["evaluation/majority"] == 0.25
    assert sampling["evaluation/accuracy"] == 0.25 and rows[0]["kind"] == "evaluation"
    assert not [name for name in greedy if "pass" in name or "majority" in name]
    line = " ".join(stream.getvalue().split())
    assert "accuracy 0.250 ± 0.490, pass@2 0.500, maj@2 0.250, language" in line and line.count("pass@") == 1


def test_numbers_of_environments_are_means_over_problems_with_an_interval(tmp_path):
    infos = [[{"progress": 1.0}, {"progress": 0.0}], [{"progress": 0.0}, {"other": 2.0}], [{}, {}]]
    score = summarise(1.0, [[msgspec.structs.replace(sampled(RIGHT), info=info) for info in two] for two in infos])
    # means of the problems that have it: .5 and 0; s^2 = .125
    assert score.info["progress"].mean == 0.25 and score.info["other"].mean == 2.0
    assert score.info["progress"].half_width == pytest.approx(1.96 * math.sqrt(0.125 / 2))
    stream = io.StringIO()
    logger_of(tmp_path, stream).evaluation(3, score)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["evaluation/info/progress"] == 0.25
    assert "progress 0.250 ± 0.490" in " ".join(stream.getvalue().split())
    assert read_evaluations(tmp_path / "run")[0].evaluation.info == score.info


def measured(temperature: float, accuracy: float, pass_at_k: float | None = None) -> Evaluation:
    return Evaluation(
        4, accuracy, 0.1, 0.5, pass_at_k=pass_at_k, temperature=temperature, format=0.9, reward=accuracy, tokens=12.0
    )


def write(config: Config, *entries: tuple[int, Evaluation]) -> list[EvaluationRecord]:
    """entries: (version, its evaluation)."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    records = [EvaluationRecord(version, 1.0, score) for version, score in entries]
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    (config.run_dir / "evaluations.jsonl").write_bytes(lines)
    return records


def evaluating(folder: Path, **evaluate: Any) -> Config:
    evaluate = {"every": 5, **evaluate}
    data = {"validation": "validation.jsonl"}
    return Config.model_validate({"runs_dir": str(folder), "steps": 20, "data": data, "evaluate": evaluate})


def test_the_best_version_is_the_first_of_the_highest_at_the_sampling_temperature(tmp_path):
    config = evaluating(tmp_path)
    assert best_version(config) is None
    scores = [(0, 1.0, 0.2), (0, 0.0, 0.9), (5, 1.0, 0.6), (10, 1.0, 0.6), (15, 1.0, 0.4)]
    write(config, *((version, measured(temperature, accuracy)) for version, temperature, accuracy in scores))
    assert best_version(config) == 5
    assert wanted_versions(config) == {5, 20}, "the best, and what is not evaluated yet"
    forget_evaluations(config.run_dir, 4)
    assert best_version(config) == 0 and len(read_evaluations(config.run_dir)) == 2
    assert wanted_versions(config) == {0, 5, 10, 15, 20}
    config = evaluating(tmp_path, samples=2, best="pass_at_k")
    write(config, (0, measured(1.0, 0.9)), (5, measured(1.0, 0.3, 0.6)), (10, measured(1.0, 0.4, 0.5)))
    assert best_version(config) == 5, "and not one without the figure"


def test_what_is_due_depends_on_the_mode():
    validation, imitating = {"data": {"validation": "v.jsonl"}}, {"sft": {"steps": 6, "demonstrations": "d.jsonl"}}

    def due(**given: Any) -> list[int]:
        return [version for version in range(11) if evaluation_due(Config.model_validate(given), version)]

    assert due(steps=10, evaluate={"every": 4}, **validation) == [0, 4, 8, 10]
    assert due(mode="sft", evaluate={"every": 0}, **imitating, **validation) == [0, 6]
    assert due(data={"train": "t.jsonl", "validation": ""}) == []
    assert wanted_versions(Config.model_validate({"data": {"validation": ""}})) == set()


class FullEngines:
    """Engines of 32 slots that training has filled; an evaluation's completion waits until `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.under_way = self.most = 0
        self.seeds: list[int] = []

    def slots(self) -> int:
        return 32

    def spare(self) -> int:
        return -40

    def episode(self, seed: int) -> Completion:
        return Completion(group=-1, index=0, seed=seed)

    async def sample(self, token_ids: list[int], seeds: list[int], temperature: float) -> list[Completion]:
        self.under_way += 1
        self.seeds += seeds
        self.most = max(self.most, self.under_way)
        await self.go.wait()
        self.under_way -= 1
        return [Completion(group=-1, index=0, seed=seed, token_ids=[1, 2]) for seed in seeds]


class ThreeTurns:
    """Every episode has three turns; two of them have a number."""

    async def open(self, prompt: Prompt) -> Prompt:
        return prompt

    async def play(self, prompt: Prompt, completion: Completion, sample: object) -> Completion:
        turns = [Turn(0, 1, info={"hits": 1.0}), Turn(1, 2), Turn(2, 3, info={"hits": 4.0})]
        return msgspec.structs.replace(completion, token_ids=[1, 2, 3], turns=turns)


class EasyJudges:
    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        return reward_for(RIGHT), "text"


class Plain:
    seed, prompt_format = 0, None

    def render(self, problem: Problem, position: int) -> Prompt:
        return Prompt(position, problem, [1])


def evaluator_of(engines: FullEngines, problems: list[Problem], episodes: Any = None) -> Evaluator:
    return Evaluator(engines, EasyJudges(), Plain(), problems, episodes)


def test_a_number_of_an_episode_is_its_mean_over_turns(monkeypatch):
    monkeypatch.setattr("trainer.evaluation.turns_of", lambda *_: [])
    evaluator = evaluator_of(FullEngines(), [Problem("p", "?", "", environment="mine")], ThreeTurns())
    [[episode]] = asyncio.run(evaluator.sample(1.0, 1))
    assert episode.info == {"hits": 2.5}


def test_an_evaluation_has_an_eighth_of_the_slots_where_training_leaves_none():
    async def evaluate() -> Evaluation:
        engines, ended = FullEngines(), list[tuple[int, int]]()
        evaluator = evaluator_of(engines, [Problem(str(number), "?", "1") for number in range(9)])
        task = asyncio.create_task(evaluator.run(1.0, 2, ended=lambda *numbers: ended.append(numbers)))
        for _ in range(100):  # until nothing can go on
            await asyncio.sleep(0)
        assert engines.under_way == 4
        engines.go.set()
        score = await asyncio.wait_for(task, 600)
        trained = {completion_seed(Plain.seed, index, sample) for index in range(99) for sample in range(2)}
        assert engines.most == 4 and ended == [(number + 1, 18) for number in range(18)]
        assert len(set(engines.seeds)) == 18 and trained.isdisjoint(engines.seeds), "training has other seeds"
        return score

    score = asyncio.run(evaluate())
    assert score.problems == 9 and score.accuracy == 1.0


def group(domain: str, *verdicts: Verdict) -> Group:
    problem = Problem("p", "?", "1", domain=domain, hidden=domain == "open")
    ended = [Completion(0, n, 0, [5, 6], [-0.1] * 2, [VersionSpan(0, 0, 2)], "stop") for n in range(len(verdicts))]
    return Group(Prompt(0, problem, [1]), ended, [reward_for(verdict) for verdict in verdicts])


def test_the_accuracy_of_a_step_and_of_a_surface_is_over_verified_problems():
    solved = group("math", RIGHT, WRONG, RIGHT, Verdict.TIMEOUT)
    unverified = group("open", OPEN, OPEN, NONE, OPEN)
    row = rollout_metrics([solved, unverified], [0, 0], [unverified])
    assert row["accuracy"] == pytest.approx(2 / 3), "a timeout is no grade"
    assert row["format"] == pytest.approx(9 / 11) and row["reward/mean"] == pytest.approx((2 * 1.0 + 7 * 0.1) / 11)
    assert rollout_metrics([unverified], [0], [solved])["accuracy"] == pytest.approx(2 / 3)
    row = rollout_metrics([unverified], [0], [])
    assert "accuracy" not in row and row["format"] == 0.75
    assert surface.summarise(0, 0, (0.0, 0.0), [solved, unverified], limit=8).accuracy == pytest.approx(2 / 3)
    alone = surface.summarise(0, 0, (0.0, 0.0), [unverified], limit=8)
    assert alone.accuracy == 0.0 and alone.format == 0.75


def of_verdicts(*problems: tuple[Verdict, Verdict]) -> Evaluation:
    domains = ["open" if OPEN in verdicts else "math" for verdicts in problems]
    pairs = zip(problems, domains, strict=True)
    return summarise(1.0, [[sampled(verdict, domain=domain) for verdict in verdicts] for verdicts, domain in pairs])


MIXED, ONLY_OPEN = of_verdicts((RIGHT, RIGHT), (WRONG, WRONG), (OPEN, OPEN), (OPEN, NONE)), of_verdicts((OPEN, NONE))


def test_pass_at_1_and_votes_are_over_verified_problems():
    assert (MIXED.problems, MIXED.accuracy, MIXED.majority, MIXED.format, MIXED.consistency) == (
        4,
        0.5,
        0.5,
        *[0.875] * 2,
    )
    breakdown = MIXED.parts["domain/open"]
    assert (breakdown.problems, breakdown.accuracy, breakdown.majority, breakdown.consistency) == (2, None, None, 0.75)
    assert MIXED.parts["domain/math"].accuracy == 0.5
    alone = ONLY_OPEN
    assert (alone.accuracy, alone.accuracy_half_width, alone.majority, alone.format) == (None, 0.0, None, 0.5)
    assert msgspec.json.decode(msgspec.json.encode(alone), type=Evaluation) == alone


def test_the_best_version_tables_and_plots_use_what_there_is(tmp_path):
    config = evaluating(tmp_path)
    MetricsLog(config.run_dir / "metrics.jsonl").write(1, {"reward/mean": 0.5})
    write(config, (0, ONLY_OPEN), (1, ONLY_OPEN))
    assert best_version(config) is None and best_version(evaluating(tmp_path, best="reward")) == 0
    records = write(config, (0, ONLY_OPEN), (1, MIXED))
    lines = [line.split() for line in plain(before_after_table(records, 1.0)).splitlines()]
    assert ["accuracy", "0.500"] in lines and ["accuracy,", "domain", "open"] in lines
    assert write_plot(config.run_dir).stat().st_size > 10_000
    (_, first), (_, second) = evaluated_parts(config.run_dir, 1.0)
    assert first == {} and second["domain/open"].accuracy is None
    page = page_table({"before": ONLY_OPEN, "after": ONLY_OPEN})
    assert "| **pass@1** (95 % interval over problems) |  |  |" in page
    assert not clearly_above(MIXED, ONLY_OPEN)
