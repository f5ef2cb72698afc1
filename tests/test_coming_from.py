"""docs/coming_from.md: its files are runs, and its tables say of other projects' settings what an error would say."""

import re
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.settings_file import SETTINGS, load, peer_settings
from trainer.objectives.page import describe_settings
from trainer.objectives.registry import complaints, load_all

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "coming_from.md").read_text(encoding="utf-8")
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
            told = SYNONYMS.get(name.rpartition(".")[2], "nothing to set")
            compared += name.rpartition(".")[2] in SYNONYMS
            assert any(setting in told for setting in here) or " " in told, f"{name}: the table has {here}, not {told}"
    assert len(ROWS) > 55 and compared > 45


def test_the_error_of_the_page_is_the_one_that_comes(tmp_path):
    (tmp_path / "run.toml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.toml", ["--num_generations=8"])
    assert f"error: {refused.value}" in PAGE
