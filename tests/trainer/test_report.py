"""The report of a run folder: plot, table, samples made safe, where the time went, and what to type next."""

import io
import json
from operator import itemgetter
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from shared import settings_file
from shared.config import Config
from shared.errors import DataError, python
from shared.metrics import MetricsLog
from shared.progress import Progress, plain
from shared.types import Problem, Reward, Verdict
from tests.tables import read_table
from trainer import bottleneck, export, report
from trainer.bottleneck import PHASES, part_shares
from trainer.evaluation import Breakdown, Evaluation, EvaluationRecord, Sampled, read_evaluations
from trainer.plot import bound_shares, figure, write_plot
from trainer.run_lock import RunLock, failure

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
def run(tmp_path):
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


def shown(config: Config) -> tuple[str, int]:
    """What the report prints, and how many failures it counts."""
    progress = Progress(stream := io.StringIO())
    report.show(config, progress)
    return stream.getvalue(), progress.failures


@pytest.mark.parametrize("values", [(0.0, 0.01), (0.98, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)])
def test_an_axis_of_shares_ends_at_0_and_at_1(tmp_path, values):
    with figure(tmp_path / "x.png", "x", 1, 2, (4, 2)) as axes:
        for axis, names in zip(axes.flat, (["accuracy", "evaluation/accuracy"], ["reward/mean"]), strict=True):
            axis.plot([1, 2], values)
            before = axis.get_ylim()
            bound_shares(axis, names)
            low, high = axis.get_ylim()
            assert (0 <= low < high <= 1) if names[0] == "accuracy" else (low, high) == before


@pytest.mark.parametrize("command", [report.main, export.main])
def test_a_folder_that_is_no_runs_is_told_with_the_nearest(run, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for given, text in (
        ("dema", "dema is no run's folder: there is no such folder; did you mean demo?"),
        ("mine", "mine is no run's folder: there is no such folder; did you mean runs/mine?"),
        ("runs/mine", "runs/mine is no run's folder: it has no config.toml"),
    ):
        assert command([given]) == 2
        assert text in " ".join(capsys.readouterr().out.split())


def test_a_run_that_failed_says_why(run, tmp_path, capsys):
    """As does one that failed before its settings were written, and one whose processes were killed."""
    assert "next: " in shown(run)[0] and "launch failed" not in shown(run)[0]
    lock = RunLock(run.run_dir)
    assert "launch failed" not in shown(run)[0], "it goes on"
    lock.close("exit code 1", "SyncMismatch: engine 0 does not hold the weights")
    text = shown(run)[0]
    assert "error: the last launch failed (exit code 1): SyncMismatch: engine 0 does not hold the weights" in text
    assert text.index("the last launch failed") < text.index("next: ") and "--steps=24" not in text
    RunLock(tmp_path / "early").close("exit code 2", "data.train: row 3 has no answer")
    capsys.readouterr()
    assert report.main([str(tmp_path / "early")]) == 2 and "row 3 has no answer" in capsys.readouterr().out
    for ended, begins in (("exit code 130", ""), ("exit code 0", ""), ("", "the launch before (controller pid")):
        RunLock(run.run_dir).close(ended, "")
        assert failure(run.run_dir)[:33] == begins


def test_the_report_says_where_everything_is_and_draws_the_plot(run):
    text, failures = shown(run)
    assert str(run.run_dir / "plot.png") in text and "greedy" in text and failures == 0
    assert f"-m trainer {run.run_dir / 'config.toml'} --steps=24" in text
    assert "slowest part of a step: waiting for a full batch" in text and "to make it faster: more engines" in text
    content = (run.run_dir / "plot.png").read_bytes()
    assert content.startswith(PNG) and len(content) > 20_000


def test_a_plot_needs_only_the_reward_and_a_report_not_even_a_step(tmp_path):
    with pytest.raises(DataError, match="no training step yet"):
        write_plot(tmp_path)
    MetricsLog(tmp_path / "metrics.jsonl").write(1, {"reward/mean": 0.5})
    assert write_plot(tmp_path).read_bytes().startswith(PNG)
    text, failures = shown(Config(name="empty", runs_dir=str(tmp_path)))
    assert "warning: no plot" in text and failures == 0


def test_the_table_shows_before_and_after_sampled_and_greedy(run):
    records = read_evaluations(run.run_dir)
    text = plain(report.before_after_table(records, 1.0))
    assert "64 validation problems, version 0 and version 12" in text and "@" not in text
    cells = {line.split("  ")[1].strip(): line.split()[-4:] for line in text.splitlines() if "0." in line}
    assert cells["accuracy"] == ["0.125", "0.875", "0.125", "0.875"]
    assert cells["accuracy, language fr"] == ["0.250"] * 4
    assert max(len(line) for line in text.splitlines()) <= 79
    last = records[-1].evaluation
    last.completions, last.pass_at_k, last.majority = 4, 0.953, 0.922
    lines = [line.split() for line in plain(report.before_after_table(records, 1.0)).splitlines()]
    rows = [line for line in lines if line and ("@" in line[0] or line[0] == "95")]
    assert rows[0][0] == "95" and rows[1:] == [["pass@4", "0.953"], ["maj@4", "0.922"]], "the first version has neither"


def test_numbers_are_whole_where_no_terminal_says_how_wide_it_is(run):
    records = read_evaluations(run.run_dir)
    for record in records:
        record.evaluation.parts = {f"kind/{'a long name of problems ' * 4}": Breakdown(32, 0.3125, 0.1, 0.5)}
    progress = Progress(stream := io.StringIO())
    progress.show(report.before_after_table(records, 1.0))
    rows = [line.split()[-4:] for line in stream.getvalue().splitlines() if "accuracy" in line]
    assert rows == [["0.125", "0.875", "0.125", "0.875"], ["0.312"] * 4] and "…" not in stream.getvalue()


def test_samples_are_of_different_languages_and_safe_for_a_terminal(run):
    panels = report.sample_panels(read_evaluations(run.run_dir), 1.0)
    text = "".join(plain(panel) for panel in panels)
    assert len(panels) == 3 and all(f"─ {code}  ground truth 7" in text for code in ("de", "fr", "zh"))
    assert "[bold]·[2J·" in text and "\x1b" not in text and "\u202e" not in text
    assert "more characters)" in text


def test_the_command_shows_all_samples_in_full(run, capsys):
    assert report.main([str(run.run_dir), "--samples"]) == 0
    text = capsys.readouterr().out
    assert text.count("ground truth 7") == 4 and text.count("x") >= 900 and "more characters" not in text


def test_the_command_shows_a_folder_or_says_what_is_wrong(run, capsys):
    assert [report.main(words) for words in ([str(run.run_dir)], [str(run.run_dir / "nowhere")], [])] == [0, 2, 2]
    assert "there is no such folder" in capsys.readouterr().out


def test_speed_and_memory_are_told():
    rows = [{"kind": "train", "step": step, "tokens/trained_per_s": 1000.0 * step, "mfu": 0.1 * step,
             "memory/trainer_peak_bytes": step << 30, "tflops_per_device": 0.05} for step in (1, 2, 3)]  # fmt: skip
    sft: dict[str, Any] = {"kind": "sft", "step": 1, "sft/mfu": 0.9}
    text = plain(report.speed_table([*rows, sft]))
    assert "2,000" in text and "20.0%" in text and "3.0 GiB" in text and "0.05" in text
    assert "GPU memory" not in text and "90.0%" not in text
    assert "90.0%" in plain(report.speed_table([sft])) and report.speed_table([]) is None


def step(number: int, **values: float) -> dict[str, Any]:
    """A step of 4 s: 1.5 for the batch, 1.4 trained, 0.4 for the update, 0.2 for the checkpoint, 0.5 left."""
    known = {"time/step_s": 4.0, "time/wait_batch_s": 1.5, "time/train_s": 1.4, "time/wait_sync_s": 0.4,
             "time/checkpoint_s": 0.2, "groups/trained": 16.0, "groups/filtered": 2.0}  # fmt: skip
    return {"kind": "train", "step": number, "time": 1000.0 + 4 * number, **known, **values}


def steps(count: int = 5, **values: float) -> list[dict[str, Any]]:
    return [step(number, **values) for number in range(1, count + 1)]


def test_the_shares_are_sums_over_steps_and_sum_to_one():
    long = step(6, **{"time/step_s": 16.0, "time/wait_batch_s": 14.5})
    shares = part_shares([step(1), long])  # batch (1.5 + 14.5) / 20, training 2.8 / 20, update 0.8 / 20
    assert shares["time/wait_batch_s"] == pytest.approx(0.8) and shares["time/train_s"] == pytest.approx(0.14)
    assert shares["time/wait_sync_s"] == pytest.approx(0.04) and shares["time/checkpoint_s"] == pytest.approx(0.02)
    assert sum(shares.values()) == pytest.approx(1.0) and shares["rest"] < 1e-9


@pytest.mark.parametrize("row", read_table("trainer/bottlenecks"), ids=itemgetter("name"))
def test_the_slowest_part_is_named_with_what_to_try(row, tmp_path):
    config = Config.model_validate({"runs_dir": str(tmp_path), "rollout": {"max_async_level": row["level"]}})
    slowest, faster = bottleneck.lines(steps(**row["planted"]), config)
    assert slowest.startswith("slowest part of a step: ") and row["slowest"] in slowest.partition("(")[0]
    assert row["try"] in faster


def test_only_the_last_steps_count(tmp_path):
    early = steps(30, **{"time/step_s": 90.0, "time/checkpoint_s": 80.0})
    late = [step(number, **{"time/train_s": 2.0}) for number in range(31, 51)]
    slowest, _ = bottleneck.lines([*early, *late], Config(runs_dir=str(tmp_path)))
    assert slowest == "slowest part of a step: training (forward, backward, optimiser), 50% of 4 s"


def test_a_start_that_took_longer_than_the_steps_is_told_and_the_last_phase_where_there_is_none(tmp_path):
    config = Config(runs_dir=str(tmp_path))
    assert bottleneck.lines([], config) == []
    began = [
        (100, "reading the problems"), (110, "training"), (900, "reading the problems"), (905, "loading the model"),
        (990, "connecting the engines"), (1000, "training"), (1021, "exporting the model"),
    ]  # fmt: skip
    config.run_dir.mkdir()
    lines = [json.dumps({"time": at, "phase": name}) for at, name in began]
    (config.run_dir / PHASES).write_text("\n".join([*lines, '{"time": 3, "pha']))
    assert bottleneck.lines(steps(), config)[2] == (
        "the start of the last launch took 100 s, all its steps 20 s; "
        'longest: "loading the model", 85 s: train more steps a launch'
    )
    assert len(bottleneck.lines(steps(30), config)) == 2, "30 steps took 120 s"
    assert bottleneck.lines([], config) == ['no training step yet; the last phase of the launch: "exporting the model"']


def test_an_adapter_is_named_with_the_command_that_serves_it(run):
    config = run.model_copy(update={"model": run.model.model_copy(update={"path": "base"})})
    assert "adapter:" not in shown(config)[0]
    for name in ("latest", "latest-adapter"):
        (run.run_dir / name).mkdir()
    folder = run.run_dir / "latest-adapter"
    text, _ = shown(config)
    assert f"latest adapter: {folder}" in text
    assert f"serve the adapter: {python()} -m serve --model base --adapter demo={folder}" in text


def test_a_run_of_which_nothing_is_left_says_so(run, monkeypatch):
    """Only where the last launch ended well, nothing was changed, and the last version is whole and exported."""
    folder = run.run_dir
    newest = Mock(manifest=Mock(version=12))
    monkeypatch.setattr(report.reader, "newest", lambda _: Mock(newest=newest))
    (folder / "hf" / "step_12").mkdir(parents=True)
    (folder / "latest").symlink_to("hf/step_12")
    (folder / "lock").write_text('{"pid": 1, "host": "a", "since": "", "ended": "exit code 0"}')
    line = report.finished(run)
    assert line.startswith(f"{folder} is finished: nothing is left after step 12 of 12. To go on: ")
    assert line.endswith(f"{folder / 'config.toml'} --steps=24")
    assert not report.finished(run.model_copy(update={"steps": 24}))
    assert not report.finished(run.model_copy(update={"seed": 5})), "the launch says what the change means"
    newest.manifest.version = 11
    assert not report.finished(run), "a damaged checkpoint"
    newest.manifest.version = 12
    (folder / "lock").write_text('{"pid": 1, "host": "a", "since": "", "ended": "exit code 1"}')
    assert not report.finished(run), "perhaps its export is due"
