"""The journal of a resumable command: rows, kills, identities and damaged files."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import journal as journals
from shared.errors import ConfigError, DataError, InputError
from shared.journal import Journal, differences, read_journal
from tests.process import started


class Answer(msgspec.Struct):
    id: int
    value: Any = None
    error: str = ""


REPAIR = "give another --out"


def key(answer: Answer) -> int:
    return answer.id


def opened(path: Path, identity: Any = None, *, sync: bool = False, **options: Any) -> Journal[int, Answer]:
    identity = {"seed": 1} if identity is None else identity
    return Journal(path, Answer, key, identity, REPAIR, failed=lambda row: bool(row.error), sync=sync, **options)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.fixture(params=["inside", "beside"])
def header(request, tmp_path):
    """The file of the identity; None: it is the first line of the rows."""
    return None if request.param == "inside" else tmp_path / "identity.json"


PLAIN = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN | st.sampled_from(["\ud800", "ü\n\r\u2028"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=12)
@given(st.lists(VALUES))
def test_rows_come_back_as_they_were(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("rows")
    for header in (None, folder / "identity.json"):
        path = folder / f"{header is None}.jsonl"
        with opened(path, header=header) as journal:
            for number, value in enumerate(values):
                journal.add(Answer(number, value))
        content = path.read_bytes()
        with opened(path, header=header) as journal:
            assert [journal.rows[number].value for number in range(len(values))] == values
            assert journal.lacks(len(values)) and not any(map(journal.lacks, range(len(values))))
            assert journal.identity == {"seed": 1}
        assert path.read_bytes() == content and content.count(b"\n") == len(values) + (header is None)
    assert read_journal(path, Answer, key).keys() == set(range(len(values)))


@pytest.mark.parametrize("sync", [True, False])
def test_a_failed_row_is_made_again_and_replaces_nothing_and_a_row_is_on_the_disk_where_that_is_asked_for(
    path, sync, monkeypatch
):
    flushed: list[bytes] = []
    monkeypatch.setattr(journals, "flush", lambda file: flushed.append(file.read_bytes().splitlines()[-1]))
    with opened(path, sync=sync) as journal:
        journal.add(Answer(1, error="no answer"))
        assert journal.lacks(1)
        journal.add(Answer(1, "x"))
        assert not journal.lacks(1)
        journal.add(Answer(1, error="late"))
    assert flushed == path.read_bytes().splitlines()[1:] * sync
    with opened(path) as journal:
        assert not journal.lacks(1) and journal.rows[1].value == "x"
        with pytest.raises(ConfigError, match=r"--out = a: another process is writing it"):
            opened(path, where="--out = a")
    opened(path).close()


PROGRAM = """
import sys
from pathlib import Path
from tests.shared.test_journal import Answer, opened
journal = opened(Path(sys.argv[1]), sync=True)
for number in range(10_000_000):
    if journal.lacks(number):
        journal.add(Answer(number, "x" * (number % 5000)))
        print(number, flush=True)
"""


def test_kills_lose_no_row_and_make_none_twice(path):
    last = -1
    for kill in range(2):
        process = started(PROGRAM, path)
        lines = [process.stdout.readline() for _ in range(8 + 3 * kill)]
        process.kill()
        numbers = list(map(int, lines + process.stdout.read().split()))  # `communicate` would lose what is buffered
        process.wait()
        assert numbers[0] in (last + 1, last + 2), "one row may have been written and not reported"
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        last = numbers[-1]
    with opened(path) as journal:
        assert len(journal.rows) in (last + 1, last + 2)
        assert path.read_bytes().count(b"\n") == len(journal.rows) + 1, "no row is there twice"
        assert all(len(row.value) == number % 5000 for number, row in journal.rows.items())


def test_every_cut_of_the_last_line_is_removed(path, header):
    rows = Answer(1, "ü"), Answer(2, "ö")
    with opened(path, header=header) as journal:
        for row in rows:
            journal.add(row)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with opened(path, header=header) as journal:
            for row in rows:
                if journal.lacks(row.id):
                    journal.add(row)
        assert path.read_bytes() == content, length


@pytest.mark.parametrize(("now", "words"), [
    ({"seed": 2}, "seed = 1, now 2"), ({"seed": 1, "model": "a"}, 'model = null, now "a"'), ({}, "seed = 1, now null"),
    ({"seed": "1"}, 'seed = 1, now "1"'), ({"seed": ["long"] * 20}, "other seed"),
    ({"seed": {"a": 1}}, 'seed = 1, now {"a": 1}'),
])  # fmt: skip
def test_another_identity_is_refused_and_nothing_changes(path, header, now, words):
    with opened(path, header=header) as journal:
        journal.add(Answer(1))
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(ConfigError) as error:
        opened(path, now, header=header, where="out = a")
    assert str(error.value) == f"out = a was made with other settings ({words}): {REPAIR}"
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before
    with opened(path, now, header=header, restart=True) as journal:
        assert not journal.rows and journal.identity == now


def test_differences_name_settings_inside_of_tables():
    before = {"a": {"b": {"c": 1}}, "settings": {"limit": 3}, "same": (1, 2)}
    now = {"a": {"b": {"c": 2}}, "settings": {"limit": 4}, "same": [1, 2]}
    assert differences(before, now) == ["a.b.c = 1, now 2", "limit = 3, now 4"]


def test_tables_grow_and_first_values_stay(path, tmp_path):
    header = tmp_path / "identity.json"

    def join(tasks: dict[str, Any], secret: str) -> dict[str, Any]:
        identity = {"seed": 1, "tasks": tasks}
        with opened(path, identity, header=header, grows=("tasks",), once={"secret": secret}) as journal:
            return journal.identity

    assert join({"a": {"t": 1}}, "x") == {"seed": 1, "tasks": {"a": {"t": 1}}, "secret": "x"}
    grown = {"seed": 1, "tasks": {"a": {"t": 1}, "b": {"t": 2}}, "secret": "x"}
    assert join({"b": {"t": 2}}, "y") == grown == json.loads(header.read_text())
    with pytest.raises(ConfigError, match=r"tasks\.a\.t = 1, now 3"):
        join({"a": {"t": 3}, "c": {}}, "z")
    assert json.loads(header.read_text()) == grown


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b'{"id": "a"}', b"{}", b"\xff", b"[" * 5000, b"null"])
def test_damaged_rows_and_headers_are_one_line(path, tmp_path, line):
    with opened(path) as journal:
        journal.add(Answer(1))
    first, row = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, row, b""]))
    with pytest.raises(DataError, match=r"rows\.jsonl:2 is no Answer .*: delete that line"):
        opened(path)
    header = tmp_path / "identity.json"
    header.write_bytes(line)
    for content, options in (([line, row, b""], {}), ([row, b""], {"header": header})):
        path.write_bytes(b"\n".join(content))
        with pytest.raises(InputError, match=f": .*{REPAIR}") as error:
            opened(path, **options)
        assert "\n" not in str(error.value)
    opened(path, restart=True).close()
    header.unlink()
    path.write_bytes(row + b"\n")
    with pytest.raises(ConfigError, match=r"has rows, but .*identity\.json is missing"):
        opened(path, header=header)
