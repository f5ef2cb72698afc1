"""Reads evaluations.jsonl of a run folder. Who calls this: report, plot. It is written by record."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainer.record import EvaluationRecord

GREEDY = 0.0
"""temperature of greedy decoding"""



def read_evaluations(run_dir: Path) -> list[EvaluationRecord]:
    """Records of evaluations.jsonl by version; of one version and temperature the last. Cut lines are skipped."""
    path = run_dir / "evaluations.jsonl"
    found: dict[tuple[int, float], EvaluationRecord] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = msgspec.json.decode(line, type=EvaluationRecord)
        except msgspec.MsgspecError:
            continue  # the last line of a launch that was killed
        found[record.version, record.evaluation.temperature] = record
    return [found[key] for key in sorted(found)]


def at_temperature(records: list[EvaluationRecord], temperature: float) -> list[EvaluationRecord]:
    """The records of one sampling temperature (0 is greedy), by version."""
    return [record for record in records if record.evaluation.temperature == temperature]
