"""Stages on files: order, resume, refusals, results; and the command as a process, stopped with Ctrl-C."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from curate.__main__ import COMMANDS, main
from curate.runner import OutputFiles, run
from curate.stage import CurationStage, Decision, Kept, Rejected, Show
from shared.errors import ConfigError, DataError
from shared.jsonl import Row


class Numbers(CurationStage):
    """Keeps even numbers twice, rejects odd ones; a row that says so stops everything."""

    name = "numbers"
    concurrency = 4

    def __init__(self, stops: bool = False, **settings: Any):
        super().__init__()
        self.stops, self.given = stops, settings
        self.asked: list[int] = []
        self.closed = 0

    @property
    def settings(self) -> dict[str, Any]:
        return self.given

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        await show(1, 2)

    async def decide(self, index: int, row: Row) -> Decision:
        await asyncio.sleep(0.001 * (7 - index % 8))  # they end in another order than they began
        if self.stops and row.fields["n"] == 20:
            raise KeyboardInterrupt
        self.asked.append(index)
        if row.fields["n"] % 2:
            return Rejected("odd" if row.fields["n"] % 3 else "odd, by three", f"n = {row.fields['n']}")
        return Kept([row.fields, {**row.fields, "again": "ü"}], {"doubled": 1, "written": 2})

    async def close(self) -> None:
        self.closed += 1


ROWS = 20_000
"""of the command that is stopped: it must not be done before that"""


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def numbers(tmp_path):
    rows = [{"n": number} for number in range(40)]
    return [write(tmp_path / "a.jsonl", rows[:25]), write(tmp_path / "b.jsonl.gz", rows[25:])]


def test_results_keep_the_order_and_count(numbers, tmp_path):
    stage, out = Numbers(limit=3), tmp_path / "out.jsonl"
    outcome = run(stage, numbers, out, quiet=True)
    assert outcome.decided == 40 and stage.closed == 1 and sorted(stage.asked) == list(range(40))
    assert [row["n"] for row in read(out)] == [number for number in range(0, 40, 2) for _ in range(2)]
    rejected = read(tmp_path / "out.rejected.jsonl")
    assert [row["n"] for row in rejected] == list(range(1, 40, 2))
    assert rejected[1]["rejected"] == {"stage": "numbers", "reason": "odd, by three", "detail": "n = 3"}
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report == outcome.report
    assert report["rejected"] == {"odd": 13, "odd, by three": 7} and report["counts"] == {"written": 40, "doubled": 20}
    assert (report["rows_in"], report["rows_kept"], report["rows_out"], report["rows_rejected"]) == (40, 20, 40, 20)
    assert report["settings"] == {"limit": 3} and [one["file"] for one in report["inputs"]] == ["a.jsonl", "b.jsonl.gz"]
    assert not (tmp_path / "out.journal").exists() and not list(tmp_path.glob("*.partial"))
    assert str(tmp_path) not in (tmp_path / "out.report.json").read_text()


def test_stopped_stage_goes_on_and_ends_the_same(numbers, tmp_path):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(Numbers(), numbers, whole, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        run(Numbers(stops=True), numbers, out, quiet=True)
    journal = tmp_path / "out.journal"
    assert journal.exists() and not out.exists()
    before = {json.loads(line)["row"] for line in journal.read_bytes().splitlines()[1:]}
    stage = Numbers()
    outcome = run(stage, numbers, out, quiet=True)
    assert 0 < len(before) < 40 and set(stage.asked) == set(range(40)) - before
    assert outcome.decided == 40 - len(before)
    for suffix in (".jsonl", ".rejected.jsonl", ".report.json"):
        assert out.with_suffix(suffix).read_bytes() == whole.with_suffix(suffix).read_bytes()


def test_journals_of_earlier_versions_are_read(numbers, tmp_path):
    out, files = tmp_path / "out.jsonl", OutputFiles(tmp_path / "out.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(Numbers(stops=True), numbers, out, quiet=True)
    job = files.journal.read_bytes().splitlines()[0]
    kept = {"row": 0, "rows": [{"n": 0, "large": 2**90}], "counts": {"written": 1}}
    lines = [json.loads(job), kept, {"row": 1, "reason": "odd", "detail": "n = 1", "counts": {}}]
    files.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stage = Numbers()
    run(stage, numbers, out, quiet=True)
    assert set(stage.asked) == set(range(2, 40)) and read(out)[0] == {"n": 0, "large": 2**90}
    assert read(files.rejected)[0]["rejected"]["detail"] == "n = 1"


def test_finished_stage_does_nothing(numbers, tmp_path):
    out = tmp_path / "out.jsonl"
    run(Numbers(), numbers, out, quiet=True)
    stage = Numbers()
    assert run(stage, numbers, out, quiet=True).decided == -1 and not stage.asked


def test_other_jobs_are_refused(numbers, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(Numbers(stops=True, limit=3), numbers, out, quiet=True)
    with pytest.raises(ConfigError, match=r"was made with other settings \(limit = 3, now 4\).*--restart"):
        run(Numbers(limit=4), numbers, out, quiet=True)
    with pytest.raises(ConfigError, match="other inputs"):
        run(Numbers(limit=3), numbers[:1], out, quiet=True)
    run(Numbers(limit=3), numbers, out, quiet=True)
    with pytest.raises(ConfigError, match=r"was made with other settings \(limit = 3, now 4\).*--restart"):
        run(Numbers(limit=4), numbers, out, quiet=True)
    assert run(Numbers(limit=4), numbers, out, restart=True, quiet=True).decided == 40


def test_places_that_cannot_be_written(numbers, tmp_path):
    for source in (numbers[0], write(tmp_path / "out.rejected.jsonl", [{"n": 1}])):
        with pytest.raises(ConfigError, match="would overwrite"):
            run(Numbers(), [source], tmp_path / source.name.replace(".rejected", ""), quiet=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        run(Numbers(), numbers, tmp_path / "no" / "out.jsonl", quiet=True)
    with pytest.raises(ConfigError, match="must be a name"):
        run(Numbers(), numbers, tmp_path / "out.json", quiet=True)
    write(tmp_path / "mine.jsonl", [{"n": 1}])
    with pytest.raises(ConfigError, match="exists and has no report"):
        run(Numbers(), numbers, tmp_path / "mine.jsonl", quiet=True)
    (tmp_path / "bad.journal").write_text("what is this\n")
    with pytest.raises(DataError, match="cannot be read as the identity of a journal .*--restart"):
        run(Numbers(), numbers, tmp_path / "bad.jsonl", quiet=True)
    with pytest.raises(DataError, match="no rows"):
        run(Numbers(), [write(tmp_path / "empty.jsonl", [])], tmp_path / "out.jsonl", quiet=True)


def test_lone_surrogates_pass_through(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"n": 2, "text": "\\ud800 ü"}\n')
    run(Numbers(), [source], tmp_path / "out.jsonl", quiet=True)
    assert read(tmp_path / "out.jsonl")[0]["text"] == "\ud800 ü"


def test_bad_lines_and_options_are_one_line_with_exit_code_2(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"problem": "2+2?", "answer": "4"}\n{"problem"\n')
    out = str(tmp_path / "out.jsonl")
    assert main(["format", str(tmp_path / "bad.jsonl"), "--out", out]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "bad.jsonl:2 is not JSON" in told
    assert main(["format", str(tmp_path / "bad.jsonl"), "--out", out, "--words=0"]) == 2
    assert "--words = 0" in capsys.readouterr().err
    assert main(["format", str(tmp_path / "none.jsonl"), "--out", out]) == 2
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    told = capsys.readouterr().out
    assert end.value.code == 0 and "example" in told and f"curate {name}" in told


@pytest.mark.soak  # in make test: the same within one process, above
@pytest.mark.slow
def test_command_is_stopped_and_goes_on(root, tmp_path):
    answers = [f"\\sqrt{{{4 * n * n}}}+x^{n}" for n in range(ROWS)]
    rows = [{"id": str(n), "problem": f"What is {n}+{n}?", "answer": answer} for n, answer in enumerate(answers)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "curate", "format", str(source), "--out", str(out), "--workers=1"]
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=root, env=environment, stderr=subprocess.PIPE, text=True)
    journal = OutputFiles(out).journal
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 20):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "the same command goes on" in told and not out.exists()
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "going on" in done.stderr and "stage format" in done.stdout
    assert [row["id"] for row in read(out)] == [str(n) for n in range(ROWS)]
    again = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=150)
    assert again.returncode == 0 and "all of it was there before" in again.stdout
