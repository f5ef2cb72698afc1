"""Start real launches (torchrun, vLLM, FSDP2) of a model small enough for tests, and look at what they left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil

ROOT = Path(__file__).resolve().parents[2]

TINY = {
    "steps": 4, "rollout.prompts_per_step": 4, "rollout.group_size": 4, "rollout.max_completion_tokens": 40,
    "rollout.cache_bytes": 64 << 20, "rollout.max_sequences": 64, "model.max_tokens": 192, "model.dtype": "float32",
    "optimiser.compute_dtype": "float32", "optimiser.learning_rate": 1e-3, "objective.filter_groups_by": "off",
    "sft.steps": 3, "sft.batch": 8, "checkpoint.every": 1, "evaluate.problems": 8, "prepare.options.problems": 64,
    "prepare.options.validation": 8, "prepare.options.max_tokens": 192, "deadlines.sync_s": 60,
}  # fmt: skip
BEGUN: list[Launch] = []
"""all launches of this process"""
HANG_S = 1500.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launch:
    """One torchrun of the tiny model; `wait()` returns the exit code, `output` all it printed."""

    def __init__(
        self, runs_dir: Path, name: str = "run", torchrun: tuple[str, ...] = (), log_dir: Path | None = None,
        options: tuple[str, ...] = (), command: Literal["torchrun", "trainer"] = "torchrun",
        file: str = "configs/quickstart.toml", delay_s: float = 0.0, inside: str = "", **settings: Any,
    ):  # fmt: skip
        """file: of another one than the quickstart only `settings` are changed. command: `torchrun -m trainer FILE`, or
        `python -m trainer FILE`. delay_s: largest delay of each point at which trainers and engines meet for a weight
        transfer over the network; `delays` names those that came. inside: a network namespace."""
        self.run_dir = runs_dir / name
        values = {**(TINY if "quickstart" in file else {}), "name": name, "runs_dir": str(runs_dir)}
        values |= {key.replace("__", "."): value for key, value in settings.items()}
        ranks = 1 + int(values.get("placement.trainers", 1)) + int(values.get("placement.engines", 1))
        where = torchrun or ("--standalone", f"--nproc-per-node={ranks}")
        namespace = ["ip", "netns", "exec", inside] if inside else []
        by_torchrun = ["torch.distributed.run", *where, "-m"] if command == "torchrun" else []
        line = [*namespace, sys.executable, "-m", *by_torchrun, "trainer", file]
        line += [f"--{key}={json.dumps(x) if isinstance(x, list) else x}" for key, x in values.items()]
        self.log = (log_dir or runs_dir) / f"{name}-{time.monotonic_ns()}.log"
        for folder in (runs_dir, self.log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        self._stream = self.log.open("w")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._delays = self.log.with_suffix(".delays")
        if delay_s:
            environment |= {"DELAY_S": str(delay_s), "DELAYS": str(self._delays)}
            environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests" / "system" / "delays"), str(ROOT)))
        self.process = subprocess.Popen(
            [*line, *options], cwd=ROOT, stdout=self._stream, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self.tree: set[psutil.Process] = set()
        BEGUN.append(self)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]

    @property
    def delays(self) -> Counter[str]:
        """Points of a meeting that came after a delay -> how often."""
        return Counter(line.split()[1] for line in self._delays.read_text().splitlines())

    def wait(self, timeout_s: float = HANG_S) -> int:
        try:
            code = self.process.wait(timeout_s)
            self._stream.close()
            return code
        except subprocess.TimeoutExpired:
            self.remember_processes()
            self.kill()
            raise AssertionError(f"the launch did not end in {timeout_s} s:\n{self.output[-6000:]}") from None

    def finish(self) -> Launch:
        """Wait until it ends well."""
        assert self.wait() == 0, self.output[-6000:]
        return self

    def until(self, condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the launch ended early:\n{self.output[-6000:]}"
            assert time.monotonic() < end, f"waited in vain:\n{self.output[-6000:]}"
            time.sleep(0.05)
        self.remember_processes()

    def until_step(self, step: int) -> None:
        self.until(lambda: len(self.metrics()) >= step)

    def remember_processes(self) -> None:
        """All processes of the launch that live now."""
        try:
            agent = psutil.Process(self.process.pid)
            self.tree |= {agent, *agent.children(recursive=True)}
        except psutil.NoSuchProcess:
            return

    def rank_pid(self, rank: int) -> int:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "trainer.rank_process" in child.cmdline() and child.environ().get("RANK") == str(rank):
                return child.pid
        raise AssertionError(f"no rank {rank}")

    def told(self, *words: str) -> bool:
        """Whether one line of the output holds all these words."""
        return any(all(word in line for word in words) for line in self.output.splitlines())

    def resumed_from(self) -> int:
        """The step that this launch says it goes on from."""
        return int(self.output.partition("from step ")[2].split()[0])

    def engine_pid(self, rank: int) -> int:
        """Pid of the vLLM engine process below an engine rank."""
        children = psutil.Process(self.rank_pid(rank)).children()
        return max(children, key=lambda child: child.memory_info().rss).pid

    def until_busy(self, pid: int) -> None:
        """Wait until a process uses a third of a core: an engine without work uses none."""
        process = psutil.Process(pid)
        self.until(lambda: bool(process.cpu_percent(0.15) > 33))

    def signal_rank(self, rank: int, number: signal.Signals) -> int:
        """Signal a rank; returns its pid."""
        self.remember_processes()
        os.kill(pid := self.rank_pid(rank), number)
        return pid

    def kill(self) -> None:
        """kill -9 of the command; its ranks die with it."""
        self.remember_processes()
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._stream.close()

    def survivors(self, within_s: float = 180) -> list[str]:
        """Processes of the launch that are still there after a while."""
        end = time.monotonic() + within_s
        while alive := [p for p in self.tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
            if time.monotonic() > end:
                return [" ".join(p.cmdline())[:120] for p in alive]
            time.sleep(0.1)
        return []

    def metrics(self, kind: str = "train") -> list[dict[str, Any]]:
        path, rows = self.run_dir / "metrics.jsonl", []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # being written
        return [row for row in rows if row["kind"] == kind]

    def lines(self, file: str) -> list[dict[str, Any]]:
        """The rows of a file of the run's folder."""
        return [json.loads(line) for line in (self.run_dir / file).read_bytes().splitlines()]

    def groups(self) -> list[dict[str, Any]]:
        """All trained groups, in order of steps."""
        files = sorted((self.run_dir / "rollouts").glob("step_*.jsonl"), key=lambda p: int(p.stem.split("_")[1]))
        return [json.loads(line) for path in files for line in path.read_bytes().splitlines()]

    def completions(self) -> list[dict[str, Any]]:
        return [completion for group in self.groups() for completion in group["completions"]]

    def trained_prompts(self) -> list[int]:
        return sorted(group["prompt"]["index"] for group in self.groups())

    def losses(self, kind: str = "train") -> list[float]:
        return [row["loss" if kind == "train" else "sft/loss"] for row in self.metrics(kind)]
