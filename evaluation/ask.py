"""Asks for the samples that are missing, so many at a time, grades each response and writes it down at once.

    a response                                    graded and recorded
    a refusal for its language (status 422)       recorded as wrong: the model did not do what was asked of it
    status 401, 403, 404                          ends the run
    any other refusal, e.g. a prompt too long     an error record; where nothing at all is answered it ends the run
    no usable response after all tries            an error record; too many in a row end the run

Error records are asked again by the next launch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from evaluation.benchmarks import Benchmark, Sampling, Task
from evaluation.client import Client, Got, Refused, Unanswered
from evaluation.grade import Grader
from evaluation.records import Effort, Folder, Key, Record, Spoken, settings_mark
from evaluation.reply import Said, said
from evaluation.settings import Settings
from serve.response.language import AUTO, OFF
from shared.bar import Bar
from shared.errors import ConfigError, RunError
from shared.types import Verdict
from verify.language import detect, spoken_in

MISMATCH = "reasoning_language_mismatch"
MOST_FAILURES = 20
"""samples in a row without a response, beyond those under way"""
SEEDS = 1 << 31
"""some servers take no larger ones"""


class Job(NamedTuple):
    """One sample to be drawn."""

    task: Task
    sampling: Sampling
    sample: int

    @property
    def key(self) -> Key:
        """Which sample it is."""
        return Key(self.task.benchmark, self.task.problem.id, self.sample)


def jobs_of(benchmarks: list[Benchmark]) -> list[Job]:
    """All samples of the benchmarks: first one of every problem, then the second ones."""
    return [
        Job(task, benchmark.sampling, sample)
        for benchmark in benchmarks
        for sample in range(benchmark.sampling.samples)
        for task in benchmark.tasks
    ]


def seed_of(seed: int, key: Key) -> int:
    """The seed of a sample: another for each, the same in every launch."""
    digest = hashlib.blake2b(f"{seed}\0{key.benchmark}\0{key.id}\0{key.sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEEDS


class Asker:
    """Draws the missing samples of a folder."""

    def __init__(self, settings: Settings, client: Client, grader: Grader, folder: Folder, context: int | None = None):
        """context: tokens of the model's, beyond which servers refuse to be asked for."""
        self.settings, self.client, self.grader, self.folder = settings, client, grader, folder
        self.context = context
        self._failures = 0
        """samples in a row without a response"""
        self._refusals = 0
        """requests that the server will not answer"""
        self._last_refusal = ""
        self._answered = any(record.correct is not None for record in folder.records.values())

    async def run(self, jobs: list[Job], stop: asyncio.Event, bar: Bar) -> bool:
        """Draw all; False where `stop` came first. Raises ConfigError, RunError."""
        left = iter(jobs)
        total, done = len(jobs), 0

        async def work(jobs: Iterator[Job]) -> None:
            nonlocal done
            for job in jobs:
                self.folder.add(*await self._one(job))
                done += 1
                bar.show(bar.began_with + done)

        workers = [asyncio.ensure_future(work(left)) for _ in range(min(self.settings.concurrency, total))]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            pending: set[asyncio.Future[Any]] = {*workers}
            while pending and not stop.is_set():
                ended, pending = await asyncio.wait({*pending, stopping}, return_when=asyncio.FIRST_COMPLETED)
                pending.discard(stopping)
                for worker in ended - {stopping}:
                    worker.result()
            if done == total and self._refusals and not self._answered:
                raise ConfigError(f"the server refuses every request, {self._last_refusal}")
            return done == total
        finally:
            for task in (*workers, stopping):
                task.cancel()
            await asyncio.gather(*workers, stopping, return_exceptions=True)

    async def _one(self, job: Job) -> tuple[Record, Effort]:
        """The record of one sample, and what it took. Raises ConfigError, RunError where the run cannot go on."""
        record = self._blank(job)
        try:
            got = await self.client.ask(self._body(job, record.seed))
        except Unanswered as failed:
            self._failures += 1
            if self._failures >= MOST_FAILURES + self.settings.concurrency:
                raise RunError(
                    f"{self._failures} samples in a row have no response, the last one: {failed}. What is there is "
                    "kept: look at the server, then give the same command again"
                ) from None
            record.error = str(failed)
            return record, Effort(failed.tries)
        except Refused as refused:
            return self._refused(record, refused), Effort(1)
        self._failures, self._answered = 0, True
        await self._fill(record, job.task, got)
        return record, Effort(got.tries, round(got.latency_s, 3))

    def _refused(self, record: Record, refused: Refused) -> Record:
        if refused.code == MISMATCH:
            record.correct, record.verdict, record.reason = False, Verdict.NO_ANSWER, f"refused: {refused.message}"
            self._answered = True
            return record
        self._refusals += 1
        self._last_refusal = f"{refused}{_advice(refused)}"
        hopeless = refused.status in (401, 403, 404) or self._refusals >= MOST_FAILURES + self.settings.concurrency
        if hopeless and not self._answered:
            raise ConfigError(f"the server refuses every request, {self._last_refusal}")
        record.error = str(refused)
        return record

    def _body(self, job: Job, seed: int) -> dict[str, Any]:
        """The request."""
        settings, task = self.settings, job.task
        most = job.sampling.max_tokens
        body: dict[str, Any] = {
            "model": self.folder.identity["model"], "messages": [{"role": "user", "content": task.prompt}],
            "temperature": job.sampling.temperature, "top_p": job.sampling.top_p,
            "max_tokens": min(most, self.context or most), "seed": seed,
        }  # fmt: skip
        if settings.reasoning_language:
            body["reasoning_language"] = settings.reasoning_language
        if settings.reasoning_language_enforcement:
            body["reasoning_language_enforcement"] = settings.reasoning_language_enforcement
        if task.tools is not None:
            body |= {"tools": task.tools, "tool_choice": "auto"}
        return body

    def _blank(self, job: Job) -> Record:
        """What is known before asking."""
        problem, asked = job.task.problem, self.settings.reasoning_language
        return Record(
            benchmark=job.task.benchmark, id=problem.id, sample=job.sample,
            settings=settings_mark(self.folder.identity, job.task.benchmark), kind=job.task.kind,
            source=problem.source, language=problem.language, prompt_sha=job.task.prompt_sha,
            seed=seed_of(self.settings.seed, job.key), sampling=job.sampling,
            model=self.folder.identity["model"], weights=self.folder.identity["weights"], gold=problem.answer,
            wanted_language=problem.language if asked in ("", AUTO, OFF) else asked,
        )  # fmt: skip

    async def _fill(self, record: Record, task: Task, got: Got) -> None:
        """What came back, and what it is worth."""
        choice, usage = got.reply.choices[0], got.reply.usage
        found = said(choice.message)
        record.thoughts, record.answer, record.finish_reason = found.thoughts, found.answer, choice.finish_reason
        record.server_language = choice.reasoning_language
        if usage is not None:
            details = usage.completion_tokens_details
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            record.reasoning_tokens = details.reasoning_tokens if details else None
        grade = await self.grader.grade(task, found)
        record.verdict, record.reason, record.extracted = grade.verdict, grade.reason, grade.extracted
        record.correct, record.missed = grade.verdict is Verdict.CORRECT, grade.missed
        record.followed, record.loose = grade.followed, grade.loose
        await asyncio.to_thread(_measure, record, task.problem.text, found)


def _measure(record: Record, problem: str, found: Said) -> None:
    """Which languages were spoken."""
    code = record.wanted_language
    asked = detect(problem)
    record.problem_spoken = Spoken(asked.language, round(asked.share, 6))
    for name, text in (("thoughts_spoken", found.thoughts), ("answer_spoken", found.answer)):
        heard, same = spoken_in(text, code)
        setattr(record, name, Spoken(heard.language, round(heard.share, 6), same))


def _advice(refused: Refused) -> str:
    """How to repair what a server refuses to everybody."""
    words = refused.message.lower()
    if refused.status in (401, 403):
        return ": set MAESTRALE_EVALUATE_KEY to a key that may use this model"
    if "context" in words or "max_tokens" in words or "maximum" in words:
        return ": give a smaller --max-tokens, or serve the model with a longer context"
    if "tool" in words:
        return ": this server takes no tools: give --function-calls prompt"
    return ""
