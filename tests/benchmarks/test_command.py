"""The command that runs the benchmarks: what it writes, refuses and compares."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.__main__ import choose, declared, main, medians
from benchmarks.figures import Figure, decode, encode
from shared.errors import ConfigError
from tests.benchmarks.test_figures import measured

STANDS = declared(Path(__file__).parent / "stand_ins", "tests.benchmarks.stand_ins")


def test_a_file_that_decorates_a_function_of_its_name_is_a_benchmark() -> None:
    assert list(STANDS) == ["absent", "broken", "good", "paged", "starts"], "echo.py is none"
    assert STANDS["good"] == ("tests.benchmarks.stand_ins.good", "Measures what it was told.", "")
    assert STANDS["paged"].page == "docs/none.md"
    ours = declared()
    assert {"end_to_end", "training", "rollout", "weight_update", "verify", "serve", "quickstart"} <= ours.keys()


def test_without_names_all_without_a_page_are_run() -> None:
    assert choose([], STANDS) == ["absent", "broken", "good"]
    assert choose(["paged", "good"], STANDS) == ["paged", "good"]
    with pytest.raises(ConfigError, match="there is no benchmark 'god': did you mean 'good'"):
        choose(["god"], STANDS)


def test_a_wrong_name_file_or_option_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["god"], STANDS) == 2
    assert main(["--compare", str(tmp_path / "no.json"), "good"], STANDS) == 2
    assert main(["--against", str(tmp_path / "no.json")], STANDS) == 2
    assert main(["good", "paged", "--loud"], STANDS) == 2
    errors = capsys.readouterr().err
    assert "did you mean 'good'" in errors and "no.json is no file of results" in errors and "needs --compare" in errors
    assert "--loud: options of a benchmark need one NAME" in errors


def test_a_launch_ends_with_the_command_that_measures(tmp_path: Path) -> None:
    line = tmp_path / "line"
    os.mkfifo(line)
    code = f"import benchmarks.__main__ as m; m.measure({STANDS['starts'].module!r}, False, ['--line={line}'])"
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(command.ROOT)})
    reader = os.open(line, os.O_RDONLY)
    try:
        assert os.read(reader, 1) == b"x"
        runner.terminate()
        assert select.select([reader], [], [], 30)[0] and os.read(reader, 1) == b""
    finally:
        runner.kill()
        runner.wait()
        os.close(reader)


def test_two_files_are_compared_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path, value in ((old, 1.0), (new, 0.9)):
        path.write_bytes(encode({"good": measured(Figure("a", [value], "", "x", "higher"))}))
    assert main(["--compare", str(old), "--against", str(new)], STANDS) == 1
    assert "SLOWER  good, a: 1.00 -> 0.900, 10.0% worse (allowed 5%)" in capsys.readouterr().out
    assert main(["--compare", str(new), "--against", str(old)], STANDS) == 0


def test_runs_are_put_together_by_their_medians() -> None:
    runs = [{"a": measured(Figure("x", [value, value, 9.0], ""), Figure("y", [1.0], ""))} for value in (3.0, 1.0, 2.0)]
    runs[0]["a"].rows.pop()
    found = medians(runs)["a"]
    assert found.rows == [Figure("x", [3.0, 1.0, 2.0], "")], "a figure that one run lacks is left out"


def test_two_checkouts_are_measured_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[Path] = []
    values = iter([4.0, 2.0, 9.0, 4.0, 4.0, 1.0])

    def of_checkout(folder: Path, names: list[str], quick: bool) -> dict[str, object]:
        order.append(folder)
        return {names[0]: measured(Figure("rate", [next(values)], "x/s", better="higher"))}

    monkeypatch.setattr(command, "of_checkout", of_checkout)
    assert main(["good", "--compare", str(tmp_path)], STANDS) == 1
    assert order == [tmp_path, command.ROOT, command.ROOT, tmp_path, tmp_path, command.ROOT]
    assert "SLOWER  good, rate: 4.00 x/s -> 2.00 x/s" in capsys.readouterr().out, "medians of 4 4 4 and 2 9 1"


@pytest.mark.soak  # in make test: the other commands of this file
@pytest.mark.slow
def test_figures_are_written_failures_told_and_what_is_not_run_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results, document = tmp_path / "results.json", tmp_path / "performance.md"
    document.write_text("# Speed\n<!-- results -->\nOUTDATED\n<!-- end of results -->\nthe end\n")
    kept = measured(Figure("a", [1.0], "", "x", "higher"), seconds=3.0)
    results.write_bytes(encode({"broken": kept}))
    assert main(["--json", str(results), "--document", str(document)], STANDS) == 1, "one of them failed"
    found = decode(results.read_bytes())
    assert found["good"].rows == [Figure("rate", [2.0, 1.0, 3.0], "x/s", better="higher", target=1.5)]
    assert found["good"].place.versions.keys() == {"python", "torch", "vllm", "transformers"}
    assert found["absent"].not_measured == "no such card here"
    assert found["broken"] == kept, "the figures of the last run"
    text = document.read_text()
    assert "| rate | 2.00 x/s (1.00 x/s to 3.00 x/s) |  | >= 1.50 x/s, met |" in text
    assert "Not measured: no such card here." in text and "OUTDATED" not in text and text.endswith("the end\n")
    shown = capfd.readouterr()
    assert "broken failed" in shown.out and "it broke" in shown.err and "noise" in shown.err
    assert "  rate: 2.00 x/s (1.00 x/s to 3.00 x/s)  >= 1.50 x/s, met\n" in shown.out


@pytest.mark.slow
def test_a_run_is_compared_with_old_figures_and_quick_tries_are_not_committed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = command.RESULTS.read_bytes()
    assert main(["good", "--quick", "--values", "8"], STANDS) == 0
    assert command.RESULTS.read_bytes() == before and "rate: 4.00 x/s" in capfd.readouterr().out
    old = tmp_path / "old.json"
    old.write_bytes(encode({"good": measured(Figure("rate", [4.0], "", "x", "higher"))}))
    assert main(["good", "--no-write", "--compare", str(old)], STANDS) == 1
    assert "SLOWER  good, rate" in capfd.readouterr().out


@pytest.mark.soak  # in make test: the other commands of this file
@pytest.mark.slow
def test_a_page_is_written_with_what_stands_beside_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit) as refused:
        main(["paged"], STANDS)
    assert refused.value.code == 2 and "--page" in capfd.readouterr().err
    assert main(["paged", "--page", str(page), "--loud", "--no-write"], STANDS) == 0
    assert not page.exists() and "LOUD" in capfd.readouterr().out
    assert main(["paged", "--page", str(page), "--loud"], STANDS) == 0
    assert page.read_text() == "LOUD" and page.with_suffix(".png").read_bytes() == b"\x89PNG"
