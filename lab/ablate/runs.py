"""The runs of an ablation: names, settings, order, and the progress of each, read from its run folder.

All of them are checked before the first one starts. They go seed by seed, so that complete comparisons exist after an
interruption.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from lab.ablate.ablation import Ablation, nearest
from shared import settings_file
from shared.config import Config
from shared.errors import ConfigError
from shared.journal import check_same
from shared.metrics import read_rows
from trainer.objectives.registry import complaints
from verify.chosen_rewards import choose

DONE_BY_THE_START = ("prepare.", "sft.")
"""settings without effect on a run with a start, which has run prepare.script and imitated the demonstrations"""


@dataclass(frozen=True)
class AblationRun:
    """One `python -m trainer` of an ablation: a variant with a seed, or a start."""

    title: str
    """title to display, e.g. "quick: symmetric clip, seed 1\""""
    arguments: list[str]
    """arguments after `python -m trainer`"""
    config: Config
    """the settings that the arguments resolve to"""
    serves: frozenset[str]
    """variants that need this run: its own, or all variants for a start"""
    variant: str = ""
    """"" for a start"""
    seed: int = 0
    start: AblationRun | None = None
    """run that must have finished before"""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.config.run_dir

    @property
    def log(self) -> Path:
        """The file of what the run printed."""
        return self.run_dir.with_name(self.run_dir.name + ".log")

    @property
    def finished(self) -> bool:
        """Whether the run was trained to its last step and exported."""
        return (self.run_dir / "latest").resolve().name == f"step_{self.config.last_version}"

    @property
    def steps_made(self) -> tuple[int, int]:
        """SFT steps and optimiser steps that the run has made."""
        made = {"sft": 0, "train": 0}
        for row in read_rows(self.run_dir / "metrics.jsonl"):
            if row["kind"] in made:
                made[row["kind"]] = max(made[row["kind"]], int(row["step"]))
        return made["sft"], made["train"]

    @property
    def progress(self) -> str:
        """The progress to display: "SFT step 200/450", then "step 12/40"."""
        imitated, trained = self.steps_made
        if self.config.sft.steps and not trained:
            return f"SFT step {imitated}/{self.config.sft.steps}"
        return f"step {trained}/{self.config.steps}"


def plan(
    ablation: Ablation, path: Path, runs_dir: Path, seeds: Sequence[int], more: Sequence[str] = ()
) -> list[AblationRun]:
    """Return all runs of one file, in order; `more` are settings from the command line.

    Raises ConfigError for invalid settings, with file and variant, and for a run folder that has other settings.
    """
    runs: dict[str, AblationRun] = {}
    folder = runs_dir / path.stem
    for seed in seeds:
        start = None
        if ablation.start is not None:
            name = f"start-{seed}" if ablation.start.per_seed else "start"
            runs.setdefault(name, _start(ablation, path, folder, name, [f"--seed={seed}"] * ablation.start.per_seed))
            start = runs[name]
        for variant in ablation.variants:
            runs[f"{variant}-{seed}"] = _run(ablation, path, folder, variant, seed, start, more)
    for run in runs.values():
        check_folder(run)
    return list(runs.values())


def _start(ablation: Ablation, path: Path, folder: Path, name: str, seed: list[str]) -> AblationRun:
    assert ablation.start is not None
    arguments = [ablation.config, *ablation.settings, "--steps=0", *ablation.start.settings, *seed]
    arguments += [f"--name={name}", f"--runs_dir={folder}"]
    title = f"{path.stem}: {name.replace('-', ', seed ')}"
    return AblationRun(title, arguments, _resolve(arguments, f"{path}: start"), frozenset(ablation.variants))


def _run(
    ablation: Ablation, path: Path, folder: Path, variant: str, seed: int, start: AblationRun | None,
    more: Sequence[str],
) -> AblationRun:  # fmt: skip
    changes = ablation.variants[variant].settings
    for key in (setting.lstrip("-").partition("=")[0] for setting in changes):
        if start is not None and key.startswith(DONE_BY_THE_START):
            raise ConfigError(
                f"{path}: variants.{variant}: {key} has no effect on a run that begins from [start], which made "
                "the problems and imitated the demonstrations: set it there, or leave [start] out"
            )
    arguments = [ablation.config, *ablation.settings, *(begin_from(start) if start else []), *changes, *more]
    arguments += [f"--seed={seed}", f"--name={variant}-{seed}", f"--runs_dir={folder}"]
    config = _resolve(arguments, f"{path}: variants.{variant}")
    title = f"{path.stem}: {ablation.label(variant)}, seed {seed}"
    return AblationRun(title, arguments, config, frozenset({variant}), variant, seed, start)


def begin_from(start: AblationRun) -> list[str]:
    """Return the settings of a run that begins from a start: its export, the problems that it made, no SFT."""
    config, data = start.config, start.config.data
    options = [f"--model.path={start.run_dir / 'latest'}", "--sft.demonstrations=", "--sft.steps=0"]
    if config.prepare.script:
        options += ["--prepare.script=", "--prepare.options={}"]
    for name, path in (("train", data.train), ("validation", data.validation)):
        if (where := config.locate(path, f"data.{name}")) != path:
            options.append(f"--data.{name}={where}")
    return options


def _resolve(arguments: list[str], where: str) -> Config:
    """Return the settings of a run. Raises ConfigError, each line with the place in the ablation's file."""
    try:
        config = settings_file.load(arguments[0], arguments[1:], complaints, os.environ)
        choose(config.reward)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from error
    return config


def check_folder(run: AblationRun) -> None:
    """Raise ConfigError if the run folder has other settings, or its start is to be made again."""
    path = run.run_dir / "config.toml"
    if path.is_file():
        also = " and the runs that began from it" if not run.variant else ""
        before = settings_file.load(path)
        moved = f"{before.runs_dir}/", f"{run.config.runs_dir}/"
        check_same(
            identity_of(before, moved), identity_of(run.config), str(run.run_dir),
            f"delete it{also}, or give another --runs-dir",
        )  # fmt: skip
    if run.start is not None and run.run_dir.exists() and not run.start.finished:
        raise ConfigError(
            f"{run.run_dir} began from a start that is not there any more ({run.start.run_dir}): delete it too, or "
            "give another --runs-dir"
        )


def identity_of(config: Config, moved: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the settings that make a run. moved: the folder that a start's files were in, and where they are now."""
    settings = {key: attrgetter(key)(config) for key in settings_file.SETTINGS if key not in ("name", "runs_dir")}
    for key, value in settings.items():
        if moved and isinstance(value, str) and value.startswith(moved[0]):
            settings[key] = moved[1] + value.removeprefix(moved[0])
    return settings


def chosen(only: Sequence[str] | None, ablations: Mapping[Path, Ablation]) -> set[str]:
    """Return the variants that --only names, all without it. Raises ConfigError for a name that no file has."""
    known = {name for ablation in ablations.values() for name in ablation.variants}
    for name in only or []:
        if name not in known:
            there = ", ".join(sorted(known))
            raise ConfigError(f"--only {name}: no such variant{nearest(name, known)}; there are {there}")
    return known if only is None else set(only)
