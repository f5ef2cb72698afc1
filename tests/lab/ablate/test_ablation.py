"""The file of an ablation: what it must say, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.ablate.ablation import read
from lab.ablate.runs import plan
from shared.errors import ConfigError
from tests.lab.ablate.conftest import TEXT

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "configs" / "ablations").glob("*.toml"))


def mistakes(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    """What is said of TEXT after replacements."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read(path)
    lines = str(raised.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('label = "clip', 'lable = "clip', "unknown key variants.base.lable; did you mean label?"),
        ('about = "Two clips"', "", "about is missing"),
        ('config = "run.toml"', "", "config is missing"),
        ("seeds = [0, 1, 2]", 'seeds = "0"', 'seeds = "0": must be a valid list'),
        ("seeds = [0, 1, 2]", "seeds = [1, 1]", "seeds = [1, 1]: each once, and none below 0"),
        ("[variants.symmetric]", '[variants."sym metric"]', "variants.sym metric: a name is of small letters"),
        ("[variants.symmetric]", "[variants.start]", "variants.start: a name is of small letters"),
        ('than = "symmetric"', 'than = "symetric"', 'than = "symetric" is not a variant; did you mean symmetric?'),
        ('than = "symmetric"', "", "claims 1: compares base with itself: give `than`, or another `than_over`"),
        ('than = "symmetric"', 'than_over = "last 2 steps"', "claims 1: compares base with itself"),
        ('metric = "entropy"', 'metric = "entropie"', 'metric "entropie" is not one of shared/metrics.py'),
        ('metric = "entropy"', 'metric = "evaluation/accuracy/fr"', 'metric "evaluation/accuracy/fr" is not one of'),
        ('relation = "above"', 'relation = "over"', "claims.1.relation = \"over\": must be 'above', 'below'"),
        ('over = "last 2 steps"', 'over = "last two"', 'over = "last two": must be "start", "end", "all steps"'),
        ('over = "last 2 steps"', 'over = "steps 9 to 3"', 'over = "steps 9 to 3": must be'),
        ('says = "Higher entropy"', 'says = "x"\nmargin = "a lot"', 'margin = "a lot": a number, or a share such as'),
        ('says = "Higher entropy"', 'says = "x"\nmargin = [1]', "claims.1.margin = [1]: must be"),
        ('says = "Higher entropy"', 'says = "x"\neach = "language"', "is there for evaluation/accuracy and"),
        ('variants = ["base"]', 'variants = ["bas"]', 'panels 2: "bas" is not a variant; did you mean base?'),
        ("[variants.base]", "[[variants]]", "variants = "),
    ],
)  # fmt: skip
def test_every_mistake_is_one_line_with_file_and_key(tmp_path: Path, old: str, new: str, line: str) -> None:
    changes = [(old, new)]
    if old == "[variants.base]":  # TOML does not let one name be a list and a table
        changes += [("[variants.symmetric]\nsettings", "settings")]
    assert any(line in found for found in mistakes(tmp_path, *changes))


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    found = mistakes(tmp_path, ('"entropy"\nrelation', '"entropi"\nrelation'), ('than = "symmetric"', 'than = "other"'))
    assert len(found) == 3 and "entropi" in found[2] and all("other" in line for line in found[:2])


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such settings file"):
        read(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("about = ")
    with pytest.raises(ConfigError, match="broken.toml: not valid TOML"):
        read(tmp_path / "broken.toml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_files_that_are_shipped_can_be_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant resolves, changes something, and no two are the same run."""
    monkeypatch.chdir(ROOT)
    ablation = read(path)
    launches = plan(ablation, path, tmp_path, ablation.seeds)
    runs = [launch for launch in launches if launch.variant and launch.seed == ablation.seeds[0]]
    assert len(runs) == len(ablation.variants) >= 2 and len(ablation.seeds) >= 3
    alone = {launch.config.model_copy(update={"name": ""}).model_dump_json() for launch in runs}
    assert len(alone) == len(runs)
    assert ablation.claims and (ablation.start is None or all(launch.config.sft.steps == 0 for launch in runs))


def test_there_is_a_file_for_every_knob() -> None:
    text = "".join(path.read_text() for path in SHIPPED)
    knobs = ["objective.clip_high=", "objective.kl.weight=", "kl.gradient=", "reward.extra=", "optimiser.minibatches=",
             "filter_groups_by=", "advantage.scale=", "entropy_bonus=", "rollout.max_async_level=",
             "objective.loss_aggregation=", "reward.length=", "reward.language=", "data.domains="]  # fmt: skip
    assert not [knob for knob in knobs if knob not in text]
