"""The file of an ablation: its runs, their start, and the claims that they test. It is checked before any run.

A claim is a sentence (of a paper, say) with a comparison that decides it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from shared.errors import ConfigError
from shared.metrics import METRICS, check_names
from shared.section import Section
from shared.settings_file import literal, read_toml

WINDOW = re.compile(
    r"start|end|all steps|(?P<side>first|last) (?P<count>[1-9]\d*) steps?|steps (?P<from>\d+) to (?P<to>\d+)"
)
END = "end"
MARGIN = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<percent>%)")
NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
DETAILED = ("accuracy", "consistency")
"""validation figures that evaluations report for parts of the problems too"""
KINDS = ("language", "domain", "set")
"""kinds of parts; evaluations report parts if there are several languages, domains or sets (`source` of a row)"""
Relation = Literal["above", "below", "not above", "not below", "as"]


class Start(Section):
    """A launch whose export all runs begin from, e.g. SFT only."""

    settings: list[str] = []
    """settings of this launch, as on the command line, after those of the file; steps = 0 unless they set it"""
    per_seed: bool = False
    """true: one start for each seed, so that the intervals cover the start too; else all seeds share one"""


class Variant(Section):
    """One variant of the run, a row of the table."""

    label: str = ""
    """its name in table and plot; "" for the key of its table"""
    settings: list[str] = []
    """settings that it changes, as on the command line"""


class Claim(Section):
    """ "`variant` has `metric` `relation` that of `than`"."""

    says: str
    """the claim in words, and its source"""
    variant: str
    """name of the variant that it is about"""
    metric: str
    """a name of shared/metrics.py; evaluation/accuracy/language/fr, evaluation/accuracy/domain/code or
    evaluation/consistency/set/mgsm for parts of the validation problems"""
    relation: Relation
    """"as": neither above nor below by more than the margin"""
    than: str = ""
    """the variant that it is compared with on the same seeds; "" for itself, at another time"""
    over: str = ""
    """"start", "end", "all steps", "first N steps", "last N steps" or "steps A to B"; "" for the file's `over`, or the
    end for validation figures"""
    than_over: str = ""
    """the same for `than`; "" for `over`"""
    margin: float | str = 0.0
    """in the metric's unit, or in percent of `than` ("10 %"). Above and below must be by more than it; "not above",
    "not below" and "as" forgive it"""
    each: Literal["", "language", "domain", "set"] = ""
    """check the claim for every language, domain or set of the validation problems by itself"""


class Panel(Section):
    """One diagram of the plot."""

    metric: str
    variants: list[str] = []
    """[] for all"""
    title: str = ""


class Ablation(Section):
    """The contents of the file of an ablation."""

    about: str
    """heading of the table"""
    config: str
    """settings file of every run"""
    settings: list[str] = []
    """more settings of every run, as on the command line"""
    seeds: list[int] = Field([0, 1, 2], min_length=1)
    """one run of every variant with each"""
    start: Start | None = None
    variants: dict[str, Variant] = Field(min_length=1)
    """name -> variant"""
    over: str = "last 10 steps"
    """steps whose mean a training metric's column shows"""
    columns: list[str] = []
    """metrics of the table; [] for the usual ones"""
    claims: list[Claim] = []
    panels: list[Panel] = []
    """diagrams of the plot; [] for reward, accuracy, entropy and length of all variants"""

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Ablation:
        """Raises ValueError with all contradictions, one line each."""
        if faults := [*name_faults(self), *value_faults(self)]:
            raise ValueError("\n".join(faults))
        return self

    def label(self, variant: str) -> str:
        """Return the label of a variant, its name if it has none."""
        return self.variants[variant].label or variant


def read(path: Path) -> Ablation:
    """Read an ablation from a TOML file. Raises ConfigError with all mistakes, one line each: file, key, mistake."""
    table = read_toml(path)
    try:
        return Ablation.model_validate(table)
    except ValidationError as error:
        lines = dict.fromkeys(line for mistake in error.errors() for line in explain(mistake, path))
        raise ConfigError("\n".join(lines)) from error


# ---- what does not fit together ----------------------------------------------------------------------------------


def name_faults(ablation: Ablation) -> Iterator[str]:
    """Yield errors of names and seeds: unknown variants, repeated seeds, names that cannot be folders."""
    for name in ablation.variants:
        if not NAME.fullmatch(name) or name == "start":
            yield f"variants.{name}: a name is of small letters, digits and _, and not start (it becomes a folder)"
    if len(set(ablation.seeds)) < len(ablation.seeds) or min(ablation.seeds) < 0:
        yield f"seeds = {ablation.seeds}: each once, and none below 0"
    named = []
    for number, claim in enumerate(ablation.claims, 1):
        named += [(f"claims {number}: variant = ", claim.variant), (f"claims {number}: than = ", claim.than)]
        over = window_of(claim.metric, claim.over, ablation.over)
        if claim.than in ("", claim.variant) and claim.than_over in ("", over):
            yield f"claims {number}: compares {claim.variant} with itself: give `than`, or another `than_over`"
    named += [
        (f"panels {number}: ", name) for number, panel in enumerate(ablation.panels, 1) for name in panel.variants
    ]
    for key, name in named:
        if name and name not in ablation.variants:
            yield f'{key}"{name}" is not a variant{nearest(name, ablation.variants)}'


def value_faults(ablation: Ablation) -> Iterator[str]:
    """Yield errors of values: unknown metrics, invalid windows and margins."""
    metrics = [("columns", name) for name in ablation.columns]
    windows = [("over", ablation.over)]
    for number, claim in enumerate(ablation.claims, 1):
        key = f"claims {number}"
        metrics.append((key, claim.metric))
        windows += [(f"{key}: over", claim.over), (f"{key}: than_over", claim.than_over)]
        if isinstance(claim.margin, str) and not MARGIN.fullmatch(claim.margin):
            yield f'{key}: margin = "{claim.margin}": a number, or a share such as "10 %"'
        elif isinstance(claim.margin, float) and claim.margin < 0:
            yield f"{key}: margin = {claim.margin:g}: at least 0"
        if claim.each and claim.metric.removeprefix("evaluation/") not in DETAILED:
            there = " and ".join(f"evaluation/{name}" for name in DETAILED)
            yield f'{key}: each = "{claim.each}" is there for {there}, not for {claim.metric}'
    metrics += [(f"panels {number}", panel.metric) for number, panel in enumerate(ablation.panels, 1)]
    for key, name in metrics:
        if not is_metric(name):
            yield f'{key}: metric "{name}" is not one of shared/metrics.py{nearest(name, METRICS)}'
    for key, window in windows:
        match = WINDOW.fullmatch(window)
        if window and (not match or int(match["from"] or 0) > int(match["to"] or 0)):
            yield (
                f'{key} = "{window}": must be "start", "end", "all steps", "first N steps", "last N steps" or '
                '"steps A to B"'
            )


def window_of(metric: str, given: str, usual: str) -> str:
    """Return the steps over which a metric is taken: `given`, else the end for validation figures, `usual` for
    others."""
    return given or (END if metric.startswith("evaluation/") else usual)


def is_metric(name: str) -> bool:
    """Whether runs write a metric of this name, or evaluations report it for a part of the problems."""
    try:
        check_names({name: 0.0})
    except KeyError:
        section, *rest = name.split("/", 3)
        return section == "evaluation" and len(rest) == 3 and rest[0] in DETAILED and rest[1] in KINDS and rest[2] != ""
    return True


def nearest(name: str, known: Any) -> str:
    """Return "; did you mean ...?" with the nearest known name, "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def explain(error: ErrorDetails, path: Path) -> list[str]:
    """Describe one mistake that pydantic found: in one line, or in several for contradictions."""
    location = [step for step in error["loc"] if step not in ("float", "str")]  # branches of a union
    key = ".".join(str(step + 1) if isinstance(step, int) else step for step in location)
    if not key:
        text = str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        return [f"{path}: {line}" for line in text.splitlines()]
    if error["type"] == "missing":
        return [f"{path}: {key} is missing"]
    if error["type"] == "extra_forbidden":
        tables: dict[str, type[Section]] = {"start": Start, "variants": Variant, "claims": Claim, "panels": Panel}
        known = tables[str(error["loc"][0])] if len(error["loc"]) > 1 else Ablation
        fields = known.model_fields
        near = nearest(str(error["loc"][-1]), fields) or "; known are " + ", ".join(fields)
        return [f"{path}: unknown key {key}{near}"]
    message = error["msg"].removeprefix("Input should be ")
    if error["type"] in ("model_type", "dict_type"):
        message = "a table"
    return [f"{path}: {key} = {literal(error['input'])}: must be {message}"]
