"""What is wrong with a start is told at once: one line, exit code 2, before any weights are read."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.rollout.tiny_llama import random_weights, write_model
from tests.shared.test_chat import make_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", random_weights(0))
    return Path(make_folder(folder))


def start(model: Path, *more: str) -> tuple[int, str, float]:
    """Exit code, what was told, seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "serve", "--model", str(model), "--cache-bytes", str(16 << 20), *more],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def test_a_port_in_use_is_told_before_the_model_loads(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, told, seconds = start(model, "--port", str(port))
    assert code == 2 and told.count("\n") == 1, told
    assert told.startswith(f"error: port = {port}: another program listens at 127.0.0.1:{port}") and "--port" in told
    assert "starting" not in told and "EngineCore" not in told
    print(f"told after {seconds:.1f} s: {told.strip()}")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_told(model: Path, host: str) -> None:
    code, told, _ = start(model, "--host", host, "--anybody", "--port", "0")
    assert code == 2 and told.count("\n") == 1 and told.startswith(f"error: host = {host}: "), told


@pytest.mark.parametrize("harm", ["truncated", "no weights", "no config", "a file", "config no JSON", "foreign"])
def test_a_model_that_cannot_be_read_is_told_in_one_line(model: Path, tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "harmed"
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    if harm == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif harm == "no weights":
        weights.unlink()
    elif harm == "no config":
        (folder / "config.json").unlink()
    elif harm == "config no JSON":
        (folder / "config.json").write_text("{")
    elif harm == "foreign":
        kept = {name: weight for name, weight in random_weights(0).items() if "layers.2" not in name}
        save_file(kept, weights)
    else:
        folder = weights
    code, told, seconds = start(folder, "--port", "0")
    lines = [line for line in told.splitlines() if not line.startswith(("starting", "[W"))]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and str(folder) in lines[0], told
    assert harm != "foreign" or "the weights do not fit config.json: lacks model.layers.2." in lines[0]
    print(f"{harm}: {seconds:.1f} s: {lines[0]}")


def test_what_the_engines_start_fails_of_is_told(model: Path) -> None:
    code, told, _ = start(model, "--port", "0", "--max-tokens", "100000")
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert code == 2 and "max_model_len (100000)" in "".join(errors) and "Traceback" not in told, told
