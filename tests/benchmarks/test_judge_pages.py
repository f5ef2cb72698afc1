"""The pages of `benchmarks judge` and `benchmarks oversight`, from run folders and results as runs write them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from benchmarks import judge, oversight
from lab.ablate.runner import note_time
from shared import settings_file
from trainer.evaluation import Breakdown, Evaluation, EvaluationRecord


def evaluation(accuracy: float) -> Evaluation:
    parts = {f"set/{kind}": Breakdown(128, accuracy, 0.04, 1.0) for kind in ("debate", "article", "speech")}
    parts["domain/verdict"] = Breakdown(256, accuracy, 0.03, 1.0)
    return Evaluation(256, accuracy, 0.03, 1.0, temperature=1.0, format=1.0, reward=accuracy, tokens=9.0, parts=parts)


def make_run(run_dir: Path, *accuracies: float) -> None:
    run_dir.mkdir(parents=True)
    settings_file.write(settings_file.load(Path("examples/judge/settings.toml")), run_dir / "config.toml")
    records = [EvaluationRecord(version, 1.0, evaluation(one)) for version, one in enumerate(accuracies)]
    (run_dir / "evaluations.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, records)))
    row = {"step": 1, "kind": "train", "judge/argued/tokens": 60.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run_dir / "latest").symlink_to(run_dir)
    note_time(run_dir, 125.0, 0)


def test_the_page_says_what_was_reached(tmp_path: Path) -> None:
    for seed, (by_debate, alone) in enumerate([(0.9, 0.5), (0.52, 0.5)]):
        make_run(tmp_path / f"judge-{seed}", 0.5, 0.95 - 0.1 * seed)
        make_run(tmp_path / f"debate-{seed}", 0.5, by_debate)
        make_run(tmp_path / f"answers-{seed}", 0.5, alone)
    make_run(tmp_path / "judge-2", 0.5, 0.95)
    make_run(tmp_path / "debate-2", 0.5, 0.9)
    make_run(tmp_path / "answers-2", 0.5)
    page = judge.page(range(3), tmp_path)
    assert "| 0 | 0.500 (0.470 to 0.530) | 0.950 (0.920 to 0.980) | 0.950 (0.910 to 0.990) |" in page
    assert "2 of 3 judges are above .9." in page and "| 2:05 min |" in page
    assert "| 0.900 (0.870 to 0.930) | not measured | 1 and 0 |" in page
    assert "In 1 of 2 seeds" in page and "do NOT in every seed raise" in page and "| 60 | 120 |" in page


def test_the_page_of_an_evaluation_tells_kills_and_bias(tmp_path: Path) -> None:
    contests = [{"protocol": "qa", "position": 1.25}, {"protocol": "debate", "position": None}]
    (tmp_path / "results.json").write_text(json.dumps({"contests": contests}))
    (tmp_path / "summary.md").write_text("# Scalable oversight\n\nDefinitions: docs.\n\n## Accuracy\n\nrows\n")
    (tmp_path / "games.jsonl").write_bytes(b"{}\n" * 9)
    page = oversight.page(tmp_path, ["stories", f"--out={tmp_path}"], [2, 5], 60.0)
    assert "killed (SIGKILL) with 2 and 5 of 9 games" in page and "qa 1.25." in page and str(tmp_path) not in page
    assert page.rstrip().endswith("## Accuracy\n\nrows")
