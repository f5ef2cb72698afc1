"""`python -m serve` in a process of its own, for tests with the real engine."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from examples.quickstart.prepare import Options, make_tiny_model
from shared.config import Config
from tests.serve.conftest import eventually
from trainer.export import note_training

QUESTION = "Tom has 3 apples. Tom buys 2 more. How many apples does Tom have now?"


def untrained_model(runs_dir: Path, **changes: int) -> Path:
    """The folder of the quickstart's model before any training: its texts mean nothing, its tokens are tokens.

    changes: other values for its config.json.
    """
    config = Config.model_validate({"runs_dir": str(runs_dir), "data": {"system_prompt": ""}})
    folder = config.run_dir / "made" / "model"
    make_tiny_model(folder, Options(), 0)
    if changes:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    note_training(config, folder, 0)
    return folder


ADDRESS = re.compile(r"http://127\.0\.0\.1:([1-9]\d*)")
"""what a server prints of itself"""


class Command:
    """`python -m serve` in a process of its own."""

    def __init__(
        self, model: Path, log: Path, name: str = "tiny", dtype: str = "float32", settings: Sequence[str] = ()
    ):
        self.log, self.model = log, model
        self.temporary = Path(tempfile.mkdtemp())
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "serve", "--model", str(model), "--cache-bytes", str(64 << 20), "--port", "0",
                   "--dtype", dtype, "--name", name, *settings]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        eventually(lambda: self.process.poll() is not None or ADDRESS.search(log.read_text()) is not None, 500)
        address = ADDRESS.search(log.read_text())
        assert address, log.read_text()
        self.url, self.port = address[0], int(address[1])
        self.client = httpx.Client(base_url=self.url, timeout=300)
        eventually(lambda: self.process.poll() is not None or self.status("/ready") == 200, 500)
        assert self.process.poll() is None, log.read_text()

    def status(self, path: str) -> int:
        """Of a GET, 0 where nobody answers."""
        try:
            return self.client.get(path).status_code
        except httpx.HTTPError:
            return 0

    def engine(self) -> psutil.Process:
        """The engine process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(one for one in children if "resource_tracker" not in " ".join(one.cmdline()))

    def close(self) -> None:
        """Kill whatever is left."""
        self.client.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


def check_sigterm(command: Command) -> None:
    """A response under way comes to its end, and then no process is left."""
    tree = [command.process.pid, *(one.pid for one in psutil.Process(command.process.pid).children(recursive=True))]
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300, "stream": True, "temperature": 1}
    with command.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        command.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert command.process.wait(90) == 0, command.log.read_text()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in tree), 60)
    assert "Exception ignored" not in command.log.read_text()
