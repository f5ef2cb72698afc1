"""docs/coming_from.md: its files are runs, and its tables say of other projects' settings what an error would say.
docs/tutorial.md: what it works out by hand is right. docs/elasticity.md: what it computes."""

import math
import re
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.settings_file import SETTINGS, load, peer_settings
from trainer.objectives.page import describe_settings
from trainer.objectives.registry import complaints, load_all

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "coming_from.md").read_text(encoding="utf-8")
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
SYNONYMS = peer_settings()["settings"]
ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:4]]
    for table in re.findall(r"^\| (?:TRL|verl|prime-rl) \| here .*\n.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for line in table.splitlines()
]
"""theirs, ours and what the remark names, of each row of the tables"""


@pytest.mark.parametrize("project", ["trl", "verl", "prime"])
def test_a_file_of_the_page_is_a_run(project, tmp_path):
    [text] = re.findall(rf"^```toml {project}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    assert load(file, [], complaints).rollout.group_size in (8, 16)


def test_settings_of_the_tables_exist_and_are_what_an_error_would_name():
    load_all()
    ours = {*SETTINGS, *re.findall(r"(?:--|\[)([\w.]+)", describe_settings())}
    compared = 0
    for theirs, here, _ in ROWS:
        assert {*here} <= ours, f"{theirs}: {here}"
        for name in theirs:
            meant = SYNONYMS.get(name.rpartition(".")[2], "nothing to set")
            compared += name.rpartition(".")[2] in SYNONYMS
            assert any(setting in meant for setting in here) or " " in meant, (
                f"{name}: {here} here, {meant} in an error"
            )
    assert len(ROWS) > 55 and compared > 45


def test_the_error_of_the_page_is_the_one_that_comes(tmp_path):
    (tmp_path / "run.toml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.toml", ["--num_generations=8"])
    assert f"error: {refused.value}" in PAGE


def test_the_tutorial_works_out_advantages_and_loss_rightly():
    [line] = re.findall(r"^((?:\d\.\d ?){16})$", TUTORIAL, re.MULTILINE)
    rewards = [float(number) for number in line.split()]
    mean, deviation = sum(rewards) / 16, 0.4307
    assert mean == pytest.approx(0.5) and f"deviation was\n{deviation}" in TUTORIAL
    lengths = [11, 11, 33, 11, 9, 12, 11, 33, 33, 12, 12, 33, 33, 33, 11, 12]
    advantages = [(reward - mean) / deviation for reward in rewards]
    weight = 1 / (sum(lengths) * 16)
    terms = [-weight * length * advantage for length, advantage in zip(lengths, advantages, strict=True)]
    assert sum(lengths) == 310 and {f"{advantage:.2f}" for advantage in advantages} == {
        "1.39", "1.16", "-0.70", "-0.93", "-1.16"
    }  # fmt: skip
    written = [f"{-weight * advantages[2]:.6f}", f"{terms[2]:.5f}", f"{terms[0]:+.5f}", f"{sum(terms):.4f}"]
    assert written == ["-0.000281", "-0.00927", "+0.00154", "-0.0349"]
    assert all(number in TUTORIAL for number in (*written, "1.39", "1.16", "-0.70", "-1.16"))


def test_failures_on_many_cards_are_computed_as_the_page_says():
    page = (DOCS / "elasticity.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+,\d+) \| ([\d,]+) \| (.+) \| ([\d,]+) \| (.+) % \| (.+) % \|$", page, re.MULTILINE)
    held, start, written = 1.0, 480.0, 170.0
    for hours, cards, *cells in rows:
        between = 3600 * float(hours.replace(",", "")) / int(cards.replace(",", ""))

        def lost(interval: float, between: float = between) -> float:
            return 100 * (held / interval + (interval / 2 + start) / between)

        best = max(math.sqrt(2 * held * between), written)
        expected = (between / 3600, best, lost(best), lost(3600))
        assert [float(cell.replace(",", "")) for cell in cells] == [
            pytest.approx(value, abs=0.5 * 10 ** -len(cell.partition(".")[2]) + 1e-9)
            for cell, value in zip(cells, expected, strict=True)
        ]
    assert len(rows) == 6
