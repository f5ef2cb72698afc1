"""The wheel in environments without a checkout, used from a folder that has files with the names of our packages
(`make wheel`)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
BASE_BYTES = 150 << 20
ROW = {"problem": "What is 3 + 4?", "answer": "7", "response": "<think>3 + 4 = 7</think>It is \\boxed{7}."}
QUICK = (
    "--steps=3",
    "--sft.steps=30",
    "--evaluate.problems=8",
    "--prepare.options.problems=64",
    "--checkpoint.every=0",
)
TAKEN = ("shared", "trainer.py", "serve.py", "evaluation")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not UV.exists(), reason="no uv"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source") / "maestrale", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "models", "build", "tests", "benchmarks"))
    subprocess.run([UV, "build", "--quiet", "--wheel", "--out-dir", out, source], check=True)
    [file] = out.glob("*.whl")
    return file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, whose names are ours."""
    for name in ("trainer.py", "serve.py", "shared/__init__.py", "evaluation/__init__.py"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('this is the user\\'s own')\n")
    (tmp_path / "project" / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def run(*command: str | Path, code: int = 0) -> str:
    """What a command prints."""
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert ended.returncode == code and "Traceback" not in ended.stdout, ended.stdout[-3000:]
    return ended.stdout


def test_the_base_installation_is_small_and_grades_a_file(wheel, folder, tmp_path):
    run(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "env")
    run(UV, "pip", "install", "--quiet", "--python", tmp_path / "env/bin/python", wheel)
    size = sum(path.stat().st_size for path in (tmp_path / "env").rglob("*") if path.is_file())
    print(f"the base installation has {size / 1e6:.0f} MB")
    assert size < BASE_BYTES
    command = tmp_path / "env/bin/maestrale"
    assert "1 verdicts in verdicts.jsonl" in run(command, "grade", "rows.jsonl", "--out", "verdicts.jsonl")
    assert json.loads((folder / "verdicts.jsonl").read_text())["reward"]["verdict"] == "correct"
    for name in ("train", "serve", "dashboard"):
        line = run(command, name, "quickstart", code=2).splitlines()[-1]
        assert line.startswith(f"error: maestrale {name} needs ") and "docs/install.md" in line
    assert "did you mean 'train'?" in run(command, "trian", code=2)
    program = (
        "import maestrale; from maestrale import Case, environment, reward, verifier; print(maestrale.__version__)"
    )
    printed = run(tmp_path / "env/bin/python", "-c", program).splitlines()
    assert len(printed) == 2 and all(f"project/{name}" in printed[0] for name in TAKEN)
    assert printed[1] in run(command, "--version")


def test_it_trains_and_serves_the_quickstart(wheel, folder, tmp_path):
    """The packages that it needs are those of this environment."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    run(UV, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = tmp_path / "env/bin/maestrale"
    assert "step 3/3" in run(command, "train", "quickstart", *QUICK)
    assert (folder / "runs/quickstart/latest/model.safetensors").exists()
    run(python, "-c", "from maestrale import Session, Objective, publish")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        [command, "serve", "runs/quickstart", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        with urllib.request.urlopen(f"{address.rstrip('/')}/v1/models", timeout=120) as answer:
            assert json.load(answer)["data"]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)
