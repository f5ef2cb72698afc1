"""How long the sentences of README.md and of the beginnings of docs/*.md are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 18
"""of a sentence, on average over a page's text"""
ENDS = r"(?<=[.!?:])[)\"'*]*\s+(?=[\W\d]*[A-Z\d]|code)|\n\s*\n|^\s*(?:[-*]|\d+\.) "
"""the end of a sentence, of a paragraph, and the beginning of an item of a list"""


def beginning(page: str) -> str:
    """The text before the second heading; where there is none, the first text of the page."""
    parts = re.split(r"^#+ .*\n", re.sub(r"(?ms)^(`{3,}).*?^\1$", "", page), flags=re.MULTILINE)
    return next((part for part in parts if sentences(part)), "")


def sentences(text: str) -> list[int]:
    """How many words each sentence has, without code, tables, pictures, comments and addresses of links. Code within a
    line is one word."""
    text = re.sub(r"(?ms)^ *(`{3,}).*?^ *\1$|<!--.*?-->|^\s*(?:\||#|!\[).*?$", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    pieces = re.split(ENDS, text, flags=re.MULTILINE)
    return [words for piece in pieces if (words := len(re.findall(r"[^\W_][\w'’.,/-]*", piece)))]


def test_sentences_are_counted():
    text = (
        "# A title of many words\n\nOne two `three of code`. [Four](five.md) six\nseven! (Eight nine?) 1.5 ten:\n\n"
        "| a | table |\n```\ncode block. Of many. Words\n```\n- an item\n- e.g. another 3.5 item\n\n## 2\n\nNot read."
    )
    assert sentences(beginning(text)) == [3, 3, 2, 2, 2, 4]
    assert sentences(beginning("# A\n\n## B\n\nHere at last.\n")) == [3]


@pytest.mark.parametrize("path", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))])
def test_a_page_begins_with_short_sentences(path):
    page = (ROOT / path).read_text(encoding="utf-8")
    counts = sentences(page if path == "README.md" else beginning(page))
    mean = sum(counts) / len(counts)
    assert mean <= MOST_WORDS, f"{path}: {mean:.1f} words a sentence, {counts}: break the long ones"
