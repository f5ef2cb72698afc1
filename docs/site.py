"""The files of the documentation site (mkdocs.yml): the site has the tree of the checkout, so that every relative link
of a page leads there to what it leads to here. A linked file that is no page is copied; one that is not there ends the
build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**/*.md", "examples/**/*.md"),
    *("docs/site.css", "serve/page/icon.svg"),
)
LINK = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Take the pages, and the files of the checkout that they link to, in the place of what lies in docs/."""
    pages = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
    found = {path.relative_to(ROOT) for path in pages}
    for page in pages:
        linked = {(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))}
        found |= {path.relative_to(ROOT) for path in linked if path.is_file() and path.is_relative_to(ROOT)}
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    place = (str(ROOT), config.site_dir, config.use_directory_urls)
    return Files([*of_theme, *(File(str(path), *place) for path in sorted(found))])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave out the second word of a fence (```python example), by which tests find an example."""
    return re.sub(r"^(```+\w+) \w+$", r"\1", markdown, flags=re.MULTILINE)
