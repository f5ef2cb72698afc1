"""Computes results.json from samples. The same samples give the same bytes, in whatever order they were drawn.

docs/evaluation.md defines the figures ("Figures").
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from evaluation.samples import SampleKey, SampleRecord, written
from evaluation.tasks import Benchmark
from shared.diversity import mean_diversity
from shared.statistics import cluster_bootstrap, majority_at_k, pass_at_k
from shared.types import Verdict
from verify.answer_checker import AnswerChecker

DIGITS = 6
"""decimal digits of the figures in results.json"""
Json = dict[str, Any]


class Votes(NamedTuple):
    """The distribution of the answers to one problem."""

    right: int
    wrong: list[int]
    """[different wrong answers] number of samples with each"""
    silent: int
    """number of samples without an answer"""


async def count_votes(samples: Sequence[SampleRecord], checker: AnswerChecker) -> Votes:
    """Count the votes: right answers are one, a wrong one joins the first earlier one that the verifier finds equal."""
    wrong: list[tuple[str, int]] = []
    right = silent = 0
    for sample in samples:
        if sample.correct:
            right += 1
        elif sample.extracted is None:
            silent += 1
        else:
            for number, (first, count) in enumerate(wrong):
                if await checker.check(first, sample.extracted) is Verdict.CORRECT:
                    wrong[number] = (first, count + 1)
                    break
            else:
                wrong.append((sample.extracted, 1))
    return Votes(right, [count for _, count in wrong], silent)


async def summarise(
    identity: Json, benchmarks: list[Benchmark], records: dict[SampleKey, SampleRecord], checker: AnswerChecker
) -> Json:
    """Return all figures of the chosen samples."""
    benchmark_figures: Json = {}
    for benchmark in benchmarks:
        problems = [
            [
                record
                for sample in range(benchmark.sampling.samples)
                if (record := records.get(SampleKey(benchmark.name, task.problem.id, sample))) is not None
            ]
            for task in benchmark.tasks
        ]
        votes = await asyncio.gather(*(count_votes(_answered(samples), checker) for samples in problems))
        whole = figures(problems, votes, benchmark.sampling.samples, identity["seed"])
        benchmark_figures[benchmark.name] = {
            "kinds": sorted({task.kind for task in benchmark.tasks}),
            "sampling": benchmark.sampling._asdict(),
            **({"left_out": left_out} if (left_out := left_out_of(chain.from_iterable(problems))) else {}),
            **whole,
            "parts": parts_of(problems, votes, benchmark.sampling.samples, identity["seed"]),
            "warnings": warnings_of(whole, benchmark, left_out),
        }
    common = {name: value for name, value in identity.items() if name != "benchmarks"}
    return {**common, "benchmarks": {name: _rounded(one) for name, one in benchmark_figures.items()}}


def parts_of(problems: Sequence[Sequence[SampleRecord]], votes: Sequence[Votes], samples: int, seed: int) -> Json:
    """Return `figures` for each language and set of the problems, if there are several: {"language/de": ...}."""
    parts: Json = {}
    for kind, name in (("language", "language"), ("set", "source")):
        members: dict[str, list[int]] = defaultdict(list)
        for number, records in enumerate(problems):
            if records:
                members[getattr(records[0], name)].append(number)
        if len(members) > 1:
            parts |= {
                f"{kind}/{value}": figures([problems[i] for i in chosen], [votes[i] for i in chosen], samples, seed)
                for value, chosen in sorted(members.items())
            }
    return parts


def figures(problems: Sequence[Sequence[SampleRecord]], votes: Sequence[Votes], samples: int, seed: int) -> Json:
    """Return the figures of some problems. problems: [problems][samples], errors included; votes: [problems].

    Problems without any response are left out; pass@k and maj@k are over those with at least k responses.
    """
    every = [record for records in problems for record in records]
    answered = [_answered(records) for records in problems]
    given = [record for records in answered for record in records]
    counts = [(len(records), sum(bool(record.correct) for record in records)) for records in answered]
    shares = [right / total for total, right in counts if total]
    if not shares:
        return {"problems": 0, "responses": 0, "errors": 1.0 if every else 0.0}
    sizes = sizes_of(samples)
    votable = all(record.kind == "answer" for record in given)
    ended = [record for record in given if record.finish_reason != "length" and not record.refused]
    unextracted = [record for record in ended if record.verdict is Verdict.NO_ANSWER]
    return {
        "problems": len(shares),
        "responses": len(given),
        "interval": list(cluster_bootstrap(shares, seed)),
        "pass_at": {
            str(k): mean(pass_at_k(total, right, k) for total, right in counts if total >= k) for k in sizes
        },
        "majority_at": {
            str(k): mean(majority_at_k(*one, k) for one in votes if one.right + sum(one.wrong) + one.silent >= k)
            for k in sizes
        } if votable else None,
        **mean_diversity([[f"{one.reasoning}\n{one.answer}" for one in records] for records in answered]),
        "answers": mean(len(one.wrong) + bool(one.right) for one in votes if one.right + sum(one.wrong) + one.silent)
        if votable and samples > 1 else None,
        "truncated": mean(record.finish_reason == "length" for record in given),
        "refused": mean(record.refused for record in given),
        "unextracted": len(unextracted) / len(given),
        "missed": sum(record.missed for record in unextracted) / len(given),
        "ungraded": mean(record.verdict is not None and not record.verdict.graded for record in given),
        "errors": 1 - len(given) / len(every),
        "completion_tokens": mean(
            record.completion_tokens for record in given if record.completion_tokens is not None
        ),
        "reasoning_tokens": mean(record.reasoning_tokens for record in given if record.reasoning_tokens is not None),
        "languages": languages_of(given),
        **({"instructions": instructions_of(given)} if any(record.followed for record in given) else {}),
    }  # fmt: skip


def sizes_of(samples: int) -> list[int]:
    """Return the k of pass@k: the powers of two up to `samples`, and `samples`."""
    return sorted({*(1 << power for power in range(samples.bit_length())), samples})


def languages_of(records: Iterable[SampleRecord]) -> Json:
    """Return, for each requested language, in which one reasoning, answers and whole responses were, as shares.

    same: in that language; other: in another, or mixed; undetermined: too few words to tell; none: no text at all;
    refused: the server refused the response for its language. measured: the languages of reasoning, or of answers
    where there is none. questions: the share of responses in the requested language by the language of the problem.
    """
    by_language: dict[str, list[SampleRecord]] = defaultdict(list)
    for record in records:
        by_language[record.wanted_language].append(record)
    return {
        language: {
            "responses": len(responses),
            "reasoning": _spread(responses, lambda record: record.reasoning_language.same if _reasoned(record) else ""),
            "answer": _spread(responses, lambda record: record.answer_language.same if record.answer.strip() else ""),
            "response": _spread(
                responses, lambda record: record.in_language if _reasoned(record) or record.answer.strip() else ""
            ),
            "measured": _shares(map(_measured, responses)),
            "questions": {
                asked_in: mean(record.in_language is True for record in responses if record.language == asked_in)
                for asked_in in sorted({record.language for record in responses})
            },
        }
        for language, responses in sorted(by_language.items())
    }


def _spread(records: Sequence[SampleRecord], same: Callable[[SampleRecord], bool | str | None]) -> Json:
    words = {True: "same", False: "other", None: "undetermined", "": "none"}
    counts = Counter("refused" if record.refused else words[same(record)] for record in records)
    return {name: counts[name] / counts.total() for name in (*words.values(), "refused")}


def _reasoned(record: SampleRecord) -> bool:
    return bool(written(record.reasoning, record.server_language))


def _measured(record: SampleRecord) -> str:
    """Return the language of a response, "mixed", "too few words", or "refused"."""
    spoken = record.reasoning_language if _reasoned(record) else record.answer_language
    if record.refused or spoken.same is None:
        return "refused" if record.refused else "too few words"
    mixed = spoken.language in ("", record.wanted_language)
    return record.wanted_language if spoken.same else "mixed" if mixed else spoken.language


def _shares(names: Iterable[str]) -> Json:
    counts = Counter(names)
    return {name: count / counts.total() for name, count in sorted(counts.items())}


def instructions_of(records: Sequence[SampleRecord]) -> Json:
    """Return IFEval's four figures: shares of prompts with all instructions followed, and of instructions followed,
    each by the strict and by the loose rules."""
    judged = [(record, record.followed) for record in records if record.followed is not None]
    followed = [counts for _, counts in judged]
    total = sum(count for count, _, _ in followed)
    return {
        "prompt_strict": mean(bool(record.correct) for record, _ in judged),
        "prompt_loose": mean(bool(record.loose) for record, _ in judged),
        "instruction_strict": sum(strict for _, strict, _ in followed) / total if total else None,
        "instruction_loose": sum(loose for _, _, loose in followed) / total if total else None,
    }


def left_out_of(records: Iterable[SampleRecord]) -> dict[str, float]:
    """Return the parameters that were not sent with all requests, each with the share of responses without it."""
    given = [record.left_out for record in records if not record.error]
    counts = Counter(name for names in given for name in names)
    return {name: count / len(given) for name, count in sorted(counts.items())}


def warnings_of(rates: Json, benchmark: Benchmark, left_out: Mapping[str, float]) -> list[str]:
    """Return warnings that a reader of the score needs."""
    renamed = "max_tokens" if "max_completion_tokens" not in left_out else ""
    warnings = [
        f"{share:.1%} of the responses are to requests without {name}: it was refused, or omitted"
        + ", and max_completion_tokens sent" * (name == renamed)
        for name, share in left_out.items()
    ]
    if rates["errors"]:
        warnings.append(f"{rates['errors']:.1%} of the samples have no response; the same command asks for them again")
    if not rates["problems"]:
        return warnings
    texts = {
        "truncated": f"were cut (max_tokens = {benchmark.sampling.max_tokens}, or the model's context): with a higher "
                     "limit the score may be higher",
        "unextracted": "hold nothing that could be judged",
        "missed": "seem to hold the answer, but not in the form asked for",
        "refused": "were refused for their language; they count as wrong",
        "ungraded": "could not be graded (verifier); they count as wrong",
    }  # fmt: skip
    least = {"unextracted": 0.1}
    frequent = [name for name in texts if rates[name] > least.get(name, 0)]
    return warnings + [f"{rates[name]:.1%} of the responses {texts[name]}" for name in frequent]


def mean(values: Iterable[float]) -> float | None:
    """Return the mean of the values, None if there are none."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def _answered(records: Sequence[SampleRecord]) -> list[SampleRecord]:
    return [record for record in records if not record.error]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS) + 0.0
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
