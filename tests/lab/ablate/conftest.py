"""An ablation with hand-written run folders: three seeds, numbers that can be worked out by hand."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from lab.ablate.ablation import read
from lab.ablate.runs import AblationRun, plan
from shared import settings_file
from shared.metrics import MetricsLog
from trainer.evaluation import Breakdown, Evaluation, EvaluationRecord

STEPS = 4
TEXT = """
about = "Two clips"
config = "run.toml"
settings = ["--steps=4"]
seeds = [0, 1, 2]
over = "last 2 steps"

[variants.base]
label = "clip-higher"

[variants.symmetric]
settings = ["--objective.clip_high=0.2"]

[[claims]]
says = "Higher entropy"
variant = "base"
metric = "entropy"
relation = "above"
than = "symmetric"

[[claims]]
says = "More in each language"
variant = "base"
metric = "evaluation/accuracy"
relation = "above"
than = "symmetric"
each = "language"

[[panels]]
metric = "entropy"

[[panels]]
metric = "evaluation/accuracy"
variants = ["base"]
"""
Write = Callable[[AblationRun, Mapping[str, Sequence[float]], Mapping[str, float]], None]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The ablation's file; the folder around it is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[objective]\nfilter_groups_by = 'off'\n")
    Path("clips.toml").write_text(TEXT)
    return Path("clips.toml")


@pytest.fixture
def ablation(file):
    return read(file)


@pytest.fixture
def launches(ablation, file):
    return plan(ablation, file, Path("runs"), ablation.seeds)


@pytest.fixture
def write_run():
    """write_run(launch, metric -> values by step, language -> accuracy): the folder of a finished run."""

    def write(launch: AblationRun, metrics: Mapping[str, Sequence[float]], accuracy: Mapping[str, float]) -> None:
        folder = launch.run_dir
        settings_file.write(launch.config, folder / "config.toml")
        log = MetricsLog(folder / "metrics.jsonl")
        for step in range(1, STEPS + 1):
            log.write(step, {name: values[step - 1] for name, values in metrics.items()})
        mean = sum(accuracy.values()) / len(accuracy)
        with (folder / "evaluations.jsonl").open("wb") as stream:
            for version, worth in ((0, 0.0), (STEPS, mean)):
                log.write(version, {"evaluation/accuracy": worth})
                shares = {code: value * (version > 0) for code, value in accuracy.items()}
                parts = {f"language/{code}": Breakdown(8, value, 0.1, 0.5) for code, value in shares.items()}
                found = Evaluation(
                    16, worth, 0.1, 0.5, temperature=1.0, format=1.0, reward=0.5, tokens=30.0, parts=parts
                )
                stream.write(msgspec.json.encode(EvaluationRecord(version, 1.0, found)) + b"\n")
        export = folder / "hf" / f"step_{STEPS}"
        export.mkdir(parents=True)
        (folder / "latest").symlink_to(export.relative_to(folder))

    return write


@pytest.fixture
def finished(launches, write_run):
    """All six runs. Entropy over the last two steps: base 0.6, 0.7, 0.8; symmetric 0.3, 0.5, 0.4. Accuracy at the end
    in German: base 0.5 throughout, symmetric 0.3, 0.7, 0.5; in French base 0.9, symmetric 0.1."""
    entropy = {"base": (0.6, 0.7, 0.8), "symmetric": (0.3, 0.5, 0.4)}
    german = {"base": (0.5, 0.5, 0.5), "symmetric": (0.3, 0.7, 0.5)}
    french = {"base": 0.9, "symmetric": 0.1}
    for launch in launches:
        last = entropy[launch.variant][launch.seed]
        metrics = {"reward/mean": [0.1, 0.2, 0.3, 0.4], "entropy": [1.0, 0.9, last + 0.1, last - 0.1]}
        write_run(launch, metrics, {"de": german[launch.variant][launch.seed], "fr": french[launch.variant]})
    return launches
