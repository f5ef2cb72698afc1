"""The commands of README and docs/evaluation.md, word for word, on the model that they are documented for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.quickstart.prepare import prepare
from shared.config import Config
from tests.serve.command import Command
from trainer.export import note_training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]
PAGES = ("README.md", "docs/evaluation.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a quickstart was run: its export, untrained, and its files."""
    found = tmp_path_factory.mktemp("quickstart")
    table = {"runs_dir": str(found / "runs"), "name": "quickstart", "data": {"system_prompt": ""}}
    config = Config.model_validate(table)
    made = config.run_dir / "made"
    made.mkdir(parents=True)
    prepare(made, {"problems": 64, "validation": 24, "max_tokens": 160}, 0)
    note_training(config, made / "model", 0)
    shutil.copytree(made / "model", found / "runs" / "quickstart" / "latest")
    return found


@pytest.fixture(scope="module")
def command(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    running = Command(folder / "runs" / "quickstart" / "latest", tmp_path_factory.mktemp("log") / "log", "quickstart")
    yield running
    running.close()


def documented(root: Path) -> list[list[str]]:
    """Arguments of each command."""
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in PAGES)
    found = re.findall(r"^\.venv/bin/python -m evaluation (.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in dict.fromkeys(found)]


def test_every_command_runs(command: Command, folder: Path, root: Path) -> None:
    commands = documented(root)
    assert len(commands) == 3
    for arguments in sorted(commands, key=lambda one: "--compare" in one):
        if "--compare" in arguments:
            for name in ("before", "after"):
                shutil.copytree(folder / "runs/evaluations/quickstart", folder / "runs/evaluations" / name)
        done = subprocess.run(
            [sys.executable, "-m", "evaluation", *arguments], cwd=folder, capture_output=True, text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(root), "MAESTRALE_EVALUATE_URL": f"{command.url}/v1"},
        )  # fmt: skip
        if "aime24" in arguments:
            assert done.returncode == 2 and "`python -m evaluation.download aime24`" in done.stderr, done.stderr
            assert done.stderr.count("\n") == 1 and "aime24.jsonl" in done.stderr
        else:
            assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    found = json.loads((folder / "runs/evaluations/quickstart/results.json").read_text())
    assert found["benchmarks"]["validation"]["responses"] == 24 and found["benchmarks"]["validation"]["errors"] == 0
    assert (folder / "runs/evaluations/difference").is_dir()
