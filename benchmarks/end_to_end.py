"""A real launch on SmolLM2-135M beside TRL's GRPOTrainer: steps, trained tokens, memory.

Both sides train the same model on the same prompts with the same group size, prompts a step, longest completion,
learning rate and cores; each with the fastest settings that were found, of those with float32 weights and
moments. TRL's are looked for on the machine at hand: products in float32 and in bfloat16 (autocast), each with several
batch sizes, take two steps, and the fastest goes on. It samples with plain `generate`, and glibc keeps freed memory as
our trainers tell it; on two cores a static cache and continuous batching were slower or took more memory. All of it in
bfloat16 is faster, but rounds small updates away, which is not the same training.

Prompts are English word problems under a system prompt, rendered once as the model's chat format has it, in the order
of the file. Every group is trained (`filter_groups_by = "off"`), as TRL does, so that both sides sample what they
train. The model is models/smollm2-135m-instruct where `make smollm2` and `python -m examples.quickstart.smollm2` made
it; without it a stand-in of the same shape: random weights, the quickstart's tokenizer with spare tokens up to the same
vocabulary.

Ours is `python -m trainer`, read from its metrics.jsonl; TRL runs in an environment of its own (`make install-peers`;
peers/trl_grpo.py says what it can do on a CPU). The first steps warm up and are left out, as are ours at the end, when
nothing is sampled any more. A value is one of three parts of the steps in between. Memory is the peak of the
proportional set sizes of all processes of a side, from its start to its end. `cut_short` is the same with completions
that are cut off at 128 tokens.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.figures import ROOT, Figure, NotMeasured, benchmark
from benchmarks.llama import SMOLLM2_135M, Shape, write_model, write_tokenizer
from benchmarks.memory import Watch, tree_bytes
from examples.quickstart.word_problems import make_word_problem
from shared.chat import Chat
from shared.errors import RunError
from shared.metrics import read_rows
from shared.model.cpu.processor import multiplies_bfloat16_fast
from verify.code.sandbox.syscalls import die_with_parent

MODEL = ROOT / "models" / "smollm2-135m-instruct"
SYSTEM = "Think step by step inside <think> </think>, then give the final answer in \\boxed{}."
PROBLEMS = 256


class Workload(NamedTuple):
    """What both sides do, and how much of it each side holds at a time."""

    prompts_per_step: int
    group_size: int
    max_completion_tokens: int
    learning_rate: float
    steps: int
    """of ours"""
    peer_steps: int
    micro_batch_tokens: int
    """of a micro-batch of ours: a third of a group, on average"""
    cache_bytes: int
    """of the engine: what is in flight most of the time, not all completions at their longest"""
    peer_batches: tuple[int, ...]
    """completions that the peer trains at a time: the fastest of these"""


FULL = Workload(4, 8, 512, 1e-5, 9, 4, 896, 448 << 20, (2, 4))
"""room to think: SmolLM2-135M-Instruct writes 290 tokens on average, from 10 to the limit, which three in ten reach"""
CUT_SHORT = Workload(4, 8, 128, 1e-5, 12, 5, 640, 160 << 20, (8, 16))
"""the same cut off where three in four completions have not ended: lengths hardly differ, little is padded"""
QUICK = Workload(2, 4, 32, 1e-5, 6, 3, 640, 160 << 20, (8,))


class Files(NamedTuple):
    """Where it lies."""

    model: Path
    problems: Path
    """JSON lines for ours"""
    prompts: Path
    """a JSON list of rendered prompts for the peer"""
    real_model: bool


def prepare(folder: Path, shape: Shape = SMOLLM2_135M, model: Path = MODEL) -> Files:
    """Write prompts, and a model where `model` is not there, into the folder."""
    real = model.is_dir()
    found = Files(model if real else folder / "model", folder / "problems.jsonl", folder / "prompts.json", real)
    if not real:
        found.model.mkdir()
        write_model(found.model, shape)
        write_tokenizer(found.model, shape)
    rng = random.Random("workload")
    stories = [make_word_problem(rng, "en", (2, 3)) for _ in range(PROBLEMS)]
    problems = [{"problem": story.text, "answer": str(story.answer), "language": "en"} for story in stories]
    found.problems.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
    chat = Chat(found.model)
    turns = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": story.text}] for story in stories]
    found.prompts.write_text(json.dumps([chat.render_turns(one) for one in turns]), encoding="utf-8")
    return found


def multiplies_float16_fast(device_type: str) -> bool:
    """Whether products of float16 matrices are as fast as those of bfloat16 or faster: on GPUs, and on CPUs with
    float16 instructions (AVX512-FP16) whose bfloat16 is slow. On such a CPU, an Intel Xeon, a decode step
    of SmolLM2-135M with 64 sequences took 327 ms in float16 and 412 in bfloat16, with 32 of them 213 and 211 (one
    thread)."""
    return device_type != "cpu" or (
        bool(torch.cpu.get_capabilities().get("avx512_fp16")) and not multiplies_bfloat16_fast("cpu")
    )


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
TRL: dict[str, Any] = {"generation": "generate"}
"""TRL's settings, which train as ours do; precision and batch size are tried"""
PRECISIONS = ("float32", "autocast")
TRIAL_STEPS = WARM_UP["trl"] + 1
HUGE_PAGES = "glibc.malloc.hugetlb=1"
KEEP_FREED = ":".join(
    f"glibc.malloc.{name}"
    for name in ("hugetlb=1", "mmap_max=0", "trim_threshold=2147483647", "top_pad=67108864", "arena_max=1")
)
"""what our trainers do themselves, for TRL"""
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
    """Cut steps into consecutive parts of nearly equal length, at most `count`, none empty."""
    count = min(count, len(steps))
    bounds = [round(number * len(steps) / count) for number in range(count + 1)]
    return [list(steps[first:last]) for first, last in zip(bounds, bounds[1:], strict=False)]


def rates(steps: Sequence[StepTime]) -> list[float]:
    """Return [parts] tokens a second."""
    return [sum(step.tokens for step in part) / sum(step.seconds for step in part) for part in parts(steps)]


def step_seconds(steps: Sequence[StepTime]) -> list[float]:
    """Return [parts] seconds of a step."""
    return [statistics.fmean(step.seconds for step in part) for part in parts(steps)]


def counted(steps: Sequence[StepTime], warm_up: int, tail: int) -> list[StepTime]:
    """Leave out the first `warm_up` and the last `tail` steps. Raises RunError where nothing is left."""
    left = list(steps[warm_up : len(steps) - tail])
    if not left:
        raise RunError(f"{len(steps)} steps were made, {warm_up + tail} of them do not count: nothing is left")
    return left


def from_metrics(path: Path) -> list[StepTime]:
    """Return the optimiser steps of a run."""
    rows = [row for row in read_rows(path) if row["kind"] == "train"]
    return [StepTime(row["time/step_s"], row["tokens/trained_per_s"] * row["time/step_s"]) for row in rows]


def from_lines(text: str) -> tuple[dict[str, Any], list[StepTime]]:
    """Return (versions, steps) of what the peer printed. Raises RunError if it told nothing."""
    told = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not told:
        raise RunError("TRL's runner printed nothing")
    return told[0], [StepTime(row["seconds"], row["tokens"]) for row in told[1:]]


def settings_of(folder: Path, files: Files, load: Workload, own: Mapping[str, Any]) -> list[str]:
    """Return the command line of our launch: a settings file in the folder, and `own` settings over it."""
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
    """Return (standard output, peak bytes) of a command and what it starts. Raises RunError with the end of its log."""
    parent = os.getpid()
    with (folder / "out").open("w+") as out, (folder / "log").open("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=log,
            start_new_session=True, preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
        try:
            with Watch(lambda: [tree_bytes(process.pid)]) as watch:
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
    return text, watch.peaks[0]


def environment(threads: int, tunables: str = HUGE_PAGES) -> dict[str, str]:
    """Return the environment that the Makefile gives ours: large pages, bytecode (tcmalloc is taken without it)."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": str(threads), "GLIBC_TUNABLES": tunables, "HF_HUB_OFFLINE": "1"}


def run_ours(files: Files, load: Workload, cores: int, own: Mapping[str, Any]) -> Side:
    """Launch ours."""
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
    """Return the interpreter of TRL's environment. Raises NotMeasured where it is not installed."""
    found = Path(sys.prefix) / "peers" / "trl" / "bin" / "python"
    if not found.is_file():
        raise NotMeasured(INSTALL)
    return found


def run_trl(files: Files, load: Workload, cores: int, own: Mapping[str, Any]) -> Side:
    """Run the same with TRL. Raises NotMeasured where it is not installed."""
    python = trl_python()
    settings = {
        "model": str(files.model), "prompts": str(files.prompts), "steps": load.peer_steps, "threads": cores,
        "prompts_per_step": load.prompts_per_step, "group_size": load.group_size,
        "max_completion_tokens": load.max_completion_tokens, "learning_rate": load.learning_rate,
        **own,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(settings))
        script = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
        command = [str(python), str(script), str(folder / "settings.json")]
        text, peak = watched(command, environment(cores, KEEP_FREED), folder)
    versions, steps = from_lines(text)
    return Side(counted(steps, WARM_UP["trl"], 0), peak, versions)


def fastest_trl(files: Files, load: Workload, cores: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield (settings of TRL, trained tokens a second over a step) for every precision and batch size. Raises
    NotMeasured where TRL is not installed."""
    for precision in PRECISIONS:
        for batch in load.peer_batches:
            own = {**TRL, "precision": precision, "batch": batch}
            side = run_trl(files, load._replace(peer_steps=TRIAL_STEPS), cores, own)
            yield own, statistics.median(rates(side.steps))


def absolute(name: str, side: Side) -> Iterator[Figure]:
    """Yield the figures of one side."""
    better: Any = ("higher", "lower") if name == "ours" else ("", "")
    yield Figure(f"trained, {name}", rates(side.steps), "tokens/s", better=better[0])
    yield Figure(f"optimiser step, {name}", step_seconds(side.steps), "s", better=better[1])
    yield Figure(f"peak memory of all processes, {name}", [side.peak_bytes / 2**30], "GiB", better=better[1])


def beside(ours: Side, trl: Side | None, absent: str = "") -> Iterator[Figure]:
    """Yield the ratios of ours to TRL's medians. absent: why there is no TRL."""
    peer, ratios = PEER, [list[float](), [], []]
    if trl is not None:
        peer = f"{PEER} {trl.versions.get('trl', '')}".strip()
        rate, seconds = statistics.median(rates(trl.steps)), statistics.median(step_seconds(trl.steps))
        ratios = [[value / rate for value in rates(ours.steps)], [s / seconds for s in step_seconds(ours.steps)],
                  [ours.peak_bytes / trl.peak_bytes]]  # fmt: skip
    tokens, steps, memory = ratios
    yield Figure("trained tokens a second", tokens, "", peer, "higher", TARGET, not_measured=absent)
    yield Figure("seconds of an optimiser step", steps, "", peer, "lower", not_measured=absent)
    yield Figure("peak memory", memory, "", peer, "lower", 1.0, not_measured=absent)


@benchmark()
def end_to_end(quick: bool) -> Iterator[Figure]:
    """Measure completions with room to think."""
    yield from both_sides(QUICK if quick else FULL)


def both_sides(load: Workload) -> Iterator[Figure]:
    """Run both sides, one after the other; ours alone where TRL is not installed."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        files = prepare(Path(folder))
        model = "SmolLM2-135M-Instruct" if files.real_model else "a random model of SmolLM2-135M's shape"
        yield Figure(f"completions a step, {model}", [float(load.prompts_per_step * load.group_size)], "")
        ours = run_ours(files, load, cores, OURS)
        yield from absolute("ours", ours)
        try:
            tried = []
            for own, rate in fastest_trl(files, load, cores):
                tried.append((rate, own))
                name = f"trained, TRL tried in {own['precision']} with batches of {own['batch']}"
                yield Figure(name, [rate], "tokens/s")
            trl = run_trl(files, load, cores, max(tried, key=lambda one: one[0])[1])
        except NotMeasured as absent:
            yield from beside(ours, None, str(absent))
            return
        yield from absolute("TRL", trl)
        yield from beside(ours, trl)
