"""Acceptance of damaged data, models, plug-ins, folders and disks: real launches, with a table of what each showed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.conftest import Start
from tests.system.launch import ROOT, TINY
from tests.trainer.test_full_disk import disk as disk
from tests.trainer.test_full_disk import fill

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

GOOD = {"problem": "1+1?", "answer": "2"}
PLUGIN = "import os, sys, time\nfrom verify.plugins import Case, reward\n\n"
REFUSED: dict[str, tuple[object, str]] = {
    "answer that nothing equals": ({**GOOD, "answer": "see solution"}, "rows.jsonl:2: the answer 'see solution'"),
    "misspelt key": ({"problem": "1+1?", "anwser": "2"}, "rows.jsonl:2: unknown key 'anwser': is 'answer' meant?"),
    "NaN answer": ('{"problem": "1+1?", "answer": NaN}', "rows.jsonl:2: 'answer' is nan"),
    "lone surrogate": ('{"problem": "\\ud800?", "answer": "2"}', "rows.jsonl:2: 'problem' holds half a character"),
    "list as answer": ({**GOOD, "answer": ["2"]}, "rows.jsonl:2: 'answer' is a list"),
    "unknown language": ({**GOOD, "language": "english"}, "rows.jsonl:2: language 'english'"),
    "unknown domain": ({**GOOD, "domain": "maths"}, "rows.jsonl:2: domain 'maths' is not known"),
    "id that stands twice": ({**GOOD, "id": "a"}, "rows.jsonl:2: id 'a' stands in line 1 already"),
    "a megabyte of text in each row": ({**GOOD, "problem": "7" * (1 << 20)}, "every problem of"),
    "plug-in raises": ("x = 1 / 0", "mine.py fails with ZeroDivisionError: division by zero in line 4"),
    "plug-in exits": ("os._exit(0)", "mine.py ended its process while loading (exit code 0)"),
    "run folder is a file": ("", "is a file, where a folder is wanted"),
}


def trainer(**settings: object) -> tuple[int, list[str], float]:
    """Exit code, lines of output, seconds of `python -m trainer`."""
    options = [f"--{name}={json.dumps(value)}" for name, value in (TINY | settings).items() if name != "name"]
    began = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-m", "trainer", "configs/quickstart.toml", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return found.returncode, (found.stdout + found.stderr).splitlines(), time.monotonic() - began


def test_bad_input_is_one_error_with_code_2_before_anything_starts(tmp_path: Path) -> None:
    rows, plugin = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    for fault, (given, told) in REFUSED.items():
        settings: dict[str, object] = {"runs_dir": str(tmp_path / "runs")}
        if "plug-in" in fault:
            plugin.write_text(PLUGIN + str(given) + "\n")
            settings |= {"reward.plugins": [str(plugin)]}
        elif fault == "run folder is a file":
            (tmp_path / "taken").write_text("")
            settings |= {"runs_dir": str(tmp_path / "taken")}
        else:
            first = {**GOOD, "id": "a"} if "megabyte" not in fault else {**GOOD, "problem": "7" * (1 << 20)}
            lines = [row if isinstance(row, str) else json.dumps(row) for row in (first, given)]
            rows.write_text("\n".join(lines) + "\n")
            settings |= {"data.train": str(rows)}
        code, output, seconds = trainer(**settings)
        errors = [line for line in output if line.startswith("error: ")]
        print(f"{fault} | {errors[:1]} | {seconds:.0f} s | exit code {code}")
        assert code == 2 and len(errors) == 1 and told in errors[0], "\n".join(output)[-3000:]
        assert not any("Traceback" in line or "starting trainers and engines" in line for line in output)


def test_a_full_disk_stops_the_run_by_name_and_the_next_launch_goes_on(
    start: Start, seasoned: Path, disk: Path, tmp_path: Path
) -> None:
    """On the way: a validation row that is too long, a plug-in that ends its process for some completions."""
    subprocess.run(["mount", "-o", "remount,size=60m", str(disk)], check=True)
    validation = tmp_path / "validation.jsonl"
    shutil.copyfile(seasoned / "made" / "validation.jsonl", validation)
    lines = validation.read_text().splitlines()
    validation.write_text("\n".join([json.dumps({**GOOD, "problem": "one " * 5000}), *lines]) + "\n")
    plugin = tmp_path / "mine.py"
    body = '@reward("mine")\ndef f(case: Case) -> float:\n    if case.tokens % 7 == 0:\n        os._exit(3)\n'
    plugin.write_text(PLUGIN + body + "    return (case.tokens % 5) / 5\n")
    settings = {
        "reward__plugins": [str(plugin)], "reward__extra": '{mine = 0.5}', "data__validation": str(validation),
        "steps": 8, "evaluate__greedy": "false", "reward__max_failure_share": 1.0, "log_dir": tmp_path,
    }  # fmt: skip
    launch = start(disk, command="trainer", **settings)
    launch.until_step(2)
    fill(disk)
    code = launch.wait(500)
    errors = [line for line in launch.output.splitlines() if line.startswith("error: ")]
    print(f"full disk | {errors} | exit code {code}")
    assert code == 1 and len(errors) == 1 and "cannot be written" in errors[0], launch.output[-4000:]
    assert "free" in errors[0] and "Traceback" not in launch.output
    told = launch.output.replace("\n", " ")
    assert "problems are longer than" in told and "validation.jsonl:1)" in told, "the long validation row is told"
    assert "not graded and not trained on:" in told and "mine.py:4" in told and "exit code 3" in told
    (disk / "filler").unlink()
    again = start(disk, command="trainer", **settings)
    assert again.wait(500) == 0, again.output[-4000:]
    assert "resuming" in again.output and len(again.losses()) == 8
    print("next launch | " + next(line for line in again.output.splitlines() if "resuming" in line))
