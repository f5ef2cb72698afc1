"""A tiny judge is trained, and its verdicts on debates then train a reader of articles that it cannot read.

For each seed: `examples/judge/settings.toml`; with that judge served, `examples/judge/reader.toml` (debates) and the
same with the judge by itself, asked about twice as many pairs, which takes as many of its tokens. A launch that ended
is not repeated, one that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import report
from benchmarks.figures import ROOT, Section, benchmark
from benchmarks.runs import clearly_above, interval, launch, pick, trained_on
from benchmarks.servers import OURS, Running, ours
from lab.ablate.runner import wall_s
from shared.metrics import read_rows, series
from shared.progress import duration
from trainer.evaluation import Evaluation, read_evaluations

JUDGE, ARGUED, ALONE = "judge", "debate", "answers"
VERDICTS = "domain/verdict"
PORT = 8417
"""the same for every launch: a run that goes on has its settings"""
OPPONENTS = {ARGUED: 1, ALONE: 2}


def train_judge(seed: int, runs_dir: Path, *few: str) -> Path:
    """Train the judge of a seed, and return the folder of its model."""
    launch(f"{JUDGE}-{seed}", runs_dir, "examples/judge/settings.toml", f"--seed={seed}", *few)
    return (runs_dir / f"{JUDGE}-{seed}" / "latest").resolve()


def train_readers(seed: int, runs_dir: Path, model: Path, *few: str) -> None:
    """Train two readers with a judge behind HTTP. Raises RunError."""
    if all((runs_dir / f"{name}-{seed}" / "latest").exists() for name in OPPONENTS):
        return
    server = Running(OURS, ours(model, 64, 512), runs_dir / f"serve-{seed}.log", PORT)
    try:
        server.wait()
        address = f"http://127.0.0.1:{PORT}/v1"
        for name, opponents in OPPONENTS.items():
            judge = {"url": address, "model": "model", "critic.url": address, "critic.model": "model", "asks": name,
                     "opponents": opponents}  # fmt: skip
            options = [f"--reward.judges.argued.{key}={value}" for key, value in judge.items()]
            launch(f"{name}-{seed}", runs_dir, "examples/judge/reader.toml", f"--seed={seed}", f"--model.path={model}",
                   *options, *few)  # fmt: skip
    finally:
        server.close()


def judge_rows(seeds: range, runs_dir: Path) -> list[list[str]]:
    """Return a row for each judge: accuracy before and after, of verdicts and of each kind, and wall time."""
    rows = []
    for seed in seeds:
        name = f"{JUDGE}-{seed}"
        before, after = (pick(runs_dir / name, version).parts for version in (0, None))
        kinds = [before[VERDICTS], *(after[kind] for kind in (VERDICTS, "set/article", "set/debate", "set/speech"))]
        rows.append([str(seed), *(interval(one.accuracy, one.accuracy_half_width) for one in kinds),
                     duration(wall_s(runs_dir, name))])  # fmt: skip
    return rows


def steps_of(run_dir: Path) -> int:
    """Return after how many steps a run was evaluated last, 0 if it was not, or not after training."""
    return max((record.version for record in read_evaluations(run_dir)), default=0)


def trained(run_dir: Path) -> Evaluation | None:
    """Return the last evaluation of a run, None if there is none after training."""
    return pick(run_dir, None) if steps_of(run_dir) else None


def tokens_of(run_dir: Path, opponents: int) -> float:
    """Return the judge's tokens for each response of a run, prompts included, by its last measurement."""
    found = series(read_rows(run_dir / "metrics.jsonl"), "judge/argued/tokens")[1]
    return float(found[-1]) * opponents


def page(seeds: range, runs_dir: Path) -> str:
    """Return the page, which says so where the judge or the debates fall short."""
    reached = [pick(runs_dir / f"{JUDGE}-{seed}", None).parts[VERDICTS].accuracy or 0.0 for seed in seeds]
    ends = [[trained(runs_dir / f"{name}-{seed}") for name in OPPONENTS] for seed in seeds]
    pairs = [(by_debate, alone) for by_debate, alone in ends if by_debate and alone]
    better = sum(clearly_above(*pair) for pair in pairs)
    readers = [
        [str(seed), *(interval(one.accuracy, one.accuracy_half_width) if one else "not measured" for one in (
            pick(runs_dir / f"{ARGUED}-{seed}", 0), *found)),
         " and ".join(str(steps_of(runs_dir / f"{name}-{seed}")) for name in OPPONENTS),
         *(f"{tokens_of(runs_dir / f'{name}-{seed}', count):.0f}" for name, count in OPPONENTS.items())]
        for seed, found in zip(seeds, ends, strict=True)
    ]  # fmt: skip
    return "\n".join([
        "# A judge trained on generated articles, and a reader that it trains by debates",
        "",
        f"{trained_on(runs_dir / f'{JUDGE}-{seeds[0]}')}; this page is written by `python -m benchmarks judge`.",
        "",
        "## The judge: `examples/judge/settings.toml`",
        "",
        "Accuracy on held-out questions about articles of six sentences: half of the verdicts with the article, half "
        "after a debate without it. Demonstrations of verdicts are right half of the time, by chance. Speeches, which "
        "the model learns for its part as critic, must quote the article for the side that they are told to take. Wall "
        "time holds start-up, SFT and evaluations.",
        "",
        report.table(["seed", "verdicts after SFT", "trained", "with the article", "after a debate", "speeches",
                      "wall time"],
                     *judge_rows(seeds, runs_dir)),
        f"{sum(one > 0.9 for one in reached)} of {len(reached)} judges are above .9.",
        "",
        "## The reader: `examples/judge/reader.toml`",
        "",
        "Answers are hidden from every verifier, and the article from the judge. `debate`: a critic, the judge's own "
        "model, quotes for both sides, and quotations are checked. `answers`: the judge alone, asked about more pairs. "
        "Accuracy is against the true answers of held-out questions; tokens are those of the judge a response, prompts "
        "included.",
        "",
        report.table(["seed", "after SFT", "trained by `debate`", "trained by `answers`", "after steps",
                      "tokens, `debate`", "tokens, `answers`"], *readers),
        f"In {better} of {len(pairs)} seeds the interval of `debate` lies above that of `answers`: debates "
        f"{'raise' if better == len(pairs) > 0 else 'do NOT in every seed raise'} true accuracy above the judge's own. "
        "By itself this judge can only guess, since it has no article: the figure shows that checked quotations carry "
        "the information through, in a task made for it, and nothing about debates of language models.",
        "",
    ])  # fmt: skip


@benchmark(page="docs/results/judge.md")
def judge(
    quick: bool, seeds: int = 3, runs_dir: Path = ROOT / "runs" / "judge", report_only: bool = False
) -> Iterator[Section]:
    """Train judges and readers, write the page. quick: a few steps each."""
    runs_dir = runs_dir.resolve() / ("quick" if quick else "")
    few = ["--steps=3", "--sft.steps=30"] if quick else []
    for seed in range(seeds):
        if not report_only:
            train_readers(seed, runs_dir, train_judge(seed, runs_dir, *few), *few)
    yield Section(page(range(seeds), runs_dir))
