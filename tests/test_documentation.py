"""README.md and docs/: every command of them could start, and what they call by name is there."""

import re
import shlex
import tomllib

import pytest
import yaml  # type: ignore[import-untyped]

from shared.errors import MaestraleError
from tests.commands import PYTHON, ROOT, SERVING, blocks, check, lines

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(r"(?:\S*/)?(python[\d.]*|torchrun|pip|make|bash|maestrale)")


def commands(page: str) -> list[list[str]]:
    """The words of each command in the blocks of a page, which hold output, too."""
    found = [
        line
        for block in blocks(page)
        for line in block.replace("\\\n", " ").splitlines()
        if PROGRAM.fullmatch(re.sub(r"^([A-Z_]+=('[^']*'|\S*) +)*", "", line).partition(" ")[0])
    ]
    return [words for line in found for words in lines(line)]


def inline(page: str) -> list[list[str]]:
    """The words of each command within sentences: all where they are the reader's to take, else those before the first
    that stands for something (FILE) or was left out."""
    found = []
    for code in re.findall(
        r"`((?:\.venv/bin/)?python -m [^`]+|make [^`]+|maestrale [a-z][^`]+)`", re.sub(r"(?ms)^```.*?^```$", "", page)
    ):
        words = shlex.split(code.replace("\n", " "), comments=True)
        whole = not re.search(r"\b[A-Z]{2,}\b(?!=)|\.\.\.", code) and len(words) > 3
        found.append(words if whole else words[: 2 if words[0] in ("make", "maestrale") else 3])
    return found


def test_there_are_commands_to_check():
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    assert sum(len(commands(text)) for text in texts) > 50
    assert sum(len(inline(text)) for text in texts) > 50


def test_every_command_is_one_that_starts(monkeypatch):
    monkeypatch.chdir(ROOT)
    wrong = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        for words in commands(page) + inline(page):
            try:
                check(words)
            except (AssertionError, MaestraleError, SystemExit) as error:
                wrong.append(f"{path.relative_to(ROOT)}: {shlex.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_wrong_command_is_found(monkeypatch):
    """The faults that the test above is for, planted."""
    monkeypatch.chdir(ROOT)
    page = (
        f"```\nA=1 {PYTHON} -m trainer configs/none.toml\noutput\n{PYTHON} -m dashboard runs --prot 1\n"
        f"{PYTHON} -m serve.keys keys.json --nama anna\n{PYTHON} -m lab.plan 8b --gpu 8\nmake trian\n"
        f'make gpu-check ARGS="--part none"\n{PYTHON} -m verify a.jsonl --outt b\n{PYTHON} -m oversight x\n'
        f'{PYTHON} -m trainer.none\n.venv/bin/pip install ".[none]"\n.venv/bin/torchrun -m trainer my_run.toml --x=1\n'
        f"make site ARGS=--strict\n{PYTHON} -m evaluation.download gsm9k\n{PYTHON} examples/agent/none.py\n"
        f"bash {SERVING} runs/x/latest {PYTHON} -m trainer configs/quickstart.toml --stepz=1\n```\n"
        "`python -m benchmarks paking`, `python -m nothing FILE`, `make nothing`\n"
    )
    found = commands(page) + inline(page)
    assert len(found) == 18
    for words in [*found, ["curl", "x"]]:
        with pytest.raises((AssertionError, MaestraleError, SystemExit)):
            check(words)


def test_the_newest_version_has_the_same_number_and_date_everywhere():
    number = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", f"{number} ({citation['date-released']})"]
    assert citation["version"] == number


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[bf]*.yaml")), ids=lambda form: form.stem
)
def test_a_form_for_issues_has_what_github_wants(form):
    read = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert read["name"] and read["description"]
    fields = [field for field in read["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 2
    assert all(field["type"] in ("textarea", "input") and field["attributes"]["label"] for field in fields)
