"""Requests the missing samples concurrently, grades each response and records it at once.

    a response                                    graded and recorded
    a refusal of strict (status 422)              recorded as wrong: in another language, cut, or without an answer
    status 401, 403, 404                          ends the run, unless a sample was answered before
    any other refusal, e.g. a prompt too long     an error record; ends the run if no sample is answered at all
    no usable response after all tries            an error record; too many in a row end the run

The next launch requests samples with error records again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from evaluation.client import (
    EvaluationClient,
    NoResponse,
    ParsedResponse,
    RequestRefused,
    TimedCompletion,
    parse_message,
)
from evaluation.grading import ResponseGrader
from evaluation.samples import DetectedLanguage, EvaluationFolder, SampleKey, SampleRecord, settings_mark, written
from evaluation.settings import EvaluationSettings
from evaluation.tasks import Benchmark, BenchmarkSampling, BenchmarkTask
from serve.reasoning_language import AUTO, CUT, MISMATCH, OFF, REFUSALS
from shared.errors import ConfigError, RunError
from shared.progress import PLAIN_EVERY_S
from shared.progress_bar import ProgressBar
from shared.types import Verdict
from verify.language import detect, spoken_in

Item = TypeVar("Item")
MOST_FAILURES = 20
"""number of samples in a row without a response, beyond those under way, that ends the run"""
SEEDS = 1 << 31
"""seeds are below this bound, since some servers accept no larger ones"""


class Job(NamedTuple):
    """One sample that is to be requested."""

    task: BenchmarkTask
    sampling: BenchmarkSampling
    sample: int

    @property
    def key(self) -> SampleKey:
        """The key of the sample."""
        return SampleKey(self.task.benchmark, self.task.problem.id, self.sample)


def jobs_of(benchmarks: list[Benchmark]) -> list[Job]:
    """Return all samples of the benchmarks: for each, first one of every problem, then the second ones."""
    return [
        Job(task, benchmark.sampling, sample)
        for benchmark in benchmarks
        for sample in range(benchmark.sampling.samples)
        for task in benchmark.tasks
    ]


def seed_of(seed: int, key: SampleKey) -> int:
    """Return the seed of a sample: different for each, the same in every launch."""
    digest = hashlib.blake2b(f"{seed}\0{key.benchmark}\0{key.id}\0{key.sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEEDS


async def work_through(
    jobs: list[Item], work: Callable[[Item], Awaitable[None]], concurrency: int, stop: asyncio.Event, bar: ProgressBar
) -> bool:
    """Do all jobs, `concurrency` at a time; returns False if `stop` was set first. Raises what `work` raises."""
    left, before = iter(jobs), bar.done

    async def take(left: Iterator[Item]) -> None:
        for job in left:
            await work(job)
            bar.show(bar.done + 1)

    workers = [asyncio.ensure_future(take(left)) for _ in range(min(concurrency, len(jobs)))]
    stopping = asyncio.ensure_future(stop.wait())
    try:
        pending: set[asyncio.Future[Any]] = {*workers}
        while pending and not stop.is_set():
            ended, pending = await asyncio.wait(
                {*pending, stopping}, timeout=PLAIN_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            pending.discard(stopping)
            bar.show(bar.done)
            for worker in ended - {stopping}:
                worker.result()
        return bar.done - before == len(jobs)
    finally:
        for task in (*workers, stopping):
            task.cancel()
        await asyncio.gather(*workers, stopping, return_exceptions=True)


class SampleRunner:
    """Requests, grades and records the missing samples of a folder."""

    def __init__(
        self,
        settings: EvaluationSettings,
        client: EvaluationClient,
        grader: ResponseGrader,
        folder: EvaluationFolder,
        context: int | None = None,
    ):
        """context: context length of the model in tokens; servers refuse a larger `max_tokens`."""
        self.settings, self.client, self.grader, self.folder = settings, client, grader, folder
        self.context = context
        self._failures = 0
        """number of samples in a row without a response"""
        self._refusals = 0
        """number of requests that the server refused"""
        self._last_refusal = ""
        self._answered = any(record.correct is not None for record in folder.rows.values())
        self._tokens = {"prompt": 0, "completion": 0}
        """of the responses of this launch, where the server counts them"""
        self._timed = 0
        """responses of this launch"""

    def forecast(self, jobs: list[Job]) -> str:
        """Return what the samples take, as known before the first one: their number, and their tokens at most."""
        most = sum(min(job.sampling.max_tokens, self.context or job.sampling.max_tokens) for job in jobs)
        problems = len({job.key[:2] for job in jobs})
        text = f"{len(jobs):,} samples of {problems:,} problems, at most {most:,} completion tokens"
        counts = defaultdict[str, list[int]](list)
        for record in self.folder.rows.values():
            if record.completion_tokens is not None:
                counts[record.benchmark].append(record.completion_tokens)
        means = {benchmark: fmean(numbers) for benchmark, numbers in counts.items()}
        if means.keys() >= {job.task.benchmark for job in jobs}:
            about = sum(means[job.task.benchmark] for job in jobs)
            text += f", about {about:,.0f} by the samples that are there"
        return text

    async def run(self, jobs: list[Job], stop: asyncio.Event, bar: ProgressBar) -> bool:
        """Request all samples; returns False if `stop` was set first. Raises ConfigError, RunError."""

        async def record(job: Job) -> None:
            sample, tries, latency_s = await self._one(job)
            self.folder.add_timed(sample, tries, latency_s)
            self._tokens["prompt"] += sample.prompt_tokens or 0
            self._tokens["completion"] += sample.completion_tokens or 0
            if latency_s:
                self._timed += 1
                bar.row_s += (latency_s - bar.row_s) / self._timed
            bar.note = ", ".join(f"{count:,} {name} tokens" for name, count in self._tokens.items() if count)

        whole = await work_through(jobs, record, self.settings.concurrency, stop, bar)
        if whole and self._refusals and not self._answered:
            raise ConfigError(f"the server refuses every request, {self._last_refusal}")
        return whole

    async def _one(self, job: Job) -> tuple[SampleRecord, int, float]:
        """Return one sample's record, number of requests, and seconds of the last one, 0 if it was not answered. Raises
        ConfigError, RunError if the run cannot go on."""
        record = self._blank(job)
        try:
            got = await self.client.ask(self._body(job, record.seed))
        except NoResponse as failed:
            self._failures += 1
            if self._failures >= MOST_FAILURES + self.settings.concurrency:
                raise RunError(
                    f"{self._failures} samples in a row have no response, the last one: {failed}. What is there is "
                    "kept: look at the server, then give the same command again"
                ) from None
            record.error = str(failed)
            return record, failed.tries, 0.0
        except RequestRefused as refused:
            return self._refused(record, refused), 1, 0.0
        self._failures, self._answered = 0, True
        await self._fill(record, job.task, got)
        return record, got.tries, round(got.latency_s, 3)

    def _refused(self, record: SampleRecord, refused: RequestRefused) -> SampleRecord:
        if refused.code in REFUSALS:
            record.correct, record.verdict, record.reason = False, Verdict.NO_ANSWER, f"refused: {refused.message}"
            record.refused = refused.code == MISMATCH
            record.finish_reason = "length" if refused.code == CUT else record.finish_reason
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
        """Return the body of the request."""
        settings, task = self.settings, job.task
        most = job.sampling.max_tokens
        body: dict[str, Any] = {
            "model": self.folder.identity["model"], "messages": [{"role": "user", "content": task.prompt}],
            "temperature": job.sampling.temperature, "top_p": job.sampling.top_p,
            "max_tokens": min(most, self.context or most), "seed": seed,
        }  # fmt: skip
        if language := settings.reasoning_language or task.problem.reasoning_language:
            body["reasoning_language"] = language
        if settings.reasoning_language_enforcement:
            body["reasoning_language_enforcement"] = settings.reasoning_language_enforcement
        if settings.chat_template_kwargs:
            body["chat_template_kwargs"] = settings.chat_template_kwargs
        if task.tools is not None:
            body |= {"tools": task.tools, "tool_choice": "auto"}
        return body

    def _blank(self, job: Job) -> SampleRecord:
        """Return a record with the fields that are known before the request."""
        problem = job.task.problem
        asked = self.settings.reasoning_language or problem.reasoning_language
        return SampleRecord(
            benchmark=job.task.benchmark, id=problem.id, sample=job.sample,
            settings=settings_mark(self.folder.identity, job.task.benchmark), kind=job.task.kind,
            source=problem.source, language=problem.language, prompt_sha=job.task.prompt_sha,
            seed=seed_of(self.settings.seed, job.key), sampling=job.sampling,
            model=self.folder.identity["model"], weights=self.folder.identity["weights"], ground_truth=problem.answer,
            wanted_language=problem.language if asked in ("", AUTO, OFF) else asked,
        )  # fmt: skip

    async def _fill(self, record: SampleRecord, task: BenchmarkTask, got: TimedCompletion) -> None:
        """Fill the record with the response and its grade."""
        choice, usage = got.reply.choices[0], got.reply.usage
        response = parse_message(choice.message)
        record.reasoning, record.answer = response.reasoning, response.answer
        record.finish_reason = choice.finish_reason
        record.server_language = choice.reasoning_language
        if usage is not None:
            details = usage.completion_tokens_details
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            record.reasoning_tokens = details.reasoning_tokens if details else None
        record.left_out = got.left_out
        grade = await self.grader.grade(task, response)
        record.verdict, record.reason, record.extracted = grade.verdict, grade.reason, grade.extracted
        record.correct, record.missed = grade.verdict is Verdict.CORRECT, grade.missed
        record.followed, record.loose = grade.followed, grade.loose
        await asyncio.to_thread(_measure, record, task.problem.text, response)


def _measure(record: SampleRecord, problem: str, response: ParsedResponse) -> None:
    """Set the detected languages of problem, reasoning and answer in the record."""
    code = record.wanted_language
    asked = detect(problem)
    record.problem_language = DetectedLanguage(asked.language, round(asked.share, 6))
    reasoning = written(response.reasoning, record.server_language)
    for name, text in (("reasoning_language", reasoning), ("answer_language", response.answer)):
        heard, same = spoken_in(text, code)
        setattr(record, name, DetectedLanguage(heard.language, round(heard.share, 6), same))


def _advice(refused: RequestRefused) -> str:
    """Return advice for a refusal that would affect every request, "" for none."""
    words = refused.message.lower()
    if refused.status in (401, 403):
        return ": set MAESTRALE_EVALUATE_KEY to a key that may use this model"
    if "context" in words or "max_tokens" in words or "maximum" in words:
        return ": give a smaller --max-tokens, or serve the model with a longer context"
    if "parameter" in words or "argument" in words:
        return ": a parameter of sampling can be left out with --omit"
    if "tool" in words:
        return ": this server takes no tools: give --function-calls prompt"
    return ""
