"""The commands of README and docs/evaluation.md, word for word, on the files of a quickstart; tests/serve/test_vllm.py
has an evaluation of the real engine."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from examples.quickstart.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


def test_every_command_runs(serve, tmp_path, root, monkeypatch):
    made, evaluations = tmp_path / "runs/quickstart/made", tmp_path / "runs/evaluations"
    made.mkdir(parents=True)
    prepare(made, {"problems": 64, "validation": 24, "max_tokens": 160}, 0)
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("MAESTRALE_EVALUATE_URL", serve("It is \\boxed{3}.", name="quickstart").url + "/v1")
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/evaluation.md"))
    commands = set(re.findall(r"^\.venv/bin/python -m evaluation (.*)$", text, re.MULTILINE))
    assert len(commands) == 3
    for arguments in sorted(
        (shlex.split(line, comments=True) for line in commands), key=lambda one: "--compare" in one
    ):
        if "--compare" in arguments:
            for name in ("before", "after"):
                shutil.copytree(evaluations / "quickstart", evaluations / name)
        command = [sys.executable, "-m", "evaluation", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        if "aime24" in arguments:
            assert done.returncode == 2 and "`python -m evaluation.download aime24`" in done.stderr, done.stderr
            assert done.stderr.count("\n") == 1 and "aime24.jsonl" in done.stderr
        else:
            assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    validation = json.loads((evaluations / "quickstart/results.json").read_text())["benchmarks"]["validation"]
    assert validation["responses"] == 24 and validation["errors"] == 0 and (evaluations / "difference").is_dir()
