"""The environment "search": questions that are answered from a corpus on this disk, which the policy searches.

The corpus is a .jsonl file of {"text", "title"?, "id"?}; a row without an id has its line number. Its index, SQLite's
FTS5, is made when it is first needed and kept next to the file, until the file changes; or in a temporary folder where
that cannot be written, or where another user of the machine could have made the index.
`python -m environments.search FILE` makes it before a run, which a large corpus needs. Documents are ranked by BM25
over the words of the query, each of which may be missing. Source: Robertson & Zaragoza, The Probabilistic Relevance
Framework: BM25 and Beyond (2009); for the task: Search-R1 (2503.09516).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import shutil
import sqlite3
import stat
import sys
import tempfile
import threading
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import Field

from environments.environment import Observation, environment
from environments.tools import ToolEnvironment, ToolError, ToolOptions, tool
from shared.errors import ConfigError, DataError, run_command
from shared.jsonl import read_rows, text_of
from shared.types import Problem, Verdict
from shared.user_file import missing
from verify.plugins import Failed

FORMAT = 1
"""raised when the tables of an index change"""
MOST_WORDS = 64
"""words of a query that are searched for"""
SETTING = "environment.options.search.corpus"
FIRST_ROWS = 100
"""Rows that are read before a run."""
_making = threading.Lock()


class CorpusSearchOptions(ToolOptions):
    """Options of "search"."""

    corpus: str = Field(min_length=1)
    """the .jsonl file (or .jsonl.gz) that is searched"""
    results: int = Field(5, ge=1)
    """documents that a search returns"""


def index_of(corpus: Path) -> Path:
    """The index of a corpus, made now if there is none of this file as it is. Raises DataError."""
    with _making:
        if not corpus.is_file():
            raise DataError(f"{SETTING} = '{corpus}': {missing(corpus)}")
        for folder in (corpus.parent, _temporary()):
            path = folder / f"{corpus.name}.fts5"
            if foreign := _foreign(path, corpus):
                _tell(f"{path} is not used: {foreign}; this process makes an index of its own\n")
                continue
            if _is_index(path, corpus):
                return path
            if os.access(folder, os.W_OK):
                break
        _make(corpus, path)
        return path


@cache
def _temporary() -> Path:
    """A folder of this process."""
    folder = Path(tempfile.mkdtemp(prefix="maestrale-search-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _tell(line: str) -> None:
    """Tell it once."""
    sys.stderr.write(line)


def _foreign(path: Path, corpus: Path) -> str:
    """Return why an index may be another user's work, "" if it is not, or if there is none. Owners of the corpus decide
    about its texts anyway."""
    trusted = {os.geteuid(), 0, corpus.stat().st_uid}
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mode = os.fstat(folder).st_mode
        index = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error.strerror)
    finally:
        os.close(folder)
    status = os.fstat(index)
    os.close(index)
    if not stat.S_ISREG(status.st_mode):
        return "it is no file"
    if status.st_uid not in trusted:
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return "others may replace it in its folder" if mode & stat.S_IWOTH and not mode & stat.S_ISVTX else ""


def _state(corpus: Path) -> str:
    """What changes when the corpus does."""
    status = corpus.stat()
    return f"{FORMAT} {status.st_size} {status.st_mtime_ns}"


def _read(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True))


def _is_index(path: Path, corpus: Path) -> bool:
    try:
        with _read(path) as index:
            return bool(index.execute("SELECT state FROM corpus").fetchone() == (_state(corpus),))
    except sqlite3.Error:
        return False


def _make(corpus: Path, path: Path) -> None:
    """Write the index of a corpus, whole or not at all."""
    state = _state(corpus)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.") as private:
        unfinished = Path(private) / "index"  # and SQLite's journal next to it, where nobody else can make one
        unfinished.touch(0o600)
        with closing(sqlite3.connect(unfinished)) as index, index:
            index.execute("PRAGMA synchronous = OFF")
            index.execute("CREATE TABLE corpus (state TEXT)")
            index.execute("CREATE TABLE ids (id TEXT PRIMARY KEY, document INTEGER) WITHOUT ROWID")
            words = "tokenize = 'porter unicode61 remove_diacritics 2'"
            index.execute(f"CREATE VIRTUAL TABLE documents USING fts5(title, text, id UNINDEXED, {words})")
            for row in read_rows(corpus, SETTING):
                name = text_of(row.fields, "id", row.where, str(row.number))
                try:
                    index.execute("INSERT INTO ids VALUES (?, ?)", (name, row.number))
                except sqlite3.IntegrityError as error:
                    raise DataError(f"{row.where}: the id {name!r} is there twice: ids name one document") from error
                fields = text_of(row.fields, "title", row.where, ""), text_of(row.fields, "text", row.where), name
                index.execute(
                    "INSERT INTO documents(rowid, title, text, id) VALUES (?, ?, ?, ?)", (row.number, *fields)
                )
            index.execute("INSERT INTO documents(documents) VALUES ('optimize')")
            index.execute("INSERT INTO corpus VALUES (?)", (state,))
        os.replace(unfinished, path)


@environment("search")
class CorpusSearch(ToolEnvironment):
    """Offers tools that search the corpus and open its documents; the verifier of the problem's domain grades."""

    Options = CorpusSearchOptions
    options: CorpusSearchOptions

    @classmethod
    async def check(cls, options: CorpusSearchOptions) -> None:
        """Read the first rows of the corpus. Raises ConfigError, DataError."""
        if not (corpus := Path(options.corpus)).is_file():
            raise ConfigError(f"{SETTING} = '{corpus}': {missing(corpus)}; name the .jsonl file to be searched")
        for row in islice(read_rows(corpus, SETTING), FIRST_ROWS):
            text_of(row.fields, "text", row.where)

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Make the index if there is none, in a thread, since that takes its time. Raises Failed."""
        try:
            self.index = await asyncio.to_thread(index_of, Path(self.options.corpus))
        except (DataError, OSError, sqlite3.Error) as error:
            raise Failed(Verdict.CRASH, str(error)) from error
        return await super().reset(problem, seed)

    @tool
    def search(self, query: str) -> str:
        """Search the documents for the words of a query, and return the best with their ids, titles and passages."""
        words = re.findall(r"\w+", query)[:MOST_WORDS]
        if not words:
            raise ToolError("the query has no words")
        match = " OR ".join(f'"{word}"' for word in words)
        asked = (
            "SELECT id, title, snippet(documents, 1, '', '', '...', 48) FROM documents WHERE documents MATCH ? "
            "ORDER BY bm25(documents), rowid LIMIT ?"
        )
        with _read(self.index) as index:
            hits = index.execute(asked, (match, self.options.results)).fetchall()
        return "\n\n".join(f"[{name}] {title}\n{passage}" for name, title, passage in hits) or "(nothing is found)"

    @tool
    def open(self, id: str, page: Annotated[int, Field(ge=1)] = 1) -> str:
        """Read the document with this id; a long one has several pages."""
        asked = "SELECT title, text FROM documents WHERE rowid = (SELECT document FROM ids WHERE id = ?)"
        with _read(self.index) as index:
            document = index.execute(asked, (id,)).fetchone()
        if document is None:
            raise ToolError(f"there is no document with the id {id[:100]!r}")
        size = max(self.options.result_characters - 100 - len(document[0]), 100)
        pages = max(-(-len(document[1]) // size), 1)
        if page > pages:
            raise ToolError(f"the document has {pages} pages")
        heading = f" (page {page} of {pages})" if pages > 1 else ""
        return f"{document[0]}{heading}\n{document[1][(page - 1) * size : page * size]}".strip()


def main(arguments: list[str]) -> int:
    """Make the index of a corpus before a run; returns the exit code. Raises DataError, OSError."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stdout.write("usage: python -m environments.search CORPUS.jsonl\n")
        return 0 if {*arguments} and {*arguments} <= {"-h", "--help"} else ConfigError.exit_code
    corpus = Path(arguments[0])
    try:
        path = index_of(corpus)
    except sqlite3.Error as error:
        raise DataError(f"{corpus}: its index cannot be made: {error}") from error
    if path.parent != corpus.parent:
        raise DataError(f"{corpus}: no index can be kept next to it: search a copy in a folder of your own")
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
