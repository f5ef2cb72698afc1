"""The documentation site (`make site`): it is built, every link of it leads somewhere, and pages look as on GitHub."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
COUNTED = ("ul", "ol", "li", "table", "tr", "td", "pre", "h2", "h3", "img", "strong", "em")


class Page(HTMLParser):
    """What a built page names and links to, and how often it has each tag of COUNTED outside the navigation."""

    def __init__(self, path: Path):
        super().__init__()
        self.names, self.links, self.counts, self.inside = {"", "__top"}, list[str](), Counter[str](), False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside |= tag == "article"
        self.counts[tag] += self.inside and tag in COUNTED
        for key, value in attrs:
            if key in ("id", "name"):
                self.names.add(value or "")
            elif key in ("href", "src"):
                outward = re.match(r"\w+:|//", value or "")
                assert not outward or tag == "a", f"{tag} from elsewhere: {value}"
                self.links += [] if outward else [unquote(value or "")]

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag != "article"


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=170)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    done = build(ROOT, site)
    assert done.returncode == 0, done.stderr
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_of_the_site_leads_to_a_file_and_an_anchor(pages):
    followed = 0
    for path, page in pages.items():
        for link in page.links:
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path}: {link}"
            assert target not in pages or anchor in pages[target].names, f"{path}: {link}"
            followed += 1
    assert len(pages) > 50 and followed > 5000


def test_pages_have_the_parts_that_github_shows(pages):
    """MkDocs reads another Markdown: e.g. a list right below a paragraph would be text."""
    [site] = [path.parent for path in pages if (path.parent / "sitemap.xml").is_file() and path.name == "index.html"]
    for path, page in pages.items():
        stem = path.relative_to(site).with_suffix(".md")
        source = ROOT / (stem.with_name("README.md") if path.name == "index.html" else stem)
        html = MarkdownIt("gfm-like", {"linkify": False}).render(source.read_text(encoding="utf-8"))
        shown = Counter(tag for tag in re.findall(r"<(\w+)[ >/]", html) if tag in COUNTED)
        assert +page.counts == shown, source


def test_a_page_that_leads_nowhere_ends_the_build(tmp_path):
    """The faults that a strict build is for, planted in a small checkout."""
    for name in ("docs", "examples"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "docs" / "site.py", tmp_path / "docs")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav: [README.md, examples/a.md]\n", encoding="utf-8")
    good = "# A\n\n[self](../examples/a.md#a), [start](../README.md), [program](../docs/site.py)\n"
    wrong = "[file](../docs/none.py), [page](none.md), [anchor](a.md#none), [outside](../../passwd)\n"
    (tmp_path / "examples" / "a.md").write_text(good + wrong, encoding="utf-8")
    (tmp_path / "README.md").write_text("# Start\n\n[A](examples/a.md)\n", encoding="utf-8")
    (tmp_path / "docs" / "left_out.md").write_text("# In no menu\n", encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for told in ("'../docs/none.py'", "'none.md'", "'a.md#none'", "'../../passwd'", "- docs/left_out.md"):
        assert told in done.stderr, done.stderr
    assert done.stderr.count("WARNING") == 5, "and none for links that lead somewhere"
