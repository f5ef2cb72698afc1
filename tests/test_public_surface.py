"""What users' code is written against stays as it is, or is changed on purpose."""

import re

import pytest

from tests import public_surface

KEPT = public_surface.FILE.read_text(encoding="utf-8").splitlines()
ADVICE = (
    "files of users break where a line is gone or differs. If that is on purpose: `python -m tests.public_surface > "
    "tests/public_surface.txt`, and a line in CHANGELOG.md that tells them what to write instead"
)
PAGES = [public_surface.FILE.parents[1] / "docs" / f"{page}.md" for page in ("rewards", "environments", "objectives")]


def test_the_public_surface_is_the_one_that_is_kept():
    now = public_surface.listing()
    gone, new = [line for line in KEPT if line not in now], [line for line in now if line not in KEPT]
    assert not gone and not new, f"gone: {gone}, new: {new}; {ADVICE}"
    assert now == KEPT and len(now) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_the_documents_tell_users_to_import_is_part_of_it(page):
    listed = {module.__name__: names for module, names in public_surface.SURFACE.items()}
    told = re.findall(r"^from (\w+[\w.]*) import ([\w, ]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    own = [(module, name) for module, names in told for name in names.split(", ") if module.split(".")[0] in
           ("verify", "environments", "trainer", "shared")]  # fmt: skip
    assert own and all(name in listed.get(module, ()) for module, name in own), own


def test_a_changed_argument_is_a_changed_line(monkeypatch):
    def reward(name: str, least: float = 0.0) -> None: ...

    monkeypatch.setattr(public_surface.plugins, "reward", reward)
    gone = [line for line in KEPT if line not in public_surface.listing()]
    assert [line.partition("(")[0] for line in gone] == ["verify.plugins.reward"]
