r"""Grade a file of completions: `python -m verify FILE.jsonl --out VERDICTS.jsonl`. See `--help`."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import itertools
import signal
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import IO

import msgspec
from rich.table import Table

from shared import settings_file
from shared.command_line import CommandParser
from shared.errors import ConfigError, run_command
from shared.progress import CleanConsole, duration
from shared.progress_bar import ProgressBar
from shared.sections import RewardWeights
from shared.types import Verdict
from verify.answer_checker import AnswerChecker, worker_count
from verify.chosen_rewards import choose
from verify.code.runner import ProgramVerifier
from verify.published import columns_of
from verify.records import Item, Record, check_beginning, make_record, read_items, read_records, settings_fingerprint
from verify.reward import CompletionScorer
from verify.verifiers import verifier_for

UNDER_WAY = 256
"""responses that are graded at once; verdicts are written in the order of the input"""

PARTS = ("total", "format", "correctness", "length", "language")
"""rows of the table of means"""

EXAMPLES = r"""
input, one JSON object a line (.jsonl; also .json, .csv, .tsv, each with .gz, and .parquet):
  {"problem": "2+3=?", "answer": "5", "response": "<think>Two and three are five.</think>It is \\boxed{5}."}
  optional: "id", "language" (of the problem, "en"), "domain" ("math", "code", "open", ...), "tokens" (its length).
  Problems of published sets may keep their own columns (docs/data.md); --columns names others.
  Rows of a data file may also be nested: {"problem": {"problem": ..., "answer": ...}, "response": ...}

output, one JSON object a line, in the order of the input:
  {"line": 1, "id": "", "reward": {"total": 1.1, "format": 0.1, "correctness": 0.9, "length": 0.0, "language": 0.1,
   "verdict": "correct", "reason": "answer is right", "languages": ["en", "en", "en"], "answer": "5", ...}, ...}
  A verdict that is neither correct nor wrong (timeout, crash, unverifiable) is no grade: leave it out of means.

examples:
  python -m verify responses.jsonl --out verdicts.jsonl
  python -m verify responses.jsonl --out verdicts.jsonl --config configs/quickstart.toml --reward.language=0
  python -m verify responses.jsonl --out verdicts.jsonl --reward.extra.repetition=0.1

Ctrl-C stops; the same command goes on where it was. Without "tokens" there is no length penalty.
exit codes: 0 done, 1 failed, 2 the input or a setting is wrong (one line says which, and the repair), 130 stopped
"""


def verdict_table(records: list[Record]) -> Table:
    """Return the table of verdict classes: number, share and most frequent reason."""
    table = Table(title="Verdicts")
    table.add_column("verdict")
    table.add_column("responses", justify="right")
    table.add_column("share", justify="right")
    table.add_column("most often")
    for verdict in Verdict:
        rewards = [record.reward for record in records if record.reward.verdict is verdict]
        if rewards:
            reason, count = Counter(reward.reason.split(";")[0][:60] for reward in rewards).most_common(1)[0]
            table.add_row(verdict.value, str(len(rewards)), f"{len(rewards) / len(records):.1%}", f"{reason} ({count})")
    return table


def group_table(records: list[Record]) -> Table:
    """Return the table of shares and mean reward over the graded completions: all, by language of the problem, by
    domain.

    Responses to open problems are neither right nor wrong: "-" where there are no others.
    """
    table = Table(title="Graded responses")
    table.add_column("of")
    for name in ("responses", "right", "well formed", "one language", "mean reward"):
        table.add_column(name, justify="right")
    groups: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.reward.verdict.graded:
            for key in ((0, "all"), (1, record.language), (2, record.domain)):
                groups[key].append(record)
    for (_, name), members in sorted(groups.items()):
        rewards = [record.reward for record in members]
        right = [record.reward.verdict is Verdict.CORRECT for record in members if record.verified]
        formed = fmean(not reward.reason.startswith("format: ") for reward in rewards)
        table.add_row(
            name,
            str(len(members)),
            f"{fmean(right):.1%}" if right else "-",
            f"{formed:.1%}",
            f"{fmean(bool(reward.consistent) for reward in rewards):.1%}",
            f"{fmean(reward.total for reward in rewards):.3f}",
        )
    return table


def part_table(records: list[Record]) -> Table:
    """Return the table of mean and range of the total and of every part over the graded completions."""
    rewards = [record.reward for record in records if record.reward.verdict.graded]
    table = Table(title="Parts of the reward")
    table.add_column("part")
    for name in ("mean", "lowest", "highest"):
        table.add_column(name, justify="right")
    columns = {name: [float(getattr(reward, name)) for reward in rewards] for name in PARTS}
    for name in sorted({name for reward in rewards for name in reward.extra}):
        columns[name] = [reward.extra.get(name, 0.0) for reward in rewards]
    for name, values in columns.items():
        if values:
            table.add_row(name, *(f"{value + 0.0:.3f}" for value in (fmean(values), min(values), max(values))))
    return table


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this command, and the settings that follow the form --reward.x=y."""
    parser = CommandParser(
        prog="python -m verify",
        description="Grade completions to problems: format, correctness, length, language, and extra rewards.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="problems with responses")
    parser.add_argument("--out", type=Path, required=True, metavar="VERDICTS.jsonl", help="where verdicts are written")
    parser.add_argument("--config", type=Path, metavar="RUN.toml", help="take [reward] of this run's settings")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="verifier processes (default: one per core)"
    )
    parser.add_argument(
        "--opened", action="store_true", help="the chat template opened the reasoning: no <think> first"
    )
    parser.add_argument(
        "--columns", default="", metavar="FIELD=COLUMN,...", help="columns of the file that hold fields"
    )
    parser.add_argument("--restart", action="store_true", help="overwrite VERDICTS.jsonl instead of going on")
    options, settings = parser.parse_known_args(arguments)
    for name in settings:
        if not name.startswith("--reward.") or "=" not in name:
            parser.error(f"unknown option {name}: settings are written --reward.name=value")
    return options, settings


def read_settings(path: Path | None, overrides: list[str]) -> RewardWeights:
    """The [reward] section, length_max filled in. Raises ConfigError."""
    if path is not None:
        config = settings_file.load(path, overrides)
        return config.reward.resolved(config.rollout.max_completion_tokens)
    table: settings_file.Table = {}
    origin = settings_file.put_all(table, settings_file.read_overrides(overrides))
    return settings_file.check(table, "options", origin).reward


async def grade(
    items: Iterator[Item], settings: RewardWeights, mark: str, opened: bool, stream: IO[bytes], display: ProgressBar,
    done: int,
) -> list[Record]:  # fmt: skip
    """Score the items and write their verdicts in order; `done` were graded before. Raises KeyboardInterrupt."""
    written: list[Record] = []
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    programs = ProgramVerifier(settings.sandbox)
    async with AnswerChecker(workers=settings.workers, deadline_s=settings.deadline_s) as checker:
        scorer = CompletionScorer(settings, checker, programs)

        async def graded(item: Item) -> Record:
            reward = await scorer.score(item.problem, item.completion, item.tokens, opened=opened)
            return make_record(item, reward, mark)

        waiting: deque[asyncio.Task[Record]] = deque()
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                while len(waiting) < UNDER_WAY and (item := next(items, None)) is not None:
                    waiting.append(asyncio.ensure_future(graded(item)))
                if not waiting:
                    return written
                await asyncio.wait([waiting[0], stopping], return_when=asyncio.FIRST_COMPLETED)
                while waiting and waiting[0].done():
                    written.append(waiting.popleft().result())
                    stream.write(msgspec.json.encode(written[-1]) + b"\n")
                display.show(done + len(written))
            raise KeyboardInterrupt
        finally:
            stream.flush()
            for task in (*waiting, stopping):
                task.cancel()
            await asyncio.gather(*waiting, stopping, return_exceptions=True)
            await programs.close()


async def tell_isolation(settings: RewardWeights) -> str:
    """One line about the sandboxes of programs. Raises SandboxRefused, before anything is graded."""
    programs = ProgramVerifier(settings.sandbox)
    try:
        return await programs.start()
    finally:
        await programs.close()


def go_on(
    options: argparse.Namespace, settings: RewardWeights, rows: list[str], mark: str, stream: IO[bytes]
) -> tuple[list[Record], list[Record]]:
    """The verdicts that were there, and those graded and written now. Raises as `run`."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"--out = {options.out}: another process is writing it: stop it, or give another") from error
    if options.restart:
        stream.truncate(0)
    before = read_records(options.out, mark)
    check_beginning(rows, before, options.out)
    if before:
        print(f"{options.out} holds {len(before)} of {len(rows)} verdicts: going on", file=sys.stderr)
    display = ProgressBar("grading", "graded", len(before), len(rows))
    try:
        rest = itertools.islice(read_items(options.file, options.columns), len(before), None)
        return before, asyncio.run(grade(rest, settings, mark, options.opened, stream, display, len(before)))
    finally:
        display.close()


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    """Everything after the options. Raises MaestraleError, or KeyboardInterrupt."""
    started = time.monotonic()
    options.columns = columns_of(options.columns)
    settings = read_settings(options.config, overrides)
    settings = settings.model_copy(update={"workers": worker_count(options.workers)})
    if not options.out.parent.is_dir():
        raise ConfigError(f"--out = {options.out}: there is no folder {options.out.parent}: create it first")
    choose(settings)  # its files may define the verifiers of the rows
    mark = settings_fingerprint(settings, options.opened)
    rows, sized, programs = [], False, False
    for item in read_items(
        options.file, options.columns
    ):  # all of them first: a bad last line is reported before hours of work
        rows.append(item.row)
        sized = sized or item.tokens is not None
        programs = programs or verifier_for(item.problem).needs == "sandbox"
    if sized and settings.length and not settings.length_max:
        raise ConfigError(
            "the lines have 'tokens', so that their length weighs: give --reward.length_max=N, --config RUN.toml, or "
            " --reward.length=0"
        )
    if programs:
        print(asyncio.run(tell_isolation(settings)), file=sys.stderr)
    with options.out.open("ab") as stream:
        records, fresh = go_on(options, settings, rows, mark, stream)
    records += fresh
    console = CleanConsole()
    console.print(verdict_table(records))
    console.print(group_table(records))
    console.print(part_table(records))
    took = time.monotonic() - started
    summary = f"{len(records)} verdicts in {options.out}, {len(fresh)} of them new, in {duration(took)}"
    console.print(summary, soft_wrap=True)
    return 0


def main(arguments: list[str]) -> int:
    """Parse and run; returns the exit code."""
    options, overrides = parse(arguments)
    stopped = f"stopped; the same command goes on with what {options.out} lacks"
    return run_command(lambda: run(options, overrides), stopped)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
