"""The commands of README and docs/evaluation.md, word for word, on the files of a quickstart; tests/serve/test_vllm.py
has an evaluation of the real engine."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib

import pytest

from evaluation.__main__ import main
from examples.quickstart.prepare import prepare
from tests.commands import ROOT

CONFIG = tomllib.loads((ROOT / "configs/quickstart.toml").read_text(encoding="utf-8"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


def test_every_command_runs(serve, tmp_path, root, monkeypatch, capsys):
    made, evaluations = tmp_path / "runs/quickstart/made", tmp_path / "runs/evaluations"
    made.mkdir(parents=True)
    prepare(made, {"problems": 64, "validation": 24, "max_tokens": 160}, 0)
    monkeypatch.chdir(tmp_path)
    served = serve("It is \\boxed{3}.", name="quickstart")
    monkeypatch.setenv("MAESTRALE_EVALUATE_URL", f"{served.url}/v1")
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/evaluation.md"))
    form = r"^(?:bash examples/while_serving.sh (\S+) )? *\.venv/bin/(?:python -m evaluation|maestrale evaluate) (.*)$"
    commands = dict.fromkeys(re.findall(form, text.replace("\\\n", ""), re.MULTILINE))
    assert len(commands) == 5 and list(commands)[-1][1].startswith("--compare")
    for model, line in commands:
        if model:  # what the server says of the weights of such an export
            step = re.sub(r"\D", "", model) or CONFIG["steps"]
            served.engine.version = f"quickstart, step {step}"
        arguments = shlex.split(line, comments=True)
        code, printed = main(arguments), capsys.readouterr()
        if "aime24" in arguments:
            assert code == 2 and "`python -m evaluation.download aime24`" in printed.err, printed
            assert printed.err.count("\n") == 1 and "aime24.jsonl" in printed.err
        else:
            assert code == 0, (arguments, printed)
    validation = json.loads((evaluations / "quickstart_step_0/results.json").read_text())["benchmarks"]["validation"]
    assert validation["responses"] == 24 and validation["errors"] == 0 and (evaluations / "difference").is_dir()


def test_a_model_is_not_measured_on_the_port_of_another(root, tmp_path):
    """Another server answers /ready at once, and its answers would be taken for the model's."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run(
            ["bash", root / "examples" / "while_serving.sh", "model", "touch", "measured"], cwd=tmp_path,
            env={**os.environ, "MAESTRALE_PORT": port}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 2 and f"another program listens on port {port}" in done.stderr
    assert not (tmp_path / "measured").exists()
