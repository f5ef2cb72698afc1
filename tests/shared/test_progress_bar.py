"""The time left: from what this launch did, falling while nothing is done, never below one row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shared import progress_bar
from shared.progress_bar import ProgressBar


def test_the_forecast_is_that_of_this_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
