"""Seconds of an optimiser step and trained tokens a second of a real launch, beside TRL's GRPOTrainer.

Both sides train the same model on the same prompts (workload.py) with the same group size, prompts a step, longest
completion, learning rate and cores; each with the fastest settings that were found on two cores, of those with float32
weights and moments (products in float32 or in bfloat16, whichever is faster for that side here), with

    python -m benchmarks.speed.end_to_end trl '{"batch": 32}'        one side with settings of your own
    python -m benchmarks.speed.end_to_end ours '{"rollout.max_async_level": 2}'

which prints its figures. TRL 1.16 on two cores, completions cut off at 128 tokens, bfloat16 (2026-11-22): batches of 32
are as fast as those of 8 (72 tokens/s) and take 13.8 GiB instead of 6.2; a static cache fails beside autocast. All of
it in bfloat16 it trains 90 tokens/s in 4.6 GiB, but then small updates are rounded away, which is not the same
training; continuous batching, tried in bfloat16, had not ended its first step after six minutes, half of them beside
other work. At up to 512 tokens in float32 (2026-11-23): batches of 8 take 17.5 GiB for 30 tokens/s, those of 4 10.4 GiB
for 35; the first step takes 484 s with batches of 4 (431 and 488 with a static cache), 356 with those of 2 and 408 with
single completions. Where our trainers tell glibc to keep freed memory (cpu.py), TRL's environment does
("keep_freed"); with tcmalloc instead, which ours take by themselves where it is installed, it needs 4.8 GiB instead of
6.9, but 419 s for that step (a test of some seconds ran beside it). On an AMD EPYC (2026-11-24), whose products in
bfloat16 take half the time of those in float32, autocast does not pay for TRL: it casts all weights anew for every
token that it generates. Batches of 2 train 36 tokens/s so (first step 324 s, batches of 4: 344 s), 43 in float32.

Ours is `python -m trainer`, read from its metrics.jsonl; TRL runs in an environment of its own (`make install-peers`;
peers/trl_grpo.py says what it can do on a CPU). The first steps warm up and are left out, as are ours at the end, when
nothing is sampled any more. A value is one of three parts of the steps in between. Memory is the peak of the
proportional set sizes of all processes of a side, from its start to its end.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.speed.memory import Watch
from benchmarks.speed.rows import NotMeasured, Row, Task
from benchmarks.speed.workload import FULL, QUICK, ROOT, SYSTEM, Files, Workload, prepare
from shared.errors import RunError
from shared.metrics import read_rows
from shared.model.cpu import has_matrix_units, multiplies_bfloat16_fast, multiplies_float16_fast
from verify.worker import die_with_parent

ASYNC_LEVEL = 2
WARM_UP = {"ours": 3, "trl": 1}
"""steps that are not counted"""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRODUCTS = "bfloat16" if multiplies_bfloat16_fast(DEVICE) else "float32"
"""the faster type here"""
ENGINES = "float16" if multiplies_float16_fast(DEVICE) else "bfloat16"
"""type of our engines, the more exact float16 where it is as fast: log-probs of sampled tokens differed from the
trainer's by 0.004 on average, by 0.033 in bfloat16. TRL's own generation has the type of its training"""
OURS: dict[str, Any] = {
    "rollout.max_async_level": ASYNC_LEVEL,
    "model.dtype": ENGINES,
    "optimiser.compute_dtype": PRODUCTS,
}
"""our settings; trainer and engine work at the same time: the engine with half of the cores, the trainer with as many
threads as there are cores, so that none is idle. Two batches ahead keep the engine's batch full while the longest
completions of the oldest one end"""
TRL: dict[str, Any] = {"precision": "autocast" if has_matrix_units(DEVICE) else "float32",
                       "generation": "generate", "keep_freed": True}  # fmt: skip
"""TRL's settings, which train as ours do (float32 weights and moments)"""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
KEEP_FREED = ":".join(
    f"glibc.malloc.{name}"
    for name in ("hugetlb=1", "mmap_max=0", "trim_threshold=2147483647", "top_pad=67108864", "arena_max=1")
)
"""what our trainers do themselves (cpu.py), for TRL"""
PARTS = 3
TARGET = 3.0
LIMIT_S = 3600.0
PEER = "TRL's GRPOTrainer"
INSTALL = "TRL is not installed: make install-peers"
LOG_CHARACTERS = 3000


class StepTime(NamedTuple):
    """One optimiser step."""

    seconds: float
    tokens: float
    """prompt and completion tokens that were trained"""


class Side(NamedTuple):
    """What one side did."""

    steps: list[StepTime]
    """those that count"""
    peak_bytes: int
    versions: dict[str, Any]


def parts(steps: Sequence[StepTime], count: int = PARTS) -> list[list[StepTime]]:
    """Consecutive parts of nearly equal length, at most `count`, none empty."""
    count = min(count, len(steps))
    bounds = [round(number * len(steps) / count) for number in range(count + 1)]
    return [list(steps[first:last]) for first, last in zip(bounds, bounds[1:], strict=False)]


def rates(steps: Sequence[StepTime]) -> list[float]:
    """[parts] tokens a second."""
    return [sum(step.tokens for step in part) / sum(step.seconds for step in part) for part in parts(steps)]


def step_seconds(steps: Sequence[StepTime]) -> list[float]:
    """[parts] seconds of a step."""
    return [statistics.fmean(step.seconds for step in part) for part in parts(steps)]


def counted(steps: Sequence[StepTime], warm_up: int, tail: int) -> list[StepTime]:
    """Without the first `warm_up` and the last `tail`. Raises RunError where nothing is left."""
    left = list(steps[warm_up : len(steps) - tail])
    if not left:
        raise RunError(f"{len(steps)} steps were made, {warm_up + tail} of them do not count: nothing is left")
    return left


def from_metrics(path: Path) -> list[StepTime]:
    """The optimiser steps of a run."""
    rows = [row for row in read_rows(path) if row["kind"] == "train"]
    return [StepTime(row["time/step_s"], row["tokens/trained_per_s"] * row["time/step_s"]) for row in rows]


def from_lines(text: str) -> tuple[dict[str, Any], list[StepTime]]:
    """(versions, steps) of what the peer printed. Raises RunError if it told nothing."""
    told = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not told:
        raise RunError("TRL's runner printed nothing")
    return told[0], [StepTime(row["seconds"], row["tokens"]) for row in told[1:]]


def settings_of(folder: Path, files: Files, load: Workload, own: Mapping[str, Any]) -> list[str]:
    """Command line of our launch: a settings file in the folder, and `own` settings over it."""
    (folder / "ours.toml").write_text(
        f"""name = "end-to-end"
runs_dir = {json.dumps(str(folder))}
steps = {load.steps}
[model]
path = {json.dumps(str(files.model))}
max_tokens = {load.max_completion_tokens + 384}
[data]
train = {json.dumps(str(files.problems))}
validation = ""
order = "file"
system_prompt = {json.dumps(SYSTEM)}
[rollout]
prompts_per_step = {load.prompts_per_step}
group_size = {load.group_size}
max_completion_tokens = {load.max_completion_tokens}
max_sequences = {2 * load.prompts_per_step * load.group_size}
cache_bytes = {load.cache_bytes}
[objective]
filter_groups_by = "off"
[optimiser]
learning_rate = {load.learning_rate}
warmup_steps = 0
micro_batch_tokens = {load.micro_batch_tokens}
[checkpoint]
every = 0
""",
        encoding="utf-8",
    )
    return [sys.executable, "-m", "trainer", str(folder / "ours.toml"),
            *(f"--{name}={value}" for name, value in own.items())]  # fmt: skip


def watched(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[str, int]:
    """(standard output, peak bytes) of a command and all that it starts. Raises RunError with the end of its log."""
    parent = os.getpid()
    with (folder / "out").open("w+") as out, (folder / "log").open("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=log,
            start_new_session=True, preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
        try:
            with Watch(process.pid) as watch:
                code = process.wait(LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        out.seek(0)
        log.seek(0)
        text, said = out.read(), log.read()
    if code:
        raise RunError(f"{' '.join(command[:4])} ended with code {code}:\n{(text + said)[-LOG_CHARACTERS:].strip()}")
    return text, watch.peak_bytes


def environment(threads: int, tunables: str = HUGE_PAGES) -> dict[str, str]:
    """As the Makefile runs ours: large pages, and bytecode (our launch takes tcmalloc by itself)."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": str(threads), "GLIBC_TUNABLES": tunables, "HF_HUB_OFFLINE": "1"}


def run_ours(files: Files, load: Workload, cores: int, own: Mapping[str, Any]) -> Side:
    """One launch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, peak = watched(settings_of(folder, files, load, own), environment(cores), folder)
        steps = from_metrics(folder / "end-to-end" / "metrics.jsonl")
    return Side(
        counted(steps, min(WARM_UP["ours"], load.steps // 3), int(own.get("rollout.max_async_level", ASYNC_LEVEL))),
        peak,
        {},
    )


def trl_python() -> Path:
    """The interpreter of TRL's environment. Raises NotMeasured where it is not installed."""
    found = Path(sys.prefix) / "peers" / "trl" / "bin" / "python"
    if not found.is_file():
        raise NotMeasured(INSTALL)
    return found


def run_trl(files: Files, load: Workload, cores: int, own: Mapping[str, Any]) -> Side:
    """The same with TRL. Raises NotMeasured where it is not installed."""
    python = trl_python()
    settings = {
        "model": str(files.model), "prompts": str(files.prompts), "steps": load.peer_steps, "threads": cores,
        "prompts_per_step": load.prompts_per_step, "group_size": load.group_size,
        "max_completion_tokens": load.max_completion_tokens, "learning_rate": load.learning_rate,
        "batch": load.peer_batch, **own,
    }  # fmt: skip
    tunables = KEEP_FREED if settings.pop("keep_freed") else HUGE_PAGES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(settings))
        script = ROOT / "benchmarks" / "speed" / "peers" / "trl_grpo.py"
        command = [str(python), str(script), str(folder / "settings.json")]
        text, peak = watched(command, environment(cores, tunables), folder)
    versions, steps = from_lines(text)
    return Side(counted(steps, WARM_UP["trl"], 0), peak, versions)


def absolute(name: str, side: Side) -> list[Row]:
    """Figures of one side."""
    better: Any = "higher" if name == "ours" else ""
    lower: Any = "lower" if name == "ours" else ""
    return [
        Row(f"trained, {name}", rates(side.steps), "tokens/s", better=better),
        Row(f"optimiser step, {name}", step_seconds(side.steps), "s", better=lower),
        Row(f"peak memory of all processes, {name}", [side.peak_bytes / 2**30], "GiB", better=lower),
    ]


def beside(ours: Side, trl: Side) -> list[Row]:
    """Ratios of ours to TRL's medians."""
    peer = f"{PEER} {trl.versions.get('trl', '')}".strip()
    rate, seconds = statistics.median(rates(trl.steps)), statistics.median(step_seconds(trl.steps))
    return [
        Row("trained tokens a second", [value / rate for value in rates(ours.steps)], "", peer, "higher", TARGET),
        Row("seconds of an optimiser step", [s / seconds for s in step_seconds(ours.steps)], "", peer, "lower"),
        Row("peak memory", [ours.peak_bytes / trl.peak_bytes], "", peer, "lower", 1.0),
    ]


def not_compared(reason: str) -> list[Row]:
    """The ratios where there is no TRL."""
    return [
        Row("trained tokens a second", [], "", PEER, "higher", TARGET, not_measured=reason),
        Row("seconds of an optimiser step", [], "", PEER, "lower", not_measured=reason),
        Row("peak memory", [], "", PEER, "lower", 1.0, not_measured=reason),
    ]


def rows(task: Task) -> list[Row]:
    """Completions with room to think."""
    return compare(task, FULL)


def compare(task: Task, full: Workload) -> list[Row]:
    """Both sides, one after the other; ours alone where TRL is not installed."""
    load, cores = (QUICK if task.quick else full), len(os.sched_getaffinity(0))
    task.parts(2)
    with tempfile.TemporaryDirectory() as folder:
        files = prepare(Path(folder))
        model = "SmolLM2-135M-Instruct" if files.real_model else "a random model of SmolLM2-135M's shape"
        ours = run_ours(files, load, cores, OURS)
        task.part_done()
        size = load.prompts_per_step * load.group_size
        found = [Row(f"completions a step, {model}", [float(size)], ""), *absolute("ours", ours)]
        try:
            trl = run_trl(files, load, cores, TRL)
        except NotMeasured as absent:
            return found + not_compared(str(absent))
        task.part_done()
    return [*found, *absolute("TRL", trl), *beside(ours, trl)]


def main(side: str, own: dict[str, Any]) -> None:
    """Print the figures of one side with settings over its own ones."""
    run, known = {"ours": (run_ours, OURS), "trl": (run_trl, TRL)}[side]
    with tempfile.TemporaryDirectory() as folder:
        load = FULL._replace(**{name: own.pop(name) for name in set(own) & set(Workload._fields)})
        found = run(prepare(Path(folder)), load, len(os.sched_getaffinity(0)), {**known, **own})
    for step in found.steps:
        print(f"{step.seconds:8.2f} s {step.tokens:8.0f} tokens")
    print(f"{found.peak_bytes / 2**30:.2f} GiB, {[round(rate) for rate in rates(found.steps)]} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
