"""The display: plain text without a terminal, a clean line on one, never an error for training."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest

from shared.progress import Progress, bottleneck, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


def batch(progress: Progress, done: int, step: int = 1) -> None:
    progress.batch(
        done=done, needed=100, in_flight=40, tokens_per_s=1234.5, oldest_wait_s=3.0, step=step, steps=10
    )  # fmt: skip


METRICS = {
    "reward/mean": 0.5123, "accuracy": 0.44, "consistency": 0.5, "length/mean": 63.2, "staleness/max": 2.0,
    "ratio/mean": 1.0, "kl/k3": 2e-4, "time/step_s": 4.0, "time/wait_batch_s": 3.0, "time/train_s": 1.0,
}  # fmt: skip


def test_a_step_is_one_line_with_its_bottleneck_and_what_is_left() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    batch(progress, 0)
    progress.step_line(1, METRICS)
    assert stream.getvalue() == (
        "step 1/10  reward 0.512  acc 44%  lang 50%  len 63  age 2  ratio 1.000  kl 2.0e-04  "
        "4.0 s (rollout 75%)  left 36 s\n"
    )


def test_missing_metrics_are_left_out() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    clock.now = 2.0
    progress.step_line(1, {"accuracy": 1.0})
    assert stream.getvalue() == "step 1  acc 100%  2.0 s\n"


def test_without_a_terminal_there_are_no_control_codes_and_few_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    progress.phase("[red]starting[/red] \x07")
    for second in range(31):
        clock.now = float(second)
        batch(progress, second)
    progress.warning("w")
    progress.error("e")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert lines[0].startswith("==> [red]starting[/red]")  # what is said is never taken for markup
    assert len([line for line in lines if "step 1/10" in line]) == 3
    assert lines[-2:] == ["warning: w", "error: e"]


def test_on_a_terminal_the_bar_is_erased_before_the_next_line() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    for done in (10, 20, 30):
        clock.now += 1
        batch(progress, done)
    progress.note("after")
    text = stream.getvalue()
    assert text.count("\r\x1b[2K") == 3
    assert re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).split("\r")[-1] == "    after\n"
    assert "\x1b[?25l" not in text  # the cursor is never hidden


def test_the_bar_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    clock.now = 1.0
    batch(progress, 10)
    assert len(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", stream.getvalue())) <= 59


def test_time_left_in_the_step_and_in_the_run() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    clock.now = 12.0
    batch(progress, 0)
    assert "left ?, run ?" in stream.getvalue()  # nothing is known yet
    clock.now = 25.0
    batch(progress, 50)  # half a step in 25 s: 25 s left, and nine more steps of 50 s
    assert "left 25 s, run 7:55 min" in stream.getvalue()
    clock.now = 50.0
    progress.step_line(1, {})
    clock.now = 70.0
    batch(progress, 50, step=2)  # 20 s left of this one by its own pace; the run by the mean of steps
    assert "left 20 s, run 7:10 min" in stream.getvalue()


def test_the_sft_has_a_bar_and_a_closing_line() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    clock.now = 60.0  # kernels are compiled in the first step: the others take a fifth of a second
    progress.sft(1, 100, 7.5, 20.0)
    clock.now = 70.0
    progress.sft(50, 100, 1.5, 20000.0)
    clock.now = 80.0
    progress.sft(100, 100, 1.25, 20000.0)
    first, bar, closing = stream.getvalue().splitlines()
    assert "SFT 1/100" in first and "left ?" in first
    assert "SFT 50/100" in bar and "left 10 s" in bar
    assert closing == "    SFT: 100 steps, loss 1.250, 20,000 tokens/s, 1:20 min"


def test_sampling_alone_has_a_bar_with_the_time_left() -> None:
    """100 of 400 completions in 30 s: 90 s are left."""
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    progress.phase("soft values")
    clock.now = 30.0
    progress.sampled(100, 400)
    assert "100/400 completions" in stream.getvalue() and "left 1:30 min" in stream.getvalue()


def test_a_closed_terminal_never_reaches_training() -> None:
    progress = Progress(Closed(), Clock())
    progress.phase("x")
    progress.note("x")
    progress.step_line(1, METRICS)
    progress.step_line(2, {"accuracy": "not a number"})  # type: ignore[dict-item]
    progress.close()
    assert progress.failures >= 1


def test_a_terminal_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    clock = Clock()
    progress = Progress(io.TextIOWrapper(raw, encoding="ascii"), clock)
    clock.now = 11.0
    batch(progress, 50)
    progress.note("± ä")
    progress.close()
    assert "##########----------" in raw.getvalue().decode("ascii") and progress.failures == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (75, "1:15 min"), (3599.9, "59:59 min"), (4000, "1:06 h"),
     (-1, "?"), (float("nan"), "?"), (float("inf"), "?")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_bottleneck_is_the_largest_part() -> None:
    assert bottleneck(METRICS) == "rollout 75%"
    assert bottleneck({"time/step_s": 2.0}) == bottleneck({}) == ""


def test_phases_are_kept_with_their_times_also_those_from_before(tmp_path: Path) -> None:
    path, before = tmp_path / "phases.jsonl", time.time()
    progress = Progress(io.StringIO())
    progress.phase("making the model")
    progress.keep_phases(path)
    progress.phase("loading «it»")
    again = Progress(io.StringIO())  # the next launch of the same run
    again.keep_phases(path)
    again.phase("making the model")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["phase"] for line in lines] == ["making the model", "loading «it»", "making the model"]
    times = [line["time"] for line in lines]
    assert times == sorted(times) and before - 0.001 <= times[0] and times[-1] <= time.time() + 0.001


def test_phases_that_cannot_be_written_are_shown_all_the_same(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.keep_phases(tmp_path / "no such folder" / "phases.jsonl")
    progress.phase("loading")
    assert stream.getvalue().count("warning: ") == 1 and "phases.jsonl cannot be written" in stream.getvalue()
    assert "==> loading" in stream.getvalue() and progress.failures == 1
