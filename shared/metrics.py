"""Every number that a run reports: its name, unit and definition, and the file it goes to (metrics.jsonl).

One JSON object a line: {"step": 3, "kind": "train", "time": <unix seconds>, "reward/mean": 0.61, ...}. A step that is
written again (after a resume) replaces the earlier line when read. A number that is not finite becomes null.
A disk that is full never stops training: lines wait in memory until there is room (`pending`).
"""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shared.atomic_write import append_line, write_whole
from shared.json_reader import parse_json


class Metric(NamedTuple):
    """Unit and definition of a metric."""

    unit: str
    definition: str


METRICS: dict[str, Metric] = {
    # ---- what the policy does: means over all completions that ended since the last step, filtered groups included
    "reward/mean": Metric("reward", "mean total reward of graded completions"),
    "reward/format": Metric("reward", "mean format component"),
    "reward/correctness": Metric("reward", "mean correctness component"),
    "reward/length": Metric("reward", "mean length penalty, 0 or less"),
    "reward/language": Metric("reward", "mean language component"),
    "reward/extra": Metric("reward", "mean of what all extra rewards add"),
    "reward/std": Metric("reward", "standard deviation of the total reward"),
    "accuracy": Metric("share", "completions whose final answer is right, or whose program passed every test"),
    "tests_passed": Metric("share", "mean share of its tests that a program passed; only where there are programs"),
    "consistency": Metric("share", "completions whose problem, reasoning and answer are in one language"),
    "format": Metric("share", "well-formed completions"),
    # ---- completions of the trained groups
    "length/mean": Metric("tokens", "mean completion length"),
    "length/p50": Metric("tokens", "median completion length"),
    "length/p99": Metric("tokens", "99th percentile of the completion length"),
    "length/max": Metric("tokens", "longest completion"),
    "truncated": Metric("share", "completions cut at rollout.max_completion_tokens"),
    "staleness/mean": Metric("versions", "mean age of a trained token: trained version less the one that sampled it"),
    "staleness/max": Metric("versions", "age of the oldest trained token"),
    "spans/multi_version_share": Metric("share", "completions sampled by two or more policy versions"),
    "groups/trained": Metric("groups", "groups in this step"),
    "groups/offline": Metric("groups", "offline groups in this step, in addition to the sampled ones"),
    "reward/offline": Metric("reward", "mean total reward of the offline groups of this step"),
    "groups/filtered": Metric("groups", "groups without signal since the last step: all values equal, not trained"),
    "completions/aborted": Metric("completions", "completions given up, for engines died of them: 0 but for a fault"),
    "completions/continued": Metric("completions", "completions that went on after their engine died"),
    # ---- episodes of the trained groups, where problems have an environment
    "environment/turns": Metric("turns", "mean turns of an episode"),
    "environment/wait_s": Metric("s", "mean time that an environment took to answer a turn"),
    "environment/waiting": Metric(
        "share", "open completions that wait for their environment when the step ends, of all open ones"
    ),
    "environment/idle_seats": Metric(
        "share",
        "seats of engines that are free only because episodes wait for their environments, of these seats and those in "
        "use, by time over the step (trainer/timing.py)",
    ),
    "environment/tool_calls": Metric("calls", "mean calls of tools in an episode"),
    "environment/failed_calls": Metric("share", "calls of tools that failed, of all calls"),
    "environment/failed": Metric("share", "episodes that are not graded, because their environment failed"),
    "environment/started_anew": Metric("share", "episodes begun anew, as their environment did not repeat itself"),
    "environment/info": Metric("number", "environment/info/NAME: mean over turns of a number of the environment"),
    # ---- learning: means over trained completion tokens
    "loss": Metric(
        "nats", "policy loss of the step, as normalised by objective.loss_aggregation; no KL, no entropy bonus"
    ),
    "ratio/mean": Metric("ratio", "mean importance ratio of trainer to sampling policy"),
    "ratio/max": Metric("ratio", "largest importance ratio"),
    "logprob_difference/mean": Metric("nats", "mean |log-prob of the trainer - log-prob of the engine|"),
    "logprob_difference/max": Metric("nats", "largest such difference"),
    "kl/k3": Metric("nats", "KL(sampling policy || trainer) by the k3 estimator: mean of ratio - 1 - log ratio"),
    "kl/reference": Metric("nats", "mean log-ratio of trainer to reference: KL(trainer || reference) a token"),
    "kl/teacher": Metric("nats", "mean log-ratio of trainer to teacher: KL(trainer || teacher) a token"),
    "clip/low": Metric("share", "tokens whose gradient a lower bound of the objective changes"),
    "clip/high": Metric("share", "tokens whose gradient an upper bound of the objective changes"),
    "clip/masked": Metric("share", "tokens that the objective's importance weights leave out"),
    "clip/bound": Metric("ratio", "objective.clip_high of the step, where objective.entropy_target moves it"),
    "experts/max_load": Metric("ratio", "tokens of a mixture's busiest expert by those of a mean one, mean of layers"),
    "experts/unused": Metric("share", "experts of a mixture that no token of the step went to"),
    "experts/differing": Metric("share", "replayed experts that the trainer's router would not have chosen itself"),
    "entropy": Metric("nats", "mean entropy of the trainer's next-token distribution"),
    "grad_norm": Metric("norm", "global gradient norm before clipping"),
    "stage": Metric("number", "stage of the run, 0-based"),
    "lr": Metric("rate", "learning rate of the step"),
    "padding_share": Metric("share", "token slots of the step's micro-batches that hold no token"),
    "micro_batches": Metric("count", "micro-batches of each trainer rank"),
    # ---- the last weight update that finished before the step
    "sync/bytes": Metric("bytes", "weights written for the engines"),
    "sync/write_s": Metric("s", "slowest trainer's write"),
    "sync/update_s": Metric("s", "slowest engine's update: receive, pause, apply, resume"),
    "sync/total_s": Metric("s", "from the start of the write to the proof of the last engine"),
    "sync/GB_per_s": Metric("GB/s", "bytes written by write_s"),
    "sync/stall_ms": Metric("ms", "longest time without a token that running requests saw across the update"),
    "sync/stall_steps": Metric("decode steps", "the same in median decode steps"),
    "sync/logprob_diff_mean": Metric("nats", "mean |log-prob difference| of the probe between trainer and engines"),
    "sync/logprob_diff_max": Metric("nats", "largest such difference"),
    "sync/logprob_move_diff": Metric("nats", "mean |difference| of how far the probe moved in trainer and engines"),
    # ---- time and machine
    "time/step_s": Metric("s", "wall time of the step"),
    "time/wait_batch_s": Metric("s", "waiting for a full batch of groups (rollout and verification)"),
    "time/train_s": Metric("s", "forward, backward, optimiser step"),
    "time/wait_sync_s": Metric("s", "waiting for a weight update"),
    "time/checkpoint_s": Metric("s", "writing the checkpoint of the step before"),
    "time/total_s": Metric("s", "training time of the run, over all its launches"),
    "tokens/generated_per_s": Metric("tokens/s", "completion tokens of all engines; not of a last step without any"),
    "tokens/trained_per_s": Metric("tokens/s", "prompt and completion tokens put through the trainers"),
    "tokens/generated_per_s_per_device": Metric("tokens/s", "the former, by the GPUs of the engines (CPU: by engine)"),
    "tokens/trained_per_s_per_device": Metric("tokens/s", "the latter, by trainer"),
    "tflops_per_device": Metric(
        "TFLOP/s",
        "operations of forward and backward, by trainer and time of both and of the "
        "optimiser's step; what is recomputed counts once (trainer/step/flops.py)",
    ),
    "mfu": Metric(
        "share",
        "tflops_per_device by the dense bfloat16 peak of the card's data sheet; only on cards that "
        "trainer/step/flops.py lists",
    ),
    "memory/controller_peak_bytes": Metric("bytes", "largest resident memory so far of the controller"),
    "memory/trainer_peak_bytes": Metric("bytes", "largest resident memory so far of a trainer rank"),
    "memory/engine_peak_bytes": Metric("bytes", "largest resident memory so far of an engine"),
    "memory/trainer_peak_gpu_bytes": Metric("bytes", "largest allocated GPU memory so far of a trainer rank"),
    "memory/engine_peak_gpu_bytes": Metric("bytes", "largest allocated GPU memory so far of an engine"),
    # ---- verdicts, since the launch; the last four are no grade, and their completions are not trained
    "verify/correct": Metric("completions", "right answers, and programs that passed every test"),
    "verify/wrong": Metric("completions", "wrong answers, and programs that failed a test"),
    "verify/open": Metric("completions", "answers of open problems: no verifier is asked"),
    "verify/no_answer": Metric("completions", "nothing to grade: no box, no program, or a broken format"),
    "verify/timeout": Metric("completions", "verifications killed at reward.deadline_s"),
    "verify/crash": Metric("completions", "verifications whose process died"),
    "verify/unverifiable": Metric("completions", "ground-truth answers or tests that cannot be understood"),
    "verify/sandbox_refused": Metric("completions", "programs that were not run: the host cannot isolate them"),
    # ---- faults, since the launch
    "engine/restarts": Metric("count", "engines started again after their death"),
    "messages/refused": Metric("count", "messages and connections not taken: unreadable, unasked for, of a stranger"),
    # ---- validation problems; at rollout.temperature, and greedy
    "evaluation/accuracy": Metric("share", "right final answers"),
    "evaluation/consistency": Metric("share", "problem, reasoning and answer in one language"),
    "evaluation/format": Metric("share", "well-formed completions"),
    "evaluation/reward": Metric("reward", "mean total reward"),
    "evaluation/tokens": Metric("tokens", "mean completion length"),
    "evaluation/majority": Metric("share", "maj@k: chance that the most frequent answer of evaluate.samples is right"),
    "evaluation/pass_at_k": Metric("share", "pass@k, k = evaluate.samples: problems with a right completion among k"),
    "evaluation/distinct": Metric("share", "different bigrams of a problem's completions, of all of them"),
    "evaluation/self_bleu": Metric("share", "mean BLEU-4 of each completion against the others of its problem"),
    "evaluation/answers": Metric(
        "count", "different answers to a problem among evaluate.samples, right ones being one"
    ),
    "evaluation/greedy_accuracy": Metric("share", "right final answers, greedy"),
    "evaluation/greedy_consistency": Metric("share", "one language, greedy"),
    "evaluation/greedy_format": Metric("share", "well-formed, greedy"),
    "evaluation/greedy_reward": Metric("reward", "mean total reward, greedy"),
    "evaluation/info": Metric("number", "evaluation/info/NAME: mean over problems of a number of the environment"),
    "evaluation/greedy_info": Metric("number", "evaluation/greedy_info/NAME: the same, greedy"),
    "evaluation/greedy_tokens": Metric("tokens", "mean completion length, greedy"),
    # ---- SFT; its steps count apart
    "sft/loss": Metric("nats", "mean cross-entropy of a completion token"),
    "sft/lr": Metric("rate", "learning rate of the SFT step"),
    "sft/tokens_per_s": Metric("tokens/s", "tokens put through the trainers since SFT began"),
    "sft/tokens_per_s_per_device": Metric("tokens/s", "the same, by trainer"),
    "sft/tflops_per_device": Metric("TFLOP/s", "as tflops_per_device, of the SFT step"),
    "sft/mfu": Metric("share", "as mfu, of the SFT step"),
    "sft/trainer_peak_bytes": Metric("bytes", "largest resident memory so far of a trainer rank"),
    "sft/trainer_peak_gpu_bytes": Metric("bytes", "largest allocated GPU memory so far of a trainer rank"),
}

KINDS = ("sft", "evaluation", "train")
FAMILIES = ("environment/info/", "evaluation/info/", "evaluation/greedy_info/", "judge/")
"""beginnings of names that end with a name of a plug-in or of a judge"""


def check_names(values: Mapping[str, Any]) -> None:
    """Raise KeyError naming the nearest known metric for a name that METRICS lacks."""
    for name in values:
        if name not in METRICS and not name.startswith(FAMILIES):
            near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0)
            raise KeyError(f"unknown metric '{name}' (nearest: '{near[0]}'): define it in shared/metrics.py")


def kind_of(values: Mapping[str, Any]) -> str:
    """Return "sft" or "evaluation" if all names begin with it, else "train"."""
    groups = {name.partition("/")[0] for name in values}
    return groups.pop() if len(groups) == 1 and groups <= {"sft", "evaluation"} else "train"


MOST_PENDING = 10_000
"""lines of metrics that wait for room on the disk, about 40 MB; the oldest make room for new ones"""


class MetricsLog:
    """Appends one line per step. After a resume from step N, lines of later steps are dropped and made again."""

    def __init__(self, path: Path, resume_step: int | None = None):
        """Open `path`. Lines of steps above `resume_step` go (SFT's stay); None starts an empty file."""
        self.path = path
        self.pending: list[bytes] = []
        """lines that could not be written yet"""
        self.lost = 0
        """lines that waited too long, and are written no more"""
        self.last_failure = ""
        """why the last write failed, and what to do"""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else [row for row in read_rows(path) if _survives(row, resume_step)]
        write_whole(path, "".join(_encode(row) for row in kept))

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Append one line, flushed. Raises KeyError for an unknown name, nothing for a failing disk."""
        check_names(values)
        row: dict[str, Any] = {"step": step, "kind": kind_of(values), "time": round(time.time(), 3), **values}
        self.pending.append(_encode(row).encode().removesuffix(b"\n"))
        try:
            while self.pending:
                append_line(self.path, self.pending[0])
                self.pending.pop(0)
        except OSError as error:
            self.last_failure = str(error)
            self.lost += max(len(self.pending) - MOST_PENDING, 0)
            del self.pending[:-MOST_PENDING]


def _encode(row: Mapping[str, Any]) -> str:
    return json.dumps({key: _plain(value) for key, value in row.items()}, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    number = float(value)  # NumPy's and torch's scalars too
    return number if math.isfinite(number) else None


def _survives(row: Mapping[str, Any], resume_step: int) -> bool:
    return bool(row["kind"] == "sft" or row["step"] <= resume_step)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows in the order of first writing; of rows of one step and kind the last, and of its evaluations (at
    the sampling temperature, and greedy) the last value of each metric. Damaged lines are left out (a launch that
    resumes reports them, see `trainer.run_log.check_folder`), a missing file is empty."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = decode_row(line)
        except ValueError:
            continue
        key = row["kind"], row["step"]
        rows[key] = rows.get(key, {}) | row if row["kind"] == "evaluation" else row
    return list(rows.values())


def decode_row(line: bytes) -> dict[str, Any]:
    """Decode one line. Raises ValueError for a damaged one."""
    row = parse_json(line)
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or not isinstance(row.get("step"), int):
        raise ValueError("no row of metrics")
    return row


def series(rows: list[dict[str, Any]], name: str, kind: str = "train") -> tuple[list[int], list[float]]:
    """Return (steps, values) of one metric, where it was reported."""
    points = [(row["step"], row[name]) for row in rows if row["kind"] == kind and row.get(name) is not None]
    return [step for step, _ in points], [float(value) for _, value in points]
