"""Texts of others on a terminal, in logs, in files: seen, and nothing more."""

import asyncio
import io
import json
import logging
import subprocess
import sys
import unicodedata

import msgspec
import pytest
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from dashboard.track import sample
from dashboard.trackers import as_markdown
from environments.environment import Observation, user
from environments.process import answered
from evaluation.report import embed
from evaluation.tables import ResultTable, in_markdown
from shared.clean_text import CleanRecord, CleanStream, clean, clean_errors, print_traceback
from shared.errors import ConfigError, print_error
from shared.progress import Progress, plain
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from tests.hostile_texts import texts
from verify.plugins import Failed

FLAG = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
PLAIN = f"é ü ñ Ω й ½ 東京 한글 שלום سلام\u200f क्षि नमस्ते 👩\u200d🚀 {FLAG} e\u0301 \u00a0\ttab"
"""with marks of direction, joiners and accents of their own"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def dangerous(text: str) -> list[str]:
    turns, kinds = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"), ("Cc", "Cs", "Zl", "Zp")
    return [letter for letter in text if (unicodedata.category(letter) in kinds and letter not in "\n\t")
            or unicodedata.bidirectional(letter) in turns]  # fmt: skip


def test_every_unsafe_character_is_replaced_and_no_other():
    for letter in map(chr, range(sys.maxunicode + 1)):
        if dangerous(letter):
            assert clean(letter) == "·", hex(ord(letter))
        elif unicodedata.category(letter)[0] != "C":
            assert clean(letter) == letter, hex(ord(letter))
    assert clean(PLAIN) == PLAIN
    Progress(terminal := Terminal()).note(PLAIN.expandtabs(1))
    assert PLAIN.expandtabs(1) in terminal.getvalue()
    assert clean("a\U000e0061\U000e007f \U0001f3f4\U000e0061") == "a·· \U0001f3f4·", "unseen words outside a flag"


@pytest.mark.parametrize("text", texts(), ids=lambda text: ascii(text)[:30])
def test_nothing_hostile_reaches_a_terminal_a_log_or_a_file(text, capsys):
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
    assert text not in terminal.getvalue() or text == clean(text)
    assert not dangerous(plain(table))

    print_error(ConfigError(f"a {text} b"))
    assert not dangerous(capsys.readouterr().err)
    try:
        raise ValueError(text)
    except ValueError as error:
        record = CleanRecord("serve", logging.INFO, "", 0, "a %s b", (text,), sys.exc_info())
        print_traceback(error)
    for shown in (logging.Formatter().format(record), capsys.readouterr().err):
        assert not dangerous(shown) and "Traceback" in shown and "ValueError" in shown
    cells = ResultTable(text, ["name", "figure"], [[f"{text}|<b>[x](y)`\n", "1"]])
    assert not dangerous(cells.markdown() + cells.html()) and len(cells.markdown().splitlines()) == 3


def test_hostile_texts_in_files_pages_and_trackers_are_text(tmp_path):
    escaped = r"a\|b \<img src=x> !\[x](https://example.com) \`c\` d"
    assert in_markdown("a|b <img src=x> ![x](https://example.com) `c`\nd") == escaped
    assert in_markdown("org/model_1.5-it *") == "org/model_1.5-it *"
    path, reward = tmp_path / "printed", Reward(1.0, 0.0, 0.0, 0.0, 0.0, Verdict.WRONG)
    for text in texts():
        with path.open("wb") as file:
            print(text, file=CleanStream(file.fileno()))
        assert path.read_bytes().decode() == f"{clean(text)}\n"
        group = Group(
            Prompt(0, Problem("p", text, text), [1]), [Completion(0, 0, 0)],
            [msgspec.structs.replace(reward, reason=text, answer=text)], [text],
        )  # fmt: skip
        row = sample(1, group)
        assert not dangerous(msgspec.json.encode(row).decode()) and len(row) == 7
        for cell in map(as_markdown, row):
            assert not set(cell.replace("<br>", "")) & set("<>|[]()!`*_\\"), cell
        page = embed({"text": text})
        assert not dangerous(page) and "<" not in page and json.loads(page).keys() == {"text"}


def test_what_environments_and_tools_say_of_themselves_can_be_recorded():
    async def works(text, fails):
        if fails:
            raise Failed(Verdict.CRASH, text)
        return Observation([user(text)])

    async def replies():
        return [await answered("e", works(text, fails), 5, []) for text in texts() for fails in (False, True)]

    for reply in asyncio.run(replies()):
        msgspec.msgpack.encode(reply)
        assert not dangerous(reply.reason)


def test_what_commands_of_others_write_to_standard_error_is_clean(capfd):
    subprocess.run(["printf", r"a\033[2J\233\342\200\256b\n"], stdout=clean_errors(), check=True)
    seen = ""
    while "b\n" not in seen:
        seen += capfd.readouterr().err
    assert seen == "a·[2J\ufffd·b\n"
