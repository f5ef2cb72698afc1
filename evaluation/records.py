"""The folder of an evaluation: what was asked and answered, one line a sample, and where it was stopped.

    evaluation.json   what all samples have in common: model, weights, seed, sampling of each benchmark
    samples.jsonl     one `Record` a line, on the disk before the next one; of one sample the last line counts
    timings.jsonl     how long each sample took, and how many requests: what differs each time
    launches.jsonl    when, with which settings, against which address: what may differ between launches

A sample that is there is not asked again, one that only has an error is. Other settings in the same folder are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from evaluation.benchmarks import Benchmark, Kind, Sampling, Task
from evaluation.settings import Settings
from shared.disk import beside, open_log
from shared.errors import ConfigError, DataError
from shared.types import Verdict
from verify.records import fingerprint

EVALUATION, SAMPLES, TIMINGS, LAUNCHES = "evaluation.json", "samples.jsonl", "timings.jsonl", "launches.jsonl"
COMMON = ("seed", "reasoning_language", "reasoning_language_enforcement", "ask_form", "function_calls")
"""settings that change every response"""


class Key(NamedTuple):
    """Names one sample."""

    benchmark: str
    id: str
    """of the problem"""
    sample: int
    """0 .. samples-1"""


class Spoken(msgspec.Struct):
    """The language of a text."""

    language: str = ""
    """"" where it has too few words to tell"""
    share: float = 0.0
    """of its letters that stand in no sentence of another language"""
    same: bool | None = None
    """it is the language that was wanted; None where that cannot be told"""


class Effort(NamedTuple):
    """What one sample took."""

    tries: int
    """requests"""
    latency_s: float = 0.0
    """of the last one, where it was answered"""


class Record(msgspec.Struct, kw_only=True):
    """One sample: what was asked, what came back, what it is worth; nothing that depends on when it was asked."""

    benchmark: str
    id: str
    sample: int
    settings: str
    """fingerprint of everything that changes responses"""
    kind: Kind
    source: str
    """set of the problem, as its row says"""
    language: str
    """of the problem, as its row says"""
    prompt_sha: str
    seed: int
    sampling: Sampling
    model: str
    weights: str = ""
    """as the server's /version said, "" where it does not"""
    thoughts: str = ""
    answer: str = ""
    finish_reason: str | None = None
    extracted: str | None = None
    gold: str = ""
    correct: bool | None = None
    """None where there is no response"""
    verdict: Verdict | None = None
    reason: str = ""
    missed: bool = False
    """nothing could be extracted, and yet the right answer seems to stand there"""
    followed: tuple[int, int, int] | None = None
    """IFEval: instructions, followed to the letter, followed by the loose rules"""
    loose: bool | None = None
    wanted_language: str = ""
    problem_spoken: Spoken = msgspec.field(default_factory=Spoken)
    thoughts_spoken: Spoken = msgspec.field(default_factory=Spoken)
    answer_spoken: Spoken = msgspec.field(default_factory=Spoken)
    server_language: dict[str, Any] | None = None
    """what our own server measured, tries among it"""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    error: str = ""
    """why there is no response"""

    @property
    def key(self) -> Key:
        """Which sample it is."""
        return Key(self.benchmark, self.id, self.sample)


def identify(settings: Settings, model: str, weights: str, benchmarks: list[Benchmark]) -> dict[str, Any]:
    """What all samples of a folder have in common."""
    common = {name: getattr(settings, name) for name in COMMON}
    sampled = {one.name: one.sampling._asdict() for one in benchmarks}
    for sampling in sampled.values():
        del sampling["samples"]  # more samples of the same kind may be added
    return {"model": model, "weights": weights, **common, "benchmarks": sampled}


def settings_mark(identity: dict[str, Any], benchmark: str) -> str:
    """Fingerprint of what changes the responses of a benchmark."""
    return fingerprint(json.dumps({**identity, "benchmarks": identity["benchmarks"][benchmark]}, sort_keys=True))


class Folder:
    """An evaluation's folder, locked by its launch: `with Folder(path, identity) as folder: ...`."""

    def __init__(self, path: Path, identity: dict[str, Any], tasks: list[Task]):
        """Raises ConfigError where the folder was made with other settings or is in use, DataError."""
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.identity = path, identity
        self._stream: BinaryIO
        self._stream, lines = open_log(path / SAMPLES, f"out = {path}")
        try:
            self._join()
            self.records = read_lines(path / SAMPLES, lines)
            self._check(tasks)
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def _join(self) -> None:
        """Compare with what the folder was made with; its other benchmarks stay."""
        file = self.path / EVALUATION
        if file.exists():
            before = read_identity(self.path)
            found = differences(before, self.identity)
            if found:
                raise ConfigError(
                    f"out = {self.path} was made with other settings ({'; '.join(found)}): give another --out, or the "
                    "same settings to go on"
                )
            self.identity = {**self.identity, "benchmarks": {**before["benchmarks"], **self.identity["benchmarks"]}}
        with beside(file) as partial:
            partial.write_text(json.dumps(self.identity, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def _check(self, tasks: list[Task]) -> None:
        """Raise ConfigError where a problem that has samples is asked differently now."""
        asked = {(task.benchmark, task.problem.id): task.prompt_sha for task in tasks}
        for record in self.records.values():
            now = asked.get((record.benchmark, record.id))
            if now is not None and now != record.prompt_sha:
                raise ConfigError(
                    f"out = {self.path}: the prompt of {record.id} ({record.benchmark}) has changed since its samples "
                    "were drawn: give another --out"
                )

    def add(self, record: Record, effort: Effort) -> None:
        """Append a record; it is on the disk when this returns."""
        key = dict(zip(Key._fields, record.key, strict=True))
        self._append(TIMINGS, {**key, **effort._asdict(), "error": bool(record.error)})
        self._stream.write(msgspec.json.encode(record) + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.records[record.key] = record

    def note(self, launch: dict[str, Any]) -> None:
        """Append a line about this launch."""
        self._append(LAUNCHES, launch)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, sort_keys=True) + "\n")


def read_identity(path: Path) -> dict[str, Any]:
    """What the samples of a folder have in common. Raises ConfigError, DataError."""
    file = path / EVALUATION
    if not file.is_file():
        raise ConfigError(f"{path} is no evaluation: there is no {EVALUATION} in it")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found["benchmarks"], dict):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({error}): delete the folder, or give another") from error
    raise DataError(f"{file} lists no benchmarks: delete the folder, or give another")


def read_lines(path: Path, lines: list[bytes]) -> dict[Key, Record]:
    """The records of samples.jsonl, of one sample the last; an error never replaces a response. Raises DataError."""
    found: dict[Key, Record] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = msgspec.json.decode(line, type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{number} is no record ({error}): delete that line") from error
        if not record.error or record.key not in found:
            found[record.key] = record
    return found


def differences(
    before: dict[str, Any], now: dict[str, Any], names: Sequence[str] = ("model", "weights", *COMMON)
) -> list[str]:
    """In which of `names` and in what sampling two evaluations differ, in words; benchmarks that only one has are no
    difference."""
    pairs = [(name, before.get(name), now.get(name)) for name in names]
    found = [f"{name}: {earlier!r}, now {later!r}" for name, earlier, later in pairs if earlier != later]
    for benchmark, sampling in now["benchmarks"].items():
        earlier = before["benchmarks"].get(benchmark, sampling)
        found += [
            f"{name} of {benchmark}: {earlier.get(name)!r}, now {value!r}"
            for name, value in sampling.items()
            if earlier.get(name) != value
        ]
    return found
