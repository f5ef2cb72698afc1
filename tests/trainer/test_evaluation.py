"""Evaluation: means over problems, pass@k, votes, parts by language, domain and set; and which version was best."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path

import msgspec
import pytest

from shared.config import Config
from shared.progress import Progress
from shared.types import Completion, Problem, Prompt, Reward, Turn, Verdict
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
from trainer.run_log import RunLogger
from trainer.stages import Stages
from trainer.timing import PhaseTimer

VALIDATION = {"validation": "validation.jsonl"}


def sampled(
    right: bool, answer: str | None = "1", language: str = "en", domain: str = "math", source: str = "a"
) -> Sampled:
    verdict = Verdict.CORRECT if right else Verdict.NO_ANSWER if answer is None else Verdict.WRONG
    reward = Reward(1.0 if right else 0.1, 0.1, 0.9 * right, 0.0, 0.0, verdict, consistent=right, answer=answer)
    return Sampled(Problem("p", "?", "1", language, domain, source), "text", reward, 10)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["1", "1", "x"], 1.0),
        (["1", "x", "y"], 1 / 3),  # three answers with one vote each
        (["1", "x", "x "], 0.0),  # blanks do not make another answer
        (["1", "x", None, None], 0.5),  # no answer is no vote
        ([None, None], 0.0),
        (["1", "1", "x", "x", "y"], 0.5),
    ],
)
def test_majority_of_one_problem(answers: list[str | None], expected: float):
    assert majority([sampled(answer == "1", answer) for answer in answers]) == pytest.approx(expected)


def test_right_answers_vote_together_whatever_their_form():
    votes = [sampled(True, "1/2"), sampled(True, "0.5"), sampled(False, "2"), sampled(False, "3")]
    assert majority(votes) == 1.0


def test_the_interval_is_over_problems_not_completions():
    # every completion of a problem alike: as wide as with one completion each
    problems = [[sampled(bool(i % 2))] * 4 for i in range(10)]
    assert summarise(1.0, problems).accuracy_half_width == pytest.approx(1.96 * math.sqrt(2.5 / 9 / 10))


def test_parts_are_given_where_there_are_several_kinds():
    problems = [
        [sampled(True, language="fr"), sampled(False, "2", language="fr")],
        [sampled(True, language="de"), sampled(True, language="de")],
        [sampled(False, "2", language="de", domain="code"), sampled(True, language="de", domain="code")],
    ]
    found = summarise(1.0, problems)
    assert found.accuracy == pytest.approx(4 / 6) and found.completions == 2 and found.problems == 3
    assert found.parts.keys() == {"language/de", "language/fr", "domain/code", "domain/math"}, "one set: no part of it"
    assert found.parts["language/de"].accuracy == 0.75 and found.parts["language/de"].problems == 2
    assert found.parts["domain/code"].majority is None, "programs do not vote"
    assert found.majority == pytest.approx((0.5 + 1.0) / 2)
    assert found.parts["language/fr"].consistency == 0.5


def test_pass_at_k_is_the_share_of_problems_with_a_right_completion():
    problems = [
        [sampled(True), sampled(False, "2"), sampled(False, None)],
        [sampled(False, "2"), sampled(False, "3"), sampled(False, None)],
        [sampled(True), sampled(True), sampled(True)],
        [sampled(False, "2", domain="code"), sampled(False, "2", domain="code"), sampled(True, domain="code")],
    ]
    found = summarise(1.0, problems)
    assert found.completions == 3 and found.pass_at_k == 3 / 4
    assert found.accuracy == pytest.approx((1 / 3 + 0 + 1 + 1 / 3) / 4)
    assert found.parts["domain/code"].pass_at_k == 1.0, "programs need not vote"
    assert found.parts["domain/math"].pass_at_k == pytest.approx(2 / 3)
    assert found.answers == (2 + 2 + 1) / 3, "of those with answers"
    assert found.self_bleu == pytest.approx(1.0), "all texts are alike"


def test_one_completion_a_problem_has_no_majority_and_no_pass_at_k():
    found = summarise(0.0, [[sampled(True)], [sampled(False)]])
    assert found.majority is None and found.pass_at_k is None
    assert found.distinct is None and found.self_bleu is None and found.answers is None


def test_an_evaluation_from_before_pass_at_k_can_be_read():
    found = summarise(1.0, [[sampled(True), sampled(False)], [sampled(True, language="fr"), sampled(False)]])
    record = msgspec.to_builtins(EvaluationRecord(3, 1.0, found))
    for part in (record["evaluation"], *record["evaluation"]["parts"].values()):
        assert part.pop("pass_at_k") == 1.0
    old = msgspec.json.decode(msgspec.json.encode(record), type=EvaluationRecord).evaluation
    assert old.pass_at_k is None and old.parts["language/fr"].pass_at_k is None and old.accuracy == found.accuracy


def test_an_evaluation_is_written_down_and_told(tmp_path: Path):
    config = Config.model_validate({"runs_dir": str(tmp_path), "evaluate": {"samples": 2}})
    stream = io.StringIO()
    problems = [[sampled(False, "2"), sampled(True)], [sampled(False, "2"), sampled(False, "2")]]
    logger = RunLogger(PhaseTimer(), Progress(stream), None, None, Ledger(Stages(config)), list)  # type: ignore[arg-type]
    logger.evaluation(0, summarise(1.0, problems))
    logger.evaluation(0, summarise(0.0, [samples[:1] for samples in problems]))
    assert was_evaluated(config, 0, 1.0) and was_evaluated(config, 0, 0.0) and not was_evaluated(config, 1, 0.0)
    rows = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    sampling, greedy = ({k: v for k, v in json.loads(row).items() if k.startswith("evaluation/")} for row in rows)
    assert sampling["evaluation/pass_at_k"] == 0.5 and sampling["evaluation/majority"] == 0.25
    assert sampling["evaluation/accuracy"] == 0.25
    assert not [name for name in greedy if "pass" in name or "majority" in name]
    told = " ".join(stream.getvalue().split())
    assert "accuracy 0.250 ± 0.490, pass@2 0.500, maj@2 0.250, language" in told and told.count("pass@") == 1


def test_numbers_of_environments_are_means_over_problems_with_an_interval(tmp_path: Path):
    plain = sampled(True)
    infos = [[{"progress": 1.0}, {"progress": 0.0}], [{"progress": 0.0}, {"other": 2.0}], [{}, {}]]
    problems = [[msgspec.structs.replace(plain, info=info) for info in two] for two in infos]
    found = summarise(1.0, problems)
    # means of the problems that have it: .5 and 0; s^2 = .125
    assert found.info["progress"].mean == 0.25 and found.info["other"].mean == 2.0
    assert found.info["progress"].half_width == pytest.approx(1.96 * math.sqrt(0.125 / 2))
    config, stream = Config.model_validate({"runs_dir": str(tmp_path)}), io.StringIO()
    logger = RunLogger(PhaseTimer(), Progress(stream), None, None, Ledger(Stages(config)), list)  # type: ignore[arg-type]
    logger.evaluation(3, found)
    row = json.loads((config.run_dir / "metrics.jsonl").read_text())
    assert (row["evaluation/info/progress"], row["kind"]) == (0.25, "evaluation")
    assert "progress 0.250 ± 0.490" in " ".join(stream.getvalue().split())
    assert read_evaluations(config.run_dir)[0].evaluation.info == found.info


def measured(temperature: float, accuracy: float, pass_at_k: float | None = None) -> Evaluation:
    return Evaluation(
        4, accuracy, 0.1, 0.5, pass_at_k=pass_at_k, temperature=temperature, format=0.9, reward=accuracy, tokens=12.0
    )


def write(config: Config, *entries: tuple[int, Evaluation]) -> None:
    """entries: (version, its evaluation)."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    with (config.run_dir / "evaluations.jsonl").open("ab") as stream:
        for version, score in entries:
            stream.write(msgspec.json.encode(EvaluationRecord(version, 1.0, score)) + b"\n")


def test_the_best_version_can_be_that_of_pass_at_k(tmp_path: Path):
    evaluate = {"every": 5, "samples": 2, "best": "pass_at_k"}
    table = {"runs_dir": str(tmp_path), "steps": 20, "data": VALIDATION, "evaluate": evaluate}
    config = Config.model_validate(table)
    write(config, (0, measured(1.0, 0.9)), (5, measured(1.0, 0.3, 0.6)), (10, measured(1.0, 0.4, 0.5)))
    assert best_version(config) == 5, "and not one without the figure"


def test_the_best_version_is_the_first_of_the_highest_at_the_sampling_temperature(tmp_path: Path):
    table = {"runs_dir": str(tmp_path), "steps": 20, "data": VALIDATION, "evaluate": {"every": 5}}
    config = Config.model_validate(table)
    assert best_version(config) is None
    scores = [(0, 1.0, 0.2), (0, 0.0, 0.9), (5, 1.0, 0.6), (10, 1.0, 0.6), (15, 1.0, 0.4)]
    write(config, *((version, measured(temperature, accuracy)) for version, temperature, accuracy in scores))
    assert best_version(config) == 5
    assert wanted_versions(config) == {5, 20}, "the best, and what is not evaluated yet"
    forget_evaluations(config.run_dir, 4)
    assert best_version(config) == 0 and len(read_evaluations(config.run_dir)) == 2
    assert wanted_versions(config) == {0, 5, 10, 15, 20}


def test_what_is_due_depends_on_the_mode():
    rl = Config.model_validate({"steps": 10, "data": VALIDATION, "evaluate": {"every": 4}})
    assert [version for version in range(11) if evaluation_due(rl, version)] == [0, 4, 8, 10]
    imitating = {"mode": "sft", "sft": {"steps": 6, "demonstrations": "d.jsonl"}, "evaluate": {"every": 0}}
    sft = Config.model_validate({**imitating, "data": VALIDATION})
    assert [version for version in range(11) if evaluation_due(sft, version)] == [0, 6]
    none = Config.model_validate({"data": {"train": "t.jsonl", "validation": ""}})
    assert not any(evaluation_due(none, version) for version in range(99)) and wanted_versions(none) == set()


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
        return sampled(True).reward, "text"


class Plain:
    seed = 0

    def render(self, problem: Problem, position: int) -> Prompt:
        return Prompt(position, problem, [1])


def test_a_number_of_an_episode_is_its_mean_over_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.evaluation.turns_of", lambda *_: [])
    problems = [Problem("p", "?", "", environment="mine")]
    evaluator = Evaluator(FullEngines(), EasyJudges(), Plain(), problems, ThreeTurns())  # type: ignore[arg-type]
    monkeypatch.setattr(Plain, "prompt_format", None, raising=False)
    [[found]] = asyncio.run(evaluator.sample(1.0, 1))
    assert found.info == {"hits": 2.5}


def test_an_evaluation_has_an_eighth_of_the_slots_where_training_leaves_none():
    async def evaluate() -> tuple[int, Evaluation]:
        engines = FullEngines()
        problems = [Problem(str(number), "?", "1") for number in range(9)]
        evaluator = Evaluator(engines, EasyJudges(), Plain(), problems)  # type: ignore[arg-type]
        ended = list[tuple[int, int]]()
        task = asyncio.create_task(evaluator.run(1.0, 2, ended=lambda *numbers: ended.append(numbers)))
        for _ in range(100):  # until nothing can go on
            await asyncio.sleep(0)
        first = engines.under_way
        engines.go.set()
        found = await asyncio.wait_for(task, 600)
        assert engines.most == 4
        trained = {completion_seed(Plain.seed, index, sample) for index in range(99) for sample in range(2)}
        assert len(set(engines.seeds)) == 18 and trained.isdisjoint(engines.seeds), "training has other seeds"
        assert ended == [(number + 1, 18) for number in range(18)]
        return first, found

    first, found = asyncio.run(evaluate())
    assert first == 4 and found.problems == 9 and found.accuracy == 1.0
