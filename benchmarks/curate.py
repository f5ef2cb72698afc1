"""The stages of the data pipeline on real problems with planted faults: counts, precision and recall.

`data` is a folder with math_train, math500, mbpp, humaneval, humaneval_cpp and mgsm as .jsonl or .jsonl.gz. Faults are
made deterministically (faults.py) and put among the real rows; what a stage then says about each is looked up by its
id. recall: planted faults found, with the right reason. precision: those by all rows with that reason, as if every real
row with it were sound. `seed` plants other faults.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import faults
from benchmarks.faults import Fields
from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.report import table
from curate import runner
from curate.assertions import edit, literal_of, read_code
from curate.duplicates import CONFLICT, DuplicatesStage
from curate.format import FormatStage
from curate.languages import HumanStage, why_unfaithful
from curate.programs import ProgramsStage
from curate.runner import OutputFiles, Report
from curate.stage import CurationStage
from shared.errors import DataError
from shared.jsonl import read_rows
from verify.code.runner import run_tests
from verify.code.tests import Limits

TEST_S = 12.0
"""one reference works for 3.5 s on a quiet machine"""


class Score(NamedTuple):
    """What became of one kind of planted fault."""

    stage: str
    fault: str
    planted: int
    found: int
    others: int | None
    """sound rows that got the same reason; None where there is no such reason"""


class Seen:
    """What a stage wrote: kept and rejected rows by id, and its report."""

    def __init__(self, out: Path, report: Report):
        files = OutputFiles(out)
        self.report = report
        self.kept = {row.fields["id"]: row.fields for row in read_rows(files.kept)}
        self.rejected = {row.fields["id"]: row.fields for row in read_rows(files.rejected)}

    def reason(self, name: str) -> str:
        """Return why a row was rejected, "" when it was kept."""
        return str(self.rejected[name]["rejected"]["reason"]) if name in self.rejected else ""

    def score(
        self, fault: str, rows: Sequence[Fields], right: Callable[[str], bool], allowed: Sequence[Fields] = ()
    ) -> Score:
        """Score planted rows whose reason must satisfy `right`; `allowed`: real rows that may have it too."""
        names = {row["id"] for row in rows}
        others = {name for name in self.rejected if right(self.reason(name))} - names
        others = {name for name in others if not str(name).startswith(faults.PLANTED)} - {row["id"] for row in allowed}
        found = sum(right(self.reason(name)) for name in names)
        return Score(self.report["stage"], fault, len(names), found, len(others))


class Bench:
    """One run of the benchmark."""

    def __init__(self, data: Path, folder: Path, seed: int, fraction: float):
        self.data, self.folder, self.fraction = data, folder, fraction
        self.rng = random.Random(seed)
        self.reports: list[tuple[str, Report]] = []
        self.scores: list[Score] = []

    def load(self, name: str) -> list[Fields]:
        """Return the rows of a data file. Raises DataError when it is not there."""
        for suffix in (".jsonl", ".jsonl.gz"):
            path = self.data / f"{name}{suffix}"
            if path.exists():
                rows = [row.fields for row in read_rows(path)]
                return rows if self.fraction == 1 else rows[:: round(1 / self.fraction)]
        raise DataError(f"data = {self.data}: there is neither {name}.jsonl nor {name}.jsonl.gz")

    def count(self, whole: int) -> int:
        """Return how many faults of a kind to plant, of so many in a full run."""
        return max(2, round(whole * self.fraction))

    def run(self, title: str, stage: CurationStage, rows: Sequence[Fields], shuffle: bool = True) -> Seen:
        """Run a stage on rows, planted ones at random places unless told otherwise."""
        print(f"{title} ({len(rows)} rows)", flush=True)
        mixed = self.rng.sample(list(rows), len(rows)) if shuffle else list(rows)
        path, out = self.folder / "in.jsonl", self.folder / f"{len(self.reports)}.jsonl"
        write_rows(path, mixed)
        outcome = runner.run(stage, [path], out)
        self.reports.append((title, outcome.report))
        return Seen(out, outcome.report)


def write_rows(path: Path, rows: Sequence[Fields]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def form(bench: Bench) -> None:
    """Measure the stage format on math_train."""
    base, rng = bench.load("math_train"), bench.rng
    plain = faults.plain(base)
    opened, wanted = faults.open_choices(plain, bench.count(150), rng)
    kinds = {
        "proofs, 7 languages": (faults.proofs(plain, bench.count(150), rng), "proof"),
        "several parts": (faults.parts(plain, bench.count(150), rng), "several parts"),
        "choice that needs its options": (faults.closed_choices(plain, bench.count(120), rng), "multiple choice"),
        "answers that cannot be checked": (faults.uncheckable(plain, bench.count(140), rng), "answer not checkable"),
        "lost figures": (faults.lost_figures(base, bench.count(150), rng), "missing figure"),
    }
    planted = [row for rows, _ in kinds.values() for row in rows]
    bench.run("format: math_train", FormatStage(workers=2), base, shuffle=False)
    seen = bench.run("format: math_train and faults", FormatStage(workers=2), [*base, *planted, *opened])
    for fault, (rows, reason) in kinds.items():
        bench.scores.append(seen.score(fault, rows, lambda found, reason=reason: found.startswith(reason)))
    right = sum(
        seen.kept.get(name, {}).get("answer") == row["answer"]
        and seen.kept[name]["problem"].split() == row["problem"].split()
        for name, row in wanted.items()
    )
    bench.scores.append(Score("format", "choice opened: the old statement and answer again", len(opened), right, None))


def duplicates(bench: Bench) -> None:
    """Measure the stage duplicates on math_train against math500."""
    base, test, rng = bench.load("math_train"), bench.load("math500"), bench.rng
    path = bench.folder / "math500.jsonl"
    write_rows(path, test)
    bench.run("duplicates: math_train against math500", DuplicatesStage(against=[path], workers=2), base, shuffle=False)
    originals = rng.sample(base, len(base))
    size = bench.count(100)
    groups: dict[str, list[Fields]] = {}
    for number, edit_name in enumerate(faults.EDITS):
        pool = originals[number * size : (number + 1) * size]
        groups[edit_name] = faults.copies(pool, edit_name, size, rng, f"copy {edit_name}")
    rest = originals[4 * size :]
    other = [
        {**row, "answer": f"{row['answer']}+q"}
        for number, name in enumerate(list(faults.EDITS)[:3])
        for row in faults.copies(rest[number * size : (number + 1) * size], name, size // 2, rng, f"other {name}")
    ]
    numbers = faults.renumbered(rest[3 * size :], bench.count(150), rng)
    eval_copies = {
        name: faults.copies(test, name, min(len(test), bench.count(60)), rng, f"eval {name}") for name in faults.EDITS
    }
    eval_copies["embedded in a text"] = faults.embedded(test, bench.count(60), rng, "eval embedded")
    planted = [row for rows in (*groups.values(), *eval_copies.values(), other, numbers) for row in rows]
    # originals first: of a cluster the first one is kept
    stage = DuplicatesStage(against=[path], workers=2)
    seen = bench.run("duplicates: math_train and faults against math500", stage, [*base, *planted], shuffle=False)
    for name, rows in groups.items():
        bench.scores.append(seen.score(f"copies: {name}", rows, lambda found: found == "near duplicate"))
    both = [*other, *({"id": row["of"]} for row in other)]
    bench.scores.append(seen.score("copies with another answer, both go", both, lambda found: found == CONFLICT))
    spared = sum(not seen.reason(row["id"]) for row in numbers)
    bench.scores.append(Score("duplicates", "the same text with another number stays", len(numbers), spared, None))
    for name, rows in eval_copies.items():
        bench.scores.append(
            seen.score(f"evaluation items: {name}", rows, lambda found: found.startswith("contamination"))
        )


def contamination_of_code(bench: Bench) -> None:
    """The stage duplicates on mbpp and humaneval_cpp against humaneval."""
    test, rng = bench.load("humaneval"), bench.rng
    path = bench.folder / "humaneval.jsonl"
    write_rows(path, test)
    base, translated = bench.load("mbpp"), bench.load("humaneval_cpp")
    planted = [
        row
        for name in ("punctuation", "a few words")
        for row in faults.copies(test, name, min(len(test), bench.count(60)), rng, f"code {name}")
    ]
    rows = [*base, *translated, *planted]
    title = "duplicates: mbpp, humaneval_cpp and faults against humaneval"
    seen = bench.run(title, DuplicatesStage(against=[path], workers=2), rows, shuffle=False)

    def right(found: str) -> bool:
        return found.startswith("contamination")

    score = seen.score("HumanEval items, edited", planted, right, translated)
    bench.scores.append(score)
    bench.scores.append(seen.score("HumanEval items, in C++ (humaneval_cpp)", translated, right))


def _changed(row: Fields, place: int) -> str | None:
    """Return the test code with another expected value at one of its assertions; None where that cannot be made."""
    code = row["tests"]["code"]
    statements = read_code(code)
    call = statements[place].call if place < len(statements) else None
    value = faults.other_value(call.expected) if call is not None else None
    text = None if value is None else literal_of(value)
    return None if text is None else edit(code, statements, set(), {place: text})


def _with_faults(bench: Bench, rows: Sequence[Fields]) -> Iterator[tuple[str, Fields, Fields]]:
    """Yield (fault, planted row, the sound row it was made from) for programs with several and with one solution."""
    rng, counts = bench.rng, {"wrong output": 120, "wrong output, one solution": 60, "contradiction": 100,
                              "wrong solution": 100, "wrong solution, alone": 60}  # fmt: skip
    wanted = [kind for kind, whole in counts.items() for _ in range(bench.count(whole))]
    drawn = iter(rng.sample(list(rows), len(rows)))
    for number, kind in enumerate(wanted):
        for row in drawn:
            several = faults.rewritten(row["solution"])
            made = {**row, "id": f"{faults.PLANTED}{kind}/{number}", "solution": "", "solutions": several}
            changed = _changed(row, rng.randrange(3))
            if kind == "contradiction" and changed is not None:
                one = changed.splitlines()
                added = next((line for line in one if line not in row["tests"]["code"].splitlines()), "")
                lines = [*row["tests"]["code"].splitlines()]
                lines.insert(rng.randrange(len(lines) + 1), added)
                changed = "\n".join(lines)
            if kind.startswith("wrong solution"):
                mutants = faults.mutants(row["solution"], rng)
                wrong = _first_wrong(mutants[:6], row["tests"])
                if wrong is None:
                    continue
                made["solutions"] = [wrong] if kind.endswith("alone") else [*several[:2], wrong, *several[2:]]
                yield kind, made, row
                break
            if changed is None:
                continue
            made["tests"] = {**row["tests"], "code": changed}
            if kind.endswith("one solution"):
                made["solutions"] = several[:1]
            yield kind, made, row
            break


def _first_wrong(sources: Sequence[str], tests: Any) -> str | None:
    """Return the first program that fails the tests."""
    for source in sources:
        result = run_tests(source, "python", tests, Limits(test_s=TEST_S))
        if result.passed != len(read_code(tests["code"])):
            return source
    return None


def programs(bench: Bench) -> None:
    """Measure the stage programs on mbpp with several solutions, and on humaneval_cpp with its own."""
    base = bench.load("mbpp")
    bench.run("programs: mbpp", ProgramsStage(test_s=TEST_S), base, shuffle=False)
    usable = []
    for row in base:
        try:
            usable += [row] if len(read_code(row["tests"]["code"])) == 3 and faults.rewritten(row["solution"]) else []
        except (ValueError, SyntaxError):
            continue
    planted = list(_with_faults(bench, usable))
    mixed = [*base, *(row for _, row, _ in planted)]
    seen = bench.run("programs: mbpp and faults", ProgramsStage(test_s=TEST_S), mixed)
    by_kind: dict[str, list[tuple[Fields, Fields]]] = {}
    for kind, row, sound in planted:
        by_kind.setdefault(kind, []).append((row, sound))
    alone = "its only solution fails its tests"
    for kind, pairs in by_kind.items():
        rows = [row for row, _ in pairs]
        if kind.endswith(("one solution", "alone")):
            bench.scores.append(seen.score(f"{kind}: the row goes", rows, lambda found: found == alone))
            continue
        repaired = 0
        for row, sound in pairs:
            now = seen.kept.get(row["id"])
            if kind == "wrong solution":
                repaired += now is not None and now["solutions"] == [
                    one for one in row["solutions"] if one in faults.rewritten(sound["solution"])
                ]
            elif now is not None:
                # the lines of the sound tests, in their order and nothing else
                repaired += _same_code(now["tests"]["code"], sound["tests"]["code"])
        bench.scores.append(Score("programs", f"{kind}: repaired", len(rows), repaired, None))
    bench.run("programs: humaneval_cpp", ProgramsStage(test_s=TEST_S), bench.load("humaneval_cpp"), shuffle=False)


def _same_code(one: str, other: str) -> bool:
    """Return whether two test codes have the same assertions with the same values, in any order."""
    calls = [
        sorted((repr(done.call.args), repr(done.call.expected)) for done in read_code(code) if done.call is not None)
        for code in (one, other)
    ]
    return calls[0] == calls[1]


def languages(bench: Bench) -> None:
    """Measure the checks of `translate` on human translations, and the stage human, on mgsm."""
    rows = bench.load("mgsm")
    stage = HumanStage(["fr", "es", "de", "zh", "ru"], 0.1, workers=2)
    bench.run("human: mgsm, a tenth in other languages", stage, rows)
    english = {row["id"].split("/")[-1]: row["problem"] for row in rows if row["language"] == "en"}
    foreign = [(row["id"].split("/")[-1], row) for row in rows if row["language"] != "en"]
    pairs = [(english[number], row) for number, row in foreign if number in english]
    comparable = [(text, row) for text, row in pairs if not why_unfaithful(text, row["problem"], row["language"])]
    bad: dict[str, list[tuple[str, str, str]]] = {"another number": [], "another language": [], "left in English": []}
    for text, row in comparable:
        if (changed := faults.renumber(row["problem"], bench.rng)) != row["problem"]:
            bad["another number"].append((text, changed, row["language"]))
        bad["another language"].append((text, row["problem"], "it"))
        bad["left in English"].append((text, text, row["language"]))
    for name, cases in bad.items():
        found = sum(bool(why_unfaithful(*case)) for case in cases)
        bench.scores.append(Score("translate (checks)", f"translations: {name}, refused", len(cases), found, None))
    accepted = "human translations accepted"
    bench.scores.append(Score("translate (checks)", accepted, len(pairs), len(comparable), None))


def counts_table(reports: Sequence[tuple[str, Report]]) -> str:
    """Format what every stage kept and rejected."""
    rows = []
    for title, report in reports:
        told = [f"{name} {count:,}" for name, count in {**report["rejected"], **report["counts"]}.items()]
        rows.append([title, f"{report['rows_in']:,}", f"{report['rows_kept']:,}", "; ".join(told) or "nothing"])
    return table(["stage and rows", "read", "kept", "rejected, and what else happened"], *rows)


def scores_table(scores: Sequence[Score]) -> str:
    """Format precision and recall for each fault."""
    rows: list[list[Any]] = []
    for one in scores:
        precision = "" if one.others is None else f"{one.found / max(1, one.found + one.others):.3f}"
        recall = f"{one.found / max(1, one.planted):.3f}"
        others = "" if one.others is None else one.others
        rows.append([one.stage, one.fault, one.planted, one.found, recall, others, precision])
    return table(["stage", "planted", "number", "found", "recall", "sound rows", "precision"], *rows)


@benchmark(page="docs/curation.md")
def curate(quick: bool, data: Path, seed: int = 0) -> Iterator[Section]:
    """Run all stages. quick: on a twentieth of rows and faults."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(data, Path(folder), seed, 0.05 if quick else 1.0)
        for stage in (form, duplicates, contamination_of_code, programs, languages):
            stage(bench)
    tables = f"{counts_table(bench.reports)}\n{scores_table(bench.scores)}"
    yield Section(f"{measured_with('curate')}.\n\n{tables}", mark="results")
