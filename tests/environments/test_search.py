"""The environment "search" over SQLite's index: ranking, pages, what an index is made of, and when again."""

import gzip
import json
import os
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from environments import search
from environments.search import CorpusSearch, index_of, main
from shared.errors import DataError
from tests.environments.test_tools import played, turn
from verify.plugins import Failed

ROWS = [
    {"id": "oslo", "title": "Oslo", "text": "Oslo is the capital of Norway. " + "It lies on a fjord. " * 200},
    {"id": "bergen", "title": "Bergen", "text": "Bergen is a city in Norway with much rain."},
    {"title": "Paris", "text": "Paris is the capital of France. Its café 'Procope' is old."},
]

Call = tuple[str, dict[str, Any]]


@pytest.fixture
def corpus(tmp_path):
    return written(tmp_path / "corpus.jsonl", ROWS)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(corpus: Path, *calls: Call, **options: Any) -> list[str]:
    return [message.text for message in played(CorpusSearch, turn(*calls), corpus=str(corpus), **options)[0].messages]


def query(text: str) -> Call:
    return "search", {"query": text}


def read(name: str, **page: int) -> Call:
    return "open", {"id": name, **page}


def test_the_best_documents_come_first_and_can_be_read(corpus):
    queries = ["Oslo, or a city in Norway with capitals", "RAINS, cafe?", '"NEAR( AND * -x" OR title:oslo', "xylophone"]
    best, rain, odd, none, paris = texts(corpus, *map(query, queries), read("3"))
    order = [line for line in best.splitlines() if line.startswith("[")]
    assert order == ["[bergen] Bergen", "[oslo] Oslo", "[3] Paris"]
    assert "[bergen]" in rain and "[3]" in rain and "[oslo]" not in rain and "[oslo]" in odd
    assert none == "(nothing is found)" and paris == "Paris\n" + ROWS[2]["text"]
    assert texts(corpus, query("norway"), results=1)[0].count("[") == 1


def test_long_documents_have_pages_and_mistakes_are_told(corpus):
    *pages, four, zero = texts(corpus, *(read("oslo", page=page) for page in (1, 2, 3, 4, 0)))
    assert "".join(page.split("\n", 1)[1] for page in pages).split() == ROWS[0]["text"].split()
    assert pages[0].startswith("Oslo (page 1 of 3)") and four == "Error: the document has 3 pages" and "page" in zero
    missing, empty = texts(corpus, read("rome"), query("?!"))
    assert "no document with the id 'rome'" in missing and "the query has no words" in empty


def test_an_index_is_made_once_and_again_when_the_file_changes(corpus):
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(index_of, [corpus] * 8)) == {Path(f"{corpus}.fts5")}
    made = Path(f"{corpus}.fts5").stat().st_ino
    assert index_of(corpus).stat().st_ino == made
    assert index_of(corpus).stat().st_mode & 0o777 == 0o600, "for this user alone"
    written(corpus, [{"text": "Rome is the capital of Italy."}])
    assert "[1]" in texts(corpus, query("italy"))[0] and index_of(corpus).stat().st_ino != made
    Path(f"{corpus}.fts5").write_bytes(b"no index")
    assert "[1]" in texts(corpus, query("italy"))[0]
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.fts5"]


def test_a_folder_that_cannot_be_written_is_left_alone(corpus, monkeypatch):
    monkeypatch.setattr(search.os, "access", lambda folder, mode: folder != corpus.parent)
    path = index_of(corpus)
    assert path.parent != corpus.parent and index_of(corpus) == path
    assert "[oslo]" in texts(corpus, query("oslo"))[0]
    assert [one.name for one in corpus.parent.iterdir()] == ["corpus.jsonl"]


def plant(corpus: Path) -> Path:
    """An index that says something else of the same file."""
    path = index_of(corpus)
    with closing(sqlite3.connect(path)) as index, index:
        index.execute("UPDATE documents SET text = 'planted', title = 'planted'")
    return path


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


PLANTED: dict[str, Callable[[Path], Any]] = {
    "of another user": lambda path: os.chown(path, 65534, 65534),
    "writable by a group": lambda path: path.chmod(0o660),
    "writable by all": lambda path: path.chmod(0o602),
    "a link": link,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "in a folder of all": lambda path: path.parent.chmod(0o777),
}


@pytest.mark.parametrize("how", PLANTED)
def test_an_index_that_another_user_can_have_made_is_not_taken(corpus, how, capfd):
    if how == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    corpus.parent.chmod(0o1777)
    path = plant(corpus)
    assert "planted" in texts(corpus, read("oslo"))[0], "an index of this user is taken as it is"
    PLANTED[how](path)
    capfd.readouterr()
    assert texts(corpus, read("bergen"))[0] == "Bergen\n" + ROWS[1]["text"]
    assert index_of(corpus).parent != corpus.parent and f"{path} is not used: " in capfd.readouterr().err


@pytest.mark.parametrize(("text", "told"), [
    ('{"text": "a", "id": "x"}\n{"text": "b", "id": "x"}\n', ":2: the id 'x' is there twice"),
    ('{"title": "a"}\n', ":1 lacks 'text'"),
    ('{"text": "a"}\n' + "[" * 100_000 + "\n", ":2 is nested too deeply"), (None, "there is no such file"),
], ids=["two ids", "no text", "deep", "no file"])  # fmt: skip
def test_mistakes_of_the_file_name_setting_and_line(tmp_path, text, told):
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text)
    for make in (index_of, lambda corpus: main([str(corpus)])):
        with pytest.raises(DataError, match="environment.options.search.corpus.*" + re.escape(told)):
            make(path)
    assert [one.name for one in tmp_path.iterdir()] == ["bad.jsonl"] * (text is not None)
    with pytest.raises(Failed, match=re.escape(told)):
        texts(path)


def test_its_command_makes_the_index_before_a_run(tmp_path, capsys):
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "Rome"}\n'))
    assert [main(given) for given in ([str(path)], [], ["--help"], ["a", "b"])] == [0, 2, 0, 2]
    assert f"{path}.fts5\n" in capsys.readouterr().out and "[1]" in texts(path, query("rome"))[0]
    Path(f"{path}.fts5").unlink()
    os.mkfifo(f"{path}.fts5")
    with pytest.raises(DataError, match="no index can be kept next to it"):
        main([str(path)])
