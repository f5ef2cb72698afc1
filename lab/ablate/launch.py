"""The launches of an ablation: names, settings, order, and the progress of each, read from its run folder.

All launches are checked before the first one starts. They run seed by seed, so that complete comparisons exist after an
interruption.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.ablate.ablation import Ablation, nearest
from shared import settings_file
from shared.config import Config
from shared.errors import ConfigError
from shared.metrics import read_rows
from trainer.objectives.registry import complaints
from verify.plugins import choose

FIXED_UNITS = 20
"""time of start-up, evaluations and export, in optimiser steps of the quickstart (to estimate the time left)"""
SUPERVISED_STEPS_A_UNIT = 8
DONE_BY_THE_START = ("stories.", "cold_start.")
"""settings without effect on a run with a start, which has made the problems and imitated the demonstrations"""


@dataclass(frozen=True)
class Launch:
    """One `python -m trainer` of an ablation."""

    title: str
    """title to display, e.g. "quick: symmetric clip, seed 1\""""
    arguments: list[str]
    """arguments after `python -m trainer`"""
    config: Config
    """the settings that the arguments resolve to"""
    variant: str = ""
    """"" for a start"""
    seed: int = 0
    start: Launch | None = None
    """launch that must have finished before"""
    serves: frozenset[str] = frozenset()
    """variants that need this launch: its own, or all variants for a start"""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.config.run_dir

    @property
    def log(self) -> Path:
        """The file of the launch's output."""
        return self.run_dir.with_name(self.run_dir.name + ".log")

    @property
    def finished(self) -> bool:
        """Whether the run was trained to its last step and exported."""
        return (self.run_dir / "latest").resolve().name == f"step_{self.config.last_version}"

    @property
    def progress(self) -> str:
        """The progress to display: "cold start step 200/450", then "step 12/40"."""
        done = {"train": 0, "supervised": 0}
        for row in read_rows(self.run_dir / "metrics.jsonl"):
            if row["kind"] in done:
                done[row["kind"]] = max(done[row["kind"]], int(row["step"]))
        if self.config.cold_start.steps and not done["train"]:
            return f"cold start step {done['supervised']}/{self.config.cold_start.steps}"
        return f"step {done['train']}/{self.config.steps}"

    @property
    def units(self) -> float:
        """Estimated duration of the launch, in optimiser steps."""
        return FIXED_UNITS + self.config.steps + self.config.cold_start.steps / SUPERVISED_STEPS_A_UNIT


def plan(
    ablation: Ablation, path: Path, runs_dir: Path, seeds: Sequence[int], more: Sequence[str] = ()
) -> list[Launch]:
    """Return all launches of one file, in order; `more` are settings from the command line.

    Raises ConfigError for invalid settings, with file and variant, and for a run folder that has other settings.
    """
    launches: list[Launch] = []
    folder = runs_dir / path.stem
    starts: dict[str, Launch] = {}
    for seed in seeds:
        start = None
        if ablation.start is not None:
            name = f"start-{seed}" if ablation.start.per_seed else "start"
            if name not in starts:
                starts[name] = _start(ablation, path, folder, name, [f"--seed={seed}"] * ablation.start.per_seed)
                launches.append(starts[name])
            start = starts[name]
        for variant in ablation.variants:
            launches.append(_run(ablation, path, folder, variant, seed, start, more))
    for launch in launches:
        if changed := changed_settings(launch):
            also = " and the runs that began from it" if not launch.variant else ""
            raise ConfigError(
                f"{launch.run_dir} was made with other settings ({', '.join(changed)} changed): delete it{also}, or "
                "give another --runs-dir"
            )
        if launch.start is not None and launch.run_dir.exists() and not launch.start.finished:
            raise ConfigError(
                f"{launch.run_dir} began from a start that is not there any more ({launch.start.run_dir}): delete it "
                "too, or give another --runs-dir"
            )
    return launches


def _start(ablation: Ablation, path: Path, folder: Path, name: str, seed: list[str]) -> Launch:
    assert ablation.start is not None
    arguments = [ablation.config, *ablation.settings, "--steps=0", *ablation.start.settings, *seed]
    arguments += [f"--name={name}", f"--runs_dir={folder}"]
    config = _resolve(arguments, f"{path}: start")
    title = f"{path.stem}: {name.replace('-', ', seed ')}"
    return Launch(title, arguments, config, serves=frozenset(ablation.variants))


def _run(
    ablation: Ablation, path: Path, folder: Path, variant: str, seed: int, start: Launch | None, more: Sequence[str]
) -> Launch:
    arguments = [ablation.config, *ablation.settings]
    if start is not None:
        arguments += begin_from(start)
        for setting in ablation.variants[variant].settings:
            key = setting.lstrip("-").partition("=")[0]
            if key.startswith(DONE_BY_THE_START):
                raise ConfigError(
                    f"{path}: variants.{variant}: {key} has no effect on a run that begins from [start], which made "
                    "the problems and imitated the demonstrations: set it there, or leave [start] out"
                )
    arguments += [*ablation.variants[variant].settings, *more]
    arguments += [f"--seed={seed}", f"--name={variant}-{seed}", f"--runs_dir={folder}"]
    config = _resolve(arguments, f"{path}: variants.{variant}")
    title = f"{path.stem}: {ablation.label(variant)}, seed {seed}"
    return Launch(title, arguments, config, variant, seed, start, frozenset({variant}))


def begin_from(start: Launch) -> list[str]:
    """Return the settings of a run that begins from a start: its export, the problems that it made, no cold start."""
    made, data = start.run_dir / "made", start.config.data
    options = [f"--model.path={start.run_dir / 'latest'}", "--cold_start.demonstrations=", "--cold_start.steps=0"]
    if data.train == "stories":
        options.append(f"--data.train={made / 'train.jsonl'}")
    if data.held_out == "stories":
        options.append(f"--data.held_out={made / 'held_out.jsonl'}")
    return options


def _resolve(arguments: list[str], where: str) -> Config:
    """Return the settings of a launch. Raises ConfigError, each line with the place in the ablation's file."""
    try:
        config = settings_file.load(arguments[0], arguments[1:], complaints)
        choose(config.reward)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from error
    return config


def changed_settings(launch: Launch) -> list[str]:
    """Return the keys in which a run folder's settings differ from those of its launch; [] if there is no run yet.

    Raises ConfigError if the folder's settings cannot be read."""
    path = launch.run_dir / "config.toml"
    if not path.is_file():
        return []
    before, now = settings_file.load(path), flat(launch.config)
    old, new = f"{before.runs_dir}/", f"{launch.config.runs_dir}/"
    then = {  # a start's files are the same wherever the folder is
        key: new + value.removeprefix(old) if isinstance(value, str) and value.startswith(old) else value
        for key, value in flat(before).items()
    }
    return [key for key in now if key not in ("name", "runs_dir") and then.get(key) != now[key]]


def flat(config: Config) -> dict[str, Any]:
    """Return all settings as dotted key -> value."""

    def walk(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in table.items():
            if isinstance(value, dict) and f"{prefix}{name}" in settings_file.SECTIONS:
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return dict(walk(config.model_dump(), ""))


def chosen(wanted: Sequence[str] | None, ablations: Mapping[Path, Ablation]) -> set[str] | None:
    """Return the variants that --only names, None without it. Raises ConfigError for a name that no file has."""
    known = {name for ablation in ablations.values() for name in ablation.variants}
    for name in wanted or []:
        if name not in known:
            there = ", ".join(sorted(known))
            raise ConfigError(f"--only {name}: no such variant{nearest(name, known)}; there are {there}")
    return None if wanted is None else set(wanted)
