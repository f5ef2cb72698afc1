"""`python -m environments`: every environment with its options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from environments.__main__ import main
from environments.environment import ENVIRONMENTS


def test_every_environment_and_every_option_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    heads = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert heads == sorted(ENVIRONMENTS) and {"guess", "retry"} <= set(heads)
    for known in ENVIRONMENTS.values():
        for option, field in known.make.Options.model_fields.items():
            assert f"    environment.options.{known.name}.{option}" in text
            assert field.description, f"{known.name}.{option} has no docstring"
    assert (
        "    environment.options.guess.numbers = 16\n        the number is from 1 to this (a whole number, at" in text
    )
    assert "environment.options.search.corpus  (needed)" in text and "<class" not in text


def test_plug_in_files_are_listed_too_and_what_is_wrong_is_told(tmp_path: Path) -> None:
    head = "from environments.environment import Environment, environment\n"
    (tmp_path / "mine.py").write_text(
        f'{head}@environment("parity")\nclass Parity(Environment):\n    """Odd or even."""\n'
    )
    (tmp_path / "bad.py").write_text("1 / 0\n")

    def run(*files: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "environments", *files]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    found = run(str(tmp_path / "mine.py"))
    assert found.returncode == 0 and "parity\n    Odd or even. (gives the reward itself)\n" in found.stdout
    failed = run(str(tmp_path / "bad.py"))
    assert failed.returncode == 2 and "ZeroDivisionError" in failed.stderr and "Traceback" not in failed.stderr
    assert run("--nothing").returncode == 2
