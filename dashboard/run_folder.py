"""A run folder as the dashboard sees it: its state, settings, phases, evaluations and alarms.

Nothing here trusts the folder: files may be missing, older, damaged, or made by somebody else.
"""

from __future__ import annotations

import os
import re
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dashboard import alarms
from dashboard.columns import MetricColumns, thin
from dashboard.growing_file import GrowingFile, last_lines, read_small
from dashboard.rollouts import Rollouts
from shared.config import Config
from shared.json_reader import decode_json
from shared.metrics import METRICS
from shared.section import flat

SILENT_S = 600.0
"""a run on another machine that wrote nothing for so long, and for ten steps, is called silent"""
SIGNS = ("metrics.jsonl", "config.toml", "phases.jsonl", "launches.jsonl")
"""a folder with one of them is a run's"""
STEPS_OF_TIMELINE = 120
SEGMENTS = ("time/wait_batch_s", "time/train_s", "time/wait_sync_s", "time/checkpoint_s")
MOST_EVALUATIONS = 20_000
MOST_TEXT = 100_000
"""characters of one text that are sent at once"""


def is_run(folder: Path) -> bool:
    """Whether a path is a run's folder; one that this user may not enter is none, nor is one whose name no page can
    ask for, since it is not UTF-8."""
    try:
        return any((folder / name).is_file() for name in SIGNS) and bool(folder.name.encode())
    except (OSError, UnicodeEncodeError):
        return False


def rows_of(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among lines."""
    for line in lines:
        try:
            row = decode_json(line, dict[str, Any])
        except ValueError:
            continue
        yield row


def number(value: Any) -> float | None:
    """A number, or None for anything else and for one that is larger than any float."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return None


class RunFolder:
    """One run. Its methods may be called from several threads."""

    def __init__(self, folder: Path):
        self.folder, self.name = folder, folder.name
        self.lock = threading.RLock()
        self.columns: MetricColumns | None = None
        """its metrics, once somebody looked at charts"""
        self.rollouts = Rollouts(folder / "rollouts")
        self._evaluations = GrowingFile(folder / "evaluations.jsonl")
        self._evaluated: list[dict[str, Any]] = []
        self._config: tuple[bytes, dict[str, Any]] = b"", {}

    # ---- its state -----------------------------------------------------------------------------------------------

    def signature(self) -> tuple[int, ...]:
        """Numbers that change whenever something is written into the folder."""
        numbers = []
        for name in ("metrics.jsonl", "evaluations.jsonl", "phases.jsonl", "lock", "rollouts", "config.toml"):
            try:
                status = (self.folder / name).stat()
                numbers += [status.st_size, status.st_mtime_ns]
            except OSError:
                numbers += [0, 0]
        return tuple(numbers)

    def summary(self) -> dict[str, Any]:
        """A line of the list of runs, from the ends of its files. step_s: mean of the last 20 steps."""
        path = self.folder / "metrics.jsonl"
        rows = list(rows_of(last_lines(path)))
        train = [row for row in rows if row.get("kind", "train") == "train"]
        last = train[-1] if train else rows[-1] if rows else {}
        accuracy = [value for row in train if (value := number(row.get("accuracy"))) is not None]
        reward = [value for row in train if (value := number(row.get("reward/mean"))) is not None]
        seconds = [value for row in train[-20:] if (value := number(row.get("time/step_s"))) is not None]
        settings = self.settings()
        kind = last.get("kind", "train")
        total = settings.get("sft.steps" if kind == "sft" or settings.get("mode") == "sft" else "steps")
        return {
            "name": self.name, "kind": kind if isinstance(kind, str) else "train", "step": number(last.get("step")),
            "steps": number(total), "reward": reward[-1] if reward else None,
            "accuracy": accuracy[-1] if accuracy else None, "evaluated": self._before_after(),
            "step_s": sum(seconds) / len(seconds) if seconds else None,
            "total_s": number(last.get("time/total_s")), "written": self._written(), **self._state(last),
        }  # fmt: skip

    def _before_after(self) -> list[float] | None:
        """Accuracy of the first and the last evaluation, at the temperature of its rollouts where it has such; None
        before there are two versions."""
        with self.lock:
            evaluated = [
                (version, row.get("temperature"), accuracy)
                for row in self.evaluations()
                if (version := row["version"]) is not None and (accuracy := number(row.get("accuracy"))) is not None
            ]
        sampled = self.settings().get("rollout.temperature", 1.0)
        measured = [temperature for _, temperature, _ in evaluated]
        chosen = sampled if sampled in measured or not measured else measured[-1]
        series = sorted((version, accuracy) for version, temperature, accuracy in evaluated if temperature == chosen)
        return [series[0][1], series[-1][1]] if series and series[0][0] < series[-1][0] else None

    def _holder(self) -> dict[str, Any]:
        """What the lock says of the launch that has it, or had it last; {} where it cannot be read."""
        try:
            return decode_json(read_small(self.folder / "lock", 1 << 15), dict[str, Any])
        except ValueError:
            return {}

    def _written(self) -> float:
        """Unix time at which it was last written to, in s; 0 if that is not known. Of a run that has ended by what it
        recorded itself: a copy of its folder has other times of files."""
        if self._holder().get("ended"):
            ends = [self._holder(), *rows_of(last_lines(self.folder / "metrics.jsonl")[-1:])]
            ends += rows_of(last_lines(self.folder / "phases.jsonl")[-1:])
            if times := [at for row in ends for name in ("until", "time") if (at := number(row.get(name)))]:
                return max(times)
        return max(self.signature()[1::2]) / 1e9

    def _state(self, last: dict[str, Any]) -> dict[str, str]:
        """{"state": running, finished, stopped, crashed, silent or unknown, "story": how that is known}."""
        holder = self._holder()
        pid, ended, host = holder.get("pid"), holder.get("ended"), holder.get("host")
        if not isinstance(ended, str) or not isinstance(pid, int):
            return {"state": "unknown", "story": "it has no lock: an older run, or one of another program"}
        if ended:
            code = re.fullmatch(r"exit code (\d{1,3})", ended)
            states = {"0": "finished", "129": "stopped", "130": "stopped", "143": "stopped"}
            story = ": ".join(filter(None, [ended[:300], str(holder.get("error") or "")]))
            return {"state": states.get(code[1], "crashed") if code else "crashed", "story": story}
        since = f"since {str(holder.get('since'))[:40]}, controller pid {pid} on {str(host)[:60]}"
        age = time.time() - self._written()
        if host == os.uname().nodename:
            if _controls(pid):
                return {"state": "running", "story": since}
            return {"state": "crashed", "story": f"its controller (pid {pid}) is gone, without a word"}
        if age < max(SILENT_S, 10 * (number(last.get("time/step_s")) or 0)):
            return {"state": "running", "story": since}
        return {"state": "silent", "story": f"{since}; nothing was written for {age / 60:.0f} minutes"}

    def config(self) -> dict[str, Any]:
        """Its settings as in config.toml; {} where there are none that can be read."""
        data = read_small(self.folder / "config.toml")
        if data != self._config[0]:
            try:
                self._config = data, tomllib.loads(data.decode())
            except (ValueError, RecursionError):
                self._config = data, {}
        return self._config[1]

    def settings(self) -> dict[str, Any]:
        """Its settings by "section.key"."""
        return flat(self.config())

    @property
    def bound(self) -> int | None:
        """Bound of its staleness, where its settings are of this version."""
        try:
            return Config.model_validate(self.config()).max_staleness if self.config() else None
        except (ValueError, ZeroDivisionError):
            return None

    # ---- one run ------------------------------------------------------------------------------------------------

    def loaded(self) -> MetricColumns:
        """Its metrics with all that is new."""
        if self.columns is None:
            self.columns = MetricColumns(self.folder / "metrics.jsonl")
        self.columns.look()
        return self.columns

    def overview(self) -> dict[str, Any]:
        """Everything about a run but its charts and rollouts."""
        with self.lock:
            columns = self.loaded()
            names = {
                name: {
                    "kind": kind, "unit": METRICS[name].unit if name in METRICS else "",
                    "definition": METRICS[name].definition if name in METRICS else "not of this version",
                }
                for kind, table in columns.tables.items() for name in table.names if name not in ("step", "time")
            }  # fmt: skip
            train, bound = columns.table("train"), self.bound
            raised = alarms.find(train.numbers, bound)
            return {
                "run": self.summary(), "names": names, "settings": self.settings(), "bound": bound,
                "alarms": [alarm._asdict() for alarm in raised], "damaged": columns.damaged,
                "evaluations": self.evaluations(), "timeline": self.timeline(),
                "stages": list(rows_of(last_lines(self.folder / "stages.jsonl")))[-50:],
                "verdicts": {
                    name.removeprefix("verify/"): value
                    for name in train.columns if name.startswith("verify/")
                    for value in train.numbers(name)[-1:].tolist()
                },
                "rollouts": self.rollouts.steps()[-1:],
            }  # fmt: skip

    def series(
        self, names: list[str], axis: str, points: int, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """Some metrics of one kind over an axis: {"x": [...], "values": {name: [...]}, "kind"}, thinned to `points`.
        low, high: part of the axis."""
        with self.lock:
            columns = self.loaded()
            kind = next((kind for kind, table in columns.tables.items() if names[0] in table.columns), "train")
            x, table = columns.over(kind, axis), columns.table(kind)
            values = [table.numbers(name) for name in names]
        keep = np.isfinite(x)
        keep &= (x >= low) if low is not None else True
        keep &= (x <= high) if high is not None else True
        x, values = thin(x[keep], [value[keep] for value in values], points)
        listed = dict(zip(names, (one.tolist() for one in values), strict=True))
        return {"kind": kind, "x": x.tolist(), "values": listed}

    def evaluations(self) -> list[dict[str, Any]]:
        """Its evaluations without their samples, with the places of these in the file."""
        void, lines = self._evaluations.look()
        if void:
            self._evaluated = []
        for offset, line in lines:
            for row in rows_of([line or b""]):
                evaluation = row.get("evaluation")
                if isinstance(evaluation, dict) and len(self._evaluated) < MOST_EVALUATIONS:
                    short = {key: value for key, value in evaluation.items() if key != "samples"}
                    self._evaluated.append(
                        {"version": number(row.get("version")), "hours": (number(row.get("seconds")) or 0) / 3600,
                         "offset": offset, **short}
                    )  # fmt: skip
        return self._evaluated

    def timeline(self) -> dict[str, Any]:
        """What the ranks did: phases of the launches, and where the time of the last steps went."""
        phases = [
            {"time": at, "phase": str(row.get("phase"))[:200]}
            for row in rows_of(last_lines(self.folder / "phases.jsonl"))
            if (at := number(row.get("time"))) is not None
        ]
        table = self.loaded().table("train")
        columns = [table.numbers(name)[-STEPS_OF_TIMELINE:] for name in ("step", "time", "time/step_s", *SEGMENTS)]
        stalls = table.numbers("sync/stall_ms")[-STEPS_OF_TIMELINE:] / 1000
        rows = np.nan_to_num(np.stack([*columns, stalls], 1)).tolist() if len(table.rows) else []
        return {"phases": phases, "steps": rows, "segments": ["step", "end", "step_s", *SEGMENTS, "stall_s"]}


def _controls(pid: int) -> bool:
    """Whether a process of this machine may be a run's controller: Python, as its command line says or, where it has
    given itself another title, its program (which other users may not see)."""
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes() or "python" in os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False


class RunFolders:
    """The runs below a folder, or the one run that it is."""

    MOST_CELLS = 12_000_000
    """numbers of metrics in memory, 8 bytes each; the runs looked at longest ago are forgotten"""

    def __init__(self, root: Path):
        self.root = root
        self._runs: dict[str, RunFolder] = {}
        self._lock = threading.Lock()

    def all(self) -> list[RunFolder]:
        """The runs that there are now, by name."""
        if is_run(self.root):
            folders = [self.root]
        else:
            try:
                folders = sorted(path for path in self.root.iterdir() if is_run(path))
            except OSError:
                folders = []
        with self._lock:
            self._runs = {path.name: self._runs.get(path.name) or RunFolder(path) for path in folders}
            return list(self._runs.values())

    def find(self, name: str) -> RunFolder:
        """The run of a name, which is never made into a path. Raises LookupError."""
        if name not in self._runs:
            self.all()
        with self._lock:
            run = self._runs.pop(name)
            self._runs[name] = run  # it was looked at last
            others = [other for other in self._runs.values() if other.columns is not None]
        cells = sum(other.columns.cells for other in others if other.columns is not None)
        for other in others[:-1]:
            if cells <= self.MOST_CELLS:
                break
            if other.columns is not None:
                cells -= other.columns.cells
                other.columns = None
        return run

    def differences(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """Settings in which runs differ: name of the setting -> run -> value."""
        settings = {name: self.find(name).settings() for name in names}
        keys = sorted({key for found in settings.values() for key in found} - {"name", "runs_dir"})
        table = {key: {name: found.get(key) for name, found in settings.items()} for key in keys}
        return {key: row for key, row in table.items() if len({spelled(value) for value in row.values()}) > 1}


def spelled(value: Any) -> str:
    """A value as text that is equal for equal values: 300 and 300.0 are one."""
    return repr(float(value) if type(value) is int else value)
