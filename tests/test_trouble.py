"""docs/trouble.md: thirty failures; what it quotes stands in the code, and what it names is there."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from shared.metrics import METRICS
from shared.section import flat
from shared.settings_file import SECTIONS, SETTINGS
from tests.messages import VARIES, template

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8")
FAILURES = dict(re.findall(r"^### (\d+\. [^\n]+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))


def one_line(text: str) -> str:
    """Whitespace, and several things in a row that vary, as one."""
    return re.sub(f"{VARIES}+", VARIES, " ".join(text.split()))


@cache
def templates(file: str) -> tuple[str, ...]:
    """Every text of a module, with VARIES in the place of what is filled in; or every value of a table of texts."""
    if file.endswith(".toml"):
        return tuple(flat(tomllib.loads((ROOT / file).read_text(encoding="utf-8"))).values())
    found = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and (text := template(node)) != VARIES:
            found.append(one_line(text))
    return tuple(found)


def says(file: str, message: str) -> bool:
    return any(one_line(message) in template for template in templates(file))


def quoted(body: str) -> list[str]:
    return re.findall(r"^```\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)


def test_there_are_thirty_of_them_in_order():
    assert [int(title.partition(".")[0]) for title in FAILURES] == list(range(1, 31))


@pytest.mark.parametrize("title", FAILURES)
def test_what_is_quoted_stands_in_a_module_that_is_named(title):
    body = FAILURES[title]
    modules = [file for file in re.findall(r"`([\w/]+\.(?:py|toml))`", body) if not file.startswith("tests/")]
    for message in quoted(body):
        assert len(message.replace(VARIES, "").strip()) > 15, "that could be any message"
        assert any(says(file, message) for file in modules), f"none of {modules} says: {message}"


@pytest.mark.parametrize("title", FAILURES)
def test_each_has_a_message_or_the_test_that_rules_it_out(title):
    body = FAILURES[title]
    assert quoted(body) or re.search(r"`tests/[\w/]+\.py", body)


def test_files_tests_metrics_and_settings_that_are_named_are_there():
    for file, test in re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|md))(?:::(\w+))?`", PAGE):
        assert (ROOT / file).is_file(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), test
    groups = {name.partition("/")[0] for name in METRICS if "/" in name}
    named = {name for name in re.findall(r"`(\w+/\w+)`", PAGE) if name.partition("/")[0] in groups}
    assert named and not named - METRICS.keys()
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    settings = re.findall(r"`([a-z]+\.[a-z_.]+)(?: = [^`]*)?`", prose)
    own = [name for name in settings if name.partition(".")[0] in SECTIONS - {"objective"}]
    assert len(own) > 20 and not set(own) - set(SETTINGS)


def test_a_message_that_the_code_does_not_have_is_noticed():
    assert says("trainer/run_lock.py", "… is in use by another\nlaunch: stop it")
    assert not says("trainer/run_lock.py", "… is in use by another run: stop it")
