"""The display: plain text without a terminal, a clean line on one, never an error for training."""

import io
import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.panel import Panel

from shared import progress_bar
from shared.progress import LEGEND, LINE, Progress, bottleneck, duration
from shared.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class Shown(Progress):
    """A display with its stream and a clock that stands."""

    def __init__(self, stream: Any = None):
        self.now = 0.0
        super().__init__(stream or io.StringIO(), lambda: self.now)

    def text(self) -> str:
        """What was shown, without control codes."""
        return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", self.stream.getvalue())

    def at(self, now: float, done: int, step: int = 1) -> None:
        self.now = now
        self.batch(done=done, needed=100, in_flight=40, tokens_per_s=1234.5, oldest_wait_s=3.0, step=step, steps=10)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


METRICS = {
    "reward/mean": 0.5123, "accuracy": 0.44, "consistency": 0.5, "length/mean": 63.2, "staleness/max": 2.0,
    "ratio/mean": 1.0, "kl/k3": 2e-4, "time/step_s": 4.0, "time/wait_batch_s": 3.0, "time/train_s": 1.0,
}  # fmt: skip


def test_a_step_is_one_line_with_its_bottleneck_and_what_is_left():
    progress = Shown()
    progress.at(0, 0)
    progress.step_line(1, METRICS)
    assert progress.text() == (
        f"    {LEGEND}\n"
        "step 1/10  reward 0.512  acc 44%  lang 50%  len 63  age 2  kl 2e-04  4.0 s  left 36 s  rollout 75%\n"
    )
    progress.step_line(2, METRICS)
    assert progress.text().count("age: versions") == 1, "explained once"
    few = Shown()
    few.now = 2.0
    few.step_line(1, {"accuracy": 1.0})
    assert few.text() == "step 1  acc 100%  2.0 s\n", "missing metrics are left out"
    assert bottleneck(METRICS) == "rollout 75%" and bottleneck({"time/step_s": 2.0}) == bottleneck({}) == ""


def test_the_bar_is_explained_before_it_is_drawn_and_no_count_passes_its_total():
    progress = Shown()
    progress.at(15, 512, step=11)
    legend, bar = progress.text().split("(the bar:")[1].rsplit("\n    ", 1)
    assert all(f"{word}: " in legend for word in ("left", "run", "oldest")) and "step 10/10" in bar and "100/100" in bar


def test_the_line_after_a_step_fits_a_hundred_columns_in_the_longest_run():
    progress = Shown()
    progress.steps, progress.step_s = 2000, 60.0
    largest = METRICS | {"accuracy": 1.0, "consistency": 1.0, "length/mean": 16384, "staleness/max": 10}
    progress.step_line(1000, largest | {"time/step_s": 360, "time/wait_batch_s": 360})
    assert max(map(len, progress.text().splitlines())) <= LINE


def test_text_in_a_panel_is_wrapped_and_not_cut_where_there_is_no_terminal():
    progress = Shown()
    progress.show(Panel("word " * 100))
    assert progress.text().count("word") == 100


def test_without_a_terminal_there_are_no_control_codes_and_few_lines():
    progress = Shown()
    progress.phase("[red]starting[/red] \x07")
    for second in range(31):
        progress.at(second, second)
    progress.warning("w")
    progress.error("e")
    progress.close()
    lines = progress.stream.getvalue().splitlines()
    assert "\x1b" not in progress.stream.getvalue() and "\r" not in progress.stream.getvalue()
    assert lines[0].startswith("==> [red]starting[/red]")  # what is said is never taken for markup
    assert len([line for line in lines if "step 1/10" in line]) == 3
    assert lines[-2:] == ["warning: w", "error: e"]


def test_on_a_terminal_the_bar_is_erased_before_the_next_line_and_never_wraps(monkeypatch):
    progress = Shown(Terminal())
    for second in (1, 2, 3):
        progress.at(second, 10 * second)
    progress.note("after")
    assert progress.stream.getvalue().count("\r\x1b[2K") == 3 and progress.text().split("\r")[-1] == "    after\n"
    assert "\x1b[?25l" not in progress.stream.getvalue()  # the cursor is never hidden
    monkeypatch.setenv("COLUMNS", "60")
    narrow = Shown(Terminal())
    narrow._explained = True
    narrow.at(1, 10)
    assert len(narrow.text()) <= 59


def test_time_left_in_the_step_and_in_the_run():
    progress = Shown()
    progress.at(12, 0)
    assert "left ?, run ?" in progress.text()  # nothing is known yet
    progress.at(25, 50)  # half a step in 25 s: 25 s left, and nine more steps of 50 s
    assert "left 25 s, run 7:55 min" in progress.text()
    progress.now = 50.0
    progress.step_line(1, {})
    progress.at(70, 50, step=2)  # 20 s left of this one by its own pace; the run by the mean of steps
    assert "left 20 s, run 7:10 min" in progress.text()


def test_the_sft_has_a_bar_and_a_closing_line_and_sampling_alone_has_a_bar():
    progress = Shown()
    # kernels are compiled in the first step: the others take a fifth of a second
    for progress.now, step, loss, speed in ((60.0, 1, 7.5, 20.0), (70.0, 50, 1.5, 2e4), (80.0, 100, 1.25, 2e4)):
        progress.sft(step, 100, loss, speed)
    first, bar, closing = progress.text().splitlines()
    assert "SFT 1/100" in first and "left ?" in first and "SFT 50/100" in bar and "left 10 s" in bar
    assert closing == "    SFT: 100 steps, loss 1.250, 20,000 tokens/s, 1:20 min"
    sampling = Shown(Terminal())
    sampling.phase("soft values")
    sampling.now = 30.0
    sampling.sampled(100, 400)  # in 30 s: 90 s are left
    assert "100/400 completions" in sampling.text() and "left 1:30 min" in sampling.text()


def test_a_terminal_that_is_closed_or_has_no_unicode_never_reaches_training():
    progress = Shown(Closed())
    progress.phase("x")
    progress.note("x")
    progress.step_line(1, METRICS)
    progress.step_line(2, {"accuracy": "not a number"})
    progress.close()
    assert progress.failures >= 1
    raw = io.BytesIO()
    plain = Shown(io.TextIOWrapper(raw, encoding="ascii"))
    plain.at(11, 50)
    plain.note("± ä")
    plain.close()
    assert "##########----------" in raw.getvalue().decode("ascii") and plain.failures == 0


@pytest.mark.parametrize(("seconds", "text"), [
    (0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (75, "1:15 min"), (3599.9, "59:59 min"), (4000, "1:06 h"),
    (-1, "?"), (float("nan"), "?"), (float("inf"), "?"),
])  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_phases_are_kept_with_their_times_also_those_from_before_and_shown_where_they_cannot_be(tmp_path):
    path, before = tmp_path / "phases.jsonl", time.time()
    progress, again = Shown(), Shown()  # the second of the next launch of the same run
    progress.phase("making the model")
    progress.keep_phases(path)
    progress.phase("loading «it»")
    again.keep_phases(path)
    again.phase("making the model")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["phase"] for line in lines] == ["making the model", "loading «it»", "making the model"]
    times = [line["time"] for line in lines]
    assert times == sorted(times) and before - 0.001 <= times[0] and times[-1] <= time.time() + 0.001
    lost = Shown()
    lost.keep_phases(tmp_path / "no such folder" / "phases.jsonl")
    lost.phase("loading")
    assert lost.text().count("warning: ") == 1 and "phases.jsonl cannot be written" in lost.text()
    assert "==> loading" in lost.text() and lost.failures == 1


def test_the_forecast_of_a_command_is_that_of_this_launch(monkeypatch, capsys):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: clock.now))
    bar = ProgressBar("asking", "asked", 50, 100)

    def at(seconds: float, done: int) -> str:
        clock.now = 100.0 + seconds
        bar.show(done)
        return capsys.readouterr().err

    assert at(5, 50) == "", "a line every ten seconds"
    assert at(12, 50) == "asked 50 of 100, 0/s, left ?\n", "nothing is known before the first one"
    assert at(30, 60) == "asked 60 of 100, 0.33/s, left 2:00 min\n", "what was kept is not counted: 10 in 30 s"
    bar.note = "7 tokens"
    assert at(60, 60) == "asked 60 of 100, 0.17/s, left 4:00 min, 7 tokens\n", "an endpoint that stands still"
    bar.row_s = 20.0
    assert at(100, 99) == "asked 99 of 100, 0.49/s, left 20 s, 7 tokens\n", "the last one takes as long as one"
    assert at(120, 100) == "asked 100 of 100, 0.42/s, left 0.0 s, 7 tokens\n"
    bar.close()
