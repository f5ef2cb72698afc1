"""Writes and shows what a run does: metrics.jsonl, rollouts/step_N.jsonl, evaluations.jsonl, the progress lines.

A step's `sync/*` metrics are those of the last weight update that finished before it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rollout.client import EngineClient, SyncReport
from shared.atomic_write import append_line, write_whole, writing
from shared.config import Config
from shared.errors import ConfigError
from shared.json_reader import decode_json
from shared.launch.sockets import refused
from shared.launch.watchdog import Peer
from shared.metrics import MetricsLog, decode_row
from shared.progress import Progress
from shared.types import Group, Verdict
from trainer.data.data_source import PromptFormat, write_jsonl
from trainer.episodes import turns_of
from trainer.evaluation import FILE, Evaluation, EvaluationRecord, forget_evaluations
from trainer.health import clipped_rounding, doubt
from trainer.ledger import Ledger
from trainer.objectives.registry import objective_of
from trainer.schedule import learning_rate
from trainer.step.batching import Learned
from trainer.step.rank import Stepped
from trainer.step_metrics import filtered_text, offline_metrics, rollout_metrics, speed_metrics, training_metrics
from trainer.timing import IdleSeats, PhaseTimer
from verify.scorer import RewardScorer

TRAINING = ("log-probs of the batch", "forward and backward", "optimiser step", "move of the reference")
"""phases of the clock in which trainers work"""
STAGES = "stages.jsonl"
"""one line for every change of stage"""


class RunLogger:
    """Writes metrics, rollouts and evaluations of a run and shows its progress; display never raises into training."""

    def __init__(
        self, clock: PhaseTimer, progress: Progress, engines: EngineClient, scorer: RewardScorer, ledger: Ledger,
        peers: Callable[[], list[Peer]], peak_flops: float = 0.0, prompts: PromptFormat | None = None,
    ):  # fmt: skip
        """peak_flops: of a trainer's card; 0 where it is not known. prompts: needed where problems have an
        environment."""
        self.clock, self.progress, self.peers, self.peak_flops = clock, progress, peers, peak_flops
        self.prompts = prompts
        self.engines, self.scorer, self.ledger = engines, scorer, ledger
        self.folder = self.config.run_dir
        with writing(self.folder / "rollouts"):
            (self.folder / "rollouts").mkdir(parents=True, exist_ok=True)
        self.metrics = MetricsLog(self.folder / "metrics.jsonl", resume_step=ledger.version)
        self.reported_waiting = 0
        """lines of metrics that waited for room when that was last reported"""
        self.rollouts: dict[int, int] | None = None
        """step -> bytes of its file of rollouts; None before the first is written"""
        self.told_removed = False
        self.last_sync: SyncReport | None = None
        """report of the weight update that ended last"""
        self.generated_before = 0
        self.waiting = 0
        """episodes that no engine works on, because an environment has not answered"""
        self.clips_rounding = False
        """whether it was said that the objective's bounds act on rounding"""
        self._idle = IdleSeats()

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.ledger.stages.now

    def stage(self, change: str) -> None:
        """Record that one stage ended and the next begins; `change` describes it in one line."""
        state = self.ledger.stage
        entry = {"version": state.first_version, "stage": state.number, "change": change, "retired": state.retired}
        append_line(self.folder / STAGES, msgspec.json.encode(entry))
        self.progress.note(change)

    def step(
        self, groups: list[Group], staleness: list[int], filtered: list[Group], learned: Learned, version: int,
        offline: list[Group] | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Record that a batch was trained, which gave `version`. Returns its metrics."""
        account = self.clock.close_step()
        row = rollout_metrics(groups, staleness, filtered)
        if offline:
            row |= offline_metrics(offline)
        row |= training_metrics(learned.sums, learned.stepped, learned.plan)
        row["stage"] = self.ledger.stage.number
        row["lr"] = learning_rate(version - 1, self.config.steps, self.config.optimiser)
        if "entropy_target" in (objective := objective_of(self.config).in_force):
            row["clip/bound"] = objective["clip_high"]
        row |= self._sync_metrics()
        row |= self._sampling_metrics(account["step"], version) | {
            "time/step_s": account["step"], "time/wait_batch_s": account.get("a full batch", 0.0),
            "time/train_s": sum(account.get(phase, 0.0) for phase in TRAINING),
            "time/wait_sync_s": account.get("previous weight update", 0.0) + account.get("weight update", 0.0),
            "time/checkpoint_s": account.get("checkpoint", 0.0), "time/total_s": self.clock.total_s,
            "tokens/trained_per_s": (trained := learned.sums.tokens / account["step"]),
            "tokens/trained_per_s_per_device": trained / self.config.placement.trainers,
            "engine/restarts": self.engines.restarts, "messages/refused": refused.total,
        }  # fmt: skip
        for verdict in Verdict:
            row[f"verify/{verdict.value.replace(' ', '_')}"] = self.scorer.counts.get(verdict, 0)
        row |= self.scorer.judge_metrics
        row |= speed_metrics(learned.sums, learned.stepped, self.config.placement.trainers, self.peak_flops)
        idle, still_open = self._idle.take_share(), self.ledger.unfinished()
        if "environment/turns" in row:
            row["environment/waiting"] = sum(one.waiting for one in still_open) / max(len(still_open), 1)
            row["environment/idle_seats"] = idle
        row |= self._memory_metrics(learned.stepped)
        self._write(version, row)
        self.progress.step_line(version, row)
        if line := doubt(row.get("logprob_difference/mean", 0.0), version):
            self.progress.warning(line)
        self._tell_failures()
        if not self.clips_rounding and (line := clipped_rounding(learned, self.config, max(staleness, default=0))):
            self.clips_rounding = True
            self.progress.warning(line)
        return row

    def _sampling_metrics(self, step_s: float, version: int) -> dict[str, float]:
        """Speed of sampling in a step; none of a last step whose completions were all there when it began."""
        before, self.generated_before = self.generated_before, self.engines.generated_tokens
        sampled = (self.generated_before - before) / step_s
        if not sampled and version == self.config.steps:
            return {}
        by_device = sampled / self.config.engine_gpus
        return {"tokens/generated_per_s": sampled, "tokens/generated_per_s_per_device": by_device}

    def _tell_failures(self) -> None:
        """Warn of completions that the verifiers could not grade, where there is something new to report."""
        for line in self.scorer.news():
            self.progress.warning(line)

    def _write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Write a line of metrics. Lines that find no room wait; reported at first, and whenever twice as many wait."""
        self.metrics.write(step, values)
        waiting, lost = len(self.metrics.pending), self.metrics.lost
        if waiting and waiting + lost >= max(2 * self.reported_waiting, 1):
            self.reported_waiting = waiting + lost
            older = f", {lost:,} older ones are lost" if lost else ""
            state = f"{waiting:,} line(s) wait in memory until there is room{older}"
            self.progress.warning(f"{self.metrics.last_failure}; {state}")
        elif self.reported_waiting and not waiting:
            self.reported_waiting = self.metrics.lost = 0
            state = f"{lost:,} lines are" if lost else "no line of metrics is"
            self.progress.note(f"{self.metrics.path}: there is room again, {state} lost")

    def end(self) -> None:
        """End the record: report what no step has reported yet, and lines of metrics that still wait: they are lost."""
        self._tell_failures()
        if lost := len(self.metrics.pending) + self.metrics.lost:
            self.progress.warning(f"{lost:,} line(s) of metrics are lost: {self.metrics.last_failure}")

    async def keep(self, groups: list[Group], version: int) -> None:
        """Write the groups that step `version` was trained on, in a thread: thousands of long completions take seconds,
        and messages and heartbeats must go on."""
        most_bytes = self.config.rollout.keep_bytes
        removed = await asyncio.to_thread(self._keep, version, list(groups), most_bytes)
        if removed and not self.told_removed:
            self.told_removed = True
            self.progress.note(
                f"rollouts/ has reached rollout.keep_bytes = {most_bytes:,}: the oldest files make room from now on"
            )

    def _keep(self, version: int, groups: list[Group], most_bytes: int) -> int:
        """Write a step's file, and remove the oldest where all have more than `most_bytes`; returns how many."""
        groups = [replace(one, completions=[replace(each, routes=[]) for each in one.completions]) for one in groups]
        path = self.folder / "rollouts" / f"step_{version}.jsonl"
        write_jsonl(path, [self._with_turns(group) if group.prompt.problem.environment else group for group in groups])
        if self.rollouts is None:
            self.rollouts = {step: file.stat().st_size for step, file in rollout_files(self.folder)}
        self.rollouts[version] = path.stat().st_size
        removed, total = 0, sum(self.rollouts.values())
        while most_bytes and total > most_bytes and len(self.rollouts) > 1:
            total -= self.rollouts.pop(oldest := min(self.rollouts))
            path.with_name(f"step_{oldest}.jsonl").unlink(missing_ok=True)
            removed += 1
        return removed

    def _with_turns(self, group: Group) -> Group:
        assert self.prompts is not None, "a problem has an environment, and nothing decodes its turns"
        return replace(group, turns=[turns_of(self.prompts, group.prompt, one) for one in group.completions])

    def _memory_metrics(self, stepped: Stepped) -> dict[str, float]:
        """Largest resident memory so far of a rank of each kind, an engine's is that of its own process; on GPUs also
        what they allocated there."""
        peaks: dict[str, float] = {}
        for peer in self.peers():
            name = f"memory/{peer.role}_peak_bytes"
            used = max(peer.peak_bytes, peer.children_peak_bytes) if peer.role == "engine" else peer.peak_bytes
            peaks[name] = max(peaks.get(name, 0.0), float(used))
        if stepped.gpu_peak_bytes:
            peaks["memory/trainer_peak_gpu_bytes"] = stepped.gpu_peak_bytes
        if self.last_sync is not None and self.last_sync.gpu_peak_bytes:
            peaks["memory/engine_peak_gpu_bytes"] = self.last_sync.gpu_peak_bytes
        return peaks

    def note_waiting(self) -> None:
        """Note how many episodes no engine works on because an environment has not answered, or in synchronous mode one
        of another episode."""
        self.waiting = len(self.ledger.unfinished()) - self.engines.training_in_flight
        self._idle.note(sum(self.engines.live.values()), self.engines.slots(), self.waiting)

    def live(self) -> None:
        """Update the progress bar of the current step."""
        self.note_waiting()
        ledger, elapsed = self.ledger, self.clock.since_step_s
        generated = self.engines.generated_tokens - self.generated_before
        self.progress.batch(
            done=sum(c.finish_reason is not None for group in ledger.groups.values() for c in group.completions),
            needed=ledger.settings.prompts_per_step * ledger.settings.group_size,
            in_flight=sum(self.engines.live.values()), tokens_per_s=generated / max(elapsed, 1e-3),
            oldest_wait_s=self.engines.oldest_wait_s(), waiting=self.waiting,
            filtered=filtered_text(ledger.filtered_since_step), step=ledger.version + 1, steps=self.config.steps,
        )  # fmt: skip

    def _sync_metrics(self) -> dict[str, float]:
        if (report := self.last_sync) is None:
            return {}
        return {
            "sync/bytes": report.bytes, "sync/write_s": report.write_s, "sync/update_s": report.update_s,
            "sync/total_s": report.total_s, "sync/GB_per_s": report.bytes / 1e9 / max(report.write_s, 1e-9),
            "sync/stall_ms": report.stall_s * 1000, "sync/stall_steps": report.stall_steps,
            "sync/logprob_diff_mean": report.logprob_diff_mean, "sync/logprob_diff_max": report.logprob_diff_max,
            "sync/logprob_move_diff": report.logprob_move_diff,
        }  # fmt: skip

    def sft(self, step: int, steps: int, learned: Learned, rate: float, tokens_per_s: float) -> None:
        """Record an SFT step that ended."""
        trainers, loss = self.config.placement.trainers, learned.sums.sums["loss"]
        row = speed_metrics(learned.sums, learned.stepped, trainers, self.peak_flops)
        memory = self._memory_metrics(learned.stepped)
        row |= {name.removeprefix("memory/"): value for name, value in memory.items() if "trainer" in name}
        row |= {"loss": loss, "lr": rate, "tokens_per_s": tokens_per_s,
                "tokens_per_s_per_device": tokens_per_s / trainers}  # fmt: skip
        self._write(step, {f"sft/{name}": value for name, value in row.items()})
        self.progress.sft(step, steps, loss, tokens_per_s)

    def evaluation(self, version: int, score: Evaluation) -> None:
        """Record the evaluation of a version: metrics, a line of evaluations.jsonl, a line on the screen."""
        line = msgspec.json.encode(EvaluationRecord(version, self.clock.total_s, score))
        prefix = "evaluation/" if score.temperature > 0 else "evaluation/greedy_"
        names = ["accuracy", "consistency", "format", "reward", "tokens", "majority", "pass_at_k"]
        names += ["distinct", "self_bleu", "answers"]
        values = {prefix + name: getattr(score, name) for name in names}
        values |= {f"{prefix}info/{name}": number.mean for name, number in score.info.items()}
        self._write(version, {name: value for name, value in values.items() if value is not None})
        append_line(self.folder / FILE, line)
        self.progress.note(
            f"validation at version {version}, temperature {score.temperature:g}: "
            + ("" if score.accuracy is None else f"accuracy {score.accuracy:.3f} ± {score.accuracy_half_width:.3f}, ")
            + (f"pass@{score.completions} {score.pass_at_k:.3f}, " if score.pass_at_k is not None else "")
            + (f"maj@{score.completions} {score.majority:.3f}, " if score.majority is not None else "")
            + ("" if score.consistency is None else f"language consistency {score.consistency:.3f}, ")
            + ("" if score.format is None else f"format {score.format:.3f}, ")
            + "".join(f"{name} {one.mean:.3f} ± {one.half_width:.3f}, " for name, one in score.info.items())
            + f"{score.tokens:.0f} tokens"
        )


def _stage_of(line: bytes) -> int:
    return int(decode_json(line, dict[str, Any])["stage"])


def _is_whole(decode: Callable[[bytes], Any], line: bytes) -> bool:
    try:
        decode(line)
    except (ValueError, KeyError, TypeError):
        return False
    return True


def check_folder(folder: Path) -> list[str]:
    """Check a folder before a resume: a line for each small file with damaged lines, which are left out from now on; a
    copy is kept. A last line that was cut by a kill is no damage. Raises ConfigError for a file that cannot be read."""
    readers = {"metrics.jsonl": decode_row, FILE: lambda line: decode_json(line, EvaluationRecord), STAGES: _stage_of}
    warnings = []
    for name, decode in readers.items():
        path = folder / name
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}): repair it, move it away, or use --name"
            ) from error
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        damaged = [number for number, line in enumerate(lines, 1) if not _is_whole(decode, line)]
        if damaged:
            copy = path.with_name(f"{name}.damaged")
            with writing(copy):
                shutil.copyfile(path, copy)
            warnings.append(
                f"{path}: {len(damaged):,} damaged lines (the first is line {damaged[0]}) are left out; the file as it "
                f"was is kept as {copy.name}"
            )
    return warnings


def rollout_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, file) of a run's rollouts."""
    for path in (folder / "rollouts").glob("step_*.jsonl"):
        digits = path.stem.removeprefix("step_")
        if digits.isdecimal():
            yield int(digits), path


def forget_after(folder: Path, version: int, stage: int) -> None:
    """Drop the evaluations, rollouts and changes of stage that came after `version` in `stage`, before a resume from
    there: they will be made again."""
    forget_evaluations(folder, version)
    changes = folder / STAGES
    if changes.exists():
        lines = changes.read_bytes().splitlines(keepends=True)
        kept = [
            line for line in lines if line.endswith(b"\n") and _is_whole(_stage_of, line) and _stage_of(line) <= stage
        ]
        write_whole(changes, b"".join(kept))
    for step, rollout in rollout_files(folder):
        if step > version:
            rollout.unlink()
