"""The report of a run folder: plot, table, samples made safe, and what to type next."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from shared import settings_file
from shared.config import Config
from shared.errors import DataError
from shared.metrics import MetricsLog
from shared.progress import Progress, plain
from shared.types import Problem, Reward, Verdict
from trainer import report
from trainer.evaluation import Breakdown, Evaluation, EvaluationRecord, Sampled, read_evaluations
from trainer.plot import write_plot

PNG = b"\x89PNG\r\n\x1a\n"


def sampled(language: str, text: str = "<think>3 + 4 = 7</think> 7") -> Sampled:
    problem = Problem(f"p-{language}", "Wie viele Äpfel?", "7", language)
    return Sampled(problem, text, Reward(1.1, 0.1, 0.9, 0.0, 0.1, Verdict.CORRECT), 12)


def evaluation(temperature: float, accuracy: float) -> Evaluation:
    return Evaluation(
        temperature=temperature, problems=64, accuracy=accuracy, accuracy_half_width=0.06, consistency=0.5, format=0.8,
        reward=0.7, tokens=33.4,
        parts={"language/de": Breakdown(32, accuracy, 0.1, 0.5), "language/fr": Breakdown(32, 0.25, 0.1, 0.5)},
        samples=[sampled("de"), sampled("de"), sampled("fr"), sampled("zh", "[bold]\x1b[2J\u202e" + "x" * 900)],
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Config:
    """A finished run of 12 steps with evaluations at versions 0 and 12."""
    config = Config(name="demo", runs_dir=str(tmp_path), steps=12)
    settings_file.write(config, config.run_dir / "config.toml")
    log = MetricsLog(config.run_dir / "metrics.jsonl")
    for step in range(1, 13):
        log.write(step, {"reward/mean": 0.05 * step, "accuracy": 0.08 * step, "consistency": 0.5, "staleness/max": 2,
                         "staleness/mean": 1.1, "sync/total_s": 0.05, "sync/stall_ms": 20.0, "time/step_s": 4.0,
                         "time/train_s": 1.0, "time/wait_batch_s": 2.5, "time/total_s": 4.0 * step})  # fmt: skip
    with (config.run_dir / "evaluations.jsonl").open("wb") as stream:
        for version, accuracy in ((12, 0.875), (0, 0.125)):
            for temperature in (1.0, 0.0):
                record = EvaluationRecord(version, 4.0, evaluation(temperature, accuracy))
                stream.write(msgspec.json.encode(record) + b"\n")
        stream.write(b'{"version": 99, "sec')  # a launch was killed here
    return config


def test_the_plot_is_drawn(run: Config) -> None:
    path = write_plot(run.run_dir)
    content = path.read_bytes()
    assert path == run.run_dir / "plot.png" and content.startswith(PNG) and len(content) > 20_000


def test_the_plot_needs_only_the_reward(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").write(1, {"reward/mean": 0.5})
    assert write_plot(tmp_path).read_bytes().startswith(PNG)


def test_a_run_without_a_step_has_no_plot(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training step yet"):
        write_plot(tmp_path)


def test_the_table_shows_before_and_after_sampled_and_greedy(run: Config) -> None:
    text = plain(report.before_after_table(read_evaluations(run.run_dir), 1.0))
    assert "64 validation problems, version 0 and version 12" in text
    cells = {line.split("  ")[1].strip(): line.split()[-4:] for line in text.splitlines() if "0." in line}
    assert cells["accuracy"] == ["0.125", "0.875", "0.125", "0.875"]
    assert cells["accuracy, language fr"] == ["0.250"] * 4
    assert max(len(line) for line in text.splitlines()) <= 79


def test_the_table_has_pass_at_k_and_maj_at_k_where_there_were_several_completions(run: Config) -> None:
    records = read_evaluations(run.run_dir)
    assert "@" not in plain(report.before_after_table(records, 1.0))
    last = records[-1].evaluation
    last.completions, last.pass_at_k, last.majority = 4, 0.953, 0.922
    lines = plain(report.before_after_table(records, 1.0)).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if "@" in line}
    assert rows == {"pass@4": ["0.953"], "maj@4": ["0.922"]}, "the version before has neither"
    assert [line.split()[0] for line in lines if "@" in line or "95" in line] == ["95", "pass@4", "maj@4"]


def test_samples_are_of_different_languages_and_safe_for_a_terminal(run: Config) -> None:
    panels = report.sample_panels(read_evaluations(run.run_dir), 1.0)
    text = "".join(plain(panel) for panel in panels)
    assert len(panels) == 3 and all(f"─ {code}  ground truth 7" in text for code in ("de", "fr", "zh"))
    assert "[bold]·[2J·" in text and "\x1b" not in text and "\u202e" not in text
    assert "more characters)" in text


def test_the_report_says_where_everything_is(run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    report.show(run, Progress(stream))
    text = stream.getvalue()
    assert str(run.run_dir / "plot.png") in text and "greedy" in text
    assert f"-m trainer {run.run_dir / 'config.toml'} --steps=24" in text


def test_a_report_without_anything_is_no_error(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    report.show(Config(name="empty", runs_dir=str(tmp_path)), progress)
    assert "warning: no plot" in stream.getvalue() and progress.failures == 0


def test_the_command_shows_a_folder_or_says_what_is_wrong(run: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(run.run_dir)]) == 0
    assert report.main([str(run.run_dir / "nowhere")]) == 2
    assert report.main([]) == 2
    assert "there is no such settings file" in capsys.readouterr().out


def shown(table: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    return stream.getvalue()


def test_speed_and_memory_are_told() -> None:
    rows = [{"kind": "train", "step": step, "tokens/trained_per_s": 1000.0 * step, "mfu": 0.1 * step,
             "memory/trainer_peak_bytes": step << 30, "tflops_per_device": 0.05} for step in (1, 2, 3)]  # fmt: skip
    text = shown(report.speed_table([*rows, {"kind": "sft", "step": 1, "sft/mfu": 0.9}]))
    assert "2,000" in text and "20.0%" in text and "3.0 GiB" in text and "0.05" in text
    assert "GPU memory" not in text and "90.0%" not in text


def test_speed_of_a_run_of_sft_alone() -> None:
    assert "90.0%" in shown(report.speed_table([{"kind": "sft", "step": 1, "sft/mfu": 0.9}]))
    assert report.speed_table([]) is None
