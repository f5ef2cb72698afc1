"""Where a run's time goes: each part that is planted as the slowest is named, with what to try."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from shared.progress import Progress
from trainer import bottleneck, report
from trainer.bottleneck import PHASES, part_shares


def step(number: int, **values: float) -> dict[str, Any]:
    """A step of 4 s: 1.5 for the batch, 1.5 trained, 0.4 for the update, 0.2 for the checkpoint, 0.4 left."""
    known = {"time/step_s": 4.0, "time/wait_batch_s": 1.5, "time/train_s": 1.4, "time/wait_sync_s": 0.4,
             "time/checkpoint_s": 0.2, "groups/trained": 16.0, "groups/filtered": 2.0}  # fmt: skip
    given = {name.replace("__", "/"): value for name, value in values.items()}
    return {"kind": "train", "step": number, "time": 1000.0 + 4 * number, **known, **given}


def steps(count: int = 5, /, **values: float) -> list[dict[str, Any]]:
    return [step(number, **values) for number in range(1, count + 1)]


def config(folder: Path, **rollout: Any) -> Config:
    return Config.model_validate({"name": "run", "runs_dir": str(folder), "rollout": rollout})


def test_the_shares_are_sums_over_steps_and_sum_to_one() -> None:
    long = step(6, time__step_s=16.0, time__wait_batch_s=14.5)
    shares = part_shares([step(1), long])  # batch (1.5 + 14.5) / 20, training 2.8 / 20, update 0.8 / 20
    assert shares["time/wait_batch_s"] == pytest.approx(0.8) and shares["time/train_s"] == pytest.approx(0.14)
    assert shares["time/wait_sync_s"] == pytest.approx(0.04) and shares["time/checkpoint_s"] == pytest.approx(0.02)
    assert sum(shares.values()) == pytest.approx(1.0) and shares["rest"] < 1e-9


@pytest.mark.parametrize(
    ("planted", "level", "named", "tried"),
    [
        ({"time__wait_batch_s": 1.9}, 2, "a full batch", "placement.engines"),
        ({"time__wait_batch_s": 1.9}, 0, "a full batch", "max_async_level = 1"),
        ({"environment__idle_seats": 0.6}, 2, "a full batch", "environments"),
        ({"groups__filtered": 48.0}, 2, "a full batch", "75% of the groups teach nothing"),
        ({"truncated": 0.5}, 2, "a full batch", "50% of the completions are cut"),
        ({"time__train_s": 1.9}, 2, "training", "placement.trainers"),
        ({"time__step_s": 8.0, "time__wait_sync_s": 4.0}, 0, "weight updates", "max_async_level = 1"),
        (
            {"time__step_s": 8.0, "time__wait_sync_s": 4.0, "sync__write_s": 3.0, "sync__update_s": 1.0},
            2, "weight updates", "trainers' write",
        ),
        ({"time__step_s": 8.0, "time__checkpoint_s": 4.0}, 2, "checkpoints", "checkpoint.every"),
        ({"time__step_s": 9.0}, 2, "the rest", "controller's machine"),
    ],
)  # fmt: skip
def test_the_slowest_part_is_named_with_what_to_try(
    planted: dict[str, float], level: int, named: str, tried: str, tmp_path: Path
) -> None:
    slowest, faster = bottleneck.lines(steps(**planted), config(tmp_path, max_async_level=level))
    assert slowest.startswith("slowest part of a step: ") and named in slowest.partition("(")[0]
    assert tried in faster


def test_only_the_last_steps_count(tmp_path: Path) -> None:
    early = [step(number, time__step_s=90.0, time__checkpoint_s=80.0) for number in range(1, 31)]
    late = [step(number, time__train_s=2.0) for number in range(31, 51)]
    slowest, _ = bottleneck.lines([*early, *late], config(tmp_path))
    assert slowest == "slowest part of a step: training (forward, backward, optimiser), 50% of 4 s"


def write_phases(folder: Path, *began: tuple[float, str]) -> None:
    (folder / "run").mkdir()
    lines = [json.dumps({"time": at, "phase": name}) for at, name in began]
    (folder / "run" / PHASES).write_text("\n".join([*lines, '{"time": 3, "pha']))


def test_a_start_that_took_longer_than_the_steps_is_told(tmp_path: Path) -> None:
    write_phases(
        tmp_path, (100, "reading the problems"), (110, "training"), (900, "reading the problems"),
        (905, "loading the model"), (990, "connecting the engines"), (1000, "training"), (1021, "exporting the model"),
    )  # fmt: skip
    told = bottleneck.lines(steps(), config(tmp_path))
    assert told[2] == (
        "the start of the last launch took 100 s, all its steps 20 s; "
        'longest: "loading the model", 85 s: train more steps a launch'
    )
    assert len(bottleneck.lines(steps(30), config(tmp_path))) == 2, "30 steps took 120 s"


def test_a_run_without_a_step_tells_its_last_phase(tmp_path: Path) -> None:
    assert bottleneck.lines([], config(tmp_path)) == []
    write_phases(tmp_path, (100, "reading the problems"), (110, "loading the model"))
    assert bottleneck.lines([], config(tmp_path)) == [
        'no training step yet; the last phase of the launch: "loading the model"'
    ]


def test_the_report_shows_it(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.run_dir.mkdir()
    (settings.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps()))
    stream = io.StringIO()
    report.show(settings, Progress(stream))
    assert "slowest part of a step: waiting for a full batch" in stream.getvalue()
    assert "to make it faster: more engines" in stream.getvalue()
