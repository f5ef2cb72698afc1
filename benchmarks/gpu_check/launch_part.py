"""Items of the launch part: whole launches on the card (torchrun, FSDP2, vLLM), each a command as a user types it."""

from __future__ import annotations

import asyncio
import itertools
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

from rollout.local_engine import LocalEngine  # first: it prepares the environment for vLLM

# isort: split
import psutil
import torch
from msgspec.structs import replace

from benchmarks import end_to_end
from benchmarks.figures import ROOT, Figure, NotMeasured
from benchmarks.gpu_check import faulty_worker
from benchmarks.gpu_check.place import Where
from benchmarks.llama import SMOLLM2_135M, Shape, random_weights, write_model
from benchmarks.runs import training_rows
from rollout import vllm_config
from shared.config import Config
from shared.errors import RunError, SyncMismatch
from trainer.evaluation import at_temperature, read_evaluations

QUICKSTART = "configs/quickstart.toml"
LEARNING = ("--steps=60", "--evaluate.greedy=false", "--checkpoint.every=0")
SHORT = ("--steps=12", "--sft.steps=60", "--prepare.options.problems=256", "--prepare.options.validation=32",
         "--evaluate.problems=32", "--evaluate.greedy=false", "--checkpoint.every=0")  # fmt: skip
LEARNED = 0.2
"""accuracy that the quickstart must gain by reinforcement learning"""
STALE = ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight",
         "model.layers.0.input_layernorm.weight", "model.norm.weight")  # fmt: skip
"""tensors that stay as they were, one after the other; linears cannot on a CPU, which keeps packed copies of them"""
MOVES = (0.01, 0.1)
"""how far the weights move, as a share of each tensor's size"""
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
        while not training_rows(run_dir) and process.poll() is None:
            time.sleep(WAIT_S)
        first = time.time() - began
        finished(process)
        yield Figure("command to the first trained step", [first], "s")
        yield from run_figures(run_dir, None if where.tiny else LEARNED)


def run_figures(run_dir: Path, least: float | None) -> Iterator[Figure]:
    """Yield what a finished run of the quickstart learned, sent and took. least: accuracy that it must gain."""
    rows, records = training_rows(run_dir), at_temperature(read_evaluations(run_dir), 1.0)
    before, after = (records[end].evaluation.accuracy or 0.0 for end in (0, -1))
    yield Figure("accuracy before reinforcement learning", [before], "%")
    yield Figure("accuracy after it", [after], "%")
    yield Figure("accuracy that it gained", [after - before], "%", "", "higher", least)
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
        while len(training_rows(folder / "kill")) < 3 and process.poll() is None:
            time.sleep(WAIT_S)
        victim = engine_process(process.pid) if process.poll() is None else None
        if victim is None:
            process.kill()
            out, _ = process.communicate()
            raise RunError(f"no engine process was found in the launch: {out[-SAID:]}")
        os.kill(victim.pid, signal.SIGKILL)
        killed, at = time.monotonic(), len(training_rows(folder / "kill"))
        while len(training_rows(folder / "kill")) <= at + 2 and process.poll() is None:  # two steps may be on their way
            time.sleep(WAIT_S)
        back = time.monotonic() - killed
        finished(process)
        rows = training_rows(folder / "kill")
        yield Figure("engines started again", [float(rows[-1]["engine/restarts"])], "", "", "higher", 1.0)
        yield Figure("steps of the run", [float(len(rows))], "", "12 were asked for", "higher", 12.0)
        yield Figure("kill to the third step after it", [back], "s")
        gone_on = sum(row["completions/continued"] for row in rows)
        yield Figure("completions that went on after it", [float(gone_on)], "")


def proof_faults(where: Where) -> Iterator[Figure]:
    """A model whose weights move, and an engine in which some of them stay as they were: stale, though all arrived."""
    with tempfile.TemporaryDirectory() as name:
        yield from asyncio.run(find_faults(where, Path(name)))


async def find_faults(where: Where, folder: Path) -> list[Figure]:
    """Plant each of STALE at updates that move the weights by each of MOVES; between them come honest updates."""
    vllm_config.WORKER_EXTENSION = faulty_worker.NAME
    shape = where.size(SMOLLM2_135M, Shape(hidden=128, layers=2, heads=4, kv_heads=2, inner=256, vocabulary=512))
    model, planted, named, alarms = folder / "model", 0, 0, 0
    model.mkdir()
    write_model(model, shape)
    config = Config.model_validate({"model": {"path": str(model), "dtype": "bfloat16"},
                                    "rollout": {"cache_bytes": 64 << 20, "max_sequences": 8}})  # fmt: skip
    weights = {key: value.data.to(where.device) for key, value in random_weights(shape).items()}
    async with LocalEngine(config, str(model)) as engine:
        await engine.follow(list(weights.items()))
        await engine.update()
        for tensor, share in itertools.product(STALE, MOVES):
            for values in weights.values():
                values.add_(share * values.square().mean().sqrt() * torch.randn_like(values))
            assert engine.rank.engine.llm is not None
            [count] = await engine.rank.engine.llm.collective_rpc("maestrale_keep_old", args=([tensor],))
            try:
                await engine.update()
            except SyncMismatch as found:
                named += tensor in str(found)
            planted += count > 0
            for values in weights.values():
                values.mul_(1.01)
            try:
                await engine.update()
            except SyncMismatch:
                alarms += 1
    return [
        Figure("parameters that stayed stale", [float(planted)], "", "", "higher", 1.0),
        Figure("of them stopped and named", [named / max(1, planted)], "%", "", "higher", 1.0),
        Figure("honest updates that were refused", [float(alarms)], "", "", "lower", 0.0),
    ]


def sleep_wake(where: Where) -> Iterator[Figure]:
    """The same synchronous launch with trainer and engine resident on the card, and in turns."""
    seconds = []
    with tempfile.TemporaryDirectory() as name:
        for way in ("resident", "turns"):
            process = start(Path(name), way, *SHORT, "--rollout.max_async_level=0", f"--placement.colocate={way}")
            finished(process)
            rows = training_rows(Path(name) / way)
            seconds.append(statistics.median(row["time/step_s"] for row in rows))
            yield Figure(f"steps, {way}", [float(len(rows))], "", "12 were asked for", "higher", 12.0)
            yield from medians(rows, (f"step, {way}", "time/step_s", "s", 1.0))
    yield Figure("step in turns", [seconds[1] / seconds[0]], "", "resident", "lower")


def trl(where: Where) -> Iterator[Figure]:
    """SmolLM2's shape, few steps: ours, and TRL with vLLM colocated on the same card."""
    python = end_to_end.trl_python()  # raises NotMeasured
    if subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False).returncode:
        raise NotMeasured(f"TRL's environment has no vLLM: {python} -m pip install vllm")
    load, cores = end_to_end.QUICK, len(os.sched_getaffinity(0))
    way = {**end_to_end.TRL, "generation": "vllm", "precision": "autocast", "batch": load.peer_batches[-1]}
    with tempfile.TemporaryDirectory() as name:
        files = end_to_end.prepare(Path(name))
        ours = end_to_end.run_ours(files, load, cores, end_to_end.OURS)
        other = end_to_end.run_trl(files, load, cores, way)
    for figure in end_to_end.beside(ours, other):
        yield replace(figure, target=None)  # the benchmark's targets are of a CPU
