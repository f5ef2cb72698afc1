"""The journal of a resumable command: rows, kills, identities and damaged files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import ConfigError, DataError, InputError
from shared.journal import Journal, differences, read_journal


class Answer(msgspec.Struct):
    id: int
    value: Any = None
    error: str = ""


REPAIR = "give another --out"


def key(answer: Answer) -> int:
    return answer.id


def failed(answer: Answer) -> bool:
    return bool(answer.error)


def opened(
    path: Path, identity: dict[str, Any] | None = None, *, sync: bool = False, **options: Any
) -> Journal[int, Answer]:
    identity = {"seed": 1} if identity is None else identity
    return Journal(path, Answer, key, identity, REPAIR, failed=failed, sync=sync, **options)


VALUES = [1, 2**80, 0.1, float("inf"), "ü\n\r\u2028", "\ud800", None, [{"a": [True]}], ""]


@pytest.mark.parametrize("inside", [True, False])
def test_rows_come_back_as_they_were(tmp_path: Path, inside: bool) -> None:
    header = None if inside else tmp_path / "identity.json"
    path = tmp_path / "rows.jsonl"
    with opened(path, header=header) as journal:
        for number, value in enumerate(VALUES):
            journal.add(Answer(number, value))
    content = path.read_bytes()
    with opened(path, header=header) as journal:
        assert [journal.rows[number].value for number in range(len(VALUES))] == VALUES
        assert not journal.lacks(0) and journal.lacks(len(VALUES)) and journal.identity == {"seed": 1}
    assert path.read_bytes() == content and content.count(b"\n") == len(VALUES) + inside
    if header is not None:
        assert read_journal(path, Answer, key).keys() == set(range(len(VALUES)))


def test_a_failed_row_is_made_again_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with opened(path) as journal:
        journal.add(Answer(1, error="no answer"))
        assert journal.lacks(1)
        journal.add(Answer(1, "x"))
        assert not journal.lacks(1)
        journal.add(Answer(1, error="late"))
    with opened(path) as journal:
        assert not journal.lacks(1) and journal.rows[1].value == "x"


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


def test_kills_lose_no_row_and_make_none_twice(root: Path, tmp_path: Path) -> None:
    path, reported = tmp_path / "rows.jsonl", [-1]
    for kill in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, text=True, cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        assert process.stdout is not None
        numbers = [int(process.stdout.readline()) for _ in range(8 + 3 * kill)]
        process.send_signal(signal.SIGKILL)
        numbers += [int(line) for line in process.communicate()[0].splitlines() if line]
        # one row may have been written and not reported
        assert numbers[0] in (reported[-1] + 1, reported[-1] + 2) and numbers == list(
            range(numbers[0], numbers[-1] + 1)
        )
        reported = numbers
    with opened(path) as journal:
        assert len(journal.rows) in (reported[-1] + 1, reported[-1] + 2)
        assert path.read_bytes().count(b"\n") == len(journal.rows) + 1, "no row is there twice"
        assert all(len(row.value) == number % 5000 for number, row in journal.rows.items())


@pytest.mark.parametrize("inside", [True, False])
def test_every_cut_of_the_last_line_is_removed(tmp_path: Path, inside: bool) -> None:
    header = None if inside else tmp_path / "identity.json"
    path = tmp_path / "rows.jsonl"
    with opened(path, header=header) as journal:
        journal.add(Answer(1, "ü"))
        journal.add(Answer(2, "ö"))
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with opened(path, header=header) as journal:
            for number, value in ((1, "ü"), (2, "ö")):
                if journal.lacks(number):
                    journal.add(Answer(number, value))
        assert path.read_bytes() == content, length


def test_one_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with opened(path), pytest.raises(ConfigError, match=r"--out = a: another process is writing it: stop it"):
        opened(path, where="--out = a")
    opened(path).close()


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"seed": 2}, "seed = 1, now 2"),
        ({"seed": 1, "model": "a"}, 'model = null, now "a"'),
        ({}, "seed = 1, now null"),
        ({"seed": "1"}, 'seed = 1, now "1"'),
        ({"seed": ["long"] * 20}, "other seed"),
        ({"seed": {"a": 1}}, 'seed = 1, now {"a": 1}'),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_another_identity_is_refused_and_nothing_changes(
    tmp_path: Path, now: dict[str, Any], words: str, inside: bool
) -> None:
    header = None if inside else tmp_path / "identity.json"
    path = tmp_path / "rows.jsonl"
    with opened(path, header=header) as journal:
        journal.add(Answer(1))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError) as error:
        opened(path, now, header=header, where="out = a")
    assert str(error.value) == f"out = a was made with other settings ({words}): {REPAIR}"
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    with opened(path, now, header=header, restart=True) as journal:
        assert not journal.rows and journal.identity == now


def test_differences_name_settings_inside_of_tables() -> None:
    before = {"a": {"b": {"c": 1}}, "settings": {"limit": 3}, "same": (1, 2)}
    assert differences(before, {"a": {"b": {"c": 2}}, "settings": {"limit": 4}, "same": [1, 2]}) == [
        "a.b.c = 1, now 2", "limit = 3, now 4",
    ]  # fmt: skip


def test_tables_grow_and_first_values_stay(tmp_path: Path) -> None:
    path, header = tmp_path / "rows.jsonl", tmp_path / "identity.json"

    def join(tasks: dict[str, Any], secret: str) -> dict[str, Any]:
        given = {"seed": 1, "tasks": tasks}
        with opened(path, given, header=header, grows=("tasks",), once={"secret": secret}) as journal:
            return journal.identity

    assert join({"a": {"t": 1}}, "x") == {"seed": 1, "tasks": {"a": {"t": 1}}, "secret": "x"}
    grown = {"seed": 1, "tasks": {"a": {"t": 1}, "b": {"t": 2}}, "secret": "x"}
    assert join({"b": {"t": 2}}, "y") == grown == json.loads(header.read_text())
    with pytest.raises(ConfigError, match=r"tasks\.a\.t = 1, now 3"):
        join({"a": {"t": 3}, "c": {}}, "z")
    assert json.loads(header.read_text()) == grown


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b'{"id": "a"}', b"{}", b"\xff", b"[" * 5000, b"null"])
def test_damaged_rows_and_headers_are_one_line(tmp_path: Path, line: bytes) -> None:
    path, header = tmp_path / "rows.jsonl", tmp_path / "identity.json"
    with opened(path) as journal:
        journal.add(Answer(1))
    whole = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([whole[0], line, whole[1], b""]))
    with pytest.raises(DataError, match=r"rows\.jsonl:2 is no Answer .*: delete that line"):
        opened(path)
    path.write_bytes(b"\n".join([line, whole[1], b""]))
    with pytest.raises(InputError, match=f": .*{REPAIR}") as error:
        opened(path)
    assert "\n" not in str(error.value)
    path.write_bytes(whole[1] + b"\n")
    header.write_bytes(line)
    with pytest.raises(InputError, match=f": .*{REPAIR}") as error:
        opened(path, header=header)
    assert "\n" not in str(error.value)
    opened(path, restart=True).close()


def test_rows_without_their_header_are_refused(tmp_path: Path) -> None:
    path, header = tmp_path / "rows.jsonl", tmp_path / "identity.json"
    with opened(path, header=header) as journal:
        journal.add(Answer(1))
    header.unlink()
    with pytest.raises(ConfigError, match=r"has rows, but .*identity\.json is missing: restore it, or give another"):
        opened(path, header=header)
