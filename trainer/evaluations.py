"""The file evaluations.jsonl of a run folder: its records, and which version was best."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.atomic_write import beside
from shared.config import Config
from trainer.evaluate import Evaluation

FILE = "evaluations.jsonl"
GREEDY = 0.0
"""temperature of greedy decoding"""


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
    found: dict[tuple[int, float], EvaluationRecord] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = msgspec.json.decode(line, type=EvaluationRecord)
        except ValueError:  # not JSON, or not UTF-8
            continue  # told when a launch goes on: trainer.run_log.check_folder
        found[record.version, record.evaluation.temperature] = record
    return [found[key] for key in sorted(found)]


def forget_evaluations(run_dir: Path, version: int) -> None:
    """Drop the records of versions later than `version`, which will be made again."""
    path = run_dir / FILE
    if path.exists():
        kept = [record for record in read_evaluations(run_dir) if record.version <= version]
        with beside(path) as partial:
            partial.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in kept))


def at_temperature(records: list[EvaluationRecord], temperature: float) -> list[EvaluationRecord]:
    """The records of one sampling temperature (0 is greedy), by version."""
    return [record for record in records if record.evaluation.temperature == temperature]


def evaluation_due(config: Config, version: int) -> bool:
    """Whether validation problems are to be evaluated at this version: before and after training, and on the way."""
    every = config.evaluate.every
    return bool(config.data.validation) and (
        version in (0, config.last_version) or bool(every) and version % every == 0
    )


def best_version(config: Config) -> int | None:
    """The version whose evaluation at rollout.temperature is highest in evaluate.best, the first of equals; None
    without any."""
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
