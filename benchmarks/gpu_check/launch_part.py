"""Items of the launch part: whole launches on the card (torchrun, FSDP2, vLLM), each a command as a user types it."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from benchmarks import end_to_end
from benchmarks.figures import ROOT, Figure, NotMeasured
from benchmarks.gpu_check.place import Where
from benchmarks.workload import QUICK, prepare
from shared.errors import RunError
from shared.metrics import read_rows
from trainer.evaluation import at_temperature, read_evaluations

QUICKSTART = "configs/quickstart.toml"
LEARNING = ("--steps=60", "--evaluate.greedy=false", "--checkpoint.every=0")
SHORT = ("--steps=12", "--sft.steps=60", "--prepare.options.problems=256", "--prepare.options.validation=32",
         "--evaluate.problems=32", "--evaluate.greedy=false", "--checkpoint.every=0")  # fmt: skip
LEARNED = 0.2
"""accuracy that the quickstart must gain by reinforcement learning"""
WAIT_S = 0.2
SAID = 2000


def command(folder: Path, name: str, *settings: str) -> list[str]:
    """Return the command of a launch of the quickstart whose run folder is folder/name."""
    return [sys.executable, "-m", "trainer", QUICKSTART, f"--runs_dir={folder}", f"--name={name}", *settings]


def finished(process: subprocess.Popen[str]) -> None:
    """Wait for a launch. Raises RunError with its last words if it fails."""
    out, _ = process.communicate()
    if process.returncode:
        raise RunError(f"the launch ended with code {process.returncode}: {out[-SAID:]}")


def start(folder: Path, name: str, *settings: str) -> subprocess.Popen[str]:
    """Start a launch; the runner's deadline ends it with this process's session."""
    return subprocess.Popen(command(folder, name, *settings), cwd=ROOT, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps so far."""
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train"]


def medians(rows: list[dict[str, Any]], *names: tuple[str, str, str, float]) -> Iterator[Figure]:
    """Yield (title, metric, unit, factor) as medians over the steps that have them."""
    for title, name, unit, factor in names:
        if values := [row[name] for row in rows if row.get(name) is not None]:
            yield Figure(title, [factor * statistics.median(values)], unit)


def learning(where: Where) -> Iterator[Figure]:
    """The quickstart, whose updates reach an engine that samples and are proved one by one."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.time()
        process = start(folder, "learning", *where.size(LEARNING, SHORT))
        run_dir = folder / "learning"
        while not trained(run_dir) and process.poll() is None:
            time.sleep(WAIT_S)
        first = time.time() - began
        finished(process)
        yield Figure("command to the first trained step", [first], "s")
        rows, records = trained(run_dir), at_temperature(read_evaluations(run_dir), 1.0)
        before, after = (records[end].evaluation.accuracy or 0.0 for end in (0, -1))
        yield Figure("accuracy before reinforcement learning", [before], "%")
        yield Figure("accuracy after it", [after], "%")
        yield Figure("accuracy that it gained", [after - before], "%", "", "higher", None if where.tiny else LEARNED)
        yield Figure("updates of a sampling engine, each proved", [float(len(rows))], "")
        several = [row["spans/multi_version_share"] for row in rows]
        yield Figure("completions sampled by two versions or more", [max(several)], "%", "of a step, at most", "higher",
                     1e-9)  # fmt: skip
        yield Figure("engines started again", [float(rows[-1]["engine/restarts"])], "", "", "lower", 0.0)
        yield from medians(
            rows,
            ("step", "time/step_s", "s", 1.0),
            ("tokens trained", "tokens/trained_per_s", "tokens/s", 1.0),
            ("tokens sampled", "tokens/generated_per_s", "tokens/s", 1.0),
            ("update, write to proof", "sync/total_s", "ms", 1000.0),
            ("stall of the running requests", "sync/stall_ms", "ms", 1.0),
            ("probe: trainer and engine apart", "sync/logprob_diff_mean", "nats", 1.0),
            ("memory of the trainer on the card", "memory/trainer_peak_gpu_bytes", "GiB", 2.0**-30),
            ("memory of the engine on the card", "memory/engine_peak_gpu_bytes", "GiB", 2.0**-30),
        )


def engine_process(root: int) -> psutil.Process | None:
    """Return the process in which vLLM's engine runs, below `root`; None before there is one."""
    for process in psutil.Process(root).children(recursive=True):
        try:
            if "EngineCore" in " ".join(process.cmdline()) or "EngineCore" in process.name():
                return process
        except psutil.Error:
            continue
    return None


def engine_kill(where: Where) -> Iterator[Figure]:
    """kill -9 of the engine's process after the third step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(folder, "kill", *SHORT)
        while len(trained(folder / "kill")) < 3 and process.poll() is None:
            time.sleep(WAIT_S)
        victim = engine_process(process.pid) if process.poll() is None else None
        if victim is None:
            process.kill()
            out, _ = process.communicate()
            raise RunError(f"no engine process was found in the launch: {out[-SAID:]}")
        os.kill(victim.pid, signal.SIGKILL)
        killed, at = time.monotonic(), len(trained(folder / "kill"))
        while len(trained(folder / "kill")) <= at + 2 and process.poll() is None:  # two steps may be on their way
            time.sleep(WAIT_S)
        back = time.monotonic() - killed
        finished(process)
        rows = trained(folder / "kill")
        yield Figure("engines started again", [float(rows[-1]["engine/restarts"])], "", "", "higher", 1.0)
        yield Figure("steps of the run", [float(len(rows))], "", "12 were asked for", "higher", 12.0)
        yield Figure("kill to the third step after it", [back], "s")
        gone_on = sum(row["completions/continued"] for row in rows)
        yield Figure("completions that went on after it", [float(gone_on)], "")


def proof_faults(where: Where) -> Iterator[Figure]:
    """Weights that do not arrive."""
    raise NotMeasured("the proof has no fault injection that runs on a card yet")
    yield


def sleep_wake(where: Where) -> Iterator[Figure]:
    """Trainer and engine by turns."""
    raise NotMeasured("trainers and engines do not take turns on a card yet")
    yield


def trl(where: Where) -> Iterator[Figure]:
    """SmolLM2's shape, few steps: ours, and TRL with vLLM colocated on the same card."""
    python = end_to_end.trl_python()  # raises NotMeasured
    if subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False).returncode:
        raise NotMeasured(f"TRL's environment has no vLLM: {python} -m pip install vllm")
    load, cores = QUICK, len(os.sched_getaffinity(0))
    way = {**end_to_end.TRL, "generation": "vllm", "precision": "autocast", "batch": load.peer_batches[-1]}
    with tempfile.TemporaryDirectory() as name:
        files = prepare(Path(name))
        ours = end_to_end.run_ours(files, load, cores, end_to_end.OURS)
        other = end_to_end.run_trl(files, load, cores, way)
    for figure in end_to_end.beside(ours, other):
        yield replace(figure, target=None)  # the benchmark's targets are of a CPU
