"""Open problems in a run: neither right nor wrong in accuracies, votes, stages, tables; absent where all are open."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks.runs import clearly_above
from benchmarks.runs import table as page_table
from lab.ablate.results import evaluated_parts
from lab.analyse import surface
from shared.config import Config
from shared.metrics import MetricsLog
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict, VersionSpan
from trainer.evaluation import Evaluation, EvaluationRecord, Sampled, best_version, summarise
from trainer.ledger import Ledger
from trainer.plot import write_plot
from trainer.report import before_after_table
from trainer.stages import Stages
from trainer.step_metrics import rollout_metrics


def group(domain: str, *verdicts: Verdict, name: str = "p") -> Group:
    completions = [
        Completion(0, index, 0, [5, 6], [-0.1, -0.2], [VersionSpan(0, 0, 2)], "stop") for index in range(len(verdicts))
    ]
    return Group(
        Prompt(0, Problem(name, "?", "1", domain=domain, hidden=domain == "open"), [1]),
        completions,
        [*map(reward, verdicts)],
    )


def reward(verdict: Verdict) -> Reward:
    formed = 0.0 if verdict is Verdict.NO_ANSWER else 0.1
    right = 0.9 * (verdict is Verdict.CORRECT)
    return Reward(formed + right, formed, right, 0.0, 0.0, verdict, consistent=bool(formed), answer="a")


SOLVED = group("math", Verdict.CORRECT, Verdict.WRONG, Verdict.CORRECT, Verdict.TIMEOUT)
OPEN = group("open", Verdict.OPEN, Verdict.OPEN, Verdict.NO_ANSWER, Verdict.OPEN)


def test_the_accuracy_of_a_step_is_over_verified_problems() -> None:
    row = rollout_metrics([SOLVED, OPEN], [0, 0], [OPEN])
    assert row["accuracy"] == pytest.approx(2 / 3), "a timeout is no grade"
    assert row["format"] == pytest.approx(9 / 11) and row["reward/mean"] == pytest.approx((2 * 1.0 + 7 * 0.1) / 11)
    assert rollout_metrics([OPEN], [0], [SOLVED])["accuracy"] == pytest.approx(2 / 3)


def test_a_step_of_open_problems_has_no_accuracy() -> None:
    row = rollout_metrics([OPEN], [0], [])
    assert "accuracy" not in row and row["format"] == 0.75


def sampled(domain: str, *verdicts: Verdict) -> list[Sampled]:
    return [
        Sampled(Problem("p", "?", "1", domain=domain, hidden=domain == "open"), "text", reward(verdict), 10)
        for verdict in verdicts
    ]


def mixed() -> Evaluation:
    return summarise(1.0, [
        sampled("math", Verdict.CORRECT, Verdict.CORRECT), sampled("math", Verdict.WRONG, Verdict.WRONG),
        sampled("open", Verdict.OPEN, Verdict.OPEN), sampled("open", Verdict.OPEN, Verdict.NO_ANSWER),
    ])  # fmt: skip


def only_open() -> Evaluation:
    return summarise(1.0, [sampled("open", Verdict.OPEN, Verdict.NO_ANSWER)] * 2)


def test_pass_at_1_and_votes_are_over_verified_problems() -> None:
    found = mixed()
    assert (found.problems, found.accuracy, found.majority, found.format) == (4, 0.5, 0.5, 0.875)
    assert found.consistency == 0.875
    part = found.parts["domain/open"]
    assert (part.problems, part.accuracy, part.majority, part.consistency) == (2, None, None, 0.75)
    assert found.parts["domain/math"].accuracy == 0.5


def test_an_evaluation_of_open_problems_has_no_accuracy_and_can_be_stored() -> None:
    found = only_open()
    assert (found.accuracy, found.accuracy_half_width, found.majority, found.format) == (None, 0.0, None, 0.5)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Evaluation) == found


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config.model_validate({"name": "open", "runs_dir": str(tmp_path), "rollout": {"temperature": 1.0}})
    MetricsLog(config.run_dir / "metrics.jsonl").write(1, {"reward/mean": 0.5})
    return config


def write(config: Config, *evaluations: Evaluation) -> list[EvaluationRecord]:
    records = [EvaluationRecord(version, 1.0, found) for version, found in enumerate(evaluations)]
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    (config.run_dir / "evaluations.jsonl").write_bytes(lines)
    return records


def test_the_best_version_is_chosen_by_what_there_is(config: Config) -> None:
    write(config, only_open(), only_open())
    assert best_version(config) is None
    by_reward = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"best": "reward"})})
    assert best_version(by_reward) == 0


def test_tables_and_plots_leave_out_what_is_not_there(config: Config) -> None:
    records = write(config, only_open(), mixed())
    stream = io.StringIO()
    Console(file=stream, width=200).print(before_after_table(records, 1.0))
    lines = {line.strip().rpartition("  ")[0].strip(): line.split() for line in stream.getvalue().splitlines()}
    assert lines["accuracy"] == ["accuracy", "0.500"] and lines["95 % interval"][-1].startswith("±")
    assert any(line.strip() == "accuracy, domain open" for line in stream.getvalue().splitlines())
    assert write_plot(config.run_dir).stat().st_size > 10_000
    (_, first), (_, second) = evaluated_parts(config.run_dir, 1.0)
    assert first == {} and second["domain/open"].accuracy is None
    page = page_table({"before": only_open(), "after": only_open()})
    assert "| **pass@1** (95 % interval over problems) |  |  |" in page
    assert not clearly_above(mixed(), only_open())


def test_an_open_problem_is_never_solved() -> None:
    config = Config.model_validate({"stages": [{"name": "a", "until_step": 5}, {"name": "b"}], "steps": 9})
    ledger = Ledger(Stages(config))
    ledger.stages.observe({}, [group("open", Verdict.OPEN, name="o"), group("math", Verdict.CORRECT, name="m")])
    assert ledger.stage.solved == {"m": 1}


def test_a_surface_counts_verified_problems() -> None:
    assert surface.summarise(0, 0, (0.0, 0.0), [SOLVED, OPEN], limit=8).accuracy == pytest.approx(2 / 3)
    alone = surface.summarise(0, 0, (0.0, 0.0), [OPEN], limit=8)
    assert alone.accuracy == 0.0 and alone.format == 0.75
