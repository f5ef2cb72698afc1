"""Acceptance on one card, ten minutes a part: is it right there, and how fast beside what the card can do?

    make gpu-check                                        both parts in .venv within ten minutes, to docs/results/gpu/
    python -m benchmarks.gpu_check --part trainer         any interpreter with torch 2.11 or newer and CUDA
    python -m benchmarks.gpu_check --device cpu --tiny    the same code with tiny sizes on a CPU
    python -m benchmarks.gpu_check --page                 write docs/gpu.md from the results files anew

The trainer part needs neither vLLM, network nor .venv. The packages that an interpreter with torch lacks come from
build/gpu-wheels/PYTHON-VERSION, which `make gpu-wheels` fills; what the interpreter has itself comes first. The launch
part needs vLLM, so .venv. Every item runs in a process of its own with a deadline: one that fails, hangs or runs out of
memory costs only its own figures. Items that cannot run here are told with the reason. Exit code: 0 nothing failed, 1
an item failed or missed a limit, 2 a wrong option. This file needs the standard library only.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared.supervisor import supervised

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs" / "results" / "gpu", ROOT / "docs" / "gpu.md"
WHEELS = ROOT / "build" / "gpu-wheels"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
BUDGET_S = 600.0
LEAST_S = 15.0
"""an item is not begun with less time left"""
NOT_RUN = "Not run on a card yet: there is no results file in docs/results/gpu."
PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "card": ""}
if torch.cuda.is_available():
    found |= {"card": torch.cuda.get_device_name(0), "bytes": torch.cuda.get_device_properties(0).total_memory,
              "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
print(json.dumps(found))
"""
"""run in a process of its own, so that this one never touches CUDA"""


class Item(NamedTuple):
    """One item: the function of its name in the file of its part."""

    name: str
    part: str
    deadline_s: float
    about: str


ITEMS = (
    Item("peaks", "trainer", 60, "fastest matrix product and copy: what the others are a share of"),
    Item("gradients", "trainer", 60, "a step's gradients against float64, shared prompts included"),
    Item("attention", "trainer", 60, "time and memory of attention over long sequences"),
    Item("head", "trainer", 100, "time and memory of the log-probs"),
    Item("packing", "trainer", 60, "packed sequences against each alone"),
    Item("adamw_step", "trainer", 45, "AdamW against float64, and its time beside memcpy"),
    Item("transfer", "trainer", 60, "an update written for the engines, and read by another process"),
    Item("adapters", "trainer", 60, "gradients of low-rank adapters, and their step beside that of all weights"),
    Item("families", "trainer", 90, "models that the module of transformers trains, where it is installed"),
    Item("fusion", "trainer", 60, "a step with and without compiled kernels"),
    Item("step_small", "trainer", 90, "step of a Qwen3 0.6B: MFU by tokens, with and without recomputation"),
    Item("step_middle", "trainer", 90, "step of a Qwen3 1.7B"),
    Item("step_large", "trainer", 90, "step of a Llama 3.1 8B, as many of its layers as fit"),
    Item("learning", "launch", 240, "the quickstart: start, updates under load and their proof, and that it learns"),
    Item("engine_kill", "launch", 150, "kill -9 of the engine in a run, which goes on"),
    Item("proof_faults", "launch", 180, "stale and wrong weights, which the proof must find"),
    Item("sleep_wake", "launch", 240, "trainer and engine in turns on the card: sleep and wake"),
    Item("trl", "launch", 240, "our step beside TRL's with colocated vLLM, where TRL is installed"),
)


def wheels() -> Path:
    """Return the folder of packages for this interpreter, in $GPU_WHEELS or build/gpu-wheels."""
    return Path(os.environ.get("GPU_WHEELS", WHEELS)) / ".".join(platform.python_version_tuple()[:2])


def probe() -> dict[str, Any]:
    """Return versions and card, {"why": ...} where torch cannot be imported."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return {"why": "torch did not answer within 120 s"}
    if done.returncode:
        return {"why": (done.stderr.strip().splitlines() or ["torch ended without a word"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def unfit(item: Item, found: dict[str, Any], device: str) -> str:
    """Return why an item cannot run here, "" if it can."""
    if "why" in found:
        return f"{sys.executable} has no torch that works: {found['why']}"
    version = [int(number) for number in re.findall(r"\d+", found["torch"])[:2]]
    if version < [2, 11]:
        return f"torch {found['torch']} is older than 2.11"
    if device == "cuda" and not found["card"]:
        return f"torch {found['torch']} sees no NVIDIA card"
    if item.part == "launch" and importlib.util.find_spec("vllm") is None:
        return f"{sys.executable} has no vLLM: make install EXTRA=cuda, then .venv/bin/python"
    return ""


# ---- one item, in a process of its own ----------------------------------------------------------------------------


def be_item(name: str, device: str, tiny: bool, known: dict[str, float]) -> int:
    """Measure in this process; a line of JSON on standard output for every figure, what else is printed goes to the
    error stream. 3: it cannot run here, and says why."""
    sys.path.append(str(wheels()))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", str(ROOT)), str(wheels())])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    part = next(item.part for item in ITEMS if item.name == name)
    from benchmarks.figures import Figure, NotMeasured
    from benchmarks.gpu_check.place import Where

    module = importlib.import_module(f"benchmarks.gpu_check.{part}_part")
    try:
        for figure in getattr(module, name)(Where(device, tiny, known)):
            assert isinstance(figure, Figure)
            value = figure.median if figure.values else None
            row = {"name": figure.name, "value": value, "unit": figure.unit, "of": figure.of, "met": figure.met,
                   "target": figure.target, "better": figure.better, "not_measured": figure.not_measured}  # fmt: skip
            lines.write(json.dumps(row) + "\n")
    except NotMeasured as absent:
        lines.write(json.dumps({"skipped": str(absent)}) + "\n")
    return 0


def run(item: Item, device: str, tiny: bool, known: dict[str, float], left_s: float) -> dict[str, Any]:
    """Run one item to its end or its deadline; returns its row of the results."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--item", item.name, "--device", device,
               "--known", json.dumps(known), *["--tiny"] * tiny]  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began, deadline_s = time.monotonic(), min(item.deadline_s, left_s)
    process = subprocess.Popen(supervised(command), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)  # fmt: skip
    late = False
    try:
        out, said = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        out, said = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    told = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
    figures = [row for row in told if "name" in row]
    skipped = next((row["skipped"] for row in told if "skipped" in row), "")
    missed = [row["name"] for row in figures if row["met"] is False]
    reason = ""
    if late:
        reason = f"not done within {deadline_s:.0f} s"
    elif process.returncode:
        last = [line for line in said.strip().splitlines() if line.strip()] or [f"code {process.returncode}"]
        reason = f"ended with code {process.returncode}: {last[-1][:300]}"
        if "ModuleNotFoundError" in last[-1] and item.part == "trainer":
            reason += f"; make gpu-wheels brings it (looked into {wheels()})"
        print(said[-3000:], file=sys.stderr)
    elif missed:
        reason = f"missed: {', '.join(missed)}"
    status = "failed" if reason else "skipped" if skipped else "passed"
    row = {"status": status, "reason": reason or skipped, "figures": figures}
    return {"name": item.name, "part": item.part, "about": item.about, **row, "seconds": time.monotonic() - began}


# ---- results ------------------------------------------------------------------------------------------------------


def shown(row: dict[str, Any]) -> str:
    """Format a figure's value, and whether it keeps its limit."""
    if row["value"] is None:
        return f"not measured: {row['not_measured']}"
    value, unit = row["value"], row["unit"]
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    text = f"{100 * value:.1f} %" if unit == "%" else f"{number} {unit}"
    if row["target"] is None:
        return text.strip()
    sign = ">=" if row["better"] == "higher" else "<="
    limit = f"{100 * row['target']:g} %" if unit == "%" else f"{row['target']:g}"
    return f"{text.strip()} ({sign} {limit}{'' if row['met'] else ', **missed**'})"


def section(results: dict[str, Any]) -> str:
    """Format one results file for the page."""
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items() if value)
    lines = [f"### {results['card'] or 'no card'}", "",
             f"{results['date']}, commit {results['commit']}, {results['machine']}; {versions}.", "",
             "| item | figure | value | of |", "|---|---|---|---|"]  # fmt: skip
    for row in results["items"]:
        figures = row["figures"]
        if row["status"] != "passed" or not figures:
            lines.append(f"| {row['name']} | **{row['status']}** | {row['reason']} | |")
        lines += [f"| {row['name']} | {one['name']} | {shown(one)} | {one['of']} |" for one in figures]
    return "\n".join(lines)


def write_page(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Write all results files between the marks of docs/gpu.md, or that there is none."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    text = "\n\n".join(section(one) for one in files) or NOT_RUN
    head, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"{page} has no {BEGIN} ... {END} to write between")
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def commit() -> str:
    """Return the commit, with " and changes" where files differ; "unknown" outside a checkout."""
    asked = (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    try:
        name, changes = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + (" and changes" if changes else "")


def check(given: argparse.Namespace) -> int:
    """Run all items that fit; returns the exit code."""
    found = probe()
    began, known, rows = time.monotonic(), dict[str, float](), list[dict[str, Any]]()
    print(f"gpu-check: torch {found.get('torch', 'none')}, CUDA {found.get('cuda') or 'none'}, "
          f"card {found.get('card') or 'none'}, device {given.device}", flush=True)  # fmt: skip
    for item in ITEMS:
        if given.part not in ("all", item.part) or (given.only and item.name not in given.only):
            continue
        left = given.budget - (time.monotonic() - began)
        reason = unfit(item, found, given.device)
        if not reason and left < LEAST_S:
            reason = f"the {given.budget:.0f} s are over"
        print(f"{item.part} part, {item.name}: {item.about}", flush=True)
        if reason:
            skipped = {"status": "skipped", "reason": reason, "figures": [], "seconds": 0.0}
            rows.append({"name": item.name, "part": item.part, "about": item.about, **skipped})
        else:
            rows.append(run(item, given.device, given.tiny, known, left))
            if item.name == "peaks":
                known = {one["name"]: one["value"] for one in rows[-1]["figures"] if one["value"] is not None}
        for one in rows[-1]["figures"]:
            print(f"  {one['name']}: {shown(one)}  {one['of']}".rstrip())
        print(f"  {rows[-1]['status']}" + (f": {rows[-1]['reason']}" if rows[-1]["reason"] else ""), flush=True)
    counts = {status: sum(row["status"] == status for row in rows) for status in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    card = found.get("card", "") if given.device == "cuda" else ""
    versions = {key: found.get(key, "") for key in ("torch", "cuda", "nccl")}
    results = {
        "card": card, "card_bytes": found.get("bytes", 0), "date": str(datetime.date.today()), "commit": commit(),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}",
        "versions": {"python": platform.python_version(), **versions},
        "tiny": given.tiny, "items": rows,
    }  # fmt: skip
    path = given.out
    if path is None and card and not given.tiny and not given.only:
        path = RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"results: {path}")
        if path.parent == RESULTS:
            write_page()
    return int(counts["failed"] > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="items:\n" + "\n".join(f"  {one.name:<13} {one.part:<8} {one.about}" for one in ITEMS),
    )  # fmt: skip
    names = [item.name for item in ITEMS]
    parser.add_argument("--part", choices=("all", "trainer", "launch"), default="all")
    parser.add_argument("--only", nargs="+", choices=names, metavar="ITEM", help="only these items; nothing is written")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a try; nothing is written")
    parser.add_argument("--out", type=Path, help="results file (default: docs/results/gpu/CARD.json)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in all (default 600)")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md from the results files")
    parser.add_argument("--item", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--known", default="{}", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.page:
        write_page()
        return 0
    if given.item:
        return be_item(given.item, given.device, given.tiny, json.loads(given.known))
    return check(given)


if __name__ == "__main__":
    raise SystemExit(main())
