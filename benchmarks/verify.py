r"""The math verifier beside math-verify on the same cases in one run: right, wrong, time, throughput, hostile strings.

    python -m benchmarks.verify --answers FILE.jsonl.gz ... [--hostile 10000] [--no-write]

Cases: the hand-written table (tests/verify/cases.tsv) by category, and responses that look like a model's: a few
sentences that end in \boxed{...} around the answers of the given files (JSONL with an `answer`), their rewritings and
near misses (tests/verify/rewritings.py). math-verify is used as its README does: verify(parse("$ground_truth$"),
parse("$answer$")), its own timeouts on; and once more with both sides boxed. Ours is `is_equivalent` and `grade`, the
worker process and its pipe included. Hostile strings (tests/verify/hostile.py) go through a pool with a deadline of
1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.section import ROOT, describe_machine, write
from shared.jsonl import read_rows
from shared.types import Verdict
from tests.verify import rewritings
from tests.verify.hostile import hostile
from verify.answer_checker import AnswerChecker, check_completion, is_equivalent

TABLE = ROOT / "tests" / "verify" / "cases.tsv"
OPENINGS = (
    "Let us set up the equation and solve it step by step. We get $x^2 - 5x + 6 = 0$, so $(x-2)(x-3) = 0$.",
    "First, count the cases. There are $\\binom{6}{2} = 15$ pairs, and each pair appears twice.",
    "By symmetry the two areas are equal, hence $A = \\frac{1}{2} \\cdot 8 \\cdot 3 = 12$.",
)
Case = tuple[str, bool, str, str]
Judge = Callable[[str, str], bool]


def _math_verify(frame: str) -> tuple[Judge, Judge]:
    """(pairs, responses) as judged by math-verify, answers framed as `frame` says."""
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def pair(ground_truth: str, answer: str) -> bool:
        return bool(verify(parse(frame % ground_truth), parse(frame % answer)))

    def response(ground_truth: str, text: str) -> bool:
        return bool(verify(parse(frame % ground_truth), parse(text)))

    return pair, response


def _table() -> list[Case]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(category, sign == "=", ground_truth, answer) for category, sign, ground_truth, answer in rows]


def _responses(files: list[Path], count: int) -> list[Case]:
    """Responses around real answers: one third as it is, one third rewritten, one third wrong."""
    answers = [str(row.fields["answer"]) for path in files for row in read_rows(path)]
    dice = random.Random(5)
    dice.shuffle(answers)
    cases: list[Case] = []
    for index, answer in enumerate(answers[:count]):
        options = [change(answer) for change in ([], rewritings.SAME, rewritings.DIFFERENT)[index % 3]]
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


def _row(name: str, cases: list[Case], verdicts: list[bool], seconds: list[float]) -> str:
    right = sum(verdict is same for verdict, (_, same, _, _) in zip(verdicts, cases, strict=True))
    false_positives = sum(verdict and not same for verdict, (_, same, _, _) in zip(verdicts, cases, strict=True))
    false_negatives = sum(same and not verdict for verdict, (_, same, _, _) in zip(verdicts, cases, strict=True))
    ordered = sorted(seconds)
    cells = [
        name,
        f"{right / len(cases):.2%}",
        f"{false_positives} / {sum(not case[1] for case in cases)}",
        f"{false_negatives} / {sum(case[1] for case in cases)}",
        f"{1000 * statistics.mean(seconds):.2f}",
        f"{1000 * ordered[int(0.99 * len(ordered))]:.1f}",
        f"{1000 * ordered[-1]:.0f}",
        str(sum(second > 1 for second in seconds)),
        f"{len(cases) / sum(seconds):,.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| grader | right | false positives | false negatives | mean ms | p99 ms | longest ms | over 1 s | verdicts/s |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def _by_category(cases: list[Case], found: dict[str, list[bool]]) -> list[str]:
    names = list(found)
    lines = ["| category | cases | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for category in sorted({case[0] for case in cases}):
        rows = [index for index, case in enumerate(cases) if case[0] == category]
        wrong = [sum(found[name][row] is not cases[row][1] for row in rows) for name in names]
        lines.append(f"| {category} | {len(rows)} | " + " | ".join(map(str, wrong)) + " |")
    return lines


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, nargs="+", required=True, metavar="FILE", help="JSONL with an `answer`")
    parser.add_argument("--responses", type=int, default=3000, help="responses around real answers")
    parser.add_argument("--hostile", type=int, default=10_000, help="hostile strings")
    parser.add_argument("--no-write", action="store_true", help="print the figures only")
    options = parser.parse_args()
    table, responses = _table(), _responses(options.answers, options.responses)
    is_equivalent("\\sqrt{8}", "2\\sqrt{2}")  # the worker process is started once in a run
    judges: dict[str, tuple[Judge, Judge]] = {
        "ours": (is_equivalent, lambda ground_truth, text: check_completion(ground_truth, text) is Verdict.CORRECT),
        "math-verify 0.9, README": _math_verify("$%s$"),
        "math-verify 0.9, both boxed": _math_verify("\\boxed{%s}"),
    }
    text = [
        f"Measured on {datetime.date.today()} with `python -m benchmarks.verify` on {describe_machine()}; responses "
        f"around answers of {', '.join(path.name for path in options.answers)}.",
        "",
        f"## {len(table)} hard pairs",
        "",
        HEAD,
    ]
    found = {}
    for name, (pair, _) in judges.items():
        verdicts, seconds = _run(table, pair)
        found[name] = verdicts
        text.append(_row(name, table, verdicts, seconds))
        print(text[-1], flush=True)
    text += ["", "Wrong verdicts by category:", "", *_by_category(table, found)]
    if responses:
        text += ["", f"## {len(responses)} responses around real answers", "", HEAD]
        for name, (_, response) in judges.items():
            text.append(_row(name, responses, *_run(responses, response)))
            print(text[-1], flush=True)
    text += ["", "## Hostile strings", "", *asyncio.run(_hostile(options.hostile))]
    print("\n".join(text[-3:]))
    if not options.no_write:
        write("\n".join(text) + "\n", ROOT / "docs" / "verifiers.md")


if __name__ == "__main__":
    main()
