"""The command that runs the benchmarks: what it writes, refuses and compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed.__main__ import choose, main
from benchmarks.speed.rows import Row, decode, encode
from shared.errors import ConfigError
from tests.benchmarks.test_rows import measured

STANDS = {name: f"tests.benchmarks.stand_ins.{name}" for name in ("good", "absent", "broken")}


def test_without_names_all_are_run_in_their_order() -> None:
    assert choose([], STANDS) == ["good", "absent", "broken"]
    assert choose(["broken", "good"], STANDS) == ["good", "broken"]
    with pytest.raises(ConfigError, match="there is no benchmark 'god': did you mean 'good'"):
        choose(["god"], STANDS)


def test_a_wrong_name_or_file_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["god"], STANDS) == 2
    assert main(["--compare", str(tmp_path / "no.json"), "good"], STANDS) == 2
    assert main(["--against", str(tmp_path / "no.json")], STANDS) == 2
    errors = capsys.readouterr().err
    assert "did you mean 'good'" in errors and "no.json is no file of results" in errors and "needs --compare" in errors


def test_two_files_are_compared_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path, value in ((old, 1.0), (new, 0.9)):
        path.write_bytes(encode({"good": measured(Row("a", [value], "", "x", "higher"))}))
    assert main(["--compare", str(old), "--against", str(new)], STANDS) == 1
    assert "SLOWER  good, a: 1.00 -> 0.900, 10.0% worse (allowed 5%)" in capsys.readouterr().out
    assert main(["--compare", str(new), "--against", str(old)], STANDS) == 0


@pytest.mark.slow
def test_figures_are_written_failures_told_and_what_is_not_run_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, document = tmp_path / "results.json", tmp_path / "performance.md"
    document.write_text("# Speed\n<!-- results -->\nold\n<!-- end of results -->\nthe end\n")
    kept = measured(Row("a", [1.0], "", "x", "higher"), seconds=3.0)
    results.write_bytes(encode({"broken": kept}))
    places = ["--json", str(results), "--document", str(document)]
    assert main(places, STANDS) == 1, "one of them failed"
    found = decode(results.read_bytes())
    assert list(found) == ["good", "absent", "broken"]
    assert found["good"].rows == [Row("rate", [2.0, 1.0, 3.0], "x/s", better="higher", target=1.5)]
    assert found["good"].place.versions.keys() == {"python", "torch", "vllm", "transformers"}
    assert found["absent"].not_measured == "no such card here"
    assert found["broken"] == kept, "the figures of the last run"
    text = document.read_text()
    assert "| rate | 2.00 x/s (1.00 x/s to 3.00 x/s) |  | >= 1.50 x/s, met |" in text
    assert "Not measured: no such card here." in text and "old" not in text and text.endswith("the end\n")
    shown = capsys.readouterr().out
    assert "broken failed" in shown and "it broke" in shown


@pytest.mark.slow
def test_a_run_is_compared_with_old_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.json"
    assert main(["good", "--json", str(old), "--document", str(tmp_path / "x.md"), "--no-write"], STANDS) == 0
    assert not old.exists()
    old.write_bytes(encode({"good": measured(Row("rate", [4.0], "", "x", "higher"))}))
    assert main(["good", "--no-write", "--compare", str(old)], STANDS) == 1
    assert "SLOWER  good, rate" in capsys.readouterr().out
