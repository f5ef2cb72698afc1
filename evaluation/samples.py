"""The folder of an evaluation: all requests and responses, one line per sample, from which a stopped run resumes.

    evaluation.json   format number, and the settings of all samples: model, weights, seed, sampling by benchmark
    samples.jsonl     one `SampleRecord` per line, on the disk before the next one; the last line of a sample counts
    timings.jsonl     the time and the number of requests of each sample, which differ each time
    launches.jsonl    the time, settings and address of each launch, which may differ between launches

A sample that only has an error is requested again. Other settings in the same folder are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from evaluation.settings import EvaluationSettings
from evaluation.tasks import Benchmark, BenchmarkSampling, BenchmarkTask, Kind
from serve.reasoning_language import is_written
from shared.atomic_write import append_line
from shared.errors import ConfigError, DataError
from shared.journal import Journal, read_journal
from shared.json_reader import parse_json
from shared.types import Verdict
from verify.records import fingerprint

EVALUATION, SAMPLES, TIMINGS, LAUNCHES = "evaluation.json", "samples.jsonl", "timings.jsonl", "launches.jsonl"
FORMAT = 3
"""version of the records in samples.jsonl; goes up when a field changes its name or meaning"""
COMMON = ("omit", "seed", "reasoning_language", "reasoning_language_enforcement", "ask_form", "function_calls")
"""names of the settings that change every response"""


class SampleKey(NamedTuple):
    """Identifies one sample."""

    benchmark: str
    id: str
    """id of the problem"""
    sample: int
    """0 .. samples-1"""


class DetectedLanguage(msgspec.Struct):
    """The detected language of a text."""

    language: str = ""
    """"" if the text has too few words"""
    share: float = 0.0
    """share of its letters that are in no sentence of another language"""
    same: bool | None = None
    """whether it is the requested language; None if undetermined"""


class SampleRecord(msgspec.Struct, kw_only=True):
    """One sample: its request, its response and its grade; nothing in it depends on when it was requested."""

    benchmark: str
    id: str
    sample: int
    settings: str
    """fingerprint of everything that changes responses"""
    kind: Kind
    source: str
    """set of the problem, from its row"""
    language: str
    """language of the problem, from its row"""
    prompt_sha: str
    seed: int
    sampling: BenchmarkSampling
    model: str
    weights: str = ""
    """from the server's /version, "" if it has none"""
    reasoning: str = ""
    answer: str = ""
    finish_reason: str | None = None
    extracted: str | None = None
    ground_truth: str = ""
    correct: bool | None = None
    """None if there is no response"""
    verdict: Verdict | None = None
    reason: str = ""
    missed: bool = False
    """whether nothing could be extracted although the text seems to contain the right answer"""
    followed: tuple[int, int, int] | None = None
    """IFEval: number of instructions, of those followed strictly, and of those followed by the loose rules"""
    loose: bool | None = None
    refused: bool = False
    """whether the server refused the response for its language (status 422), so that there is none of it here"""
    wanted_language: str = ""
    """language that was requested, else that of the problem"""
    problem_language: DetectedLanguage = msgspec.field(default_factory=DetectedLanguage)
    reasoning_language: DetectedLanguage = msgspec.field(default_factory=DetectedLanguage)
    """language of the model's own text: without what the server says that it prefilled"""
    answer_language: DetectedLanguage = msgspec.field(default_factory=DetectedLanguage)
    server_language: dict[str, Any] | None = None
    """measurements of our own server, including its tries"""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    left_out: tuple[str, ...] = ()
    """parameters that were not sent: the server refuses them, or `omit`"""
    error: str = ""
    """the reason why there is no response, "" if there is one"""

    @property
    def in_language(self) -> bool | None:
        """Whether the response is in the requested language: its reasoning is, or its answer where it has none, and the
        answer is in no other; None where it has too few words to tell."""
        reasoned = written(self.reasoning, self.server_language)
        spoken = self.reasoning_language if reasoned else self.answer_language
        return False if self.answer_language.same is False else spoken.same

    @property
    def key(self) -> SampleKey:
        """The key of the sample."""
        return SampleKey(self.benchmark, self.id, self.sample)


KEY, FAILED = attrgetter("key"), attrgetter("error")
"""key of a record, and whether its sample is to be drawn again"""
REPAIR = "give another --out, or the same settings to go on"


def written(reasoning: str, server_language: Mapping[str, Any] | None) -> str:
    """Return what the model wrote of the reasoning, "" for no letter and no digit: without the texts that the server
    says that it put in (`prefilled`, in our server's measurement)."""
    texts = (server_language or {}).get("prefilled") or []
    for text in [texts] if isinstance(texts, str) else texts if isinstance(texts, list) else []:
        reasoning = reasoning.replace(text.strip(), "", 1) if isinstance(text, str) else reasoning
    return reasoning if is_written(reasoning) else ""


def identify(settings: EvaluationSettings, model: str, weights: str, benchmarks: list[Benchmark]) -> dict[str, Any]:
    """Return the settings that all samples of a folder have in common."""
    common = {name: getattr(settings, name) for name in COMMON}
    common["omit"] = sorted(settings.omit) or None
    if settings.chat_template_kwargs:
        common["chat_template_kwargs"] = settings.chat_template_kwargs
    sampled = {benchmark.name: benchmark.sampling._asdict() for benchmark in benchmarks}
    for sampling in sampled.values():
        del sampling["samples"]  # more samples of the same kind may be added
    return {"format": FORMAT, "model": model, "weights": weights, **common, "benchmarks": sampled}


def label(identity: Mapping[str, Any]) -> str:
    """Return the model with its weights, which tell evaluations apart: "quickstart, step 56"."""
    model, weights = str(identity["model"]), str(identity["weights"])
    return weights if weights.startswith(f"{model}, ") else ", ".join(filter(None, (model, weights)))


def settings_mark(identity: dict[str, Any], benchmark: str) -> str:
    """Return a fingerprint of the settings that change the responses of a benchmark."""
    return fingerprint(json.dumps({**identity, "benchmarks": identity["benchmarks"][benchmark]}, sort_keys=True))


class EvaluationFolder(Journal[SampleKey, SampleRecord]):
    """An evaluation's folder, locked by its launch: `with EvaluationFolder(path, identity, tasks) as folder: ...`."""

    def __init__(self, folder: Path, identity: dict[str, Any], tasks: list[BenchmarkTask]):
        """Benchmarks may be added later. Raises ConfigError for a folder of other settings or in use, DataError."""
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / EVALUATION).exists():
            read_identity(folder)
        self.folder, where = folder, f"out = {folder}"
        super().__init__(
            folder / SAMPLES, SampleRecord, KEY, identity, REPAIR, where=where, header=folder / EVALUATION,
            grows=("benchmarks",), failed=FAILED,
        )  # fmt: skip
        try:
            self._check(tasks)
        except BaseException:
            self.close()
            raise

    def _check(self, tasks: list[BenchmarkTask]) -> None:
        """Raise ConfigError if the prompt or the answer of a problem that has samples has changed."""
        asked = {(task.benchmark, task.problem.id): (task.prompt_sha, task.problem.answer) for task in tasks}
        for record in self.rows.values():
            prompt, answer = asked.get((record.benchmark, record.id), (record.prompt_sha, record.ground_truth))
            changed = "prompt" if prompt != record.prompt_sha else "answer" if answer != record.ground_truth else ""
            if changed:
                raise ConfigError(
                    f"out = {self.folder}: the {changed} of {record.id} ({record.benchmark}) has changed since its "
                    "samples were drawn: give another --out"
                )

    def add_timed(self, record: SampleRecord, tries: int, latency_s: float) -> None:
        """Append a record, on the disk when this returns. tries: requests. latency_s: of the last, 0 unanswered."""
        key = dict(zip(SampleKey._fields, record.key, strict=True))
        self.note(TIMINGS, {**key, "tries": tries, "latency_s": latency_s, "error": bool(record.error)})
        self.add(record)

    def note(self, name: str, line: dict[str, Any]) -> None:
        """Append a line to a file of what differs each time."""
        append_line(self.folder / name, json.dumps(line, sort_keys=True).encode())


def read_identity(path: Path) -> dict[str, Any]:
    """Read the settings that the samples of a folder have in common. Raises ConfigError, DataError."""
    file = path / EVALUATION
    if not file.is_file():
        near = ", ".join(sorted(str(one.parent) for one in path.parent.glob(f"*/{EVALUATION}"))) or "none"
        what = f"there is no {EVALUATION} in it" if path.is_dir() else "there is no such folder"
        raise ConfigError(f"{path} is no evaluation: {what}; evaluations in {path.parent}: {near}")
    try:
        identity = dict(parse_json(file.read_text(encoding="utf-8")))
        version, benchmarks = identity.get("format", 1), identity["benchmarks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({error}): delete the folder, or give another") from error
    if not isinstance(benchmarks, dict):
        raise DataError(f"{file} lists no benchmarks: delete the folder, or give another")
    if version != FORMAT:
        raise DataError(f"{file} has format {version}, this version reads {FORMAT}: evaluate again into another folder")
    return identity


def read_samples(folder: Path) -> dict[SampleKey, SampleRecord]:
    """Read the samples of a folder, none if there is no file yet. Raises DataError."""
    path = folder / SAMPLES
    return read_journal(path, SampleRecord, KEY, FAILED) if path.exists() else {}
