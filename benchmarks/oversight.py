"""An evaluation of oversight by HTTP, killed and resumed: a trained tiny model as agent and judge.

Trains the judge of `examples/judge/settings.toml` where it is not there yet, serves it, draws articles about the people
that it knows, and kills the evaluation twice before it may end. `--model` takes another folder, such as a converted
SmolLM2.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import ROOT, Section, benchmark, measured_with
from benchmarks.runs import launch
from benchmarks.servers import OURS, Running, ours
from examples.judge.prepare import NAMES, RULES, JudgeFiles
from examples.quickstart.tiny_model import write_lines
from oversight.__main__ import RESULTS, SUMMARY
from oversight.games import GAMES
from oversight.questions import draw_story
from shared.errors import RunError
from shared.progress import duration

KILLS = 2
OPTIONS = ["--rounds=1", f"--words={RULES.words}", "--max-tokens=64", "--judge-tokens=32"]
"""as the judge was trained"""


def draw_questions(count: int) -> Iterator[dict[str, object]]:
    """Yield rows of a task: questions about articles with the names of the judge's training, drawn apart from it."""
    rng = random.Random("questions of the evaluation of oversight")
    for number in range(count):
        asked = draw_story(rng, str(number), JudgeFiles().facts, NAMES).question
        yield {"id": asked.id, "question": asked.text, "answers": asked.answers, "right": asked.right,
               "article": asked.article}  # fmt: skip


def games(out: Path) -> int:
    """Return the number of games on the disk."""
    return (out / GAMES).read_bytes().count(b"\n") if (out / GAMES).exists() else 0


def play(command: list[str], out: Path, killed_at: int | None = None) -> None:
    """Run the evaluation, killed when it has so many games. Raises RunError if it fails."""
    process = subprocess.Popen([sys.executable, "-m", "oversight", *command], cwd=ROOT)
    while killed_at and process.poll() is None and games(out) < killed_at:
        time.sleep(0.01)
    if killed_at:
        process.send_signal(signal.SIGKILL)
    if process.wait() and not killed_at:
        raise RunError(f"the evaluation of oversight ended with code {process.returncode}")


def page(out: Path, command: list[str], killed: list[int], seconds: float) -> str:
    """Return the page."""
    found = json.loads((out / RESULTS).read_bytes())["contests"]
    biased = [f"{one['protocol']} {one['position']:.2f}" for one in found if one["position"] is not None]
    shown = " ".join([Path(command[0]).name, *(word for word in command[1:] if not word.startswith("--out"))])
    summary = (out / SUMMARY).read_text(encoding="utf-8").partition("\n\n")[2].partition("\n\n")[2]
    return "\n".join([
        "# Scalable oversight with a tiny model as agent and judge",
        "",
        f"{measured_with('oversight')}: `python -m oversight {shown}`, {duration(seconds)}.",
        f"The evaluation was killed (SIGKILL) with {' and '.join(map(str, killed))} of {games(out)} games and went on "
        "each time with those that it lacked.",
        "",
        "One model of less than a million parameters, trained for verdicts on such articles "
        "([its page](judge.md)), is everybody. That shows that all parts work together, and no finding about debates "
        "of language models: consultancy and votes are asked in words that it was not trained on.",
        "",
        f"Position bias (mean of the verdicts, 1 to 2; 1.5 is none): {', '.join(biased) or 'no verdict was given'}.",
        "",
        summary,
    ])  # fmt: skip


@benchmark(page="docs/results/oversight.md")
def oversight(
    quick: bool, model: str = "", questions: int = 64, runs_dir: Path = ROOT / "runs" / "judge"
) -> Iterator[Section]:
    """Serve, play, kill, go on, write the page. model: a folder instead of the trained judge's; quick: 2 questions and
    a judge of a few steps."""
    runs_dir, questions = runs_dir.resolve() / ("quick" if quick else ""), 2 if quick else questions
    few = ["--steps=3", "--sft.steps=30"] if quick else []
    if not model:
        launch("judge-0", runs_dir, "examples/judge/settings.toml", "--seed=0", *few)
    folder = Path(model or runs_dir / "judge-0" / "latest").resolve()
    out = runs_dir / "oversight"
    shutil.rmtree(out, ignore_errors=True)
    server = Running(OURS, ours(folder, 64, 512), runs_dir / "serve-oversight.log")
    try:
        server.wait()
        player = f"model@http://127.0.0.1:{server.port}/v1"
        task = runs_dir / "articles.jsonl"
        write_lines(task, draw_questions(questions))
        command = [str(task), f"--agents={player}", f"--judges={player}", f"--questions={questions}", *OPTIONS]
        command.append(f"--out={out}")
        began, rng, killed = time.monotonic(), random.Random(0), list[int]()
        for number in range(KILLS):
            play(command, out, games(out) + rng.randint(1, 6 * questions // (number + 1)))
            killed.append(games(out))
        play(command, out)
        yield Section(page(out, command, killed, time.monotonic() - began))
    finally:
        server.close()
