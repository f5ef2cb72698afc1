r"""The math verifier beside math-verify on the same cases in one run: right, wrong, time, throughput, hostile strings.

Cases: the hand-written table (tests/verify/cases.tsv) by category, and responses that look like a model's: a few
sentences that end in \boxed{...} around the answers of the given files (JSONL with an `answer`), their rewritings and
near misses (tests/verify/rewritings.py). math-verify is used as its README does: verify(parse("$ground_truth$"),
parse("$answer$")), its own timeouts on; and once more with both sides boxed. Ours is `is_equivalent` and `grade`, the
worker process and its pipe included. Hostile strings (tests/verify/hostile.py) go through a pool with a deadline of
1 s.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks import report
from benchmarks.figures import ROOT, Section, benchmark, measured_with
from shared.jsonl import read_rows
from shared.types import Verdict
from tests.verify import rewritings
from tests.verify.blocking import check_completion, is_equivalent
from tests.verify.hostile import hostile
from verify.answer_checker import AnswerChecker

PAIRS = ROOT / "tests" / "verify" / "cases.tsv"
OPENINGS = (
    "Let us set up the equation and solve it step by step. We get $x^2 - 5x + 6 = 0$, so $(x-2)(x-3) = 0$.",
    "First, count the cases. There are $\\binom{6}{2} = 15$ pairs, and each pair appears twice.",
    "By symmetry the two areas are equal, hence $A = \\frac{1}{2} \\cdot 8 \\cdot 3 = 12$.",
)
Case = tuple[str, bool, str, str]
Judge = Callable[[str, str], bool]


def _math_verify(frame: str) -> tuple[Judge, Judge]:
    """Return (pairs, responses) as judged by math-verify, answers framed as `frame` says."""
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def pair(ground_truth: str, answer: str) -> bool:
        return bool(verify(parse(frame % ground_truth), parse(frame % answer)))

    def response(ground_truth: str, text: str) -> bool:
        return bool(verify(parse(frame % ground_truth), parse(text)))

    return pair, response


def _table() -> list[Case]:
    lines = PAIRS.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(category, sign == "=", ground_truth, answer) for category, sign, ground_truth, answer in rows]


def _responses(files: list[Path], count: int) -> list[Case]:
    """Make responses around real answers: one third as it is, one third rewritten, one third wrong."""
    answers = [str(row.fields["answer"]) for path in files for row in read_rows(path)]
    dice = random.Random(5)
    dice.shuffle(answers)
    cases: list[Case] = []
    for index, answer in enumerate(answers[:count]):
        options = [change(answer) for change in ({}, rewritings.SAME, rewritings.DIFFERENT)[index % 3].values()]
        kept = [option for option in options if option is not None]
        if index % 3 == 2 and not kept:
            continue
        shown = dice.choice(kept) if kept else answer
        text = f"{dice.choice(OPENINGS)}\n\nSo it is $\\boxed{{{shown}}}$."
        cases.append(("responses", index % 3 != 2, answer, text))
    return cases


def _run(cases: list[Case], judge: Judge) -> tuple[list[bool], list[float]]:
    verdicts, seconds = [], []
    for _, _, ground_truth, answer in cases:
        start = time.perf_counter()
        try:
            verdicts.append(judge(ground_truth, answer))
        except Exception:  # noqa: BLE001 - an error of a peer is a verdict: not equal
            verdicts.append(False)
        seconds.append(time.perf_counter() - start)
    return verdicts, seconds


HEAD = ("grader", "right", "false positives", "false negatives", "mean ms", "p99 ms", "longest ms", "over 1 s",
        "verdicts/s")  # fmt: skip


def _row(name: str, cases: list[Case], verdicts: list[bool], seconds: list[float]) -> list[str]:
    """Return the cells under HEAD."""
    same = [case[1] for case in cases]
    wrong = [verdict for verdict, right in zip(verdicts, same, strict=True) if verdict is not right]
    ordered = sorted(seconds)
    return [
        name, f"{1 - len(wrong) / len(cases):.2%}", f"{sum(wrong)} / {len(same) - sum(same)}",
        f"{len(wrong) - sum(wrong)} / {sum(same)}", f"{1000 * statistics.mean(seconds):.2f}",
        f"{1000 * ordered[int(0.99 * len(ordered))]:.1f}", f"{1000 * ordered[-1]:.0f}",
        str(sum(second > 1 for second in seconds)), f"{len(cases) / sum(seconds):,.0f}",
    ]  # fmt: skip


def _by_category(cases: list[Case], found: dict[str, list[bool]]) -> str:
    rows = []
    for category in sorted({case[0] for case in cases}):
        of = [index for index, case in enumerate(cases) if case[0] == category]
        rows.append([category, len(of), *(sum(one[index] is not cases[index][1] for index in of)
                                          for one in found.values())])  # fmt: skip
    return report.table(["category", "cases", *found], *rows)


async def _hostile(count: int) -> list[str]:
    """Every hostile string through one pool; lines of a table."""
    seconds: list[float] = []
    verdicts: Counter[str] = Counter()
    async with AnswerChecker(workers=2, deadline_s=1.0) as checker:
        await checker.check("x+1", "1+x")
        await asyncio.sleep(2)
        before = psutil.Process().memory_info().rss
        for ground_truth, answer in hostile(count):
            start = time.perf_counter()
            verdicts[(await checker.check(ground_truth, answer)).value] += 1
            seconds.append(time.perf_counter() - start)
        alive = await checker.check("x+2", "2+x") is Verdict.CORRECT
        growth = (psutil.Process().memory_info().rss - before) >> 20
        workers = [psutil.Process(pid).memory_info().rss >> 20 for pid in checker.pids]
        counts = dict(checker.counts)
    seconds.sort()
    return [
        f"- {count} strings, verdicts: " + ", ".join(f"{name} {number}" for name, number in verdicts.most_common()),
        f"- mean {1000 * statistics.mean(seconds):.1f} ms, p99 {1000 * seconds[int(0.99 * count)]:.0f} ms, "
        f"longest {1000 * seconds[-1]:.0f} ms (deadline 1,000 ms)",
        f"- caller grew by {growth} MB; workers {workers} MB; checker {counts}; "
        f"alive afterwards: {'yes' if alive else 'no'}",
    ]


@benchmark(page="docs/verifiers.md")
def verify(quick: bool, answers: list[Path], responses: int = 3000, hostile_strings: int = 10_000) -> Iterator[Section]:
    """Judge the table, the responses around answers, then hostile strings."""
    pairs, around = _table()[:: 40 if quick else 1], _responses(answers, 60 if quick else responses)
    is_equivalent("\\sqrt{8}", "2\\sqrt{2}")  # the worker process is started once in a run
    judges: dict[str, tuple[Judge, Judge]] = {
        "ours": (is_equivalent, lambda ground_truth, text: check_completion(ground_truth, text) is Verdict.CORRECT),
        "math-verify 0.9, README": _math_verify("$%s$"),
        "math-verify 0.9, both boxed": _math_verify("\\boxed{%s}"),
    }
    found = {name: _run(pairs, pair) for name, (pair, _) in judges.items()}
    of_pairs = [_row(name, pairs, *one) for name, one in found.items()]
    of_responses = [_row(name, around, *_run(around, response)) for name, (_, response) in judges.items()]
    categories = _by_category(pairs, {name: verdicts for name, (verdicts, _) in found.items()})
    lines = [
        f"{measured_with('verify')}; responses around answers of {', '.join(path.name for path in answers)}.", "",
        f"## {len(pairs)} hard pairs", "", report.table(HEAD, *of_pairs), "Wrong verdicts by category:", "",
        categories, f"## {len(around)} responses around real answers", "", report.table(HEAD, *of_responses),
        "## Hostile strings", "", *asyncio.run(_hostile(200 if quick else hostile_strings)),
    ]  # fmt: skip
    yield Section("\n".join(lines) + "\n", mark="results")
