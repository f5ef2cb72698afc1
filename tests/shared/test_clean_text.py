"""Texts of others on a terminal, in logs, in files: seen, and nothing more."""

from __future__ import annotations

import io
import logging
import sys
import unicodedata

import pytest
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from evaluation.tables import ResultTable, in_markdown
from shared.clean_text import CleanRecord, clean
from shared.errors import ConfigError, print_error
from shared.progress import Progress, plain

HOSTILE = [
    "\x1b]0;PWNED\x07", "\x1b[2J\x1b[31m", "\x1b[?1049h", "\x1bP+q544e\x1b\\", "\x9b2J", "\x9d0;PWNED\x9c",
    "\x90q\x9c", "\x84", "safe\rEVIL", "abc\b\b\b", "\x00\x7f\x0b\x0c\x1c\x85", "\u202eexe.txt", "\u2066x\u2069",
    "\u2067", "\u2028line\u2029", "\ud83d",
]  # fmt: skip
FLAG = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
PLAIN = f"é ü ñ Ω й ½ 東京 한글 שלום سلام\u200f क्षि नमस्ते 👩\u200d🚀 {FLAG} e\u0301 \u00a0\ttab"
"""with marks of direction, joiners and accents of their own"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def dangerous(text: str) -> list[str]:
    return [
        letter
        for letter in text
        if (unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") and letter not in "\n\t")
        or unicodedata.bidirectional(letter) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    ]


def test_every_unsafe_character_is_replaced_and_no_other() -> None:
    for letter in map(chr, range(sys.maxunicode + 1)):
        if dangerous(letter):
            assert clean(letter) == "·", hex(ord(letter))
        elif unicodedata.category(letter)[0] != "C":
            assert clean(letter) == letter, hex(ord(letter))
    assert clean(PLAIN) == PLAIN


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nothing_hostile_reaches_a_terminal_a_log_or_a_file(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    plainly = io.StringIO()  # no terminal: nothing of ours is a control code either
    table = Table(title=escape(text))
    table.add_row(escape(f"a{text}b"))
    for progress in (Progress(plainly), Progress(terminal := Terminal())):
        for show in (progress.phase, progress.note, progress.warning, progress.error):
            show(f"before {text} behind")
        progress.show(Panel(escape(text)))
        progress.show(table)
        assert not progress.failures
    assert not dangerous(plainly.getvalue()) and plainly.getvalue().count("behind") == 4
    usual = Terminal()
    for show in (Progress(usual).phase, Progress(usual).warning):
        show("x")
    ours = {letter for letter in usual.getvalue() if dangerous(letter)}
    assert {letter for letter in terminal.getvalue() if dangerous(letter)} <= ours == {"\x1b"}
    assert text not in terminal.getvalue()
    assert not dangerous(plain(table))

    print_error(ConfigError(f"a {text} b"))
    assert not dangerous(capsys.readouterr().err)
    record = CleanRecord("serve", logging.INFO, "", 0, "a %s b", (text,), None)
    assert not dangerous(logging.Formatter().format(record))
    cells = ResultTable(text, ["name", "figure"], [[f"{text}|<b>[x](y)`\n", "1"]])
    assert not dangerous(cells.markdown() + cells.html()) and len(cells.markdown().splitlines()) == 3


def test_in_markdown_a_text_is_a_text() -> None:
    assert in_markdown("a|b <img src=x> ![x](https://example.com) `c`\nd") == (
        r"a\|b \<img src=x> !\[x](https://example.com) \`c\` d"
    )
    assert in_markdown("org/model_1.5-it *") == "org/model_1.5-it *"


def test_plain_text_stays_as_it_is() -> None:
    stream = Terminal()
    Progress(stream).note(PLAIN.expandtabs(1))
    assert PLAIN.expandtabs(1) in stream.getvalue()
